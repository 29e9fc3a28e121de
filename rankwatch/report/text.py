"""report.txt: an incident for a terminal, culprit first. Reads incident.json documents of any age: a missing key is an empty part."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch import shown
from rankwatch.model import PAGING

WIDTH = 110
MAX_STACKS = 24


def render(doc: Mapping[str, Any]) -> str:
    """The whole report as plain ASCII-art-free text, at most 110 columns where the content lets us; ends with a newline."""
    parts = [
        _headline(doc),
        _section("What to do", _bullets(doc.get("advice") or ())),
        _section("Who waits", _waiting(doc)),
        _section("Exception", _crash(doc)),
        _section("Compiling", _compile(doc)),
        _section("Stacks, grouped (innermost frame first)", _stack_groups(doc)),
        _section("Full stacks", _stacks(doc)),
        _section("Process groups", _groups(doc)),
        _section("Evidence", _bullets(doc.get("evidence") or ())),
        _section("Missing evidence", _bullets(doc.get("missing_evidence") or ())),
        _section("History", _history(doc)),
        _section("Files", _files(doc)),
        _section("Run", _run(doc)),
    ]
    return shown.clean("\n".join(filter(None, parts)) + "\n")


def verdict_words(doc: Mapping[str, Any]) -> str:
    """ "STUCK (not_entered, user_code), certain"."""
    verdict = str(doc.get("verdict", "?")).upper()
    return f"{verdict} ({doc.get('cause', '?')}, {doc.get('domain', '?')}), {doc.get('confidence', '?')}"


def page_words(doc: Mapping[str, Any]) -> str:
    """Whether somebody must be woken, and why (not)."""
    if doc.get("closed_at") is not None:
        return "no: it is over"
    verdict = doc.get("verdict")
    if verdict == "failed" and doc.get("domain") not in ("node", "network", "storage"):
        return "no: a ticket for the owner of the job"
    if verdict in PAGING:
        return "yes: it does not end by itself"
    return "no: a ticket" if verdict == "straggler" else "no: it may end by itself"


def times_words(doc: Mapping[str, Any]) -> str:
    """Since when, how long, until when: the line below the headline."""
    since, closed = doc.get("since"), doc.get("closed_at")
    until = closed if closed is not None else doc.get("as_of", doc.get("updated_at"))
    parts = [f"since {shown.utc(since)}"]
    if since is not None and until is not None:
        parts.append(f"{'lasted' if closed is not None else 'for'} {shown.duration(max(0.0, until - since))}")
    if closed is not None:
        parts.append(f"closed {shown.utc(closed, date=False)}")
    elif doc.get("timeout_left_s") is not None:
        deadline = (doc.get("updated_at") or 0.0) + doc["timeout_left_s"]
        parts.append(f"the watchdog ends the job in {shown.duration(doc['timeout_left_s'])} (at {shown.utc(deadline, date=False)})")
    if doc.get("lost_rank_s"):
        parts.append(f"cost{'' if closed is not None else ' so far'} {lost_words(doc['lost_rank_s'])}")
    return ", ".join(parts)


def lost_words(lost_rank_s: float) -> str:
    """ "41 rank-min", "12 rank-s"."""
    return f"{round(lost_rank_s / 60)} rank-min" if lost_rank_s >= 60 else f"{round(lost_rank_s)} rank-s"


def culprit_words(doc: Mapping[str, Any]) -> str:
    """ "rank 1 on node05, pid 21107", at most four of them."""
    culprits = list(doc.get("culprit_ranks") or ())
    if not culprits:
        return "no single rank"
    hosts, pids = doc.get("hosts") or {}, doc.get("pids") or {}

    def one(rank: int) -> str:
        host = f" on {hosts[str(rank)]}" if str(rank) in hosts else ""
        pid = f", pid {pids[str(rank)]}" if str(rank) in pids else ""
        return f"rank {rank}{host}{pid}"

    return "; ".join(map(one, culprits[:4])) + (
        f"; {shown.plural(len(culprits) - 4, 'rank')} more ({shown.short_ranks(culprits)})" if len(culprits) > 4 else ""
    )


def size_words(run: Mapping[str, Any]) -> str:
    """ "8 ranks on 1 node"."""
    return f"{shown.plural(run.get('world_size') or 0, 'rank')} on {shown.plural(run.get('nnodes') or 0, 'node')}"


def group_words(group: Mapping[str, Any]) -> str:
    """ "all_reduce seq 26 of default_pg, [1024, 1024] Float"."""
    sizes = " ".join(map(str, group.get("sizes") or ()))
    dtypes = " ".join(map(str, group.get("dtypes") or ()))
    payload = f", {sizes} {dtypes}".rstrip() if sizes or dtypes else ""
    return f"{group.get('op', '?')} seq {group.get('seq', '?')} of {group.get('desc') or group.get('name') or '?'}{payload}"


def compile_words(activity: Mapping[str, Any]) -> str:
    """ "forward@model.py:31 (3/1): inductor for 12 s, 41 s in all, split 2 of 4; recompiled because ..."."""
    text = f"{activity.get('frame') or '?'}"
    if activity.get("compile_id"):
        text += f" ({activity['compile_id']})"
    text += f": {activity.get('phase', '?')}"
    if activity.get("phase_s") is not None:
        text += f" for {shown.duration(activity['phase_s'])}"
    if activity.get("elapsed_s") is not None:
        text += f", {shown.duration(activity['elapsed_s'])} in all"
    if activity.get("splits"):
        text += f", split {activity.get('split')} of {activity['splits']}"
    return text + (f"; recompiled because {activity['reason']}" if activity.get("reason") else "")


def _headline(doc: Mapping[str, Any]) -> str:
    rows = [
        verdict_words(doc),
        *textwrap.wrap(str(doc.get("summary") or "no summary"), WIDTH, break_long_words=False, break_on_hyphens=False),
        "",
        f"culprit  {culprit_words(doc)}" + (f", at {doc['at']}" if doc.get("at") else ""),
        f"times    {times_words(doc)}",
        f"page     {page_words(doc)}",
    ]
    return "\n".join(rows) + "\n"


def _section(title: str, rows: Iterable[str]) -> str:
    body = list(rows)
    return "\n".join((title, "-" * len(title), *body)) + "\n" if body else ""


def _bullets(texts: Iterable[Any]) -> list[str]:
    rows: list[str] = []
    for text in texts:
        rows += textwrap.wrap(str(text), WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return rows


def _waiting(doc: Mapping[str, Any]) -> list[str]:
    waiting, unknown = doc.get("waiting_ranks") or (), doc.get("unknown_ranks") or ()
    rows = []
    if waiting:
        group = f" in {group_words(doc['group'])}" if doc.get("group") else ""
        rows.append(f"{shown.plural(len(waiting), 'rank')}: {shown.short_ranks(waiting, 400)}{group}")
    if doc.get("timeout_s") is not None:
        rows.append(f"timeout of that group: {shown.duration(doc['timeout_s'])}")
    if unknown:
        rows.append(f"without a report: {shown.plural(len(unknown), 'rank')}: {shown.short_ranks(unknown, 400)}")
    return rows


def _crash(doc: Mapping[str, Any]) -> list[str]:
    rows = []
    for rank, crash in (doc.get("crash") or {}).items():
        rows.append(
            f"rank {rank}: {crash.get('type', '?')}: {shown.one_line(crash.get('message', ''))}" + (f" ({crash['source']})" if crash.get("source") else "")
        )
        rows += [f"  {line}" for line in str(crash.get("traceback") or "").splitlines()]
    return rows


def _compile(doc: Mapping[str, Any]) -> list[str]:
    table = doc.get("compile") or {}
    return _bullets(f"rank {rank}: {compile_words(activity)}" for rank, activity in list(table.items())[:MAX_STACKS])


def _stack_groups(doc: Mapping[str, Any]) -> list[str]:
    rows: list[str] = []
    for group in (doc.get("stack_groups") or ())[:MAX_STACKS]:
        role = f" ({group['role']})" if group.get("role") in ("culprit", "waiting") else ""
        ranks = str(group.get("ranks", "?"))
        rows += ["", f"{'rank' if ranks.isdigit() else 'ranks'} {ranks}{role}", *(f"    {frame}" for frame in group.get("frames") or ("no Python frame",))]
    return rows[1:]


def _stacks(doc: Mapping[str, Any]) -> list[str]:
    """The culprits' full text; the others are in the files."""
    stacks = doc.get("stacks") or {}
    rows: list[str] = []
    for rank in map(str, (doc.get("culprit_ranks") or ())[:4]):
        if rank in stacks:
            text = stacks[rank]
            rows += [f"rank {rank}", *(f"    {line}" for line in text.splitlines())] if text else [f"rank {rank}: no stack was caught"]
    return rows


def _groups(doc: Mapping[str, Any]) -> list[str]:
    rows = []
    for group in doc.get("groups") or ():
        low, high = group.get("seq_min"), group.get("seq_max")
        seq = "seq ?" if low is None else f"seq {low}" if low == high else f"seq {low}-{high}"
        behind = f", behind: {group['behind']}" if group.get("behind") else ""
        timeout = f", timeout {shown.duration(group['timeout_s'])}" if group.get("timeout_s") is not None else ""
        name = f"{group.get('desc', '?')} ({group.get('backend', '?')}) ranks {group.get('ranks', '?')}"
        rows.append(f"{'>' if group.get('waited_on') else ' '} {name}: {seq}{behind}{timeout}")
    return rows


def _history(doc: Mapping[str, Any]) -> list[str]:
    rows = [
        f"{shown.utc(c.get('at'), date=False)} {c.get('verdict')} ({c.get('cause')}) rank {shown.short_ranks(c.get('culprit_ranks') or ())}"
        for c in doc.get("history") or ()
    ]
    if doc.get("closed_at") is not None and not ends_recovered(doc):
        rows.append(f"{shown.utc(doc['closed_at'], date=False)} recovered")
    return rows


def ends_recovered(doc: Mapping[str, Any]) -> bool:
    """Whether the history itself tells the end."""
    history = list(doc.get("history") or ())
    return bool(history) and history[-1].get("verdict") == "recovered"


def _files(doc: Mapping[str, Any]) -> list[str]:
    run_dir = (doc.get("run") or {}).get("run_dir")
    if not run_dir:
        return []
    rows = [f"{run_dir}/incidents/{doc.get('id')}/", "    incident.json, index.html, report.txt"]
    caught = [int(rank) for rank, text in (doc.get("stacks") or {}).items() if text]
    if caught:
        rows.append(f"    stacks/ of ranks {shown.short_ranks(caught, 200)}")
    rows += [f"    {name}" for name in (doc.get("recorder_files") or ())[:8]]
    return rows


def _run(doc: Mapping[str, Any]) -> list[str]:
    run = doc.get("run") or {}
    if not run:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items() if version)
    command = "command: " + " ".join(run.get("command") or ())
    rows = [
        f"job {run.get('job_id')}, {size_words(run)}, attempt {run.get('attempt')}",
        *textwrap.wrap(command, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False),
    ]
    if versions:
        rows.append(f"versions: {versions}")
    if run.get("status_url"):
        rows.append(f"live: {run['status_url']}")
    return rows
