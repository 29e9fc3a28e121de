"""Waits in torch's store outside of any group's: no recorder shows them, Python frames rarely, native ones do.

Native samples are taken once an incident; what one has shown of a rank holds as long as the rank's Python lines stay the same.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rankwatch.model import RankState, Stack
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.finding import Finding

_NATIVE = re.compile(r"^c10d::(?:Prefix|TCP|File|Hash)?Store::(get|wait|multiGet|add|compareSet|waitForWorkers|TCPStore)\b")
_WORDS = {"waitForWorkers": "its constructor", "TCPStore": "its constructor", "multiGet": "multi_get()", "compareSet": "compare_set()"}
_PYTHON = re.compile(r"torch/distributed/elastic/utils/store\.py$")
_PYTHON_CALLS = ("barrier", "synchronize", "get_all")
ADVICE = (
    "A key of the store is waited for that nobody has set yet: see who is to set it, and whether that rank waits for this one.",
    "Give the wait a timeout of its own: store.wait([key], timedelta(...)), store.set_timeout(...).",
)


def call(stack: Stack | None) -> str:
    """`get()`: the call of a store that the main thread is in; "" where none is seen."""
    found = ""
    for frame in stack.main if stack else ():
        if native := _NATIVE.match(frame.name):
            found = _WORDS.get(native[1], f"{native[1]}()")  # the outermost is the one that was called
        elif _PYTHON.search(frame.file) and frames.function(frame) in _PYTHON_CALLS:
            return f"{frames.function(frame)}()"
    return found


def seen(rank: RankState, since: float) -> str:
    """The same of a rank's newest samples, as long as it stays at the lines at which a native sample has shown it."""
    stack, native = rank.stack, rank.native_stack
    if found := call(stack):
        return found
    if stack is None or native is None or native.pid != stack.pid or native.at < since or frames.signature(native) != frames.signature(stack):
        return ""
    return call(native)


def refine(finding: Finding, rank: RankState, since: float) -> Finding:
    """The finding of a rank whose stack told no more than a line of the job, where it waits in the store there."""
    name = seen(rank, since) if finding.cause == "not_entered" else ""
    if not name:
        return finding
    says = f"it waits in {name} of the store" + (f", called from {finding.at}" if finding.at else "")
    return replace(finding, cause="store_wait", says=says, evidence=(f"its stack shows {name} of a torch store", *finding.evidence), advice=ADVICE)
