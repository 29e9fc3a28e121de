"""What is found of one rank that others wait for: the word for its cause, where it is, and how long that may last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankwatch.model import Cause, Confidence, Domain

PRECEDENCE: tuple[Cause, ...] = (
    "killed",
    "oom_killed",
    "crashed",
    "exited",
    "stopped",
    "uninterruptible",
    "gil_held",
    "data_loading",
    "external_io",
    "checkpointing",
    "not_entered",
    "store_wait",
    "debugger",
    "compiling",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank does. limit: which silence makes it stuck (pause: healthy jobs pause like that too); at_once: evidence that cannot heal;
    never: it waits for a person.

    says: the clause in the summary, "it is in train.py:31:load_batch". silent_from: start of a compile's silence, maybe before the wait.
    """

    rank: int
    cause: Cause
    domain: Domain
    says: str = ""
    at: str = ""
    limit: Literal["normal", "pause", "io", "compile", "at_once", "never"] = "normal"
    silent_from: float | None = None
    evidence: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    exit_code: int | None = None  # of a rank that ended without an exception
    advice: tuple[str, ...] = ()  # next steps, where the cause's own do not fit
    ready: bool = True  # False: at_once evidence that has not lasted long enough
