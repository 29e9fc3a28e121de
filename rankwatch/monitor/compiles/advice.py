"""What to change, each line with the evidence that it rests on; nothing is advised without, and nothing twice. Pure.

Settings are torch 2.9-2.14's own names (torch/_dynamo/config.py, torch.compiler, torch/_inductor/config.py); those against guards and graph
breaks stand in cures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rankwatch.monitor.compiles import graph_cures
from rankwatch.monitor.compiles.cures import GUARD_CURES, Cure, break_cure, cure_of
from rankwatch.monitor.compiles.regime import compiled_anew, frames, hot_breaks, number, on_ranks, requested, times

MAX_ADVICE = 20
WORTH_S = 1.0  # of compiling or waiting on account of it
_DYNAMIC = GUARD_CURES["tensor_size"].setting
SKEW_SHARE = 0.25  # of the smallest timeout: from there on a compile on one rank is a danger to the job


class Advice(NamedTuple):
    """One line. `about` makes it unique: the same advice about the same thing is given once, with the ranks of both."""

    about: str
    words: str
    evidence: str
    setting: str = ""
    at: str = ""
    ranks: str = ""
    weight: float = 0.0


def give(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{key, words, evidence, setting, at, ranks}] for a document that has its `regime`, what costs most first; at most 20."""
    found: dict[str, Advice] = {}
    for advice in (
        *_failures(doc),
        *_nothing(doc),
        *_divergence(doc),
        *_anew(doc),
        *_recompiles(doc),
        *_breaks(doc),
        *_ddp(doc),
        *_skew(doc),
        *_caches(doc),
        *(Advice(*cure) for cure in graph_cures.cures(doc)),
    ):
        found.setdefault(advice.about, advice)
    ordered = sorted(found.values(), key=lambda advice: -advice.weight)[:MAX_ADVICE]
    return [
        {"key": one.about, "words": one.words, "evidence": [one.evidence], "setting": one.setting or None, "at": one.at or None, "ranks": one.ranks}
        for one in ordered
    ]


def _failures(doc: Mapping[str, Any]) -> Iterator[Advice]:
    alone = {found.get("frame") for found in doc.get("divergence") or () if found.get("kind") == "failed_alone"}
    for frame in frames(doc):
        for failure in frame.get("failures") or ():
            name, ranks = frame.get("frame"), str(failure.get("ranks", ""))
            evidence = f"{name}: {failure.get('type')}: {failure.get('reason')} on {on_ranks(ranks)}"
            if name in alone and ranks.isdigit():
                words = f"only rank {ranks} fails to compile {name}, others have compiled it: compare its node's compiler, disk and settings with theirs"
                words += ", then run it with an empty cache"
                yield Advice(f"failed_alone {name}", words, evidence, "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1", str(failure.get("at") or ""), ranks, 1e9)
            words = f"find the layer that fails on {name}: rankwatch ablate -- torchrun ...; then let torch make a small reproduction"
            yield Advice(f"failed {name}", words, evidence, 'TORCHDYNAMO_REPRO_AFTER="aot"', str(failure.get("at") or ""), ranks, 1e9 - 1)


def _nothing(doc: Mapping[str, Any]) -> Iterator[Advice]:
    regime = doc.get("regime") or {}
    evidence = "; ".join(regime.get("evidence") or ())
    if regime.get("name") == "compiled_nothing":
        totals = doc.get("totals") or {}
        if any(number(totals, key) for key in ("library", "skipped", "frames")):
            words = "compile the model before DistributedDataParallel wraps it: DDP(torch.compile(model)); a bare nn.Sequential has no frame of its own"
            words += ": a module with a forward of its own around it has one"
        else:
            words = "nothing of what was compiled has run: call what torch.compile returns, not the module itself; model.compile() does nothing for"
            words += " a bare nn.Sequential, torch.compile(model) does"
        yield Advice("compiled_nothing", words, evidence, "", requested(doc)[1], "", 1e8)
    elif regime.get("name") == "fell_back" and "switched off" in str(regime.get("words")):
        ranks = doc.get("ranks") or {}
        reason = next((str(why) for why in (*(ranks.get("disabled") or {}).values(), *(ranks.get("stance") or {}).values()) if why), "")
        words = f"take {reason} away if compiled code is wanted" if "=" in reason else f"take the stance {reason!r} away if compiled code is wanted"
        yield Advice("switched_off", words, evidence, "", requested(doc)[1], "", 1e8)


def _divergence(doc: Mapping[str, Any]) -> Iterator[Advice]:
    for found in doc.get("divergence") or ():
        kind, frame, words = found.get("kind"), found.get("frame"), str(found.get("words") or "")
        groups = [group for group in found.get("groups") or () if isinstance(group, Mapping)]
        odd = str(groups[-1].get("ranks", "")) if groups else ""
        weight = 1e6 if found.get("correlated") else 1e4
        if kind == "different_graph" and found.get("cause") == "sizes":
            size = GUARD_CURES["tensor_size"]
            yield Advice(f"guard {frame} tensor_size", f"{frame}: {size.words}", words, size.setting, str(frame or ""), odd, weight)
        elif kind == "different_graph":
            cure = "let all ranks take the same branch: broadcast what it depends on, or write it as torch.where or torch.cond"
            setting = ""
            if found.get("cause") == "sizes_or_branch":
                cure, setting = f"compare the sizes of its inputs between ranks, and mark what differs dynamic; if they are alike, {cure}", _DYNAMIC
            yield Advice(f"branch {frame}", f"{frame}: {cure}", words, setting, str(frame or ""), odd, weight)
        elif kind in ("lone_recompile", "different_guard"):
            cure, setting = _lone_cure(doc, frame)
            yield Advice(f"lone {frame}", cure, words, setting, str(frame or ""), odd, weight)
        elif kind == "different_split":
            cure, setting = _split_cure(doc)
            yield Advice("ddp_split", cure, words, setting, "", odd, weight)
        elif kind == "split_mode":
            yield Advice("ddp_mode", "set optimize_ddp alike on every rank", words, "torch._dynamo.config.optimize_ddp", "", odd, weight)


def _split_cure(doc: Mapping[str, Any]) -> tuple[str, str]:
    """(words, setting) against splits that differ: by the bucket caps of the ranks, if these differ."""
    groups = [group for group in (doc.get("ddp") or {}).get("groups") or () if number(group, "cap_bytes")]
    if len({number(group, "cap_bytes") for group in groups}) < 2:
        return "the bucket caps are alike, so the models are not: give every rank the same model, with the same parameters frozen", ""
    caps = ", ".join(f"{number(group, 'cap_bytes') / 2**20:g} on {on_ranks(group.get('ranks'))}" for group in groups[:4])
    return f"DistributedDataParallel has other bucket caps on some ranks ({caps}): give the same on every rank", "bucket_cap_mb"


def _lone_cure(doc: Mapping[str, Any], frame: object) -> tuple[str, str]:
    """(words, setting) against recompiles on some ranks only, by the frame's first guard."""
    guards = next((one.get("guards") for one in frames(doc) if one.get("frame") == frame), None) or ()
    cure = _cure(guards[0]) if guards else None
    what = cure.words if cure else "make its inputs alike on every rank"
    return f"the other ranks wait while some recompile {frame}: {what}; or compile all shapes before the loop", cure.setting if cure else ""


def _cure(guard: Mapping[str, Any]) -> Cure | None:
    return cure_of(str(guard.get("class")), str(guard.get("source") or ""), str(guard.get("expected") or ""))


def _anew(doc: Mapping[str, Any]) -> Iterator[Advice]:
    for frame in compiled_anew(doc):
        name, seconds = frame.get("frame"), number(frame, "seconds_max")
        words = f"{name}: compile it once, before the loop: no torch._dynamo.reset() in the loop, and no torch.compile there"
        evidence = f"{name} was compiled anew in {int(number(frame, 'steps_compiled'))} steps ({seconds:.1f} s)"
        evidence += "" if frame.get("guards") else "; no guard has failed"
        yield Advice(f"anew {name}", words, evidence, "", str(name), str(frame.get("ranks", "")), seconds + 1e3)


def _recompiles(doc: Mapping[str, Any]) -> Iterator[Advice]:
    lone = {found.get("frame") for found in doc.get("divergence") or () if found.get("kind") in ("lone_recompile", "different_guard")}
    for frame in frames(doc):
        limited, count, seconds = frame.get("limited"), number(frame, "recompiles"), number(frame, "seconds_max") + number(frame, "lost_rank_s")
        if not limited and (count < 2 or seconds < WORTH_S):
            continue
        name = frame.get("frame")
        for guard in list(frame.get("guards") or ())[name in lone : 2]:  # the first one's cure is told of a frame that some recompile alone
            cure = _cure(guard)
            if cure is None:
                continue
            place = f" ({guard['at']})" if guard.get("at") else ""
            evidence = f"{name} was recompiled {times(count)} ({seconds:.1f} s): {guard.get('text') or guard.get('source')}{place}"
            yield Advice(
                f"guard {name} {guard.get('class')}",
                f"{name}: {cure.words}",
                evidence,
                cure.setting,
                str(guard.get("at") or name),
                str(guard.get("ranks", "")),
                seconds + 1e3 * bool(limited),
            )
        if limited and not frame.get("guards"):
            evidence = f"{name} was compiled {times(number(frame, 'compiles'))}: {frame.get('last_reason')}"
            words = f"{name}: find the guard that fails"
            yield Advice(f"limit {name}", words, evidence, "TORCH_LOGS=recompiles", str(name), str(limited), seconds + 1e3)


def _breaks(doc: Mapping[str, Any]) -> Iterator[Advice]:
    whole = {id(frame) for frame, _found in hot_breaks(doc)}
    for frame in frames(doc):
        for found in frame.get("breaks") or ():
            reason, at = str(found.get("reason") or ""), str(found.get("at") or "")
            cure = break_cure(reason)
            cost = f"; {frame.get('frame')} runs in Python as a whole because of it" if id(frame) in whole else ""
            link = f" ({found['gb']})" if found.get("gb") else ""
            yield Advice(
                f"break {at}",
                f"{at}: {cure.words}",
                f"graph break at {at}: {reason}{link}{cost}",
                cure.setting,
                at,
                str(found.get("ranks", "")),
                100.0 if cost else 10.0,
            )


def _ddp(doc: Mapping[str, Any]) -> Iterator[Advice]:
    for group in (doc.get("ddp") or {}).get("groups") or ():
        status, ranks, cap = group.get("status"), str(group.get("ranks", "")), number(group, "cap_bytes")
        size = f"{number(group, 'bytes') / 1e6:.1f} MB of parameters, cap {cap / 1e6:.1f} MB"
        if status == "init_failed":
            words = "DDPOptimizer wants buckets of at least its first one of 1 MiB: raise bucket_cap_mb of DistributedDataParallel"
            yield Advice("ddp_init", words, f"{group.get('error')}", "bucket_cap_mb=25", "", ranks, 1e7)
        elif status == "failed" and str(group.get("error")).startswith("in split"):  # else the frame's own failure says it all
            words = "a split of DDPOptimizer fails to compile: see the error; compile the blocks one by one, or do without the splits"
            yield Advice("ddp_failed", words, f"{group.get('error')}", "torch._dynamo.config.optimize_ddp = False", "", ranks, 1e7)
        elif status == "not_applied":
            words = "gradients are not reduced while the compiled backward still runs: mend the graph break, or compile each block and set optimize_ddp = False"
            yield Advice("ddp_not_applied", words, f"{group.get('reason')}", "", str(group.get("frame") or ""), ranks, 50.0)
        elif status == "single_bucket" and cap and number(group, "bytes") > cap / 2:
            words = "one bucket only: the all-reduce starts when the whole backward is done; a smaller bucket_cap_mb lets them overlap"
            yield Advice("ddp_single", words, size, "bucket_cap_mb", "", ranks, 5.0)


def _skew(doc: Mapping[str, Any]) -> Iterator[Advice]:
    skew = doc.get("skew") or {}
    worst, timeout = number(skew, "worst_s"), number(skew, "smallest_timeout_s")
    if worst >= WORTH_S and timeout and worst > SKEW_SHARE * timeout:
        frame, ranks = skew.get("worst_frame"), str(skew.get("worst_ranks", ""))
        evidence = f"ranks {ranks} compiled {frame} for {worst:.0f} s while others waited under a timeout of {timeout:.0f} s"
        words = "compiles come near the timeout: let every rank run one step and then a barrier under a longer timeout, or raise the group's"
        yield Advice("skew", words, evidence, "init_process_group(timeout=timedelta(minutes=30))", "", ranks, 1e5)


def _caches(doc: Mapping[str, Any]) -> Iterator[Advice]:
    cold = [found for found in doc.get("divergence") or () if found.get("kind") == "cache"]
    if cold:
        groups = cold[0].get("groups") or ()
        ranks = ",".join(str(group.get("ranks")) for group in groups if "miss" in str(group.get("what")))
        words = "some ranks compile what others load from the cache: give all nodes the same warm cache, or compile once before the job"
        yield Advice("cold_cache", words, str(cold[0].get("words")), "TORCHINDUCTOR_CACHE_DIR, or torch.compiler.save_cache_artifacts()", "", ranks, 20.0)
