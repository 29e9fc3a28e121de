"""Owner state `loaded`: the agent is in this process, which has not imported torch. So a script that never does is not taken for one without agent.

Written at interpreter start, with no more modules of Python's than struct, zlib and time. Only a slot that nobody has had gets the mark, or one that a
process left which came no further than this and has ended.
"""

from __future__ import annotations

import os
import sys
from os import getpid  # bound now: a job may replace os.getpid

from rankwatch.agent import orphan, ownership
from rankwatch.agent.clock import clock
from rankwatch.wire import env, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_OWNER, _LIFECYCLE = layout.RECORDS["owner"], layout.RECORDS["lifecycle"]


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
        self._pid = getpid()
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
        payload = f'{{"pid":{self._pid},"start_ticks":{ticks},"state":"loaded","rank":{rank},"wall_ns":{clock.wall_ns()}}}'.encode()
        seq = found[0] + 1 if found else 1
        for n in (seq, seq + 1):
            copy = layout.pack(n, clock.now_ns(), payload)
            os.pwrite(fd, copy, _OWNER.offset + (n & 1) * _OWNER.copy_bytes)
            if not n & 1:
                self._written = copy
        if found:
            _put_lifecycle(fd, b"")  # what the process before has left
        return True

    def exits(self) -> None:
        """atexit: of a job without torch, too, the exception that ends it is told, and the last one removes what a dead launcher cannot.

        Where torch came, Rank does both.
        """
        try:
            self._exits()
        except Exception:
            pass

    def _exits(self) -> None:
        raised, gone = hasattr(sys, "last_value") or hasattr(sys, "last_exc"), self._launcher.gone()
        if getpid() != self._pid or not (raised or gone):
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.pread(fd, len(self._written), _OWNER.offset) != self._written:
                return
            if raised:
                _write_exception(fd)
        finally:
            os.close(fd)
        if gone:
            orphan.remove(self._slot_dir, self._rank)


def _write_exception(fd: int) -> None:
    """The lifecycle record, as Rank would write it. What it takes is looked for where Python's own modules lie: a json.py beside the script is the job's."""
    home, paths = os.path.dirname(os.__file__), sys.path
    sys.path = [path for path in paths if path == home or path.startswith(os.path.join(home, "lib-dynload")) or path.endswith(".zip")]
    try:
        from rankwatch.agent.crash import ending_exception
        from rankwatch.agent.slot import fit

        exception = ending_exception()
    finally:
        sys.path = paths
    if exception is not None:
        record = {"stage": "exiting", "since_mono_ns": clock.now_ns(), "exception": exception, "barrier": None, "join": None}
        _put_lifecycle(fd, fit(record, _LIFECYCLE.payload_bytes))


def _put_lifecycle(fd: int, payload: bytes) -> None:
    """Both copies: the one that a reader finds newest is whole at any time."""
    found = layout.read_record(os.pread(fd, layout.EVENTS_OFFSET, 0), _LIFECYCLE)
    if not payload and (not found or not found[2]):
        return
    seq = found[0] + 1 if found else 1
    for n in (seq, seq + 1):
        os.pwrite(fd, layout.pack(n, clock.now_ns(), payload), _LIFECYCLE.offset + (n & 1) * _LIFECYCLE.copy_bytes)


def gives_way(payload: bytes) -> bool:
    """Whether an owner record is the mark of a process that is gone."""
    if b'"state":"loaded"' not in payload:
        return False
    pid, start_ticks = (int(field.partition(b":")[2]) for field in payload.split(b",", 2)[:2])
    return not ownership.alive({"pid": pid, "start_ticks": start_ticks})
