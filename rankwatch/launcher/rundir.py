"""Where the files of a run go: made with a deadline, since the place may be a network file system that does not answer."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankwatch.config import RUNS
from rankwatch.report import moved

DEADLINE_S = 5.0
LATEST = "latest"
EARLIER = "earlier"
_CONTRACT = ("run.json", "events.jsonl", "incidents", "nodes")
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,120}\Z")
_DEFAULT_NAME = re.compile(r"\d{8}T\d{6}Z-([0-9A-Za-z._-]{1,64})\Z")


@dataclass(frozen=True, slots=True)
class RunDir:
    """An existing, writable directory (absolute path). `notes` are lines for people: what went wrong, what was found there."""

    path: str
    notes: tuple[str, ...] = ()


def job_in(name: str) -> str:
    """The job that the name of a default run directory holds, <utc>-<job>; "" for any other name."""
    found = _DEFAULT_NAME.match(name)
    return found[1] if found else ""


def make(
    given: str | None,
    job: str,
    mode: int = 0o700,
    first_node: bool = True,
    wall_at: float | None = None,
    deadline_s: float = DEADLINE_S,
    name: str = "",
) -> RunDir:
    """The run's directory. given None: ./rankwatch-runs/<utc>-<job>, with `latest` pointing to it.

    A place that cannot be written or does not answer within deadline_s gives way to a new folder in the temp dir, and a note says so; so does one in a
    folder that all users write, such as /tmp, where another user has put a link or a folder in the way.
    A given directory that holds an earlier run is used as it is; the earlier run.json and events.jsonl are kept in earlier/.
    One that lies in a folder rankwatch-runs becomes its `latest` as well.
    first_node: this launcher writes run.json; the others neither move `latest` nor mistake the first one's files for an earlier run's.
    name: what the first launcher has called its default directory: where both see the same files, that is one directory.
    OSError only when the temp dir cannot be written either.
    """
    if given is None and _NAME.match(name):
        wanted, how = os.path.join(RUNS, name), "set --run-dir to a place that can be written"
    elif given is None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() if wall_at is None else wall_at))
        wanted, how = os.path.join(RUNS, f"{stamp}-{job}"), "set --run-dir to a place that can be written"
    else:
        wanted, how = os.path.expanduser(given), "check --run-dir"
    try:
        ours = given is None and not _NAME.match(name)
        path, notes = _within(deadline_s, lambda: _make(wanted, ours, mode, first_node))
    except OSError as error:
        fallback = tempfile.mkdtemp(prefix="rankwatch-run-")
        return RunDir(fallback, (f"run dir {wanted} cannot be used ({_why(error)}); this run's files go to {fallback}; {how}",))
    return RunDir(path, notes)


def _make(wanted: str, ours: bool, mode: int, first_node: bool) -> tuple[str, tuple[str, ...]]:
    path = os.path.abspath(wanted)
    notes: tuple[str, ...] = ()
    _refuse_foreign(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if ours:
        _refuse_foreign(os.path.dirname(path))  # as it is now: whoever was faster than we has it
        path = _make_new(path, mode)
    elif os.path.isdir(path):
        notes = _keep_earlier(path) if first_node else ()
        if first_node:
            _forget_move(path)
    else:
        try:
            os.mkdir(path, mode)
        except FileExistsError:  # another node of this job was faster, or a file is in the way
            if not os.path.isdir(path):
                raise
        else:
            os.chmod(path, mode)  # mkdir is subject to the umask
    _refuse_foreign(path)
    _check_writable(path)
    if first_node and (ours or os.path.basename(os.path.dirname(path)) == RUNS):
        _point_latest(path)
    return path, notes


def _refuse_foreign(path: str) -> None:
    """PermissionError where a part of the path lies in a folder that everybody writes and belongs to another user than us and root.

    That user could lead our files elsewhere: with a link, or by renaming what we make below. What is ours in such a folder stays ours: it is sticky.
    Both the path as given and the one behind its links are looked at. What does not exist yet is no reason.
    """
    for name in dict.fromkeys((path, os.path.realpath(path))):
        parts = name.split(os.sep)
        for n in range(2, len(parts) + 1):
            folder, part = os.sep.join(parts[: n - 1]) or os.sep, os.sep.join(parts[:n])
            try:
                around, owner = os.stat(folder), os.lstat(part).st_uid
            except (FileNotFoundError, NotADirectoryError):
                break
            shared = around.st_mode & stat.S_ISVTX and around.st_mode & stat.S_IWOTH
            if shared and owner not in (os.geteuid(), 0):
                raise PermissionError(0, f"{part} belongs to another user (uid {owner}) in a folder that everybody writes")


def _make_new(path: str, mode: int) -> str:
    """`path`, or `path` with -2, -3, ... when two runs start within a second: a default directory is never shared."""
    for n in range(1, 100):
        candidate = path if n == 1 else f"{path}-{n}"
        try:
            os.mkdir(candidate, mode)
        except FileExistsError:
            continue
        os.chmod(candidate, mode)
        return candidate
    raise FileExistsError(0, "a hundred runs with this name exist")


def _check_writable(path: str) -> None:
    """Write and remove 4 KiB: permission bits do not tell, and a full disk lets empty files through."""
    fd, probe = tempfile.mkstemp(prefix=".rankwatch-probe-", dir=path)
    try:
        os.write(fd, b"\0" * 4096)
    finally:
        os.close(fd)
        os.unlink(probe)


def _keep_earlier(path: str) -> tuple[str, ...]:
    """Give an earlier run's single files a second name that this run does not write. Nothing is moved: another node may be writing here."""
    found = [name for name in _CONTRACT if os.path.lexists(os.path.join(path, name))]
    if not found:
        return ()
    kept = []
    for name in ("run.json", "events.jsonl"):
        source = os.path.join(path, name)
        if not os.path.isfile(source):
            continue
        os.makedirs(os.path.join(path, EARLIER), mode=0o700, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(os.stat(source).st_mtime))
        target = os.path.join(path, EARLIER, f"{stamp}-{name}")
        try:
            os.link(source, target)
        except FileExistsError:
            pass  # kept already
        except OSError:  # a file system without hard links
            _copy(source, target)
        kept.append(f"{EARLIER}/{stamp}-{name}")
    also = f"; its files are kept as {' and '.join(kept)}" if kept else ""
    return (f"run dir {path} holds an earlier run{also}; incidents of both runs lie side by side",)


def _forget_move(path: str) -> None:
    """What an earlier run has left of where its later files went is not said of this one."""
    try:
        os.unlink(os.path.join(path, moved.NAME))
    except OSError:
        pass


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "xb") as new:
        while chunk := old.read(1 << 20):
            new.write(chunk)


def _point_latest(path: str) -> None:
    """Best effort; a real file or folder of that name is the user's and stays."""
    link = os.path.join(os.path.dirname(path), LATEST)
    if os.path.lexists(link) and not os.path.islink(link):
        return
    temporary = f"{link}.{secrets.token_hex(4)}"
    try:
        os.symlink(os.path.basename(path), temporary)
        os.replace(temporary, link)
    except OSError:
        pass  # a file system without links


def _within(deadline_s: float, function: Callable[[], tuple[str, tuple[str, ...]]]) -> tuple[str, tuple[str, ...]]:
    """The function's result or its OSError; TimeoutError when it does not come in time. The thread is left to the file system."""
    outcome: list[tuple[str, tuple[str, ...]] | Exception] = []

    def work() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="rankwatch-rundir", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        raise TimeoutError(0, f"no answer within {deadline_s:g} s; is its file server up?")
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    if isinstance(outcome[0], Exception):
        raise OSError(0, f"{type(outcome[0]).__name__}: {outcome[0]}")
    return outcome[0]


def _why(error: OSError) -> str:
    return error.strerror or str(error)
