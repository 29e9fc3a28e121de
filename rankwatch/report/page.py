"""index.html of an incident: one self-contained file that reads without scripts, network or rankwatch itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch import shown, traces
from rankwatch.model import PAGING
from rankwatch.report import collectives, html, text, timeline, who
from rankwatch.report.compile_parts import table
from rankwatch.wire.ranks import expand

MAX_GROUPS = 20
MAX_TRACEBACK_LINES = 120
MAX_RAW_STACKS = 32
MAX_RAW_CHARS = 12_000
MAX_RAW_TOTAL = 120_000
MAX_JSON_CHARS = 60_000
MAX_FILES = 80
LINKED_OTHERS = 8  # of a large job so many others have a file of their own, see monitor/files.py
LONG_LIST = 64
HOME = "../../index.html"
"""From an incident to the job's status page: as the launcher serves them, in the run directory and in the archive."""
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


def render(doc: Mapping[str, Any], nonce: str = "", files: bool = True, home: str = HOME) -> str:
    """The page of an incident.json document of any age.

    nonce: of the server's content security policy, for the little script. files: whether stacks/ and fr/ lie beside it, so that they can be linked.
    home: link to the job's status page, "" where there is none.
    """
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
        summary=text.summary_words(doc) if over else shown.without_countdown(text.summary_words(doc)) or text.summary_words(doc),
        facts=facts(doc),
        deadline=None if over else text.deadline(doc),
        left_words=text.left_words(doc),
        cards=who.cards(doc),
        timeline=timeline.chart(table(doc, "timeline")),
        collective_rows=[collectives.cells(row) for row in doc.get("collectives") or ()],
        evidence_files=evidence_files(doc),
        files=files,
        home=home,
        rank_map=who.the_map(doc),
        clusters=who.clusters(doc, text.call_words(doc)),
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
        commands=who.commands(doc, over),
        document=document(doc),
    )


def evidence_files(doc: Mapping[str, Any]) -> list[str]:
    """Names of what lies in the incident's folder beside the page, culprits first, at most MAX_FILES."""
    caught = {int(rank) for rank, body in (doc.get("stacks") or {}).items() if body and rank.isdigit()}
    culprits = [rank for rank in doc.get("culprit_ranks") or () if rank in caught]
    others = sorted(caught.difference(culprits))
    few = int((doc.get("run") or {}).get("world_size") or 0) <= LONG_LIST
    ranks = (*culprits, *(others if few else others[:LINKED_OTHERS]))
    return ["incident.json", "report.txt", *(f"stacks/rank_{rank}.txt" for rank in ranks), *map(str, doc.get("recorder_files") or ())][:MAX_FILES]


def crash_text(crash: Mapping[str, Any]) -> str:
    """The traceback, long ones cut in their middle; without one the exception alone."""
    return "\n".join(traces.traceback_rows(str(crash.get("traceback") or ""), MAX_TRACEBACK_LINES)) or f"{crash.get('type', '?')}: {crash.get('message', '')}"


def facts(doc: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines under the headline, as (what, value)."""
    rows = [
        ("culprit", text.culprit_words(doc)),
        ("where", str(doc.get("at") or "")),
        ("time", text.times_words(doc)),
        ("waited" if text.over(doc) else "waiting", text.waiting_words(doc)),
        ("no report", shown.short_ranks(doc.get("unknown_ranks") or (), 160)),
        ("page", text.page_words(doc)),
        *((("action", text.action_words(doc)),) if doc.get("action") else ()),
    ]
    return [(what, value) for what, value in rows if value]


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


def document(doc: Mapping[str, Any]) -> str:
    """incident.json as shown at the foot: stacks are above, long lists of ranks compressed; "" where it is still too long."""

    def short(value: Any) -> Any:
        if isinstance(value, list) and len(value) > LONG_LIST and all(isinstance(item, int) for item in value):
            return shown.short_ranks(value, 400)
        if isinstance(value, Mapping):
            return {key: short(item) for key, item in value.items()}
        return [short(item) for item in value] if isinstance(value, list) else value

    body = json.dumps({key: short(value) for key, value in doc.items() if key not in ("stacks", "stack_groups", "ranks", "timeline")}, indent=1)
    return body if len(body) <= MAX_JSON_CHARS else ""
