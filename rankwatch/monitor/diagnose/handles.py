"""A main thread that sleeps in C++ behind a line of Python: `work.wait()` of isend, irecv and batch_isend_irecv has no Python frame of its own.

Such a line may as well wait for a lock or a library of the job's own. One native sample tells: on gloo the thread itself sits in the message's
buffer, while a collective is run by another thread (torch 2.13, ProcessGroupGloo.cpp: SendWork, RecvWork, AsyncWork). What the sample has shown
holds as long as the rank's Python lines stay the same.
"""

from __future__ import annotations

import re

from rankwatch.model import Frame, RankState, Stack
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.work import fresh_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwatch.monitor.diagnose.wants import Asked

EVERY_S = 30.0  # between two native samples of one rank: each pauses it for about half a second
COMES_S = 8.0  # after it was asked for; py-spy is given 6
_RECEIVES, _SENDS = re.compile(r"\bRecvWork::wait|\bUnboundBuffer::waitRecv"), re.compile(r"\bSendWork::wait|\bUnboundBuffer::waitSend")
_PYTHON = re.compile(r"\.pyw?$")
_TELLS = re.compile(r"(<stdlib>|/lib/python3[^/]*)/(?!(site|dist)-packages/)|(^|/)torch/(?!distributed/pipelining/)|<frozen")  # a line there is no handle's
_SLEEPS = ("", "futex")  # the kernel's call of a thread that waits for another one; "": not known


def message(rank: RankState, since: float) -> str:
    """`work.wait() of a receive`: the message that its main thread waits for, by a native sample of this wait and of the present lines; else ""."""
    native = _native(rank, since)
    for frame in native.main if native is not None else ():
        if _RECEIVES.search(frame.name):
            return "work.wait() of a receive"
        if _SENDS.search(frame.name):
            return "work.wait() of a send"
    return ""


def opaque(rank: RankState, since: float) -> bool:
    """Whether its main thread sleeps on gloo in a native call that may be a handle's, and its Python lines do not tell."""
    stack = fresh_stack(rank, since)
    if stack is None or stack.threads[0].active or not any("gloo" in group.backend for group in rank.groups):
        return False
    innermost, wait = stack.main[0], rank.process.main_wait if rank.process is not None else None
    if not _PYTHON.search(innermost.file) or _TELLS.search(innermost.file) or (wait is not None and wait.call not in _SLEEPS):
        return False
    return frames.recognise(stack) is None and not frames.in_point_to_point(stack)


def unread(rank: RankState, since: float) -> bool:
    """Whether only a native sample could tell what it waits for, and there is none."""
    return opaque(rank, since) and not read(rank, since)


def read(rank: RankState, since: float) -> bool:
    """Whether there is a native sample of this wait and of the present lines."""
    return _native(rank, since) is not None


def refused(rank: RankState, since: float) -> bool:
    """Whether that sample was asked for in this wait and could not be had."""
    native = rank.native_stack
    return native is not None and native.at >= since and not native.main and opaque(rank, since)


def pending(rank: RankState, since: float, scene: Scene) -> bool:
    """Whether that sample is about to come. Bounded: one that is not there COMES_S after it was due does not come."""
    if not unread(rank, since) or refused(rank, since):
        return False
    asked_at = scene.state.asked.get(("native_stack", rank.rank), 0.0)
    return scene.now - max(asked_at, since + scene.limits.stack_s) < COMES_S


def to_ask(suspects: Iterable[int], since: float, scene: Scene, asked: Asked, every_s: float = EVERY_S) -> tuple[int, ...]:
    """Those of `suspects` whose native stack is to be taken now; in every_s at most max_stacks of the whole job."""
    hidden = [rank for rank in suspects if unread(scene.ranks[rank], since)]
    recent = sum(kind == "native_stack" and scene.now - at < every_s for (kind, _), at in asked.times.items()) if hidden else 0
    return asked.due("native_stack", hidden, every_s, max(0, scene.limits.max_stacks - recent))


def _native(rank: RankState, since: float) -> Stack | None:
    """The native sample that holds for the newest stack."""
    stack, native = fresh_stack(rank, since), rank.native_stack
    if stack is None or native is None or native.at < since or native.pid != stack.pid or _lines(native) != _lines(stack):
        return None
    return native


def _lines(stack: Stack) -> tuple[object, ...]:
    """The innermost Python line and the job's own ones."""
    innermost = next((frame for frame in stack.main if _is_python(frame)), None)
    return ((innermost.file, innermost.line) if innermost is not None else None, frames.signature(stack))


def _is_python(frame: Frame) -> bool:
    return bool(_PYTHON.search(frame.file))
