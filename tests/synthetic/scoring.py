"""Drives the judge and the incident fold over generated cases, and compares what they say with what was planted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import process_time

from generate import Case

from rankwatch.model import PAGING, Verdict
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits

Said = tuple[str, str, tuple[int, ...]]  # verdict, cause, culprits


@dataclass(slots=True)
class Outcome:
    """One case played. pages, tickets, notices: what was said, in order, each once. *_s: from the onset, None if it never came.

    wrong: ranks that a page named and that were not planted. early: something was paged before anything was planted.
    """

    case: Case
    pages: list[Said] = field(default_factory=list)
    notices: list[Said] = field(default_factory=list)
    tickets: list[Said] = field(default_factory=list)
    named_s: float | None = None
    paged_s: float | None = None
    early: list[Said] = field(default_factory=list)
    incidents: int = 0
    snapshots: int = 0
    judged_s: float = 0.0  # CPU seconds of diagnose and fold
    first_wrong: Verdict | None = None

    @property
    def named(self) -> set[int]:
        return {rank for _, _, culprits in self.pages for rank in culprits}

    @property
    def wrong(self) -> set[int]:
        return self.named - set(self.case.truth.culprits) - set(self.case.truth.tolerated)

    @property
    def false_page(self) -> bool:
        return bool(self.early) or (self.case.truth.must in ("ticket", "nothing") and bool(self.pages))

    @property
    def false_ticket(self) -> bool:
        """Whether a rank is called a straggler that is not; who is late behind a fault is not judged."""
        truth = self.case.truth
        return (truth.healthy or truth.fault == "straggler") and any(culprits != truth.culprits for _, _, culprits in self.tickets)

    @property
    def found(self) -> bool:
        """Whether what had to come has come: a page that names every culprit, or a ticket."""
        truth = self.case.truth
        said = self.tickets if truth.must == "ticket" else self.pages
        return truth.must in ("nothing", "perhaps") or (bool(said) and set(truth.culprits) <= {rank for _, _, culprits in said for rank in culprits})

    @property
    def right_causes(self) -> int:
        return sum(cause in self.case.truth.causes for _, cause, _ in self.pages)

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.false_page and not self.false_ticket and self.found

    def line(self) -> str:
        truth = self.case.truth
        return (
            f"{self.case.name}: planted {truth.fault} on {truth.culprits} (+{truth.tolerated}); pages {self.pages}, early {self.early}, "
            f"notices {self.notices[:4]}, tickets {self.tickets[:2]}"
        )


def play(case: Case, limits: Limits | None = None) -> Outcome:
    """The whole case through a fresh judge."""
    limits = limits or Limits()
    outcome, state, book = Outcome(case), State(), Book()
    culprits = set(case.truth.culprits)
    seen: set[Said] = set()
    for snapshot in case.snapshots:
        began_cpu_s = process_time()
        state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, limits)
        book, _ = fold(book, verdicts, snapshot, snapshot.now, limits)
        outcome.judged_s += process_time() - began_cpu_s
        outcome.snapshots += 1
        for verdict in verdicts:
            said = (verdict.verdict, verdict.cause, verdict.culprit_ranks)
            began = case.began_at
            page = verdict.verdict in PAGING
            if began is not None:
                right = bool(culprits.intersection(verdict.culprit_ranks)) or not culprits
                if right and outcome.named_s is None:
                    outcome.named_s = snapshot.now - began
                if page and right and outcome.paged_s is None:
                    outcome.paged_s = snapshot.now - began
            if page and outcome.first_wrong is None and set(verdict.culprit_ranks) - culprits - set(case.truth.tolerated):
                outcome.first_wrong = verdict
            if said not in seen:
                seen.add(said)
                kind = outcome.pages if page else outcome.tickets if verdict.verdict == "straggler" else outcome.notices
                kind.append(said)
                if page and began is None:
                    outcome.early.append(said)
        case.want(wanted, state.failure_held)
    outcome.incidents = book.opened
    return outcome


@dataclass(slots=True)
class Row:
    """The cases of one fault together."""

    fault: str
    unhealable: bool = False
    cases: int = 0
    unreached: int = 0
    found: int = 0
    named: int = 0
    right: int = 0
    pages: int = 0
    right_causes: int = 0
    false_pages: int = 0
    false_tickets: int = 0
    named_s: list[float] = field(default_factory=list)
    paged_s: list[float] = field(default_factory=list)
    late: int = 0

    def add(self, outcome: Outcome) -> None:
        truth = outcome.case.truth
        if not truth.healthy and outcome.case.began_at is None:
            self.unreached += 1
            return
        self.cases += 1
        self.unhealable = truth.unhealable
        self.found += outcome.found
        self.named += len(outcome.named)
        self.right += len(outcome.named) - len(outcome.wrong)
        self.pages += len(outcome.pages)
        self.right_causes += outcome.right_causes
        self.false_pages += outcome.false_page
        self.false_tickets += outcome.false_ticket
        if not truth.healthy:
            self.named_s += [outcome.named_s] if outcome.named_s is not None else []
            self.paged_s += [outcome.paged_s] if outcome.paged_s is not None else []
            self.late += outcome.paged_s is not None and outcome.paged_s > truth.due_s


def table(outcomes: Iterable[Outcome]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.case.truth.fault, Row(outcome.case.truth.fault)).add(outcome)
    return rows


def render(rows: dict[str, Row]) -> str:
    """For people: a line a fault, unhealable ones marked with `!`."""
    head = ("planted", "cases", "rank prec.", "recall", "cause prec.", "named s", "page s", "late", "false pages", "false tickets")
    lines = [_line(head), _line(("", "", "", "", "", "median / max", "median / max", "", "", ""))]
    for name in sorted(rows, key=lambda each: (each.startswith("healthy"), each)):
        row = rows[name]
        found = "" if name.startswith("healthy") else _share(row.found, row.cases)
        cells = (name + (" !" if row.unhealable else ""), row.cases, _share(row.right, row.named), found, _share(row.right_causes, row.pages))
        lines.append(_line((*cells, _times(row.named_s), _times(row.paged_s), row.late or "", row.false_pages or "", row.false_tickets or "")))
    return "\n".join(lines)


def _line(cells: tuple[object, ...]) -> str:
    widths = (-26, 6, 12, 8, 13, 14, 16, 6, 13, 15)
    return "".join(f"{cell!s:<{-width}}" if width < 0 else f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.1f} / {ordered[-1]:.0f}"
