"""--textfile-dir: this launcher's metrics as a file for node_exporter's textfile collector, where no port of ours may be scraped.

node_exporter (--collector.textfile.directory) reads every *.prom in the text format, refuses timestamps, serves a file for as long as it lies there and
tells its age as node_textfile_mtime_seconds. So the last state of a job outlives its launcher here, and somebody has to remove it: see `stale`.
Where two files explain a metric in different words, node_exporter drops the second one's (1.5.0 was seen to): all versions of rankwatch use the same words.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

from rankwatch.export.prometheus import Exporter
from rankwatch.model import Status
from rankwatch.whole_files import PREFIX, SUFFIX, replace_file

FINAL_KEPT_S = 600.0
SILENT_KEPT_S = 3600.0
HEAD_BYTES = 200
_NAME = re.compile(r"rankwatch_[A-Za-z0-9._-]+\.prom\Z")
_HEAD = b"# rankwatch "
_FINAL = b"# rankwatch final"
_HELP = re.compile(rb"^(# HELP \S+) .*$", re.MULTILINE)
SAME_HELP = b"rankwatch metrics --describe tells."


def file_name(job_id: str, node: str) -> str:
    """rankwatch_<job>_<node>.prom, of characters that a file name may have."""
    job, host = (re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:100].strip("._") or "unknown" for text in (job_id, node))
    return f"rankwatch_{job}_{host}.prom"


def stale(name: str, head: bytes, age_s: float) -> bool:
    """Whether a file is a rankwatch's that writes it no more. head: how it begins; age_s: since it was last written.

    A finished job's goes after FINAL_KEPT_S, time enough for scrapes and alerts; one that is not final and not written for SILENT_KEPT_S is of a launcher
    that was killed.
    """
    if name.startswith(PREFIX) and name.endswith(SUFFIX):
        return age_s > SILENT_KEPT_S
    if not _NAME.match(name) or not head.startswith(_HEAD):
        return False
    return age_s > (FINAL_KEPT_S if head.startswith(_FINAL) else SILENT_KEPT_S)


class Textfile:
    """One launcher's file in `directory`. Methods may block as long as the file system does: they belong into a thread of their own."""

    def __init__(self, directory: str, level: str, wall: Callable[[], float]) -> None:
        """level: --metrics-level. wall: unix seconds, as the file system's."""
        self._directory = os.path.expanduser(directory)
        self._exporter = Exporter(level)
        self._wall = wall

    def write(self, status: Status, final: bool) -> None:
        """The file as of `status`. OSError as the file system gives it; a last state that cannot be written leaves no older one to be taken for it."""
        body, _ = self._exporter.render(status, "")
        node = status.job.node.encode("unicode_escape").decode("ascii")  # one line, whatever a node calls itself
        head = f"# rankwatch {'final' if final else 'running'} {node} {os.getpid()}\n".encode("ascii")
        path = os.path.join(self._directory, file_name(status.job.job_id, status.job.node))
        try:
            replace_file(path, head + _HELP.sub(rb"\1 " + SAME_HELP, body), 0o644, despite_umask=True)
        except OSError:
            if final:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    def sweep(self) -> None:
        """Remove what earlier launchers have left and this user may remove. Nothing is raised for what cannot be read or removed."""
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            path = os.path.join(self._directory, name)
            if not name.startswith((PREFIX, "rankwatch_")):
                continue
            try:
                if stale(name, _head(path), self._wall() - os.lstat(path).st_mtime):
                    os.unlink(path)
            except OSError:
                continue


def _head(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, HEAD_BYTES)
    finally:
        os.close(fd)
