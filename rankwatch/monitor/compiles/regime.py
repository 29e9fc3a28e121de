"""In which of the compile manual's regimes a job is: it compiles and runs steadily, it compiles and yet does not, or it fails. Pure.

Reads the compile document (monitor/compiles: what all ranks compiled) and says one name, one sentence for people, and what it rests on.
Whether compiled code is *faster* cannot be told from a job alone: that takes a baseline, which `rankwatch ablate` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankwatch import shown

SETTLED_STEPS = 5  # so many steps without a compile are `compiled`; before that a young job is `starting`
STORM_RECOMPILES = 3  # of one frame; automatic dynamic shapes make one or two healthy ones
OUTLIVED_STEPS = 3  # a frame that fails in so many steps ends no job
STORM_AFTER_STEPS = 8  # a job younger than this is still warming up
STORM_SHARE = 0.25  # the last compile lies within this share of the steps: it has not stopped


def judge(doc: Mapping[str, Any]) -> dict[str, Any]:
    """{name, words, evidence} of the job, the gravest regime that the document proves; words end without a full stop."""
    for found in (_not_used, _switched_off, _failing, _compiled_nothing, _limited, _for_ever, _broken):
        if regime := found(doc):
            return regime
    return _compiled(doc)


def frames(doc: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The document's frames, those that took most time first."""
    yield from (frame for frame in doc.get("frames") or () if isinstance(frame, Mapping))


def number(table: object, key: str) -> float:
    """A number of a part of the document; 0 where it is absent."""
    value = table.get(key) if isinstance(table, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def times(count: float) -> str:
    """ "once", "twice", "5 times"."""
    return {1: "once", 2: "twice"}.get(int(count), f"{int(count)} times")


def on_ranks(ranks: object) -> str:
    """ "rank 1", "ranks 0-3"."""
    return f"rank{'s' if any(mark in str(ranks) for mark in ',-') else ''} {ranks}"


def hot_breaks(doc: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(frame, its first break) of frames that gave no graph at all because of a graph break: they run in Python at each step."""
    return [(frame, frame["breaks"][0]) for frame in frames(doc) if frame.get("breaks") and not number(frame, "graphs")]


def compiled_anew(doc: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Frames that are compiled from the start again and again, with no guard that failed, and still were in the newest part of the run."""
    return [
        frame
        for frame in frames(doc)
        if min(number(frame, "compiles") - number(frame, "recompiles"), number(frame, "steps_compiled")) > STORM_RECOMPILES and _not_stopped(doc, frame)
    ]


def _not_stopped(doc: Mapping[str, Any], frame: Mapping[str, Any]) -> bool:
    steps = number(doc.get("run"), "steps_max")
    return steps >= STORM_AFTER_STEPS and _last_step(doc, frame) >= steps * (1 - STORM_SHARE)


def _last_step(doc: Mapping[str, Any], frame: Mapping[str, Any]) -> float:
    """Of the frame's last compile; of the job's where the frame's is not known."""
    return number(frame, "last_step") if frame.get("last_step") is not None else number(doc.get("steps"), "last_compile_step")


def _ago(doc: Mapping[str, Any], frame: Mapping[str, Any]) -> str:
    since = int(number(doc.get("run"), "steps_max") - _last_step(doc, frame))
    return f"{since} steps ago" if since > 1 else "in the newest step"


def _regime(name: str, words: str, *evidence: str) -> dict[str, Any]:
    return {"name": name, "words": words, "evidence": [line for line in evidence if line]}


def _totals(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    return doc.get("totals") or {}


def requested(doc: Mapping[str, Any]) -> tuple[float, str]:
    """(calls of torch.compile on the rank that called most, the line of the first)."""
    told = [row for row in ((doc.get("ranks") or {}).get("requested") or {}).values() if isinstance(row, Mapping)]
    return max((number(row, "count") for row in told), default=0), next((str(row["first_at"]) for row in told if row.get("first_at")), "")


def _not_used(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    totals = _totals(doc)
    seen = sum(number(totals, key) for key in ("frames", "graphs", "library", "skipped", "failures"))
    if seen or requested(doc)[0] or doc.get("now"):
        return None
    blind = (doc.get("ranks") or {}).get("no_probe")
    return _regime("not_used", "no rank has asked for torch.compile", f"the compile probe does not work on ranks {blind}" if blind else "")


def _switched_off(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    if number(_totals(doc), "graphs"):
        return None
    ranks = doc.get("ranks") or {}
    why = {**(ranks.get("disabled") or {}), **{who: f'torch.compiler.set_stance("{stance}")' for who, stance in (ranks.get("stance") or {}).items() if stance}}
    told = [(who, reason) for who, reason in why.items() if reason and str(reason) != "default"]
    if not told:
        return None
    _count, at = requested(doc)
    asked = f"torch.compile is asked for{f' at {at}' if at else ''}, but" if at or _count else "torch.compile"
    return _regime(
        "fell_back",
        f"{asked} {'it ' if at or _count else ''}is switched off by {told[0][1]}: everything runs eagerly",
        *(f"{on_ranks(who)}: {reason}" for who, reason in told),
        "no graph was compiled",
    )


def _failing(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    failed = [(frame, failure) for frame in frames(doc) for failure in frame.get("failures") or ()]
    if not failed:
        return None
    frame, failure = failed[0]
    where = f" at {at}" if (at := failure.get("at")) and not str(frame.get("frame")).endswith(f"@{at}") else ""
    goes_on = f"; {words}" if (words := outlived(doc, frame)) else ""
    return _regime(
        "failing",
        f"compiling {frame.get('frame')} fails on {on_ranks(failure.get('ranks'))}{where}: {failure.get('type')}: {failure.get('reason')}{goes_on}",
        *(f"{other.get('frame')}: {why.get('type')} {times(number(why, 'count') or 1)}, {on_ranks(why.get('ranks'))}" for other, why in failed[:5]),
    )


def outlived(doc: Mapping[str, Any], frame: Mapping[str, Any]) -> str:
    """What became of a frame whose compile failed, in a job that goes on; "" where the failure may end it yet."""
    if (doc.get("ranks") or {}).get("suppress_errors"):
        return "torch._dynamo.config.suppress_errors is on, so it runs eagerly"
    if number(doc.get("run"), "steps_min") >= _last_step(doc, frame) + 2 or number(frame, "steps_compiled") >= OUTLIVED_STEPS:
        return "the job has caught the error and goes on without that graph"
    return ""


def _compiled_nothing(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    totals = _totals(doc)
    count, at = requested(doc)
    if number(totals, "graphs") or doc.get("now") or not (count or number(totals, "library")):
        return None
    steps = number(doc.get("run"), "steps_max")
    if not steps or _cut_off(doc):
        return None
    tried = number(totals, "library") + number(totals, "skipped") + number(totals, "frames")
    return _regime(
        "compiled_nothing",
        f"torch.compile was asked for{f' at {at}' if at else ''} and not one graph was compiled in {int(steps)} steps: everything runs eagerly",
        f"{int(tried)} frames were looked at, {int(number(totals, 'library'))} of them library code, none gave a graph with operations"
        if tried
        else "Dynamo has not looked at one frame",
    )


def _cut_off(doc: Mapping[str, Any]) -> str:
    """The frame that was being compiled when its process ended, "" for none."""
    rows = [row for row in doc.get("timeline") or () if isinstance(row, Mapping) and row.get("end_wall") is None]
    return str(rows[0].get("frame") or "a frame") if rows else ""


def _limited(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    limited = [frame for frame in frames(doc) if frame.get("limited")]
    if not limited:
        return None
    worst = limited[0]
    more = f", and {len(limited) - 1} more" if len(limited) > 1 else ""
    return _regime(
        "fell_back",
        f"{worst.get('frame')} has reached the recompile limit of {int(number(worst, 'limit') or number(worst, 'cache_size'))} on {on_ranks(worst['limited'])} "
        f"and runs eagerly there for ever{more}",
        *(f"{frame.get('frame')}: {reason}" for frame in limited[:5] if (reason := frame.get("last_reason"))),
    )


def _for_ever(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    run_steps = number(doc.get("run"), "steps_max")
    storming = [frame for frame in frames(doc) if number(frame, "recompiles") >= STORM_RECOMPILES and _not_stopped(doc, frame)]
    if not storming:
        return _anew(doc)
    worst = max(storming, key=lambda frame: number(frame, "recompiles"))
    guard: Mapping[str, Any] = next(iter(worst.get("guards") or ()), {})
    why = f": {guard.get('text') or worst.get('last_reason')}" if guard or worst.get("last_reason") else ""
    return _regime(
        "compiles_for_ever",
        f"{worst.get('frame')} was recompiled {times(number(worst, 'recompiles'))} in {int(run_steps)} steps, the last time {_ago(doc, worst)}{why}",
        *(
            f"{frame.get('frame')}: {shown.plural(int(number(frame, 'recompiles')), 'recompile')}, {number(frame, 'seconds_max'):.1f} s on the slowest rank"
            for frame in storming[:5]
        ),
    )


def _anew(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    again = compiled_anew(doc)
    if not again:
        return None
    worst = max(again, key=lambda frame: number(frame, "steps_compiled"))
    return _regime(
        "compiles_for_ever",
        f"{worst.get('frame')} is compiled anew in the loop, in {int(number(worst, 'steps_compiled'))} of {int(number(doc.get('run'), 'steps_max'))} steps, "
        f"the last time {_ago(doc, worst)}: torch._dynamo.reset() or a fresh torch.compile in the loop",
        *(
            f"{frame.get('frame')}: {shown.plural(int(number(frame, 'compiles')), 'compile')}, {shown.plural(int(number(frame, 'recompiles')), 'recompile')}, "
            f"{number(frame, 'seconds_max'):.1f} s on the slowest rank"
            for frame in again[:5]
        ),
    )


def _broken(doc: Mapping[str, Any]) -> dict[str, Any] | None:
    hot = hot_breaks(doc)
    if not hot:
        return None
    frame, found = hot[0]
    where = f"{found.get('at')} ({found.get('reason')})"
    return _regime(
        "fell_back",
        f"{frame.get('frame')} runs in Python because of a graph break at {where}; only what it calls is compiled, piece by piece",
        *(f"{other.get('frame')}: {why.get('reason')} ({why.get('gb') or 'no id'}) at {why.get('at')}" for other, why in hot[:5]),
        f"{int(number(_totals(doc), 'graphs'))} graphs on the rank with most of them",
    )


def _compiled(doc: Mapping[str, Any]) -> dict[str, Any]:
    steps, totals = doc.get("steps") or {}, _totals(doc)
    since = number(steps, "since_compile")
    graphs, breaks = int(number(totals, "graphs")), int(number(totals, "graph_breaks"))
    cut = f", cut by {breaks} graph break{'s' if breaks != 1 else ''}" if breaks else ""
    evidence = f"{shown.plural(int(number(totals, 'recompiles')), 'recompile')}, {number(totals, 'compile_max_s'):.1f} s of compiling on the slowest rank"
    if not graphs and doc.get("over"):
        frame = _cut_off(doc)
        return _regime("starting", f"ended while compiling {frame}" if frame else "ended before a graph was compiled", evidence)
    if not graphs:
        return _regime("starting", "no graph so far", evidence)
    if since < SETTLED_STEPS and not doc.get("over"):
        return _regime("starting", f"{graphs} graph{'s' if graphs != 1 else ''} so far{cut}, still compiling or young", evidence)
    steady = f", steady: no compile for {int(since)} steps" if since >= SETTLED_STEPS else f"; the run has ended {_after(since)} its last compile"
    return _regime("compiled", f"{graphs} graph{'s' if graphs != 1 else ''} compiled{cut}{steady}", evidence)


def _after(since: float) -> str:
    return f"{int(since) - 1} steps after" if since > 2 else "one step after" if since == 2 else "in the step of" if since == 1 else "right after"
