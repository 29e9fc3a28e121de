"""Removing what a launcher that was killed leaves behind: its last rank does it."""

from __future__ import annotations

import os
import stat

from rankwatch.agent import ownership
from rankwatch.wire import env

_BASE_PREFIX = "rankwatch."  # of the directory above SLOT_DIR, see launcher/slots.py
_LAUNCHERS_FILES = {"owner.json", "owner.json.new"}


class Launcher:
    """The launcher as it was when this process started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks = ownership.start_ticks(pid) if pid > 0 else 0

    def gone(self) -> bool:
        """Whether it ran then and does not now."""
        return bool(self._ticks) and not ownership.alive({"pid": self._pid, "start_ticks": self._ticks})


def remove(slot_dir: str, rank: int) -> None:
    """Remove the rank's files; then the directories, as far as nothing of another rank is in them. Raises nothing."""
    try:
        for name in (env.slot_name(rank), env.socket_name(rank)):
            try:
                os.unlink(os.path.join(slot_dir, name))
            except FileNotFoundError:
                pass
        os.rmdir(slot_dir)
        base = os.path.dirname(slot_dir)
        status = os.lstat(base)
        if os.path.basename(base).startswith(_BASE_PREFIX) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            left = set(os.listdir(base))
            if left <= _LAUNCHERS_FILES:
                for name in left:
                    os.unlink(os.path.join(base, name))
                os.rmdir(base)
    except OSError:
        pass  # another rank still has files in it, or is removing it at this moment
