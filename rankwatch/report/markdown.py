"""An incident as Markdown for a ticket: the verdict, what to do, who waits, the stacks that matter, where the rest lies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch import shown, traces
from rankwatch.report import text

MAX_STACK_LINES = 40


def render(doc: Mapping[str, Any]) -> str:
    """Markdown of an incident.json document; text that others wrote can neither format nor link anything."""
    parts = [
        f"## {escape(text.verdict_words(doc))}: {escape(text.culprit_words(doc))}" + (f" (incident {escape(doc['id'])})" if doc.get("id") else ""),
        *filter(None, (escape(text.end_words(doc)),)),
        escape(text.summary_words(doc)),
        escape(text.times_words(doc)),
        *((f"Action: {escape(text.action_words(doc))}",) if doc.get("action") else ()),
        *_list("What to do", doc.get("advice") or (), ours=True),
        *_list("Who waited" if text.over(doc) else "Who waits", _waiting(doc)),
        *_list("Compiling", (f"rank {rank}: {text.compile_words(each, text.over(doc))}" for rank, each in list((doc.get("compile") or {}).items())[:8])),
        *_list("Memory of the GPU", text.memory_rows(doc)),
        *_stacks(doc),
        *_list("Evidence", doc.get("evidence") or ()),
        *_list("Missing evidence", doc.get("missing_evidence") or ()),
    ]
    run = doc.get("run") or {}
    if run.get("run_dir"):
        parts.append(f"Files: {code(run['run_dir'] + '/incidents/' + str(doc.get('id')))}")
    versions = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items() if version)
    if versions:
        owner = (run.get("labels") or {}).get("owner")
        parts.append(
            f"Job {escape(run.get('job_id'))}, {shown.plural(run.get('world_size') or 0, 'rank')}; {escape(versions)}"
            + (f"; owner {escape(owner)}" if owner else "")
        )
    return "\n\n".join(parts) + "\n"


_IDENTIFIER = re.compile(r"(?<![\w`/.])(?:[\w.-]*/)*[A-Za-z_][\w.]*(?:@[\w.]+)?(?::\d+)?(?::[\w.<>]+)?(?![\w`])")
_GUARD = re.compile(r"(?<=recompiled because: )(.+)$|(?<=recompiled because )(.+)$|(?<=\(recompiled: )(.+?)(?=\)\)|\)$)")
_OUR_CODE = re.compile(rf"`([^`]+)`|{_GUARD.pattern}")


def escape(value: object, ours: bool = False) -> str:
    """One line in which nothing is Markdown or HTML; guards, identifiers and places in files as code spans. ours: what it has in backticks as well."""
    line = shown.one_line(value)
    parts, end = [], 0
    for found in (_OUR_CODE if ours else _GUARD).finditer(line):
        parts += [_with_identifiers(line[end : found.start()]), code(found[found.lastindex or 0])]
        end = found.end()
    return "".join((*parts, _with_identifiers(line[end:])))


def _with_identifiers(line: str) -> str:
    parts, end = [], 0
    for found in _IDENTIFIER.finditer(line):
        word = found[0].rstrip(".:")
        if "_" in word or re.search(r"\.py(?::\d|$)", word):
            parts += [_escaped(line[end : found.start()]), code(word)]
            end = found.start() + len(word)
    return "".join((*parts, _escaped(line[end:])))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~!&@])", r"\\\1", text)


def code(value: object) -> str:
    """A code span whatever the text holds."""
    line = shown.one_line(value)
    fence = "`" * (max((len(run) for run in re.findall(r"`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def block(lines: Iterable[str]) -> str:
    """A code block whatever the text holds."""
    body = "\n".join(map(shown.clean, lines))
    fence = "`" * max(3, max((len(run) for run in re.findall(r"`+", body)), default=0) + 1)
    return f"{fence}\n{body}\n{fence}"


def _list(title: str, rows: Iterable[object], ours: bool = False) -> list[str]:
    body = [f"- {escape(row, ours)}" for row in rows]
    return [f"**{title}**", "\n".join(body)] if body else []


def _waiting(doc: Mapping[str, Any]) -> list[str]:
    return list(filter(None, (text.waiting_words(doc),)))


def _stacks(doc: Mapping[str, Any]) -> list[str]:
    parts = []
    for rank, crash in list((doc.get("crash") or {}).items())[:2]:
        parts += [f"**Exception of rank {rank}**", block(traces.traceback_rows(str(crash.get("traceback") or crash.get("message") or ""), MAX_STACK_LINES))]
    for group in (doc.get("stack_groups") or ())[:4]:
        role = f", {group['role']}" if group.get("role") in ("culprit", "waiting") else ""
        ranks = str(group.get("ranks", "?"))
        parts += [
            f"**Stack of {'rank' if ranks.isdigit() else 'ranks'} {escape(ranks)}{role}** (innermost first)",
            block(traces.folded(group.get("frames") or ("no Python frame",))[:MAX_STACK_LINES]),
        ]
    for title, frames in text.child_stacks(doc)[:4]:
        parts += [f"**Stack of {escape(title)}** (innermost first)", block(traces.folded(frames)[:MAX_STACK_LINES])]
    return parts
