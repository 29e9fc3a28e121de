"""After NCCL's watchdog has fired: how long until it ends the process, what it has printed, and an abort that never returns.

Between the timeout and the end torch waits four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC for dumps: the time to gather evidence. The abort
itself may hang: a kernel captured in a CUDA graph holds the device (run on torch 2.11, NCCL 2.28), and then nobody ends the job. Whether the
heartbeat monitor does is not known. Source: torch 2.9-2.14, ProcessGroupNCCL.
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import RankState, Verdict
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.state import State, Trouble
from rankwatch.monitor.diagnose.views import alive
from rankwatch.monitor.workers import DUMP, HANDLING, HEARTBEAT, MONITORING, switched_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_DEFAULTS = {DUMP: 15_000, HEARTBEAT: 480, MONITORING: 1, HANDLING: 3}
_WAITS = 4  # times DUMP
ABORT_S = 15.0  # from its beginning; one that works takes less than a second
_DOWN_S = 60.0  # from when it says that it takes the process down: a core dump takes its time
_LATE_S = 20.0  # beyond the wait for dumps, where no log tells when the abort has begun: symbols may take 6 s
_STILL_S = 10.0  # nothing has moved for so long
_MAX_SHOWN = 8


def fired(trouble: Trouble, ranks: Mapping[int, RankState]) -> bool:
    """Whether a rank that waits in it has printed so."""
    waiting = trouble.verdict.waiting_ranks if trouble.verdict is not None else ()
    return any((at := ranks[rank].watchdog.fired_at) is not None and at >= trouble.since for rank in waiting if rank in ranks)


def holds(frozen: Iterable[Verdict], state: State, scene: Scene) -> bool:
    """Whether it is not over though nobody is seen waiting: after an abort the operations count as done, and the ranks stand all the same."""
    standing = scene.now - state.moved_at >= _STILL_S
    return standing and any(_ends_here(verdict, scene) and _living(verdict, scene) for verdict in frozen)


def told(frozen: Sequence[Verdict], state: State, scene: Scene) -> list[Verdict]:
    """The verdicts of the moment at which it fired, with what has come since."""
    return [_told(verdict, state, scene) if _ends_here(verdict, scene) else verdict for verdict in frozen]


def _told(verdict: Verdict, state: State, scene: Scene) -> Verdict:
    since = state.frozen_at if state.frozen_at is not None else scene.now
    passed = scene.age(since)
    living = _living(verdict, scene)
    logs = [
        f"rank {rank} printed: {line}" for rank in verdict.waiting_ranks[:_MAX_SHOWN] if rank in scene.ranks for line in scene.ranks[rank].watchdog.lines[:2]
    ]
    missing = verdict.missing_evidence
    unread = [rank for rank in verdict.waiting_ranks if rank in scene.ranks and not scene.ranks[rank].watchdog.readable]
    if unread and not logs:
        missing = (*missing, f"what the watchdog of {words.ranks_text(unread)} has printed: it is on the terminal (torchrun --tee 3 keeps a log)")
    head = "; ".join(clause for clause in verdict.summary.split("; ") if not clause.startswith("the group's timeout"))
    seen = any(scene.ranks[rank].watchdog.fired_at is not None for rank in living)
    happened = "the watchdog has fired" if seen else "the timeout has passed"
    summary = f"{head}; {happened} {passed:.0f} s ago"
    window_s, setting = window(scene.snapshot.environment)
    advice = verdict.advice
    level = verdict.verdict
    if value(scene.snapshot.environment, HANDLING) == 0:
        lines = [f"no watchdog ends these processes: {HANDLING}=0 is set in the job's environment"]
        advice = (_by_hand(living, scene), *advice) if living else advice
    elif living and _does_not_return(living, passed, window_s, scene):
        level = "stuck"
        summary += f", and its abort does not return: {words.ranks_text(living)} must be ended by hand"
        lines = [f"torch waits {window_s:.0f} s from the timeout to the abort ({setting}); {passed:.0f} s have passed", *_aborting(living, scene)]
        advice = (_by_hand(living, scene), _heartbeat(scene.snapshot.environment), *advice)
    else:
        lines = [
            f"{happened}; torch ends the process up to {window_s:.0f} s later ({setting}), and what moves until then is no recovery",
            *_aborting(living, scene),
        ]
    return replace(
        verdict, verdict=level, summary=summary, timeout_left_s=None, evidence=(*verdict.evidence, *lines, *logs[:_MAX_SHOWN]), missing_evidence=missing,
        advice=tuple(dict.fromkeys(advice)),
    )  # fmt: skip


def window(environment: Mapping[str, str]) -> tuple[float, str]:
    """(seconds from the timeout to the abort, how that is known)."""
    given = "as the job's environment has it" if environment.get(DUMP, "").strip() else "by default"
    return _WAITS * value(environment, DUMP) / 1e3, f"{_WAITS} x {DUMP}, {value(environment, DUMP)} ms {given}"


def value(environment: Mapping[str, str], name: str) -> int:
    """The setting in force; torch's default where it is not set or no number."""
    text = environment.get(name, "").strip()
    if name == MONITORING and text:
        return int(switched_on(text))
    return int(text) if text.isdigit() else _DEFAULTS[name]


def _ends_here(verdict: Verdict, scene: Scene) -> bool:
    """Whether it is about a wait in an NCCL group."""
    if verdict.group is None or not verdict.waiting_ranks:
        return False
    waiters = (scene.ranks[rank] for rank in verdict.waiting_ranks if rank in scene.ranks)
    return any("nccl" in group.backend for rank in waiters for group in rank.groups if group.name == verdict.group.name)


def _living(verdict: Verdict, scene: Scene) -> tuple[int, ...]:
    """Ranks whose watchdog is about to end them, and that live: those that said so, else those that wait."""
    waiting = [rank for rank in verdict.waiting_ranks if rank in scene.ranks and alive(scene.ranks[rank])]
    said = [rank for rank in waiting if scene.ranks[rank].watchdog.fired_at is not None]
    return tuple(sorted(said or waiting))


def _does_not_return(living: Sequence[int], passed: float, window_s: float, scene: Scene) -> bool:
    ends = [at for rank in living if (at := scene.ranks[rank].watchdog.ends_at) is not None]
    if ends:
        return scene.age(min(ends)) >= _DOWN_S
    began = [at for rank in living if (at := scene.ranks[rank].watchdog.aborts_at) is not None and scene.ranks[rank].watchdog.aborted_at is None]
    if began:
        return scene.age(min(began)) >= ABORT_S
    return passed >= window_s + _LATE_S


def _aborting(living: Sequence[int], scene: Scene) -> list[str]:
    found = []
    for rank in living[:_MAX_SHOWN]:
        log = scene.ranks[rank].watchdog
        if log.ends_at is not None:
            found.append(f"rank {rank} said {scene.age(log.ends_at):.0f} s ago that it takes the process down, and still lives")
        elif log.aborts_at is not None and log.aborted_at is None:
            found.append(f"rank {rank} began to abort its communicator {scene.age(log.aborts_at):.0f} s ago and has not told that it is done")
    return found


def _by_hand(living: Sequence[int], scene: Scene) -> str:
    by_node: dict[str, list[str]] = {}
    for rank in living[:_MAX_SHOWN]:
        process = scene.ranks[rank].process
        if process is not None:
            by_node.setdefault(scene.ranks[rank].node, []).append(str(process.pid))
    commands = "; ".join(f"`kill -KILL {' '.join(pids)}`" + (f" on {node}" if node else "") for node, pids in by_node.items())
    return f"End {words.ranks_text(living)} by hand: {commands or 'SIGKILL'}; torchrun then ends the other ranks, and restarts them where it may."


def _heartbeat(environment: Mapping[str, str]) -> str:
    if not value(environment, MONITORING):
        return f"Nothing else will: torch's heartbeat monitor is off ({MONITORING} in the job's environment)."
    seconds = value(environment, HEARTBEAT)
    return f"torch's heartbeat monitor may end it after {seconds} s ({HEARTBEAT}); whether it does in this state is not known."
