"""Every number that decides when a wait becomes a verdict. One table; `--stuck-after` and overrides change it, code does not."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    N = TypeVar("N", float, int)


def _number(default: N, meaning: str) -> N:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds end in _s, shares of a timeout or of a core in _ratio, sizes in _bytes, counts in _polls; `meanings` has a line for each.

    All durations count from the start of the wait, on the judging node's monotonic clock.
    """

    # -- when a wait is told
    notice_s: float = _number(5.0, "a wait this long is named (slow); shorter ones are everyday skew")
    first_notice_s: float = _number(10.0, "the first collective of a group: connections are made, ranks warm up")
    startup_notice_s: float = _number(10.0, "init_process_group and new_group: imports and file systems differ between ranks")
    all_entered_notice_s: float = _number(15.0, "a large collective may take its time when everybody is in")
    notice_ratio: float = _number(0.25, "of a short timeout: the first word must come well before the last one")

    # -- when it is paged
    stuck_ratio: float = _number(0.2, "of the group's timeout without any progress: stuck")
    stuck_min_s: float = _number(5.0, "floor of what stuck_ratio gives")
    stuck_max_s: float = _number(120.0, "ceiling of what stuck_ratio gives; also the limit where no timeout is known")
    pause_min_s: float = _number(35.0, "floor for a held GIL or an empty data loader (a garbage collection may take 41 s), never past half of the timeout")
    first_stuck_min_s: float = _number(30.0, "floor for the first collective of a group and for all_entered, never past half of the timeout")
    startup_stuck_s: float = _number(120.0, "nobody joins and the absent ranks do nothing: stuck")
    io_ratio: float = _number(0.5, "of the timeout, for recognised checkpointing and external I/O that moves nothing")
    compile_silent_s: float = _number(60.0, "a compile with neither a new phase nor CPU in its process tree for this long is stuck")
    imminent_s: float = _number(30.0, "timeout_imminent when less than max(imminent_s, imminent_ratio) is left")
    imminent_ratio: float = _number(0.2, "the share in imminent_s")
    imminent_max_ratio: float = _number(0.5, "timeout_imminent never while more than this share of the timeout is left")

    # -- what counts as evidence
    suspect_s: float = _number(1.5, "from here on evidence is gathered")
    settle_s: float = _number(1.5, "an unhealable finding about a wait needs a wait of this age (status numbers are up to one beat old)")
    agree_polls: int = _number(2, "looks that have to agree on unhealable evidence; an exit code needs none")
    stopped_s: float = _number(3.0, "state T for this long is lasting (a debugger's or py-spy's stop is not)")
    traced_s: float = _number(5.0, "state t for this long is a debugger")
    uninterruptible_s: float = _number(5.0, "state D for this long; short D is every disk read")
    gil_stale_s: float = _number(3.0, "the agent's thread beats every 0.5 s")
    report_stale_s: float = _number(15.0, "a node's report older than this makes its ranks unknown")

    # -- what counts as progress
    look_s: float = _number(5.0, "CPU and bytes are compared over this long; shorter looks mistake our own questions for work")
    progress_cpu_ratio: float = _number(0.05, "of one core, process tree")
    progress_io_bytes: float = _number(16384.0, "per look; a log line is no progress")

    # -- how often evidence is asked for
    stack_s: float = _number(3.5, "age of a wait at which the suspects' stacks are first taken, so that the notice can say where")
    restack_s: float = _number(10.0, "stacks of suspects are taken again after this long")
    rerecord_s: float = _number(5.0, "recorder entries are asked for again after this long")
    max_stacks: int = _number(8, "suspects or representatives in one request")
    max_recorders: int = _number(256, "ranks whose entries are asked for in one request")

    # -- other rules
    blind_after_s: float = _number(30.0, "a rank alive this long whose agent did not load is reported")
    max_gap_s: float = _number(2.0, "a longer gap between looks is a paused clock (three polls, with room for a slow one)")
    quiet_polls: int = _number(2, "nothing is judged for this many polls after a paused clock")
    idle_min_s: float = _number(60.0, "no step for this long and for idle_factor median steps, once idle_steps were seen, is idle")
    idle_factor: float = _number(20.0, "median steps without a step, for the same rule")
    idle_steps: int = _number(20, "steps that were seen before the same rule holds")
    lead_polls: int = _number(4, "ranks whose numbers stay apart over this many polls have their recorders read (diverged)")
    straggler_window_s: float = _number(10.0, "three windows in a row have to show the same late rank")
    straggler_ratio: float = _number(0.1, "share of looks in which every other rank is found waiting")
    straggler_open_ratio: float = _number(0.05, "share of its time that every other rank loses to a straggler by arrival times: named from here on")
    straggler_close_ratio: float = _number(0.025, "the same: named until it is less than this")
    exit_hold_s: float = _number(3.0, "--on-stuck exit: what cannot heal has stood unchanged for this long")
    exit_stopped_s: float = _number(60.0, "--on-stuck exit: the same for a stopped process, which somebody may continue")
    exit_evidence_s: float = _number(10.0, "--on-stuck exit: the evidence then has this long to reach the disk")
    post_mortem_s: float = _number(90.0, "after a watchdog timeout nothing counts as recovery for this long")

    @classmethod
    def from_options(cls, stuck_after_s: float | None = None, overrides: Mapping[str, float] | None = None) -> Limits:
        """The default table with `--stuck-after` (fixes the ambiguous-absence limit) and named overrides.

        ValueError names an unknown key, a value out of its range, or a floor above its ceiling.
        """
        changes: dict[str, float] = {}
        if stuck_after_s is not None:
            if problem := _out_of_range("stuck_after_s", stuck_after_s):
                raise ValueError(f"limit stuck_after_s is {stuck_after_s!r}: it takes {problem}")
            changes = dict.fromkeys(("stuck_min_s", "stuck_max_s", "first_stuck_min_s", "pause_min_s"), stuck_after_s)
        for name, given in (overrides or {}).items():
            try:
                cls.check(name, given)
            except ValueError as error:
                raise ValueError(f"limit {name} is {given!r}: {error}") from None
            changes[name] = int(given) if name in _COUNTS else float(given)
        limits = replace(cls(), **changes)  # type: ignore[arg-type]
        if limits.stuck_min_s > limits.stuck_max_s:
            raise ValueError(f"limit stuck_min_s ({limits.stuck_min_s:g}) is above stuck_max_s ({limits.stuck_max_s:g})")
        return limits

    @classmethod
    def check(cls, name: str, value: object) -> None:
        """ValueError says what a limit takes, or that there is none of this name."""
        known = [field.name for field in fields(cls)]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            raise ValueError(f"there is no limit {name}{f' (did you mean {near[0]}?)' if near else ''}; rankwatch config --limits lists them")
        if problem := _out_of_range(name, value):
            raise ValueError(f"it takes {problem}")

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each number decides, in the order of the table."""
        return {field.name: str(field.metadata["meaning"]) for field in fields(cls)}

    # -- the rules made of them

    def stuck_after_s(self, timeout_s: float | None, *, first: bool = False) -> float:
        """How long a wait without progress may last. first: of a group's first collective, or with all ranks in."""
        if not timeout_s:
            return self.stuck_max_s
        limit = min(max(self.stuck_ratio * timeout_s, self.stuck_min_s), self.stuck_max_s)
        return max(limit, min(self.first_stuck_min_s, 0.5 * timeout_s)) if first else limit

    def notice_after_s(self, notice_s: float, timeout_s: float | None) -> float:
        """When a wait is named that is due after notice_s: sooner under a timeout so short that its end would be near by then."""
        return min(notice_s, max(self.suspect_s, self.notice_ratio * timeout_s)) if timeout_s else notice_s

    def pause_after_s(self, timeout_s: float | None, *, first: bool = False) -> float:
        """The same for what pauses in healthy jobs as well: a held GIL, a loader without a batch."""
        limit = self.stuck_after_s(timeout_s, first=first)
        return max(limit, min(self.pause_min_s, 0.5 * timeout_s)) if timeout_s else limit

    def io_after_s(self, timeout_s: float | None) -> float:
        """The same where a rank is known to read or write something large."""
        return self.io_ratio * timeout_s if timeout_s else 2 * self.stuck_max_s

    def imminent_left_s(self, timeout_s: float) -> float:
        """Less than this left of a timeout is imminent."""
        return min(max(self.imminent_s, self.imminent_ratio * timeout_s), self.imminent_max_ratio * timeout_s)


_COUNTS = tuple(field.name for field in fields(Limits) if field.type == "int")


def _out_of_range(name: str, value: object) -> str:
    """What `name` takes where `value` is something else; "" where it fits."""
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    size = float(value) if number else 0.0  # type: ignore[arg-type]
    if name in _COUNTS:
        return "" if size >= 1 and size.is_integer() else "a whole number from 1 on"
    if name.endswith("_ratio"):
        return "" if 0 < size <= 1 else "a share above 0 and not above 1, such as 0.2"
    if name.endswith("_s"):
        return "" if size > 0 else "seconds above 0 and not negative, such as 5, 90s, 1.5m"
    return "" if size > 0 else "a number above 0"
