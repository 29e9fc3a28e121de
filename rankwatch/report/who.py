"""Who does what in an incident, from its incident.json of any age: ranks that do the same, the picture of all ranks, what one would type next. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rankwatch import shown
from rankwatch.report import rank_map
from rankwatch.report.compile_parts import rows as objects
from rankwatch.wire.ranks import expand


def the_map(doc: Mapping[str, Any]) -> rank_map.RankMap | None:
    """Every rank of the world: its phase where the document knows it, else waiting, silent or other."""
    world_size = int((doc.get("run") or {}).get("world_size") or 0)
    rows = doc.get("ranks") or {}
    kinds: dict[str, list[int]] = {"collective_wait": list(doc.get("waiting_ranks") or ()), "no_report": list(doc.get("unknown_ranks") or ())}
    if doc.get("cause") == "compiling":
        kinds["compiling"] = list(doc.get("culprit_ranks") or ())
    for rank, row in rows.items():
        kinds.setdefault(_kind(row), []).append(int(rank))
    titles = {int(rank): f"{_label(row)} {row.get('detail') or ''}".strip() for rank, row in rows.items()}
    return rank_map.build(min(world_size, 1 << 17), kinds, doc.get("culprit_ranks") or (), titles, nodes(doc))


def nodes(doc: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """(node, its ranks) as far as the document tells."""
    found = []
    for row in objects(doc, "nodes"):
        try:
            found.append((str(row.get("node") or "?"), expand(str(row.get("ranks") or ""))))
        except ValueError:
            continue
    return found


def cards(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ranks of a small job in order, each with what is known of it; [] for a larger one."""
    world_size, rows = int((doc.get("run") or {}).get("world_size") or 0), doc.get("ranks") or {}
    if not 0 < world_size <= rank_map.MAX_CARDS or not rows:
        return []
    silent: dict[str, Any] = {"kind": "no_report", "label": "no report", "detail": "", "culprit": False}
    culprits = set(doc.get("culprit_ranks") or ())
    return [{**silent, **(rows.get(str(rank)) or {}), "rank": rank, "culprit": rank in culprits} for rank in range(world_size)]


def _kind(row: Mapping[str, Any]) -> str:
    return str(row.get("kind") or row.get("phase") or "other")


def _label(row: Mapping[str, Any]) -> str:
    return str(row.get("label") or str(row.get("phase") or "?").replace("_", " "))


def clusters(doc: Mapping[str, Any], waits: str) -> list[tuple[int, str, str, str, str, bool]]:
    """Ranks that do the same: (how many, ranks, kind for the colour, label, detail, whether culprits), culprits first.

    waits: what those wait for of whom the document has no row.
    """
    found: dict[tuple[bool, str, str, str], list[int]] = {}
    rows = doc.get("ranks") or {}
    for rank, row in rows.items():
        detail = str(row.get("detail") or "") if row.get("phase") != "running" or row.get("culprit") else ""
        found.setdefault((bool(row.get("culprit")), _kind(row), _label(row), detail), []).append(int(rank))
    lost = [rank for rank in doc.get("culprit_ranks") or () if str(rank) not in rows]
    if lost:
        found[(True, "culprit", f"culprit: {doc.get('cause') or '?'}", str(doc.get("at") or ""))] = lost
    unseen = [rank for rank in doc.get("waiting_ranks") or () if str(rank) not in rows]
    if unseen:
        found.setdefault((False, "collective_wait", "waiting", waits), []).extend(unseen)
    if doc.get("unknown_ranks"):
        found[(False, "no_report", "no report", "")] = list(doc["unknown_ranks"])
    return [
        (len(ranks), shown.short_ranks(ranks, 200), kind, label, detail, culprit)
        for (culprit, kind, label, detail), ranks in sorted(found.items(), key=lambda item: (not item[0][0], len(item[1])))
    ]


def commands(doc: Mapping[str, Any], over: bool) -> list[tuple[str, str]]:
    """(where, what one would type there next)."""
    pids = doc.get("pids") or {}
    found = [pids[str(rank)] for rank in (doc.get("culprit_ranks") or ())[:2] if str(rank) in pids]
    if over or doc.get("cause") in ("exited", "killed", "oom_killed", "crashed"):
        found = []
    run_dir = str((doc.get("run") or {}).get("run_dir") or "")
    folder = shlex.quote(f"{run_dir}/incidents/{doc.get('id')}")
    ticket = [("for a ticket", f"rankwatch report --format markdown --redact {folder}")] if doc.get("id") and run_dir and not run_dir.startswith("...") else []
    return [*(("on the culprit's node", f"py-spy dump --native --pid {pid}") for pid in found), *ticket]
