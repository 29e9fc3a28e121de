"""What every rule looks at, and what a rule makes of a hang."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch.model import Cause, Confidence, Domain, JobSnapshot, RankState, Verdict, VerdictName
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import State, age
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

Clock = tuple[float, float | None, bool, float, str]  # since, timeout, first collective, notice, kind of the wait


@dataclass(frozen=True, slots=True)
class Ruling:
    """What is said of a hang at this look. mark: the unhealable evidence, () if there is none; equal marks in two looks agree.

    agree, witness: as in state.Trouble, this look included.
    """

    verdict: Verdict | None
    culprits: tuple[int, ...]
    since: float
    deadline: float | None
    mark: tuple[object, ...] = ()
    agree: int = 0
    witness: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scene:
    """What every rule looks at."""

    state: State
    snapshot: JobSnapshot
    ranks: Mapping[int, RankState]
    limits: Limits
    lags: Mapping[str, float] = field(default_factory=dict)  # node -> age of its report, seconds
    unknown: tuple[int, ...] = ()  # ranks that nobody reports
    gpu_notes: Mapping[int, tuple[int, str]] = field(default_factory=dict)  # rank -> place of its node, and why nothing is known of its GPU

    @property
    def now(self) -> float:
        return self.snapshot.now

    def age(self, since: float) -> float:
        return age(self.state.pauses, since, self.now)

    def lag(self, rank: int) -> float:
        """How far behind now what is known of this rank is. What a late report shows does not grow older with the report."""
        return self.lags.get(self.ranks[rank].node, 0.0) if rank in self.ranks else 0.0

    def seen_at(self, rank: int) -> float:
        """When the report was made that this rank is in."""
        return self.now - self.lag(rank)


@dataclass(frozen=True, slots=True)
class Picture:
    """A hang reduced to what a verdict needs, whichever rule made it."""

    level: VerdictName | None
    cause: Cause
    domain: Domain
    culprits: tuple[int, ...]
    wait: Wait
    says: str
    at: str = ""
    evidence: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    mark: tuple[object, ...] = ()
    finding: Finding | None = None
    places: tuple[tuple[int, str], ...] = ()  # of the culprits, where they are not in one place
