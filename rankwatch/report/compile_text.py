"""The compile document for a terminal: the regime first, then what to do, then the tables. Reads documents of any age: a missing key is an empty part."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rankwatch import shown
from rankwatch.report import compile_chart, graph_text
from rankwatch.report.compile_parts import finite, listed, number, rows, table

WIDTH = 110
MAX_FRAMES = 20
MAX_ROWS = 12
MAX_LINE = 300
MAX_CELL = 160

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
        _section("CUDA graphs", _graphs(doc)),
        _section("Numerics", _numerics(doc)),
        _section("When each rank compiled", compile_chart.chart(doc)),
    ]
    return shown.clean("\n".join(filter(None, parts)) + "\n")


def _headline(doc: Mapping[str, Any]) -> str:
    run, regime, steps, totals = table(doc, "run"), table(doc, "regime"), table(doc, "steps"), table(doc, "totals")
    world, seen = run.get("world_size"), run.get("ranks_seen")
    ranks = shown.plural(int(known), "rank") if (known := finite(world)) is not None else "? ranks"
    unseen = f" ({int(there)} seen)" if (there := finite(seen)) is not None and there != known else ""
    over = "ended" if doc.get("over") else "running"
    head = [
        f"run {shown.public_line(run.get('id') or '?')}: {ranks}{unseen}, {over} at step {int(number(run, 'steps_max'))}, torch {run.get('torch') or '?'}",
        *_wrapped(f"{str(regime.get('name') or '?').upper().replace('_', ' ')}: {shown.public_line(regime.get('words') or '?')}"),
    ]
    head += _wrapped(_attempt_words(doc))
    if step_line := _step_words(steps):
        head.append(step_line)
    compiled, waited = number(totals, "compile_s"), number(totals, "waited_rank_s")
    if compiled or waited:
        waits = f"; others waited {shown.lost_words(waited)} for it" if waited >= 1 else ""
        whose = (
            f", {_seconds(number(totals, 'compile_max_s'))} on the slowest rank ({totals.get('compile_max_rank')})" if number(totals, "compile_max_s") else ""
        )
        head.append(f"compiling took {_seconds(compiled)} over all ranks{whose}{waits}")
    if phases := _phases(table(totals, "phases")):
        head.append(f"slowest rank by phase: {phases}")
    if (worst := number(table(doc, "skew"), "worst_s")) >= 1:
        skew = table(doc, "skew")
        limit = f" of a {shown.duration(number(skew, 'smallest_timeout_s'))} timeout" if number(skew, "smallest_timeout_s") else ""
        head.append(f"compile skew at worst {_seconds(worst)}{limit}: {_ranks(skew.get('worst_ranks'))} in {shown.public_line(skew.get('worst_frame') or '?')}")
    if lost := number(table(doc, "ranks"), "events_lost"):
        head.append(f"incomplete: {int(lost)} events were overwritten before they were read")
    return "\n".join(map(_flat, head)) + "\n"


def _attempt_words(doc: Mapping[str, Any]) -> str:
    """After a restart: which attempt this is, and what the one before compiled. Only the waits are of the whole run."""
    before = rows(doc, "attempts")
    this = int(number(table(doc, "run"), "attempt"))
    if not before:
        return f"attempt {this}, whose compiles alone are told here; none before it compiled anything" if this else ""
    last = before[-1]
    again = f", {shown.plural(int(count), 'recompile')}" if (count := number(last, "recompiles")) else ""
    took = f" in {_seconds(number(last, 'compile_s'))} over all ranks" if number(last, "compile_s") else ""
    earlier = f" ({len(before) - 1} more before it: rankwatch compile --json)" if len(before) > 1 else ""
    what = f"{shown.plural(int(number(last, 'frames_compiled')), 'frame')} compiled{again}{took}, up to step {int(number(last, 'steps_max'))}"
    return f"attempt {this}, whose compiles alone are told here; attempt {int(number(last, 'attempt'))}: {what}{earlier}"


def _step_words(steps: Mapping[str, Any]) -> str:
    if not any(finite(steps.get(key)) is not None for key in ("last_compile_step", "during_s", "after_s")):
        alone = finite(steps.get("before_s"))
        return f"step time, median: {_seconds(alone)}; no step has compiled anything" if alone is not None else ""
    told = [
        f"{_seconds(steps[key])} {words}"
        for key, words in (("before_s", "before the first compile"), ("during_s", "in steps that compiled"), ("after_s", "since the last compile"))
        if finite(steps.get(key)) is not None
    ]
    return f"step time, medians: {', '.join(told)}" if told else ""


def _advice(doc: Mapping[str, Any]) -> Iterator[str]:
    for place, one in enumerate(rows(doc, "advice"), 1):
        yield from _wrapped(f"{place}. {shown.public_line(one.get('words') or '')}", "   ")
        if one.get("setting"):
            yield f"   set: {shown.public_line(one['setting'])}"
        yield from _wrapped(f"   because {shown.public_line('; '.join(map(str, listed(one, 'evidence'))))}", "   ")


def _now(doc: Mapping[str, Any]) -> Iterator[str]:
    for row in rows(doc, "now")[:MAX_ROWS]:
        eta = f"; its peers {row.get('peers')} took {_seconds(row.get('peers_took_s'))}" if number(row, "peers_took_s") else ""
        left = f", so about {_seconds(row['eta_s'])} are left" if number(row, "eta_s") > 0 else ""
        detail = f" ({row['detail']})" if row.get("detail") else ""
        reason = f"; recompiled because {row['reason']}" if row.get("reason") else ""
        text = f"rank {row.get('rank')}: {row.get('frame')} [{row.get('compile_id')}] for {_seconds(row.get('elapsed_s'))}, in {row.get('phase')}{detail}"
        yield from _wrapped(shown.public_line(f"{text}{eta}{left}{reason}"), "    ")


def _divergence(doc: Mapping[str, Any]) -> Iterator[str]:
    for found in rows(doc, "divergence")[:MAX_ROWS]:
        yield from _wrapped(f"* {_DIFFERENCES.get(str(found.get('kind')), found.get('kind'))}: {shown.public_line(found.get('words') or '')}", "  ")
        groups = rows(found, "groups")
        for group in groups[:8] if len(groups) > 2 else ():  # the sentence tells of two
            yield _cut(f"    {_ranks(group.get('ranks'))}: {shown.public_line(group.get('what') or '')}")


def _frames(doc: Mapping[str, Any]) -> Iterator[str]:
    lines = [("FRAME", "RANKS", "COMPILES", "SLOWEST", "ALL RANKS", "OTHERS WAITED", "CACHE", "NOTE")]
    every = rows(doc, "frames")
    for frame in every[:MAX_FRAMES]:
        slowest = f"{_seconds(frame.get('seconds_max'))} (rank {frame.get('seconds_max_rank')})"
        again = f" of {int(limit)}" if (limit := number(frame, "limit")) and number(frame, "recompiles") else ""
        lines.append(
            (
                shown.cut(shown.public_line(frame.get("frame") or "?"), MAX_CELL),
                shown.cut(shown.one_line(frame.get("ranks", "")), MAX_CELL),
                f"{int(number(frame, 'compiles'))}{again}",
                slowest,
                _seconds(frame.get("seconds_sum")),
                shown.lost_words(number(frame, "lost_rank_s")) if number(frame, "lost_rank_s") >= 1 else "-",
                _cache(frame),
                _note(frame),
            )
        )
    if len(lines) > 1:
        yield from _columns(lines)
    left_out = int(number(doc, "frames_left_out"))
    if hidden := max(0, len(every) - MAX_FRAMES) + left_out:
        held = f" has the {len(every)} that cost most" if left_out else ""
        yield f"... and {hidden} more: rankwatch compile --json{held}"


def _note(frame: Mapping[str, Any]) -> str:
    if frame.get("limited"):
        return f"eager for ever on {_ranks(frame['limited'])}"
    if frame.get("failures"):
        return "fails"
    if frame.get("breaks") and not number(frame, "graphs"):
        return "runs in Python: graph break"
    return ""


def _cache(frame: Mapping[str, Any]) -> str:
    results: dict[str, int] = {}
    layers = table(frame, "cache")
    for layer in (table(layers, name) for name in layers):
        for result in layer:
            results[str(result)] = results.get(str(result), 0) + int(number(layer, result))
    return " ".join(f"{count} {result}" for result, count in sorted(results.items()) if count) or "-"


def _guards(doc: Mapping[str, Any]) -> Iterator[str]:
    for frame in rows(doc, "frames")[:MAX_FRAMES]:
        for guard in rows(frame, "guards")[:5]:
            ranks = f" over {int(number(guard, 'rank_count'))} ranks" if number(guard, "rank_count") > 1 else ""
            many = f" ({int(guard['count'])} times{ranks})" if number(guard, "count") > 1 else ""
            earlier = [shown.public_line(value) for value in listed(guard, "expected_before")] if not guard.get("actual") else []
            before = f", before that {', '.join(earlier)}" if earlier else ""
            place = f" ({guard['at']})" if guard.get("at") else ""
            yield _cut(
                f"{frame.get('frame')}, {_ranks(guard.get('ranks'))}: {guard.get('class')}: {shown.public_line(guard.get('text') or '')}{before}{place}{many}"
            )


def _breaks(doc: Mapping[str, Any]) -> Iterator[str]:
    for frame in rows(doc, "frames"):
        for found in rows(frame, "breaks")[:5]:
            reason = shown.public_line(f"{found.get('reason') or ''} {found.get('gb') or ''}")
            yield _cut(f"{found.get('at')} in {frame.get('frame')}, {_ranks(found.get('ranks'))}: {reason}")


def _failures(doc: Mapping[str, Any]) -> Iterator[str]:
    for frame in rows(doc, "frames"):
        for failure in rows(frame, "failures")[:5]:
            where = f" at {at}" if (at := failure.get("at")) and not str(frame.get("frame")).endswith(f"@{at}") else ""
            yield from _wrapped(
                f"{frame.get('frame')}{where}, {_ranks(failure.get('ranks'))}: {failure.get('type')}: {shown.public_line(failure.get('reason') or '')}", "    "
            )


def _ddp(doc: Mapping[str, Any]) -> Iterator[str]:
    ddp = table(doc, "ddp")
    for group in rows(ddp, "groups")[:MAX_ROWS]:
        status = str(group.get("status") or "?").replace("_", " ")
        buckets = [number(bucket, "bytes") for bucket in rows(group, "buckets")]
        shape = f": {shown.megabytes(buckets)}" if buckets else ""
        cap = f", cap {shown.megabytes([size])} (bucket_cap_mb={size / 2**20:g})" if (size := number(group, "cap_bytes")) else ""
        why = f"; {shown.public_line(group.get('error') or group.get('reason'))}" if group.get("error") or group.get("reason") else ""
        count = f", {shown.plural(int(splits), 'bucket')}" if (splits := number(group, "splits")) > 1 else ""
        yield from _wrapped(f"{_ranks(group.get('ranks'))}: {status}{count}{shape}{cap}{why}", "    ")
    if number(ddp, "recompiles_x_splits"):
        yield f"each compile of a split forward compiles every split: {int(number(ddp, 'recompiles_x_splits'))} subgraphs recompiled so far"


def _graphs(doc: Mapping[str, Any]) -> Iterator[str]:
    for line in graph_text.lines(table(doc, "cudagraphs")):
        yield from _wrapped(shown.public_line(line), "    ")


def _numerics(doc: Mapping[str, Any]) -> Iterator[str]:
    yield from (_cut(shown.public_line(line)) for line in listed(table(doc, "numerics"), "words"))


def _ranks(text: object) -> str:
    """ "rank 1", "ranks 0-3"."""
    return f"rank{'s' if any(mark in str(text) for mark in ',-') else ''} {text}"


def _section(title: str, lines: Iterable[str]) -> str:
    body = "\n".join(f"  {_flat(line)}" for line in lines)
    return f"{title}\n{body}\n" if body else ""


def _flat(line: str) -> str:
    """One line, whatever is in it; blanks stay, columns need them."""
    return line.replace("\n", " ").replace("\t", " ")


def _columns(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))]
    for row in lines:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _phases(phases: Mapping[str, Any]) -> str:
    told = sorted(((str(name), number(phases, name)) for name in phases), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {_seconds(seconds)}" for name, seconds in told if seconds >= 0.05)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cut(text: str) -> str:
    return shown.cut(text, MAX_LINE)


def _seconds(value: object) -> str:
    """Compile times need a digit more than people's durations: "4.2 ms", "0.42 s", "12.3 s", then "2m05s"."""
    seconds = finite(value)
    if seconds is None or seconds < 0:
        return "?"
    if 0 < seconds < 0.1:
        return f"{seconds * 1e3:.2g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 100 else shown.duration(seconds)
