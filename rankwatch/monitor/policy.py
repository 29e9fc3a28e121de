"""Every number that decides when a wait becomes a verdict. One table; `--stuck-after` and overrides change it, code does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds end in _s, shares of a timeout or of a core in _ratio, sizes in _bytes, counts in _polls.

    All durations count from the start of the wait, on the judging node's monotonic clock.
    """

    # -- when a wait is told
    notice_s: float = 5.0  # a wait this long is named (slow); shorter ones are everyday skew
    first_notice_s: float = 10.0  # the first collective of a group: connections are made, ranks warm up
    startup_notice_s: float = 10.0  # init_process_group and new_group: imports and file systems differ between ranks
    all_entered_notice_s: float = 15.0  # a large collective may take its time when everybody is in
    notice_ratio: float = 0.25  # of a short timeout: the first word must come well before the last one

    # -- when it is paged
    stuck_ratio: float = 0.2  # of the group's timeout without any progress
    stuck_min_s: float = 5.0
    stuck_max_s: float = 120.0  # also the limit where no timeout is known
    pause_min_s: float = 35.0  # floor for a held GIL or an empty data loader, never past half of the timeout: a garbage collection of 41 s is on record
    first_stuck_min_s: float = 30.0  # floor for the first collective of a group and for all_entered, never past half of the timeout
    startup_stuck_s: float = 120.0  # nobody joins and the absent ranks do nothing
    io_ratio: float = 0.5  # of the timeout, for recognised checkpointing and external I/O
    compile_silent_s: float = 60.0  # a compile with neither a new phase nor CPU in its process tree
    imminent_s: float = 30.0  # timeout_imminent when less than max(imminent_s, imminent_ratio) is left
    imminent_ratio: float = 0.2
    imminent_max_ratio: float = 0.5  # but never while more than this share is left

    # -- what counts as evidence
    suspect_s: float = 1.5  # from here on evidence is gathered
    settle_s: float = 1.5  # an unhealable finding about a wait needs a wait of this age (status numbers are up to one beat old)
    agree_polls: int = 2  # looks that have to agree on unhealable evidence; an exit code needs none
    stopped_s: float = 3.0  # state T for this long is lasting (a debugger's or py-spy's stop is not)
    traced_s: float = 5.0  # state t for this long is a debugger
    uninterruptible_s: float = 5.0  # state D for this long; short D is every disk read
    gil_stale_s: float = 3.0  # the agent's thread beats every 0.5 s
    report_stale_s: float = 15.0  # a node's report older than this makes its ranks unknown

    # -- what counts as progress
    look_s: float = 5.0  # CPU and bytes are compared over this long; shorter looks mistake our own questions for work
    progress_cpu_ratio: float = 0.05  # of one core, process tree
    progress_io_bytes: float = 16384.0  # per look; a log line is no progress

    # -- how often evidence is asked for
    stack_s: float = 3.5  # age of a wait at which the suspects' stacks are first taken, so that the notice can say where
    restack_s: float = 10.0
    rerecord_s: float = 5.0
    max_stacks: int = 8  # suspects or representatives in one request
    max_recorders: int = 256

    # -- other rules
    blind_after_s: float = 30.0  # a rank alive this long whose agent did not load is reported
    max_gap_s: float = 2.0  # a longer gap between looks is a paused clock (three polls, with room for a slow one)
    quiet_polls: int = 2  # nothing is judged for this many polls after it
    idle_min_s: float = 60.0  # no step for this long and ...
    idle_factor: float = 20.0  # ... for this many median steps, once idle_steps were seen
    idle_steps: int = 20
    lead_polls: int = 4  # a constant lead of one rank's numbers over this many polls makes its recorders be read (diverged)
    straggler_window_s: float = 10.0  # three windows in a row have to show the same late rank
    straggler_ratio: float = 0.1  # share of looks in which every other rank is found waiting
    straggler_open_ratio: float = 0.05  # share of its time that every other rank loses to a straggler by arrival times: named from here on ...
    straggler_close_ratio: float = 0.025  # ... until it is less than this
    exit_hold_s: float = 3.0  # --on-stuck exit: what cannot heal has stood unchanged for this long
    exit_stopped_s: float = 60.0  # the same for a stopped process, which somebody may continue
    exit_evidence_s: float = 10.0  # and then the evidence has this long to reach the disk
    post_mortem_s: float = 90.0  # after a watchdog timeout nothing counts as recovery for this long

    @classmethod
    def from_options(cls, stuck_after_s: float | None = None, overrides: Mapping[str, float] | None = None) -> Limits:
        """The default table with `--stuck-after` (fixes the ambiguous-absence limit) and named overrides.

        ValueError names an unknown key, a value that is no positive number, or a floor above its ceiling.
        """
        types = {field.name: field.type for field in fields(cls)}
        changes: dict[str, float] = {}
        if stuck_after_s is not None:
            value = _positive("stuck_after_s", stuck_after_s)
            changes = {"stuck_min_s": value, "stuck_max_s": value, "first_stuck_min_s": value, "pause_min_s": value}
        for name, given in (overrides or {}).items():
            if name not in types:
                raise ValueError(f"unknown limit {name!r}; known limits: {', '.join(sorted(types))}")
            value = _positive(name, given)
            changes[name] = int(value) if types[name] == "int" else value
        limits = replace(cls(), **changes)  # type: ignore[arg-type]
        if limits.stuck_min_s > limits.stuck_max_s:
            raise ValueError(f"limit stuck_min_s ({limits.stuck_min_s:g}) is above stuck_max_s ({limits.stuck_max_s:g})")
        return limits

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


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"limit {name} is {value!r}, want a number above 0")
    return float(value)
