"""What to change about CUDA graphs, each line with the evidence that it rests on. Pure. Settings: torch 2.9-2.14, torch/_inductor/config.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rankwatch import shown
from rankwatch.monitor.compiles.cudagraphs import number

MOVED = 3  # re-recordings for moved memory from which on it is no single move
_TRITON = "torch._inductor.config.triton"


class Cure(NamedTuple):
    about: str
    words: str
    evidence: str
    setting: str
    at: str
    ranks: str
    weight: float


def cures(doc: Mapping[str, Any]) -> Iterator[Cure]:
    """For a document that has `cudagraphs`."""
    graphs = doc.get("cudagraphs") or {}
    for row in graphs.get("frames") or ():
        name, ranks, seconds = str(row.get("frame")), str(row.get("ranks", "")), number(row, "seconds")
        if row.get("growing"):
            yield _growing(row)
        if number(row, "rerecords") >= MOVED:
            words = f"{name}: keep its parameters and static inputs where they are: copy_ into them instead of replacing them, no load_state_dict(assign=True)"
            evidence = f"{name} was recorded again {int(number(row, 'rerecords'))} times because memory of its graph had moved"
            words += " and no .data = in the loop; torch gives a function up after that many re-recordings"
            yield Cure(f"graphs moved {name}", words, evidence, f"{_TRITON}.cudagraph_unexpected_rerecord_limit", name, ranks, seconds + 100.0)
    for row in graphs.get("skip_reasons") or ():
        reason, at, frame = str(row.get("reason") or ""), str(row.get("at") or ""), str(row.get("frame") or "")
        if words := _skip_words(reason):
            where = f"{at}: " if at else f"{frame}: " if frame else ""
            evidence = f"{reason}{f' at {at}' if at else ''}{f' in {frame}' if frame else ''}, {shown.plural(int(number(row, 'count')), 'time')}"
            yield Cure(f"graphs skip {reason[:60]} {at or frame}", f"{where}{words}", evidence, "", at or frame, str(row.get("ranks", "")), 8.0)
    sites = [row for row in graphs.get("capture_sites") or () if row.get("at")]
    if sites and not graphs.get("steps_seen"):
        words = "call rankwatch.step() once a step: collectives replayed in a graph are seen by no recorder and end by no timeout, so that only steps tell"
        evidence = f"a graph is captured at {sites[0]['at']} ({sites[0].get('via')}), and no optimizer step is seen"
        yield Cure(
            "graphs steps", words + " when a rank has stopped replaying", evidence, "rankwatch.step()", str(sites[0]["at"]), str(sites[0].get("ranks", "")), 3.0
        )


def _growing(row: Mapping[str, Any]) -> Cure:
    name, shape = str(row.get("frame")), str(row.get("shape") or "")
    ranks = str(row.get("growing_ranks") or row.get("ranks", ""))
    if "sizes " in shape:  # dynamic already: one compile, a recording for each set of sizes
        words = f"{name}: a CUDA graph is recorded for every new size: pad its inputs to a few sizes, record only the sizes that come often"
        words += f" ({_TRITON}.cudagraph_capture_sizes), or let it run without graphs"
        setting = f"{_TRITON}.cudagraph_skip_dynamic_graphs = True"
    else:
        words = f"{name}: it is compiled and recorded for every new size: pad its inputs to a few sizes, or mark the size dynamic, which saves the compiles,"
        words += f" and set {_TRITON}.cudagraph_skip_dynamic_graphs, which saves the recordings"
        setting = "torch._dynamo.mark_dynamic(x, 0)"
    return Cure(f"graphs grow {name}", words, f"{name} was {row.get('words')}", setting, name, ranks, number(row, "seconds") + 2e3)


def _skip_words(reason: str) -> str:
    """What to do about one of torch's reasons not to record; "" where it explains itself or is deliberate."""
    if "mutated inputs" in reason:
        return "this line writes into an input, so that nothing of the frame is recorded: return the new value, or keep the tensor as a buffer of the module"
    if "cpu device" in reason:
        return "a tensor on the CPU keeps the frame from being recorded: create it on the device"
    if "re-recording limit" in reason:
        return "the memory of its graph moves at every call: keep parameters and inputs in place, torch runs it without a graph now"
    if "multiple devices" in reason:
        return "the frame uses several devices: compile the part of each on its own"
    return ""
