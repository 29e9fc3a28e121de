"""The launchers of this user that run on this machine: found by the sockets in their node-local directories, not by what run directories claim."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankwatch.launcher.slots import PREFIX, standard_places
from rankwatch.report import moved
from rankwatch.report.documents import load
from rankwatch.serve.control import NAME, ControlError, ask

FILE = "control.json"
INFO_S = 1.0
ALL_S = 5.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """One that has just answered. info: what it says of itself and its run."""

    socket: str
    info: dict[str, Any]

    @property
    def run(self) -> dict[str, Any]:
        found = self.info.get("run")
        return found if isinstance(found, dict) else {}

    @property
    def run_dir(self) -> str:
        return str(self.run.get("run_dir") or "")


def launchers(places: Sequence[str] | None = None) -> list[Launcher]:
    """Those that answer, the newest first. At most ALL_S."""
    until = time.monotonic() + ALL_S
    found = []
    for path in sockets(places):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        launcher = _asked(path, min(INFO_S, left_s))
        if launcher is not None:
            found.append(launcher)
    return sorted(found, key=lambda launcher: -_number(launcher.run.get("started_at")))


def at(run_dir: str) -> Launcher | None:
    """The launcher of this machine that writes this run directory: as control.json there says, else as the launchers say."""
    try:
        doc = load(moved.newest(run_dir, FILE), {"socket": "text", "node": "text", "pid": "number"})
    except (OSError, ValueError):
        doc = {}
    if doc.get("node") == socket.gethostname() and doc.get("socket"):
        launcher = _asked(str(doc["socket"]), INFO_S)
        if launcher is not None and launcher.info.get("pid") == doc.get("pid"):
            return launcher
    later = moved.of(run_dir)
    wanted = {os.path.realpath(place) for place in (run_dir, *((later.path,) if later is not None and later.here else ()))}
    return next((launcher for launcher in launchers() if launcher.run_dir and os.path.realpath(launcher.run_dir) in wanted), None)


def sockets(places: Sequence[str] | None = None) -> list[str]:
    """Paths of this user's control sockets. Another user's directory is not looked into, a link is not followed."""
    found = []
    for place in _places() if places is None else places:
        try:
            names = sorted(name for name in os.listdir(place) if name.startswith(PREFIX))
        except OSError:
            continue
        for name in names:
            path = os.path.join(place, name, NAME)
            try:
                folder, entry = os.lstat(os.path.join(place, name)), os.lstat(path)
            except OSError:
                continue
            if stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid() and stat.S_ISSOCK(entry.st_mode):
                found.append(path)
    return found


def _places() -> tuple[str, ...]:
    """Where launchers put their directories; a shell of another session may lack XDG_RUNTIME_DIR."""
    return tuple(dict.fromkeys((*standard_places(), f"/run/user/{os.geteuid()}")))


def _asked(path: str, deadline_s: float) -> Launcher | None:
    try:
        return Launcher(path, ask(path, {"do": "info"}, deadline_s))
    except ControlError:
        return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0
