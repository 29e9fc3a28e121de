"""What was planted: the truth that verdicts are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Truth:
    """fault: the row of the table, "healthy ..." for none. causes: words that are right for it.

    culprits: who is to be named. tolerated: who may be named beside them (both sides of a tie). must: what has to come: a page that names
    the culprits, a ticket (`straggler`), a page or none ("perhaps": the evidence hardly shows it), or nothing; with nothing due any page is false.
    due_s: when the page is due at the latest, seconds after the onset, by the table of design section 4.
    unhealable: whether it cannot get well by itself.
    """

    fault: str
    causes: tuple[str, ...] = ()
    culprits: tuple[int, ...] = ()
    tolerated: tuple[int, ...] = ()
    must: Literal["page", "ticket", "perhaps", "nothing"] = "page"
    due_s: float = 0.0
    unhealable: bool = False

    @property
    def healthy(self) -> bool:
        return self.must == "nothing"


# design section 4, by which healthy look-alikes are kept short and pages are due


def quiet_s(timeout_s: float) -> float:
    """How long an absent rank may do nothing: 20 % of the timeout, at least 5 and at most 120 s."""
    return min(max(0.2 * timeout_s, 5.0), 120.0)


def pause_s(timeout_s: float) -> float:
    """The same for what pauses in healthy jobs as well, a loader without a batch: at least 35 s, but no more than half of the timeout for that."""
    return max(quiet_s(timeout_s), min(35.0, 0.5 * timeout_s))


def io_s(timeout_s: float) -> float:
    """The same for a checkpoint or a transfer."""
    return 0.5 * timeout_s


def imminent_s(timeout_s: float) -> float:
    """Age of a wait from which its timeout is imminent, whatever the cause."""
    return timeout_s - min(max(30.0, 0.2 * timeout_s), 0.5 * timeout_s)
