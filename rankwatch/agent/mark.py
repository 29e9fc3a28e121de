"""Owner state `loaded`: the agent is in this process, which has not imported torch. So a script that never does is not taken for one without agent.

Written at interpreter start, with no more modules than struct, zlib and time. Only a slot that nobody has had gets the mark, or one that a
process left which came no further than this and has ended.
"""

from __future__ import annotations

import os
import time

from rankwatch.agent import orphan, ownership
from rankwatch.wire import env, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_OWNER = layout.RECORDS["owner"]


def leave(environ: Mapping[str, str]) -> Mark | None:
    """Write the mark into this rank's slot; None when there is no slot of this layout, or when it is another's."""
    mark = Mark(environ)
    try:
        fd = os.open(mark.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return mark if mark.write(fd) else None
    finally:
        os.close(fd)


class Mark:
    """The mark of this process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._rank, self._slot_dir = int(environ["RANK"]), environ[env.SLOT_DIR]
        self.path = os.path.join(self._slot_dir, env.slot_name(self._rank))
        self._pid = os.getpid()
        self._launcher = orphan.Launcher(int(environ.get(env.LAUNCHER_PID, "0") or 0))
        self._written = b""

    def write(self, fd: int) -> bool:
        """Both copies of the owner record, as RankSlot would: copy n at place n % 2."""
        head = os.pread(fd, _OWNER.offset + 2 * _OWNER.copy_bytes, 0)
        if os.fstat(fd).st_size != layout.SLOT_BYTES:
            return False
        magic, version, slot_bytes, rank, _attempt = layout.HEADER.unpack_from(head)
        if (magic, version, slot_bytes, rank) != (layout.MAGIC, layout.LAYOUT_VERSION, layout.SLOT_BYTES, self._rank):
            return False
        found = layout.read_record(head, _OWNER)
        if found and not gives_way(found[2]):
            return False
        ticks = ownership.start_ticks(self._pid)
        payload = f'{{"pid":{self._pid},"start_ticks":{ticks},"state":"loaded","rank":{rank},"wall_ns":{time.time_ns()}}}'.encode()
        seq = found[0] + 1 if found else 1
        for n in (seq, seq + 1):
            copy = layout.pack(n, time.monotonic_ns(), payload)
            os.pwrite(fd, copy, _OWNER.offset + (n & 1) * _OWNER.copy_bytes)
            if not n & 1:
                self._written = copy
        return True

    def exits(self) -> None:
        """atexit: of a job without torch, too, the last one removes what a dead launcher cannot. Where torch came, Rank does it."""
        if os.getpid() != self._pid or not self._launcher.gone():
            return
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            still_ours = os.pread(fd, len(self._written), _OWNER.offset) == self._written
        finally:
            os.close(fd)
        if still_ours:
            orphan.remove(self._slot_dir, self._rank)


def gives_way(payload: bytes) -> bool:
    """Whether an owner record is the mark of a process that is gone."""
    if b'"state":"loaded"' not in payload:
        return False
    pid, start_ticks = (int(field.partition(b":")[2]) for field in payload.split(b",", 2)[:2])
    return not ownership.alive({"pid": pid, "start_ticks": start_ticks})
