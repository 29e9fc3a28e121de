"""When what rankwatch said of a GPU job is right, and statistics of paired runs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from gpu_cases import PAGES, Control, Fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_watch import Seen, State

EARLY_S = 1.0  # clocks and the moment that the job noted differ by less


@dataclass(slots=True)
class Judged:
    """problems: what makes it wrong; late: what was right but after its bar. Seconds count from the onset."""

    named_s: float | None = None
    paged_s: float | None = None
    stacks_s: float | None = None
    problems: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        return "WRONG" if self.problems else "late" if self.late else "right"


def names(state: State, case: Fault, num_ranks: int) -> bool:
    return state.culprits in case.culprit_sets(num_ranks) and state.cause in (*case.causes, *case.first_causes)


def final(state: State, case: Fault, num_ranks: int) -> bool:
    return names(state, case, num_ranks) and state.cause in case.causes and state.verdict in case.verdicts


def settled(case: Fault, seen: Seen, onset: float | None, num_ranks: int, now: float) -> bool:
    """Whether all that is expected is on disk, so that the job may be ended."""
    if onset is None or case.until_exit or now < onset + case.hold_s:
        return False
    if not any(final(state, case, num_ranks) and state.at >= onset - EARLY_S for state in seen.states):
        return False
    return len(saved(case, seen, onset)) == len(case.stacks) and looks(seen, onset) >= case.compile_looks


def saved(case: Fault, seen: Seen, onset: float) -> dict[int, float]:
    """When each wanted stack lay on disk for the first time after the onset."""
    times = {rank: [at for at in seen.stack_at.get(rank, ()) if at >= onset - EARLY_S] for rank in case.stacks}
    return {rank: min(found) for rank, found in times.items() if found}


def looks(seen: Seen, onset: float) -> int:
    return sum(at >= onset for at, _ in seen.compile_looks)


def judge_fault(case: Fault, seen: Seen, onset: float | None, num_ranks: int) -> Judged:
    found = Judged()
    if onset is None:
        found.problems.append("the fault did not happen")
        return found
    states = [state for state in seen.states if state.verdict != "recovered"]
    for state in states:
        if state.verdict in PAGES and state.verdict not in case.verdicts and names(state, case, num_ranks) and not _warns(state, case):
            found.problems.append(f"page {state}")
        elif state.verdict in PAGES and not names(state, case, num_ranks):
            found.problems.append(f"WRONG PAGE {state}")
    first = next((state for state in states if state.culprits and state.at >= onset), None)
    if first is not None and not names(first, case, num_ranks):
        found.problems.append(f"first named {first}")
    right = [state for state in states if names(state, case, num_ranks) and state.at >= onset - EARLY_S]
    ends = [state for state in right if final(state, case, num_ranks)]
    pages = [state for state in right if state.verdict in PAGES]
    found.named_s = min((state.at - onset for state in right), default=None)
    found.paged_s = min((state.at - onset for state in pages), default=None)
    if not ends:
        found.problems.append(f"no {'/'.join(case.verdicts)} {'/'.join(case.causes)}")
    if found.named_s is not None and found.named_s > case.named_s:
        found.late.append(f"named after {found.named_s:.1f} s of {case.named_s:g}")
    if case.paged_s is not None and found.paged_s is not None and found.paged_s > case.paged_s:
        found.late.append(f"paged after {found.paged_s:.1f} s of {case.paged_s:g}")
    found.problems += _evidence(case, seen, onset, found)
    return found


def _warns(state: State, case: Fault) -> bool:
    """A countdown that is due anyway: a job whose stuck page came first is not wrong when its timeout then comes near."""
    return state.verdict == "timeout_imminent" and "stuck" in case.verdicts


def _evidence(case: Fault, seen: Seen, onset: float, found: Judged) -> list[str]:
    there = saved(case, seen, onset)
    problems = [f"no stack of rank {rank}" for rank in case.stacks if rank not in there]
    found.stacks_s = max(there.values()) - onset if there else None
    if seen.abort_at is not None and there and max(there.values()) >= seen.abort_at:
        problems.append("stacks only after the abort")
    if case.until_exit and case.timeout_s < 60 and seen.watchdog_at is not None and found.named_s is not None and onset + found.named_s >= seen.watchdog_at:
        problems.append("named only after the watchdog")
    if looks(seen, onset) < case.compile_looks:
        problems.append(f"{looks(seen, onset)} moments of the compile, want {case.compile_looks}")
    return problems


def judge_control(control: Control, seen: Seen, code: int | None) -> Judged:
    found = Judged()
    found.problems += [f"FALSE PAGE {state}" for state in seen.states if state.verdict in PAGES]
    found.problems += [f"undue {state}" for state in seen.states if state.verdict not in (*PAGES, "slow", "recovered")]
    if code != 0:
        found.problems.append("time limit" if code is None else f"exit code {code}")
    return found


# -- paired measurements -----------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float, float]:
    """(median, low, high, real level) by order statistics: the narrowest symmetric interval with at least `level`, the widest there is when none has."""
    ordered, number = sorted(values), len(values)
    best = (ordered[0], ordered[-1], 1 - 2 * 0.5**number)
    for skip in range(number // 2):
        below = sum(math.comb(number, k) for k in range(skip + 1)) * 0.5**number
        if 1 - 2 * below < level:
            break
        best = (ordered[skip], ordered[number - 1 - skip], 1 - 2 * below)
    return median(ordered), *best
