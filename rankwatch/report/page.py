"""index.html of an incident: one self-contained file that reads without scripts, network or rankwatch itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch import shown, traces
from rankwatch.model import PAGING
from rankwatch.report import html, rank_map, text
from rankwatch.wire.ranks import expand

MAX_GROUPS = 20
MAX_TRACEBACK_LINES = 120
MAX_RAW_STACKS = 32
MAX_RAW_CHARS = 12_000
MAX_RAW_TOTAL = 120_000
MAX_JSON_CHARS = 60_000
LONG_LIST = 64
_LISTS = ("advice", "evidence", "missing_evidence", "recorder_files")


@dataclass(frozen=True, slots=True)
class FrameView:
    """One frame of a stack. `differs`: the outermost frame in which this stack leaves the one beside it."""

    name: str
    place: str
    path: str
    library: bool
    differs: bool


@dataclass(frozen=True, slots=True)
class StackView:
    """One group of equal stacks: `runs` alternates what is shown (False) and what is folded away (True)."""

    ranks: str
    number: int
    role: str
    runs: tuple[tuple[bool, tuple[FrameView, ...]], ...]


def render(doc: Mapping[str, Any], nonce: str = "") -> str:
    """The page of an incident.json document of any age. `nonce`: of the server's content security policy, for the little script."""
    doc = {"cause": "?", "domain": "?", "confidence": "?", **{key: [] for key in _LISTS}, **doc}
    groups = stack_views(doc)
    raw, left_out = raw_stacks(doc)
    over = text.over(doc)
    return html.render(
        "incident.html.j2",
        nonce=nonce,
        doc=doc,
        title=f"{str(doc.get('verdict', '?')).upper()} {shown.rank_words(doc.get('culprit_ranks') or ())}",
        verdict=str(doc.get("verdict", "?")),
        paging=doc.get("verdict") in PAGING and not over,
        over=over,
        ended=text.end_words(doc),
        summary=text.summary_words(doc),
        facts=facts(doc),
        deadline=None if over else text.deadline(doc),
        rank_map=the_map(doc),
        clusters=clusters(doc),
        ranks=list((doc.get("ranks") or {}).values())[:16],
        memory_rows=text.memory_rows(doc),
        compile_rows=[(rank, activity, text.compile_words(activity, over)) for rank, activity in list((doc.get("compile") or {}).items())[:32]],
        pair=groups[:2] if len(groups) > 1 and groups[0].role == "culprit" else [],
        stack_groups=groups[2:] if len(groups) > 1 and groups[0].role == "culprit" else groups,
        groups_left=max(0, len(doc.get("stack_groups") or ()) - MAX_GROUPS),
        raw=raw,
        raw_left_out=left_out,
        process_groups=doc.get("groups") or [],
        crashes=[(rank, crash, crash_text(crash)) for rank, crash in (doc.get("crash") or {}).items()],
        history=[(shown.utc(c.get("at")), c.get("verdict"), c.get("cause"), shown.short_ranks(c.get("culprit_ranks") or ())) for c in doc.get("history") or ()],
        closed=shown.utc(doc["closed_at"]) if text.healed(doc) else "",
        ends_recovered=text.ends_recovered(doc),
        run=doc.get("run") or {},
        labels=list(((doc.get("run") or {}).get("labels") or {}).items()),
        command=" ".join((doc.get("run") or {}).get("command") or ()),
        size=text.size_words(doc.get("run") or {}),
        folder=f"{(doc.get('run') or {}).get('run_dir', '')}/incidents/{doc.get('id')}",
        commands=commands(doc),
        document=document(doc),
    )


def crash_text(crash: Mapping[str, Any]) -> str:
    """The traceback, long ones cut in their middle; without one the exception alone."""
    return "\n".join(traces.traceback_rows(str(crash.get("traceback") or ""), MAX_TRACEBACK_LINES)) or f"{crash.get('type', '?')}: {crash.get('message', '')}"


def facts(doc: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines under the headline, as (what, value)."""
    rows = [
        ("culprit", text.culprit_words(doc)),
        ("at", str(doc.get("at") or "")),
        ("time", text.times_words(doc)),
        ("waited" if text.over(doc) else "waiting", text.waiting_words(doc)),
        ("no report", shown.short_ranks(doc.get("unknown_ranks") or (), 160)),
        ("page", text.page_words(doc)),
        *((("action", text.action_words(doc)),) if doc.get("action") else ()),
    ]
    return [(what, value) for what, value in rows if value]


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
    return rank_map.build(min(world_size, 1 << 17), kinds, doc.get("culprit_ranks") or (), titles)


def _kind(row: Mapping[str, Any]) -> str:
    return str(row.get("kind") or row.get("phase") or "other")


def _label(row: Mapping[str, Any]) -> str:
    return str(row.get("label") or str(row.get("phase") or "?").replace("_", " "))


def clusters(doc: Mapping[str, Any]) -> list[tuple[int, str, str, str, str, bool]]:
    """Ranks that do the same: (how many, ranks, kind for the colour, label, detail, whether culprits), culprits first."""
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
        detail = text.waiting_words(doc).partition(" in ")[2].partition(",")[0]
        found.setdefault((False, "collective_wait", "waiting", detail), []).extend(unseen)
    if doc.get("unknown_ranks"):
        found[(False, "no_report", "no report", "")] = list(doc["unknown_ranks"])
    return [
        (len(ranks), shown.short_ranks(ranks, 200), kind, label, detail, culprit)
        for (culprit, kind, label, detail), ranks in sorted(found.items(), key=lambda item: (not item[0][0], len(item[1])))
    ]


def stack_views(doc: Mapping[str, Any]) -> list[StackView]:
    """Groups of equal stacks, the culprits' beside the largest other one first, library frames folded."""
    groups = list(doc.get("stack_groups") or ())[:MAX_GROUPS]
    culprit = next((group for group in groups if group.get("role") == "culprit"), None)
    others = sorted((group for group in groups if group is not culprit), key=lambda group: -_number(group))
    if culprit is None:
        return [_stack_view(group, -1) for group in others]
    if not others:
        return [_stack_view(culprit, -1)]
    common = _common(culprit.get("frames") or (), others[0].get("frames") or ())
    return [_stack_view(culprit, common), _stack_view(others[0], common), *(_stack_view(group, -1) for group in others[1:])]


def _number(group: Mapping[str, Any]) -> int:
    try:
        return len(expand(str(group.get("ranks", ""))))
    except ValueError:
        return 0


def _common(one: Any, other: Any) -> int:
    """How many frames two stacks share, from the outermost."""
    number = 0
    for first, second in zip(reversed(one), reversed(other), strict=False):
        if first != second:
            break
        number += 1
    return number


def _stack_view(group: Mapping[str, Any], common: int) -> StackView:
    frames = list(group.get("frames") or ())[:200]
    views = []
    for index, frame in enumerate(frames):
        match = traces.FRAME.match(frame)
        path = match["file"] if match else ""
        views.append(
            FrameView(
                name=match["name"] if match else frame,
                place=f"{path.rsplit('/', 1)[-1]}:{match['line']}" if match else "",
                path=path,
                library=traces.is_library(path),
                differs=common >= 0 and index == len(frames) - common - 1,
            )
        )
    return StackView(str(group.get("ranks", "?")), _number(group), str(group.get("role", "other")), _fold(views))


def _fold(frames: list[FrameView]) -> tuple[tuple[bool, tuple[FrameView, ...]], ...]:
    """Runs of three and more library frames are folded; the innermost frame and the one that differs always show."""
    runs: list[tuple[bool, list[FrameView]]] = []
    for index, frame in enumerate(frames):
        foldable = frame.library and not frame.differs and index > 0
        if runs and runs[-1][0] == foldable:
            runs[-1][1].append(frame)
        else:
            runs.append((foldable, [frame]))
    merged: list[tuple[bool, list[FrameView]]] = []
    for foldable, run in runs:
        hidden = foldable and len(run) >= 3
        if merged and merged[-1][0] == hidden:
            merged[-1][1].extend(run)
        else:
            merged.append((hidden, run))
    return tuple((hidden, tuple(run)) for hidden, run in merged)


def raw_stacks(doc: Mapping[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """((rank, text as caught) culprits first, how many did not fit)."""
    stacks = doc.get("stacks") or {}
    culprits = [str(rank) for rank in doc.get("culprit_ranks") or () if str(rank) in stacks]
    order = list(dict.fromkeys((*culprits, *stacks)))
    chosen: list[tuple[str, str]] = []
    total = 0
    for rank in order:
        caught = stacks[rank]
        if caught is None and rank not in culprits:
            continue
        body = "no stack was caught" if caught is None else caught[:MAX_RAW_CHARS] + ("\n... more in stacks/" if len(caught) > MAX_RAW_CHARS else "")
        if len(chosen) >= MAX_RAW_STACKS or total + len(body) > MAX_RAW_TOTAL:
            break
        chosen.append((rank, body))
        total += len(body)
    return chosen, len(order) - len(chosen)


def commands(doc: Mapping[str, Any]) -> list[str]:
    """What one would type next, on the culprit's node."""
    pids = doc.get("pids") or {}
    found = [pids[str(rank)] for rank in (doc.get("culprit_ranks") or ())[:2] if str(rank) in pids]
    if text.over(doc) or doc.get("cause") in ("exited", "killed", "oom_killed", "crashed"):
        found = []
    return [f"py-spy dump --native --pid {pid}" for pid in found]


def document(doc: Mapping[str, Any]) -> str:
    """incident.json as shown at the foot: stacks are above, long lists of ranks compressed; "" where it is still too long."""

    def short(value: Any) -> Any:
        if isinstance(value, list) and len(value) > LONG_LIST and all(isinstance(item, int) for item in value):
            return shown.short_ranks(value, 400)
        if isinstance(value, Mapping):
            return {key: short(item) for key, item in value.items()}
        return [short(item) for item in value] if isinstance(value, list) else value

    body = json.dumps({key: short(value) for key, value in doc.items() if key not in ("stacks", "stack_groups", "ranks")}, indent=1)
    return body if len(body) <= MAX_JSON_CHARS else ""
