"""The live page at /: drawn from the state document, redrawn by a small script while something changes, complete without it."""

from __future__ import annotations

from typing import Any

from rankwatch import shown
from rankwatch.model import PAGING, Status
from rankwatch.report import collectives, html, rank_map, state
from rankwatch.wire.ranks import MOST_RANKS, expand

PHASE_ORDER = (
    "culprit",
    "dead",
    "unknown",
    "no_report",
    "compiling",
    "cudagraph_capture",
    "data_wait",
    "checkpoint",
    "starting",
    "shutdown",
    "running",
    "collective_wait",
)


def render(status: Status, nonce: str = "") -> str:
    """The page. Bounded at any world size; many viewers of one picture share the work behind it."""
    doc = state.to_json(status)
    phases = {phase: expand(ranks) for phase, ranks in doc["phases"].items()}
    odd = set(expand(doc["odd"]))
    if odd:  # the culprit of an open incident has a colour of its own, whatever it calmly does
        phases = {phase: rest for phase, ranks in phases.items() if (rest := tuple(rank for rank in ranks if rank not in odd))} | {
            "culprit": tuple(sorted(odd))
        }
    titles = {row["rank"]: f"{row['label']} {row['detail']}".strip() for row in doc["ranks"]}
    gravest = max((row["verdict"] for row in doc["incidents"]["open"]), key=shown.VERDICT_ORDER.index, default="")
    return html.render(
        "status.html.j2",
        nonce=nonce,
        doc=doc,
        run=doc["run"],
        command=" ".join(doc["run"]["command"]),
        verdict=gravest,
        badge=gravest or doc["state"],
        paging=gravest in PAGING,
        facts=facts(doc),
        collectives=[collectives.cells(row) for row in doc["collectives"]],
        rank_map=rank_map.build(min(status.job.world_size, MOST_RANKS), phases, expand(doc["culprits"]), titles),
        legend=[(phase, len(phases[phase]), shown.short_ranks(phases[phase], 160)) for phase in (*PHASE_ORDER, *phases) if phase in phases][: len(phases)],
        broken=[probe for probe in doc["probes"] if not probe["ok"]],
        problems=[(name, reason) for name, reason in doc["run"]["capabilities"].items() if reason != "ok"],
    )


def facts(doc: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The row of figures: (what, value, key of the state document that the script keeps fresh, or "")."""
    steps = f"{doc['steps_max']}" if doc["steps_min"] == doc["steps_max"] else f"{doc['steps_min']}-{doc['steps_max']}"
    rows = [
        ("ranks seen", f"{doc['ranks_seen']} of {doc['run']['world_size']}", ""),
        ("step", steps, "steps"),
        ("step time", f"{doc['step_s']:.3g} s" if doc["step_s"] is not None else "-", "step_s"),
        ("smallest timeout", shown.duration(doc["timeout_s"]) if doc["timeout_s"] is not None else "-", ""),
        ("timeout used", f"{doc['timeout_used']:.0%}", "timeout_used"),
        ("restarts", str(doc["restarts"]), ""),
        ("running for", shown.duration(doc["as_of"] - doc["run"]["started_at"]), "uptime"),
    ]
    return [row for row in rows if row[1]]
