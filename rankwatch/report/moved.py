"""`moved_to`: what a run directory that took no more writes says of the place where the run's later files are."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from rankwatch.report.documents import load

NAME = "moved_to"
_KEYS: Mapping[str, str] = {"path": "text", "node": "text"}


@dataclass(frozen=True, slots=True)
class Moved:
    """path: of the later files, on `node`. here: whether this process can read them there."""

    path: str
    node: str
    here: bool


def document(path: str) -> bytes:
    """The file's text, for files that go to `path` of this machine."""
    return (json.dumps({"path": path, "node": socket.gethostname()}) + "\n").encode("utf-8", "backslashreplace")


def of(run_dir: str) -> Moved | None:
    """Where the later files of a run directory are; None where they are in it. Only the word of this user is taken, and only a folder of theirs."""
    file = os.path.join(run_dir, NAME)
    try:
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        doc = load(file, _KEYS)
    except (OSError, ValueError):
        return None
    path, node = str(doc.get("path") or ""), str(doc.get("node") or "")
    return Moved(path, node, node == socket.gethostname() and _ours(path)) if os.path.isabs(path) and "\0" not in path else None


def newest(run_dir: str, name: str) -> str:
    """The path of a run's file: where later files are if it is there, else in the run directory itself."""
    moved = of(run_dir)
    later = os.path.join(moved.path, name) if moved is not None and moved.here else ""
    return later if later and os.path.exists(later) else os.path.join(run_dir, name)


def words(run_dir: str) -> str:
    """The line for people; "" where nothing was moved."""
    moved = of(run_dir)
    if moved is None:
        return ""
    if moved.here:
        return f"{run_dir} took no writes for a while: the later files of this run are in {moved.path}, and are shown from there"
    there = f" on {moved.node}" if moved.node != socket.gethostname() else ", which this user cannot read or which is gone"
    return f"{run_dir} took no writes for a while: the later files of this run are in {moved.path}{there}; what is known here is older"


def _ours(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
