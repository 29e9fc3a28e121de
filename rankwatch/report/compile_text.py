"""The compile document for a terminal: the regime first, then what to do, then the tables. Reads documents of any age: a missing key is an empty part."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rankwatch import shown
from rankwatch.report import compile_chart

WIDTH = 110
MAX_FRAMES = 20
MAX_ROWS = 12
MAX_LINE = 300

_DIFFERENCES = {
    "lone_recompile": "recompiled alone",
    "different_graph": "different graphs",
    "different_guard": "different guards failed",
    "different_split": "split differently",
    "split_mode": "different DDP modes",
    "cache": "cache hit and miss",
    "failed_alone": "failed alone",
}


def render(doc: Mapping[str, Any]) -> str:
    """The whole document as text, at most 110 columns where the content lets us; ends with a newline."""
    parts = [
        _headline(doc),
        _section("What to do", _advice(doc)),
        _section("Compiling now", _now(doc)),
        _section("Ranks differ", _divergence(doc)),
        _section("Frames, by time lost", _frames(doc)),
        _section("Why they were recompiled", _guards(doc)),
        _section("Graph breaks", _breaks(doc)),
        _section("Failures", _failures(doc)),
        _section("DDP Optimizer", _ddp(doc)),
        _section("Numerics", _numerics(doc)),
        _section("When each rank compiled", compile_chart.chart(doc)),
    ]
    return shown.clean("\n".join(filter(None, parts)) + "\n")


def _headline(doc: Mapping[str, Any]) -> str:
    run, regime, steps, totals = _table(doc, "run"), _table(doc, "regime"), _table(doc, "steps"), _table(doc, "totals")
    world, seen = run.get("world_size"), run.get("ranks_seen")
    ranks = shown.plural(int(world), "rank") if isinstance(world, int) else "? ranks"
    unseen = f" ({seen} seen)" if seen != world and seen is not None else ""
    over = "ended" if doc.get("over") else "running"
    head = [
        f"run {shown.public_line(run.get('id') or '?')}: {ranks}{unseen}, {over} at step {run.get('steps_max', 0)}, torch {run.get('torch') or '?'}",
        *_wrapped(f"{str(regime.get('name') or '?').upper().replace('_', ' ')}: {shown.public_line(regime.get('words') or '?')}"),
    ]
    if step_line := _step_words(steps):
        head.append(step_line)
    compiled, waited = _number(totals, "compile_s"), _number(totals, "waited_rank_s")
    if compiled or waited:
        waits = f"; others waited {shown.lost_words(waited)} for it" if waited >= 1 else ""
        whose = f", {_seconds(_number(totals, 'compile_max_s'))} on the slowest rank ({totals.get('compile_max_rank')})" if totals.get("compile_max_s") else ""
        head.append(f"compiling took {_seconds(compiled)} over all ranks{whose}{waits}")
    if phases := _phases(_table(totals, "phases")):
        head.append(f"slowest rank by phase: {phases}")
    if (worst := _number(_table(doc, "skew"), "worst_s")) >= 1:
        skew = _table(doc, "skew")
        limit = f" of a {shown.duration(_number(skew, 'smallest_timeout_s'))} timeout" if skew.get("smallest_timeout_s") else ""
        head.append(f"compile skew at worst {_seconds(worst)}{limit}: {_ranks(skew.get('worst_ranks'))} in {shown.public_line(skew.get('worst_frame') or '?')}")
    if lost := _number(_table(doc, "ranks"), "events_lost"):
        head.append(f"incomplete: {int(lost)} events were overwritten before they were read")
    return "\n".join(head) + "\n"


def _step_words(steps: Mapping[str, Any]) -> str:
    if not any(isinstance(steps.get(key), (int, float)) for key in ("last_compile_step", "during_s", "after_s")):
        alone = steps.get("before_s")
        return f"step time, median: {_seconds(alone)}; no step has compiled anything" if isinstance(alone, (int, float)) else ""
    told = [
        f"{_seconds(steps[key])} {words}"
        for key, words in (("before_s", "before the first compile"), ("during_s", "in steps that compiled"), ("after_s", "since the last compile"))
        if isinstance(steps.get(key), (int, float))
    ]
    return f"step time, medians: {', '.join(told)}" if told else ""


def _advice(doc: Mapping[str, Any]) -> Iterator[str]:
    for number, one in enumerate(_rows(doc, "advice"), 1):
        yield from _wrapped(f"{number}. {shown.public_line(one.get('words') or '')}", "   ")
        if one.get("setting"):
            yield f"   set: {shown.public_line(one['setting'])}"
        yield from _wrapped(f"   because {shown.public_line('; '.join(map(str, one.get('evidence') or ())))}", "   ")


def _now(doc: Mapping[str, Any]) -> Iterator[str]:
    for row in _rows(doc, "now")[:MAX_ROWS]:
        eta = f"; its peers {row['peers']} took {_seconds(row['peers_took_s'])}" if row.get("peers_took_s") else ""
        left = f", so about {_seconds(row['eta_s'])} are left" if isinstance(row.get("eta_s"), (int, float)) and row["eta_s"] > 0 else ""
        detail = f" ({row['detail']})" if row.get("detail") else ""
        reason = f"; recompiled because {row['reason']}" if row.get("reason") else ""
        text = f"rank {row.get('rank')}: {row.get('frame')} [{row.get('compile_id')}] for {_seconds(row.get('elapsed_s'))}, in {row.get('phase')}{detail}"
        yield from _wrapped(shown.public_line(f"{text}{eta}{left}{reason}"), "    ")


def _divergence(doc: Mapping[str, Any]) -> Iterator[str]:
    for found in _rows(doc, "divergence")[:MAX_ROWS]:
        yield from _wrapped(f"* {_DIFFERENCES.get(str(found.get('kind')), found.get('kind'))}: {shown.public_line(found.get('words') or '')}", "  ")
        groups = _rows(found, "groups")
        for group in groups[:8] if len(groups) > 2 else ():  # the sentence tells of two
            yield _cut(f"    {_ranks(group.get('ranks'))}: {shown.public_line(group.get('what') or '')}")


def _frames(doc: Mapping[str, Any]) -> Iterator[str]:
    rows = [("FRAME", "RANKS", "COMPILES", "SLOWEST", "ALL RANKS", "OTHERS WAITED", "CACHE", "NOTE")]
    every = _rows(doc, "frames")
    for frame in every[:MAX_FRAMES]:
        slowest = f"{_seconds(frame.get('seconds_max'))} (rank {frame.get('seconds_max_rank')})"
        again = f" of {int(limit)}" if (limit := _number(frame, "limit")) and _number(frame, "recompiles") else ""
        rows.append(
            (
                shown.public_line(frame.get("frame") or "?"),
                str(frame.get("ranks", "")),
                f"{int(_number(frame, 'compiles'))}{again}",
                slowest,
                _seconds(frame.get("seconds_sum")),
                shown.lost_words(_number(frame, "lost_rank_s")) if _number(frame, "lost_rank_s") >= 1 else "-",
                _cache(frame),
                _note(frame),
            )
        )
    if len(rows) > 1:
        yield from _columns(rows)
    if len(every) > MAX_FRAMES:
        yield f"... and {len(every) - MAX_FRAMES} more: rankwatch compile --json"


def _note(frame: Mapping[str, Any]) -> str:
    if frame.get("limited"):
        return f"eager for ever on {_ranks(frame['limited'])}"
    if frame.get("failures"):
        return "fails"
    if frame.get("breaks") and not _number(frame, "graphs"):
        return "runs in Python: graph break"
    return ""


def _cache(frame: Mapping[str, Any]) -> str:
    results: dict[str, int] = {}
    for layer in _table(frame, "cache").values():
        for result, count in layer.items() if isinstance(layer, Mapping) else ():
            results[str(result)] = results.get(str(result), 0) + int(count or 0)
    return " ".join(f"{count} {result}" for result, count in sorted(results.items()) if count) or "-"


def _guards(doc: Mapping[str, Any]) -> Iterator[str]:
    for frame in _rows(doc, "frames")[:MAX_FRAMES]:
        for guard in _rows(frame, "guards")[:5]:
            many = f" ({int(guard['count'])} times)" if _number(guard, "count") > 1 else ""
            place = f" ({guard['at']})" if guard.get("at") else ""
            yield _cut(f"{frame.get('frame')}, {_ranks(guard.get('ranks'))}: {guard.get('class')}: {shown.public_line(guard.get('text') or '')}{place}{many}")


def _breaks(doc: Mapping[str, Any]) -> Iterator[str]:
    for frame in _rows(doc, "frames"):
        for found in _rows(frame, "breaks")[:5]:
            reason = shown.public_line(f"{found.get('reason') or ''} {found.get('gb') or ''}")
            yield _cut(f"{found.get('at')} in {frame.get('frame')}, {_ranks(found.get('ranks'))}: {reason}")


def _failures(doc: Mapping[str, Any]) -> Iterator[str]:
    for frame in _rows(doc, "frames"):
        for failure in _rows(frame, "failures")[:5]:
            where = f" at {at}" if (at := failure.get("at")) and not str(frame.get("frame")).endswith(f"@{at}") else ""
            yield from _wrapped(
                f"{frame.get('frame')}{where}, {_ranks(failure.get('ranks'))}: {failure.get('type')}: {shown.public_line(failure.get('reason') or '')}", "    "
            )


def _ddp(doc: Mapping[str, Any]) -> Iterator[str]:
    ddp = _table(doc, "ddp")
    for group in _rows(ddp, "groups")[:MAX_ROWS]:
        status = str(group.get("status") or "?").replace("_", " ")
        buckets = [_number(bucket, "bytes") for bucket in _rows(group, "buckets")]
        shape = f": {shown.megabytes(buckets)}" if buckets else ""
        cap = f", cap {shown.megabytes([size])} (bucket_cap_mb={size / 2**20:g})" if (size := _number(group, "cap_bytes")) else ""
        why = f"; {shown.public_line(group.get('error') or group.get('reason'))}" if group.get("error") or group.get("reason") else ""
        count = f", {shown.plural(int(splits), 'bucket')}" if (splits := _number(group, "splits")) > 1 else ""
        yield from _wrapped(f"{_ranks(group.get('ranks'))}: {status}{count}{shape}{cap}{why}", "    ")
    if _number(ddp, "recompiles_x_splits"):
        yield f"each compile of a split forward compiles every split: {int(_number(ddp, 'recompiles_x_splits'))} subgraphs recompiled so far"


def _numerics(doc: Mapping[str, Any]) -> Iterator[str]:
    yield from (_cut(shown.public_line(line)) for line in _table(doc, "numerics").get("words") or ())


def _ranks(text: object) -> str:
    """ "rank 1", "ranks 0-3"."""
    return f"rank{'s' if any(mark in str(text) for mark in ',-') else ''} {text}"


def _section(title: str, lines: Iterable[str]) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{title}\n{body}\n" if body else ""


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _phases(phases: Mapping[str, Any]) -> str:
    told = sorted(((str(name), _number(phases, name)) for name in phases), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {_seconds(seconds)}" for name, seconds in told if seconds >= 0.05)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cut(text: str) -> str:
    return shown.cut(text, MAX_LINE)


def _seconds(value: object) -> str:
    """Compile times need a digit more than people's durations: "4.2 ms", "0.42 s", "12.3 s", then "2m05s"."""
    if not isinstance(value, (int, float)):
        return "?"
    if 0 < value < 0.1:
        return f"{value * 1e3:.2g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else shown.duration(value)


def _number(table: Mapping[str, Any], key: str) -> float:
    value = table.get(key)
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def _table(doc: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = doc.get(key)
    return value if isinstance(value, Mapping) else {}


def _rows(doc: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [row for row in doc.get(key) or () if isinstance(row, Mapping)]
