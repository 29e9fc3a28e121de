"""The live page at /: drawn from the state document, redrawn by a small script while something changes, complete without it."""

from __future__ import annotations

from typing import Any

from rankwatch import shown
from rankwatch.model import PAGING, Status
from rankwatch.report import collectives, compile_panel, html, outcome, rank_map, state
from rankwatch.wire.ranks import MOST_RANKS, expand

MAX_MEMORY = 16
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


def render(status: Status, nonce: str = "", live: bool = True, files: bool = True) -> str:
    """The page. Bounded at any world size; many viewers of one picture share the work behind it.

    live: as a launcher serves it; else the last state as a file, without script, whose links lead to files beside it.
    files: whether the run's own files, such as run.json, lie there too; not so in the archive.
    """
    doc = state.to_json(status)
    phases = {phase: expand(ranks) for phase, ranks in doc["phases"].items()}
    odd = set(expand(doc["odd"]))
    if odd:  # the culprit of an open incident has a colour of its own, whatever it calmly does
        phases = {phase: rest for phase, ranks in phases.items() if (rest := tuple(rank for rank in ranks if rank not in odd))} | {
            "culprit": tuple(sorted(odd))
        }
    titles = {row["rank"]: f"{row['label']} {row['detail']}".strip() for row in doc["ranks"]}
    worst = max(doc["incidents"]["open"], key=lambda row: shown.VERDICT_ORDER.index(row["verdict"]), default=None)
    over = doc["state"] in ("done", "failed")
    gravest = worst["verdict"] if worst else ""
    culprits = expand(doc["culprits"])
    world_size = min(status.job.world_size, MOST_RANKS)
    nodes = [(row["node"], expand(",".join(filter(None, (row["ranks"], row.get("silent_ranks")))))) for row in doc["nodes"]]
    return html.render(
        "status.html.j2",
        nonce=nonce,
        live=live,
        files=files,
        doc=doc,
        run=doc["run"],
        command=" ".join(doc["run"]["command"]),
        verdict=gravest,
        badge=outcome.word(doc) if over else gravest or doc["state"],
        worst=worst,
        headline=f"{doc['headline']} {shown.past(worst['summary'])}" if over and worst else shown.without_countdown(doc["headline"]) or doc["headline"],
        left_words=_left_words(worst) if worst and not over else "",
        listed=[row for row in doc["incidents"]["open"] if row is not worst],
        paging=gravest in PAGING,
        facts=facts(doc),
        compiled=compile_panel.panel(status.compile),
        compile_rows=doc["compile"] if any(row["now"] or row["frames"] or row["failures"] or row["split_status"] for row in doc["compile"]) else [],
        memory=memory(doc),
        collectives=[collectives.cells(row) for row in doc["collectives"]],
        cards=cards(doc, culprits),
        rank_map=rank_map.build(world_size, phases, culprits, titles, nodes if world_size <= rank_map.MAX_CELLS else ()),
        legend=[(phase, len(phases[phase])) for phase in (*PHASE_ORDER, *phases) if phase in phases][: len(phases)],
        broken=[probe for probe in doc["probes"] if not probe["ok"]],
        problems=[(name, reason) for name, reason in doc["run"]["capabilities"].items() if reason != "ok"],
    )


def _left_words(row: dict[str, Any]) -> str:
    """How long the watchdog leaves the ranks that wait: "9m00s", "unknown", "" where nobody waits under a timeout."""
    if row["timeout_left_s"] is not None:
        return shown.duration(max(0.0, row["timeout_left_s"]))
    return "" if row["timeout_known"] else "unknown"


def cards(doc: dict[str, Any], culprits: tuple[int, ...]) -> list[dict[str, Any]]:
    """The ranks of a small job in order, those without a report as well; [] for a larger one."""
    world_size, rows = doc["run"]["world_size"], {row["rank"]: row for row in doc["ranks"]}
    if not 0 < world_size <= rank_map.MAX_CARDS:
        return []
    silent = {"kind": "no_report", "label": "no report", "detail": "what it does is not known"}
    return [{**silent, **rows.get(rank, {}), "rank": rank, "culprit": rank in culprits} for rank in range(world_size)]


def memory(doc: dict[str, Any]) -> list[tuple[str, int | None, int | None, str]]:
    """(ranks, CUDA graphs recorded, bytes of their pools, words for the GPU's memory), equal ones together, at most MAX_MEMORY rows."""
    graphs = {row["rank"]: row for row in doc["compile"]}
    found: dict[tuple[int | None, int | None, str], list[int]] = {}
    for row in doc["ranks"]:
        recorded = graphs.get(row["rank"], {})
        if row["gpu_memory"] or recorded.get("cudagraph_recordings"):
            key = (recorded.get("cudagraph_recordings"), recorded.get("cudagraph_pool_bytes"), row["gpu_memory"])
            found.setdefault(key, []).append(row["rank"])
    return [(shown.short_ranks(ranks), *key) for key, ranks in found.items()][:MAX_MEMORY]


def facts(doc: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The row of figures: (what, value, key of the state document that the script keeps fresh, or "")."""
    steps = f"{doc['steps_max']}" if doc["steps_min"] == doc["steps_max"] else f"{doc['steps_min']}-{doc['steps_max']}"
    rows = [
        ("ranks seen", f"{doc['ranks_seen']} of {doc['run']['world_size']}", ""),
        ("step", steps, "steps"),
        ("steps a second", f"{doc['steps_per_s']:.3g}" if doc["steps_per_s"] is not None else "-", "steps_per_s"),
        ("step time", f"{doc['step_s']:.3g} s" if doc["step_s"] is not None else "-", "step_s"),
        ("smallest timeout", shown.duration(doc["timeout_s"]) if doc["timeout_s"] is not None else "-", ""),
        ("timeout used", f"{doc['timeout_used']:.0%}", "timeout_used"),
        ("restarts", str(doc["restarts"]), ""),
        ("running for", shown.duration(doc["as_of"] - doc["run"]["started_at"]), "uptime"),
    ]
    return [row for row in rows if row[1]]
