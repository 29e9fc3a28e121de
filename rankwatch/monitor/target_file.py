"""`--sd-dir`: this launcher's scrape target as a file for Prometheus, kept young while the launcher lives and gone when it does not.

All of it runs in a thread of its own: the folder is often on a network file system. A normal end removes the file. After a kill -9 a shell
that waits for this process's end removes it at once; where that was killed too (a node that dies, a cgroup that is emptied), the file goes
stale: other launchers that judge a job and `rankwatch targets` remove it, and the latter never serves it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from rankwatch.config import DEFAULT, Options, accepted
from rankwatch.export import discovery_files as files
from rankwatch.model import JobInfo
from rankwatch.serve.http import is_loopback
from rankwatch.whole_files import replace_file

STOP_WAIT_S = 0.2
ADDRESS_LOOK_S = 1.0
_AFTER_US = 'read -r _; rm -f -- "$1"'  # its stdin ends when the last process that holds our end of the pipe does


class TargetFile:
    """Nothing here raises or blocks. url: where the server listens, "" while it does not yet. folder "": does nothing.

    host: under which others reach this launcher, where that is known; else the one of the url. chosen: somebody has chosen where it listens.
    """

    def __init__(
        self, folder: str, url: Callable[[], str], say: Callable[[str], None], host: str = "", chosen: bool = False, refresh_s: float = files.REFRESH_S
    ) -> None:
        self._folder = os.path.abspath(os.path.expanduser(folder)) if folder else ""
        self._url = url
        self._say = say
        self._host = host
        self._chosen = chosen
        self._refresh_s = refresh_s
        self._housekeeping = False
        self._written = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()
        self.path = ""

    @classmethod
    def of(cls, options: Options, url: Callable[[], str], say: Callable[[str], None]) -> TargetFile:
        """As the options want it."""
        host = accepted.host_port(options.peer_address)[0] if options.peer_address else ""
        return cls(options.sd_dir if options.listen != "off" else "", url, say, host, options.origins.get("listen", DEFAULT) != DEFAULT)

    def start(self, job: JobInfo, judges: bool) -> None:
        """Begin, once; a later call only says whether this launcher judges the job now: then it also removes what others have left behind."""
        self._housekeeping = judges
        if self._folder and self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(job,), name="rankwatch-target", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """The file goes, within STOP_WAIT_S unless the folder hangs."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)

    def _work(self, job: JobInfo) -> None:
        try:
            while not (url := self._url()):
                if self._over.wait(ADDRESS_LOOK_S):
                    return
            parts = urlsplit(url)
            target = self._target(parts.hostname or "", parts.port or 80)
            data = files.document(target, parts.scheme, job.job_id, job.node, job.labels)
            self.path = os.path.join(self._folder, files.file_name(job.job_id, job.node, parts.port or 80))
            while True:
                self._look(data)
                if self._over.wait(self._refresh_s):
                    return
        except Exception as error:  # a bug here must not end the launcher's output in a traceback
            self._tell(f"--sd-dir does nothing more: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _target(self, host: str, port: int) -> str:
        if is_loopback(host) and not self._chosen:
            self._tell(
                f"--sd-dir: {host}:{port} is reached from this machine only, and so is what the file names; for a Prometheus elsewhere give"
                f" --listen 0.0.0.0:{port} --token-file FILE (/metrics itself asks for no token)"
            )
        elif self._host and not is_loopback(host):
            host = self._host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _look(self, data: bytes) -> None:
        """Renew the file; write it first of all, whatever an earlier launcher has left there, and where it has gone. Clear away what is stale."""
        try:
            try:
                now = files.renew(self.path) if self._written else self._write(data)
            except FileNotFoundError:
                now = self._write(data)
            self._watch()
            if self._housekeeping:
                for name in files.stale(files.listing(self._folder), now, self._stale_s):
                    files.remove(os.path.join(self._folder, name))
        except OSError as error:
            self._tell(f"--sd-dir {self._folder}: {error.strerror or error}: Prometheus is not told of this job there; make the folder writable for this user")

    def _write(self, data: bytes) -> float:
        os.makedirs(self._folder, exist_ok=True)
        replace_file(self.path, data, 0o644, despite_umask=True)
        self._written = True
        return files.renew(self.path)

    @property
    def _stale_s(self) -> float:
        return files.STALE_S * self._refresh_s / files.REFRESH_S

    def _watch(self) -> None:
        if self._guard is not None:
            return
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _AFTER_US, "rankwatch-target", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C or a kill of our process group is not for it
            cwd="/",
        )

    def _end(self) -> None:
        if self.path:
            files.remove(self.path)
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            try:
                guard.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                pass  # its rm hangs in the folder, as ours would have

    def _tell(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
