"""How a job stands, or how it has ended, in one word: the badge of its page and the first word of `status`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch import shown
from rankwatch.model import PAGING

ENDED = "ended"
"""By a signal to the launcher, as by a scheduler's time limit or scancel, and nothing that pages was wrong."""
OVER = ("done", "failed")


def word(doc: Mapping[str, Any]) -> str:
    """Of a state document or a run.json: its state while it runs; once it is over the gravest verdict that pages and was open at the end,
    else "ended" where a signal has ended it, else "done" or "failed"."""
    state = doc.get("state")
    if state not in OVER:
        return str(state or "?")
    gravest = max(_open_at_end(doc), key=shown.VERDICT_ORDER.index, default="")
    return gravest or (ENDED if doc.get("ended_by") and isinstance(doc["ended_by"], str) else str(state))


def sentence(exit_code: Any, ended_by: str, ending: str = "") -> str:
    """ "The job has ended with exit code 1 (torchrun itself fails).", "The job was ended by SIGTERM (exit code 143)."."""
    if ended_by:
        return f"The job was ended by {ended_by} ({shown.exit_words(exit_code)})."
    return f"The job has ended with {shown.exit_words(exit_code)}{f' ({ending})' if ending else ''}."


def _open_at_end(doc: Mapping[str, Any]) -> Iterable[str]:
    """Verdicts that page of the incidents that had not closed when the job was over. A state document has them as open, run.json in one list."""
    held = doc.get("incidents")
    rows: list[Any] = []
    if isinstance(held, Mapping):
        opened, closed = held.get("open"), held.get("closed")
        rows += opened if isinstance(opened, list) else ()
        held = closed
    rows += [row for row in held if isinstance(row, Mapping) and row.get("closed_by") == "job_ended"] if isinstance(held, list) else ()
    return [verdict for row in rows if isinstance(row, Mapping) and (verdict := row.get("verdict")) in PAGING]
