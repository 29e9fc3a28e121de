"""From the runs of all rungs to the layer that is to blame. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwatch.commands.ablation import compare
from rankwatch.commands.ablation.compare import Difference, Floor
from rankwatch.commands.ablation.ladder import INDUCTOR, OFF, Asked, layer
from rankwatch.commands.ablation.records import RankRun
from rankwatch.model import Crash
from rankwatch.monitor.diagnose.victims import speaks_of_peers
from rankwatch.wire.ranks import compress

NO_DIFFERENCE, LAYER_FOUND, INCONCLUSIVE = 0, 3, 4
"""The command's exit codes."""

OK, FAILS, HANGS, QUIET, NOT_FINITE, WRONG, SLOWER, UNSEEN = (
    "ok", "fails", "hangs", "fails quietly", "not finite", "wrong numbers", "slower", "not seen",
)  # fmt: skip
_USER_CODE = re.compile(r'from user code:\s+(?:.*\n)*?\s*File "([^"]+)", line (\d+), in (\S+)')
_WARM_STEPS = 3
SEED = "seed the job: two equal runs give different numbers at their first step; call torch.manual_seed at its start, or use --seed N"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the job. incidents: rankwatch's own documents of it (incident.json), the first opened first.

    lingered: it was ended because it did not end by itself after all its steps.
    """

    rung: str
    folder: str
    exit_code: int
    wall_s: float
    timed_out: bool
    ranks: Mapping[int, RankRun]
    incidents: Sequence[Mapping[str, Any]] = ()
    lingered: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank recorded."""
        return min((run.steps[-1].number if run.steps else 0 for run in self.ranks.values()), default=0)

    @property
    def graphs(self) -> int:
        """Graphs that were compiled, on the rank with most."""
        return max((sum(graph.ok and graph.ops > 0 for graph in run.graphs) for run in self.ranks.values()), default=0)


@dataclass(frozen=True, slots=True)
class Pace:
    """Step time on the rank with the largest median: seconds; low and high are the quartiles. Without the first step and those that compiled."""

    median_s: float
    low_s: float
    high_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run showed. words: for people; error: of a failure, `Type: message`; frame: that was compiled when it failed."""

    kind: str
    words: str
    differences: Mapping[int, Difference] = field(default_factory=dict)
    rank: int | None = None
    error: str = ""
    at: str = ""
    frame: str = ""
    pace: Pace | None = None

    @property
    def bad(self) -> bool:
        return self.kind != OK


@dataclass(frozen=True, slots=True)
class Conclusion:
    """code: the command's. rung and below: the first rung that differs, and the one before it; "" where no layer was found."""

    code: int
    words: str
    rung: str = ""
    below: str = ""
    layer: str = ""


def outcome(run: Run, lowest: Run | None, floor: Floor | None, slower_than: float | None = None) -> Outcome:
    """What a run showed. lowest, floor: None for the lowest rung itself, which is held against nothing."""
    speed = pace(run)
    late = "; it did not end by itself after its steps" if run.lingered else ""
    goes_on = _goes_on(run)
    if goes_on:
        return Outcome(UNSEEN, goes_on, pace=speed)
    if run.timed_out:
        return Outcome(HANGS, _hang(run), pace=speed, rank=_culprit(run))
    if run.exit_code != 0:
        return _failure(run, speed)
    if not run.ranks:
        return Outcome(UNSEEN, "no rank recorded anything: the agent did not load (the run's output.log says why)")
    problems = [problem for rank in run.ranks.values() for problem in rank.problems]
    if problems:
        return Outcome(UNSEEN, f"the recording broke: {problems[0]}", pace=speed)
    quiet = next((graph for rank in run.ranks.values() for graph in rank.graphs if not graph.ok), None)
    if quiet is not None:
        words = f"{quiet.frame} did not compile ({quiet.error[:160]}), and the job went on without (suppress_errors)"
        return Outcome(QUIET, words, error=quiet.error, frame=quiet.frame, pace=speed)
    if run.steps == 0:
        return Outcome(UNSEEN, "no optimizer step was seen; a loop without torch.optim calls rankwatch.step()", pace=speed)
    if lowest is None or floor is None:
        return Outcome(OK, "the lowest rung" + late, pace=speed)
    found = compare.differences(lowest.ranks, run.ranks, floor)
    if floor.unseeded:
        found = {rank: difference for rank, difference in found.items() if difference.nonfinite}
    if found:
        first = min(found.values(), key=lambda one: (one.line, one.rank))
        words = describe(found, len(run.ranks)) + _not_finite_later(run, found)
        return Outcome(NOT_FINITE if first.nonfinite else WRONG, words, differences=found, pace=speed)
    base = pace(lowest)
    if slower_than is not None and speed and base and speed.median_s > slower_than * base.median_s and speed.low_s > base.high_s:
        return Outcome(SLOWER, f"{speed.median_s / base.median_s:.2f} times the step time of {lowest.rung}", pace=speed)
    return Outcome(OK, ("the numbers cannot be compared" if floor.unseeded else "same numbers") + late, pace=speed)


def conclude(rungs: Sequence[tuple[Run, Outcome]], floor: Floor | None, asked: Asked) -> Conclusion:
    """rungs: one run each, lowest first. The layer of the lowest rung from which on every one up to the job's own differs."""
    lowest, first = rungs[0]
    if first.kind == UNSEEN:
        return Conclusion(INCONCLUSIVE, f"{lowest.rung}: {first.words}")
    if first.bad:
        without = "without torch.compile" if lowest.rung == OFF else f"at its lowest rung, {lowest.rung},"
        return Conclusion(INCONCLUSIVE, f"the job {_verb(first.kind)} {without} already: {first.words}; no layer can be blamed")
    highest, last = rungs[-1]
    if not last.bad:
        if highest.graphs == 0:
            why = "no graph reached a backend: torch.compile is not called within these steps, is switched off (TORCHDYNAMO_DISABLE, a stance), or fell back"
            return Conclusion(INCONCLUSIVE, f"nothing was compiled; {why}")
        if floor is not None and floor.unseeded:
            return Conclusion(INCONCLUSIVE, f"no rung fails, and numbers cannot be compared; {SEED}")
        if floor is not None and compare.compared(lowest.ranks, highest.ranks, floor) == 0:
            return Conclusion(INCONCLUSIVE, "no rung fails, and no loss or gradient was seen that could be compared; call backward, or rankwatch.log_loss")
        odd = [run.rung for run, found in rungs if found.bad]
        also = f" ({', '.join(odd)} differs, and the job does not run on it)" if odd else ""
        if highest.rung == INDUCTOR and any(found.kind in (WRONG, NOT_FINITE) for _run, found in rungs):
            also += "; Inductor's code may come from a cache that is older than the fault: run again with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        return Conclusion(NO_DIFFERENCE, f"no difference up to {highest.rung}{also}")
    if last.kind == UNSEEN:
        return Conclusion(INCONCLUSIVE, f"{highest.rung}: {last.words}")
    at = len(rungs) - 1
    while rungs[at - 1][1].bad and rungs[at - 1][1].kind != UNSEEN:
        at -= 1
    if rungs[at - 1][1].kind == UNSEEN:
        return Conclusion(INCONCLUSIVE, f"{rungs[at - 1][0].rung}: {rungs[at - 1][1].words}")
    (run, found), below = rungs[at], rungs[at - 1][0].rung
    blamed = layer(run.rung, below, asked)
    caveat = "; the job is not seeded, so another run may not show it" if floor is not None and floor.unseeded and found.kind == NOT_FINITE else ""
    return Conclusion(LAYER_FOUND, f"to blame: {blamed} ({run.rung} {_verb(found.kind)}, {below} does not{caveat})", run.rung, below, blamed)


def confirmed(found: Conclusion, again: Outcome, first: Outcome) -> Conclusion:
    """The conclusion after the blamed rung ran once more: what does not repeat is no finding."""
    if found.code != LAYER_FOUND or again.kind == first.kind or {again.kind, first.kind} <= {WRONG, NOT_FINITE}:
        return found
    words = f"{found.rung} {_verb(first.kind)} once and, run again, {_verb(again.kind)}: what does not repeat cannot be pinned to a layer"
    return Conclusion(INCONCLUSIVE, f"{words} ({first.words})", found.rung, found.below, "")


def pace(run: Run) -> Pace | None:
    """None where fewer than three steps are left, or where a rank's steps are not to be seen."""
    paces = []
    for rank in run.ranks.values():
        spent = sorted(step.seconds for number, step in enumerate(rank.steps) if number > 0 and not step.compiled)
        if len(spent) < _WARM_STEPS:
            return None
        paces.append(Pace(_quantile(spent, 0.5), _quantile(spent, 0.25), _quantile(spent, 0.75), len(spent)))
    return max(paces, key=lambda one: one.median_s, default=None)


def asked_of(runs: Sequence[Run]) -> Asked:
    """What the job gave to torch.compile, over all ranks and runs."""
    given: dict[str, int] = {}
    for run in runs:
        for rank in run.ranks.values():
            given |= rank.given
    return Asked(tuple(given), tuple(given.values()))


def describe(found: Mapping[int, Difference], ranks: int) -> str:
    """`step 3, rank 1 of 4: loss 2.31 -> nan; rank 0 from step 4`: the earliest difference, then who follows."""
    earliest = min(found.values(), key=lambda one: (one.line, one.rank))
    same = [rank for rank, one in found.items() if (one.line, one.where) == (earliest.line, earliest.where)]
    who = "all ranks" if len(same) == ranks and ranks > 1 else f"rank{'s' if len(same) > 1 else ''} {compress(same)}" + (f" of {ranks}" if ranks > 1 else "")
    text = f"step {earliest.step}, {who}: {earliest.where} {_number(earliest.expected)} -> {_number(earliest.actual)}"
    later: dict[tuple[int, str], list[int]] = {}
    for rank, one in found.items():
        if rank not in same:
            later.setdefault((one.step, "not finite " if one.nonfinite else ""), []).append(rank)
    more = [f"rank{'s' if len(members) > 1 else ''} {compress(members)} {how}from step {step}" for (step, how), members in sorted(later.items())]
    return "; ".join([text, *more])


def _not_finite_later(run: Run, found: Mapping[int, Difference]) -> str:
    """`; not finite on rank 1 from step 4` for ranks whose first difference was finite yet."""
    steps: dict[int, list[int]] = {}
    for rank, one in run.ranks.items():
        step = compare.first_nonfinite(one)
        if step is not None and not (rank in found and found[rank].nonfinite):
            steps.setdefault(step.number, []).append(rank)
    return "".join(f"; not finite on rank{'s' if len(ranks) > 1 else ''} {compress(ranks)} from step {step}" for step, ranks in sorted(steps.items()))


def _failure(run: Run, speed: Pace | None) -> Outcome:
    with_exception = {rank: one.exception for rank, one in run.ranks.items() if one.exception}
    rank = _culprit(run)
    own = {one: found for one, found in with_exception.items() if not _tells_of_a_peer(found)}
    gone = rank not in with_exception and any(found.get("cause") in ("exited", "killed", "oom_killed", "crashed") for found in run.incidents)
    if not gone and rank not in own and (own or rank not in with_exception):
        known = own or with_exception
        rank = min(known, key=lambda one: known[one].get("wall_ns", math.inf), default=rank)
    if rank is None or rank not in with_exception:
        first = _first_cause(run)
        words = first["summary"] if first else f"exit code {run.exit_code}"
        return Outcome(FAILS, words, rank=rank, error=words, pace=speed, frame=_last_frame(run, rank))
    exception = with_exception[rank]
    message = str(exception["message"])
    match = _USER_CODE.search(message) or _USER_CODE.search(str(exception.get("traceback", "")))
    at = f"{match[1].rpartition('/')[2]}:{match[2]}:{match[3]}" if match else str(exception["where"])
    broken = next((graph for graph in run.ranks[rank].graphs if not graph.ok), None)
    name = str(exception["type"]).rpartition(".")[2]
    error = broken.error if broken is not None else f"{name}: {next((line for line in message.splitlines() if line.strip()), '')}"
    shown = f"{name} of {error}" if broken is not None and name not in error else error
    where = f" in {broken.frame}" if broken is not None else f" at {at}" if at else ""
    return Outcome(FAILS, f"rank {rank}: {shown[:200]}{where}", rank=rank, error=error, at=at, frame=broken.frame if broken is not None else "", pace=speed)


def _goes_on(run: Run) -> str:
    """That the script swallowed the end of a run in which every rank made all its steps: whatever came after is no finding. "" otherwise."""
    if not run.ranks or not all(rank.reached_last for rank in run.ranks.values()):
        return ""
    caught = [rank.caught for rank in run.ranks.values() if rank.caught is not None]
    where = next((f" (caught at {where})" for where in caught if where), "")
    return f"the script goes on after SystemExit{where}; let it pass, so that a run can end after its steps" if caught else ""


def _tells_of_a_peer(found: Mapping[str, Any]) -> bool:
    """Whether an exception only says that another rank is gone."""
    return speaks_of_peers(Crash(str(found["type"]), str(found["message"]), str(found["where"]), str(found.get("traceback", ""))))


def _first_cause(run: Run) -> Mapping[str, Any] | None:
    """The incident to name: a failure before a wait, one that names a rank before one that does not, then the first opened."""
    lasting = [found for found in run.incidents if found.get("verdict") != "recovered"]
    return min(lasting, key=lambda one: (not one.get("culprit_ranks"), one.get("verdict") != "failed"), default=None)


def _culprit(run: Run) -> int | None:
    found = _first_cause(run)
    return found["culprit_ranks"][0] if found and found.get("culprit_ranks") else None


def _last_frame(run: Run, rank: int | None) -> str:
    graphs = run.ranks[rank].graphs if rank is not None and rank in run.ranks else []
    return graphs[-1].frame if graphs else ""


def _hang(run: Run) -> str:
    ran = f"not done after {run.wall_s:.0f} s, {run.steps} step{'s' if run.steps != 1 else ''} by then"
    said = _first_cause(run)
    return f"{ran}; rankwatch: {said['verdict']}, {said['summary']}" if said else f"{ran}; rankwatch saw no wait between ranks"


def _verb(kind: str) -> str:
    return {
        OK: "does not differ",
        WRONG: "gives wrong numbers",
        NOT_FINITE: "gives numbers that are not finite",
        SLOWER: "is slower",
        UNSEEN: "is not seen",
    }.get(kind, kind)


def _number(value: float) -> str:
    return f"{value:.6g}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
