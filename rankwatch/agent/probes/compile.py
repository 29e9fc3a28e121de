"""torch.compile: live phases (`thread_N` records), totals (`compile` record), and events.

`compile` record, since the start of the process:
  frames      compiles of the user's frames (forward), library: those of library frames, backward, runtime (autotuning, CUDA graphs)
  recompiles  frames compiled again; last_reason: the newest reason; failures: compiles that raised; skipped: frames that Dynamo
              leaves to Python; graphs: compiles that gave a graph with operations
  graph_breaks, last_break; limit_hits, limited: frames that run eagerly now because of the recompile limit (latched)
  seconds     {dynamo, aot, inductor, triton, autotune}, each without the ones inside it, so that their sum is the time spent compiling
  cache       {fx|aot: {hit|miss|bypass|disabled: n}}
  by_frame    {frame: [compiles, seconds, fingerprint]} of the frames that took longest; fingerprint is a rolling hash of the graphs' shape
  last        the newest compile: {compile_id, frame, kind, seconds, ok, recompile_reason, wall_ns}
  disabled    torch.compile is switched off (TORCHDYNAMO_DISABLE)

Events: compile_end, recompile_limit, graph_break, cache.

Sources (torch 2.9-2.14, torch/_dynamo/utils.py): record_chromium_event_internal is called at start and end of each timed region and what it
raises breaks the user's compile; log_compilation_event once per finished compile, inside a handler that swallows.
"""

from __future__ import annotations

import hashlib
import os
import sys
from threading import get_ident
from time import monotonic_ns, time_ns

from rankwatch.agent import compat
from rankwatch.agent.guard import guarded, here
from rankwatch.agent.sources import is_torch_or_stdlib
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank
    from rankwatch.agent.threads import LiveThread

_WALK_FRAMES = 25
_KNOWN_FRAMES = 1024
_SHOWN_FRAMES = 8
_LIMITED_FRAMES = 16
_BREAKS_PER_COMPILE = 10
_REASON_LOOKS = 4  # regions that may start before torch has found the recompile reason: it has it before the second
_LIMIT_REASON = "Dynamo recompile limit exceeded"
_SECONDS = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "aot": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    "triton": "triton_compile_time_us",
    "autotune": "runtime_triton_autotune_time_us",
}
_CACHE_EVENTS = {
    f"{prefix}_{result}": (layer, result)
    for prefix, layer in (("fx_graph_cache", "fx"), ("autograd_cache", "aot"))
    for result in ("hit", "miss", "bypass", "disabled")
}


def arm(rank: Rank, probe: Probe, utils: Any) -> None:
    """Replace the hooks in torch._dynamo.utils, where its own code looks them up by name."""
    if not probe.on:
        return
    compiles = Compiles(rank, probe, utils)
    reasons = []
    for target, wrap in ((compat.CHROMIUM_EVENT, compiles.wrap_event), (compat.COMPILATION_EVENT, compiles.wrap_finished)):
        function, reason = target.find(utils)
        if function is None:
            reasons.append(reason)
        else:
            setattr(utils, target.path, wrap(function))
    log_instant, reason = compat.INSTANT_EVENT.find(utils)
    if log_instant is None:
        reasons.append(reason)
    else:
        utils.ChromiumEventLogger.log_instant_event = compiles.wrap_instant(log_instant)
    rank.on_claim.append(compiles.write)
    compiles.write()
    if len(reasons) == 3:
        probe.report("missing", "; ".join(reasons))
    else:
        probe.report("armed", "; ".join(reasons) or ("torch.compile is switched off" if compiles.totals["disabled"] else ""))


class Compiles:
    """Everything that the compile probe knows of this process. Public attributes are for its own tests."""

    def __init__(self, rank: Rank, probe: Probe, utils: Any) -> None:
        self._rank, self._probe, self._utils = rank, probe, utils
        self._threads = rank.threads
        self.frames: dict[str, str] = {}  # compile id -> frame, for backward records, which do not name theirs
        self.by_frame: dict[str, list[Any]] = {}
        self._breaks_read = 0
        self.totals: dict[str, Any] = {
            "frames": 0,
            "library": 0,
            "backward": 0,
            "runtime": 0,
            "recompiles": 0,
            "failures": 0,
            "skipped": 0,
            "graphs": 0,
            "graph_breaks": 0,
            "last_break": "",
            "limit_hits": 0,
            "limited": [],
            "seconds": dict.fromkeys(_SECONDS, 0.0),
            "last_reason": "",
            "cache": {},
            "by_frame": {},
            "last": None,
            "disabled": bool(getattr(getattr(utils, "config", None), "disable", False)),
        }

    # -- live phases

    def wrap_event(self, previous: Any) -> Any:
        """The hook of every region's start and end. It runs on the thread that compiles and costs about 2 us."""
        chain = None if compat.is_stub(previous) else previous
        probe, by_ident, add, threads = self._probe, self._threads._by_ident, self._threads.here, self._threads
        show, frame_starts, root_starts, look_for_reason = threads.show, self._frame_starts, self._root_starts, self._look_for_reason

        def record_chromium_event_internal(event: dict[str, Any]) -> Any:
            if probe.on and here.pid:  # 0 in a fork child; asking for the pid would be a sixth of the whole cost
                try:
                    live = by_ident.get(get_ident()) or add()
                    name = event["name"]
                    regions = live.regions
                    if event["ph"] == "B":
                        now_ns = monotonic_ns()
                        if name == "dynamo":
                            frame_starts(live, event)
                        elif not regions:
                            root_starts(live, name, event)
                        elif live.reason_looks:
                            look_for_reason(live)
                        regions.append((name, now_ns))
                        show(live, now_ns)
                    elif regions:
                        if regions[-1][0] == name:
                            regions.pop()
                        else:
                            _end(live, name)
                        if regions:
                            show(live, monotonic_ns())
                        else:
                            threads.closes(live)
                except Exception as error:
                    probe.caught(error)
            return chain(event) if chain is not None else None

        return record_chromium_event_internal

    def _frame_starts(self, live: LiveThread, event: dict[str, Any]) -> None:
        """Region `dynamo` begins: a frame is about to be compiled. The event does not say which; the caller's frame does."""
        self._repair(live)
        if live.regions:
            return  # a compile inside a compile: the outer one is what the thread is in
        self._root_starts(live, "dynamo", event)
        code = _code_under_compilation()
        if code is not None:
            live.frame = frame_name(code.co_name, code.co_filename, code.co_firstlineno)
            if is_torch_or_stdlib(code.co_filename):
                live.detail = "library frame"
            self._remember(live.compile_id, live.frame)
        if _ordinal(live.compile_id) > 0 and code is not None:
            live.code = code
            live.reason_place = len(self._utils.guard_failures.get(code, ()))
            live.reason_looks = _REASON_LOOKS
        live.retext()

    def _root_starts(self, live: LiveThread, name: str, event: dict[str, Any]) -> None:
        compile_id = str((event.get("args") or {}).get("compile_id") or "")
        live.compile_id = "" if compile_id == "None" else compile_id
        live.kind = "forward" if name == "dynamo" else "backward" if "backward" in name else "runtime"
        live.frame = self.frames.get(live.compile_id, "")
        live.retext()
        if live.compile_id or live.is_main:  # C++ compile threads only repeat what the main thread waits for
            self._threads.opens(live)

    def _look_for_reason(self, live: LiveThread) -> None:
        """torch notes the guard that failed right after `dynamo` begins, well before the compile is long."""
        live.reason_looks -= 1
        failures = self._utils.guard_failures.get(live.code, ())
        if len(failures) > live.reason_place:
            live.reason = str(failures[live.reason_place])
            live.reason_looks = 0
            live.retext()

    def _repair(self, live: LiveThread) -> None:
        """Drop regions that never end because a KeyboardInterrupt fell into a hook or into torch's own bookkeeping."""
        if live.regions:
            depth = len(self._utils.get_chromium_event_logger().get_stack())
            outer = next((n for n, (name, _start) in enumerate(live.regions) if name == "dynamo"), depth)
            if outer < depth and not _inside_another_compile():
                depth = outer
            del live.regions[depth:]
            if not live.regions:
                self._threads.closes(live)

    # -- finished compiles

    def wrap_finished(self, previous: Any) -> Any:
        """The hook of every finished compile: forward, backward and run-time batches."""
        finished = guarded(self._probe)(self.finished)

        def log_compilation_event(metrics: Any) -> Any:
            finished(metrics)
            return previous(metrics)

        return log_compilation_event

    def finished(self, metrics: Any) -> None:
        """Count a CompilationMetrics and write the event."""
        compile_id = str(getattr(metrics, "compile_id", None) or "")
        kind = "runtime" if getattr(metrics, "is_runtime", False) else "backward" if getattr(metrics, "is_forward", True) is False else "forward"
        name, file = getattr(metrics, "co_name", None), getattr(metrics, "co_filename", None)
        frame = frame_name(name, file or "?", getattr(metrics, "co_firstlineno", None) or 0) if name else self.frames.get(compile_id, "")
        fail_reason = getattr(metrics, "fail_reason", None) or ""
        limit = fail_reason.startswith(_LIMIT_REASON)
        seconds = (getattr(metrics, "duration_us", None) or 0) / 1e6
        reason = clean(getattr(metrics, "recompile_reason", None) or "", 300)
        library = kind == "forward" and bool(file) and is_torch_or_stdlib(str(file))
        operations = getattr(metrics, "graph_op_count", None) or 0
        fingerprint = _fingerprint(metrics) if kind == "forward" and operations else ""
        outcome = "limit" if limit else {None: "", "Unsupported": "skipped", "SkipFrame": "skipped"}.get(getattr(metrics, "fail_type", None), "failures")
        self._count(metrics, kind, frame, seconds, library, outcome)
        if reason:
            self.totals["last_reason"] = reason
        self.totals["last"] = {
            "compile_id": compile_id,
            "frame": frame,
            "kind": kind,
            "seconds": round(seconds, 3),
            "ok": not fail_reason,
            "recompile_reason": reason,
            "wall_ns": time_ns(),
        }
        slot = self._rank.slot
        if limit:
            self._limit_hit(frame, fail_reason, reason)
        elif not library:
            slot.event(
                "compile_end",
                compile_id=compile_id,
                compile_kind=kind,
                frame=frame,
                duration_s=round(seconds, 4),
                ok=not fail_reason,
                fail_type=getattr(metrics, "fail_type", None),
                fail_reason=clean(fail_reason, 300),
                recompile_reason=reason,
                cache_size=getattr(metrics, "cache_size", None),
                accumulated_cache_size=getattr(metrics, "accumulated_cache_size", None),
                graph_ops=operations,
                graph_nodes=getattr(metrics, "graph_node_count", None),
                graph_inputs=getattr(metrics, "graph_input_count", None),
                guards=getattr(metrics, "guard_count", None),
                fingerprint=fingerprint,
                times={name: round((getattr(metrics, field, None) or 0) / 1e6, 4) for name, field in _SECONDS.items() if getattr(metrics, field, None)},
                cudagraph_skip_reason=clean(getattr(metrics, "cudagraph_skip_reason", None) or "", 200),
            )
        self._read_breaks(frame)
        self.write()
        if kind == "forward" and not library and operations:
            for tell in self._rank.on_compiled:
                tell(compile_id, frame)

    def write(self) -> None:
        """Write the totals."""
        longest = sorted(self.by_frame.items(), key=lambda item: -item[1][1])[:_SHOWN_FRAMES]
        self.totals["by_frame"] = {frame: [count, round(seconds, 3), mark] for frame, (count, seconds, mark) in longest}
        self._rank.slot.write_json("compile", self.totals)

    def _count(self, metrics: Any, kind: str, frame: str, seconds: float, library: bool, outcome: str) -> None:
        totals = self.totals
        operations = getattr(metrics, "graph_op_count", None) or 0
        if library:
            totals["library"] += 1
        elif outcome in ("skipped", "failures"):
            totals[outcome] += 1
        elif not outcome:
            totals["frames" if kind == "forward" else kind] += 1
            totals["recompiles"] += kind == "forward" and _ordinal(str(getattr(metrics, "compile_id", "") or "")) > 0
        totals["graphs"] += kind == "forward" and operations > 0
        for name, spent in _own_seconds(metrics, seconds).items():
            totals["seconds"][name] = round(totals["seconds"][name] + spent, 6)
        if frame and not library and kind != "runtime":
            if frame not in self.by_frame and len(self.by_frame) >= _KNOWN_FRAMES:
                self.by_frame.pop(min(self.by_frame, key=lambda name: self.by_frame[name][1]))
            entry = self.by_frame.setdefault(frame, [0, 0.0, ""])
            entry[0] += kind == "forward"
            entry[1] += seconds
            if kind == "forward" and operations:
                entry[2] = hashlib.sha1(f"{entry[2]}{_fingerprint(metrics)}".encode(), usedforsecurity=False).hexdigest()[:12]

    def _limit_hit(self, frame: str, fail_reason: str, reason: str) -> None:
        self.totals["limit_hits"] += 1
        if frame not in self.totals["limited"] and len(self.totals["limited"]) < _LIMITED_FRAMES:
            self.totals["limited"].append(frame)
        limit_type = "accumulated_recompile_limit" if "accumulated" in fail_reason else "recompile_limit"
        limit = getattr(getattr(self._utils, "config", None), limit_type, None)
        self._rank.slot.event("recompile_limit", frame=frame, limit_type=limit_type, limit=limit, last_reason=reason)

    def _read_breaks(self, frame: str) -> None:
        """New entries of torch's list of graph breaks that are in the user's code; the list starts again at torch._dynamo.reset().

        The others are breaks inside library frames, and those that DDPOptimizer makes on purpose.
        """
        breaks = getattr(self._utils, "graph_break_reasons", ())
        if len(breaks) < self._breaks_read:
            self._breaks_read = 0
        new = [(found, _users_line(found)) for found in breaks[self._breaks_read :] if getattr(found, "graph_break", True)]
        new = [(found, at) for found, at in new if at]
        self._breaks_read = len(breaks)
        self.totals["graph_breaks"] += len(new)
        for found, at in new[-_BREAKS_PER_COMPILE:]:
            reason = clean(str(getattr(found, "reason", "")), 300)
            self.totals["last_break"] = f"{at}: {reason}"[:200]
            self._rank.slot.event("graph_break", reason=reason, at=at, frame=frame, count=self.totals["graph_breaks"])

    # -- caches

    def wrap_instant(self, log_instant: Any) -> Any:
        """The method through which torch reports each look into a compile cache."""
        seen = guarded(self._probe)(self._cache_event)

        def log_instant_event(logger: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
            if event_name in _CACHE_EVENTS:
                seen(event_name, kwargs.get("metadata", args[1] if len(args) > 1 else None))
            return log_instant(logger, event_name, *args, **kwargs)

        log_instant_event.__wrapped__ = log_instant  # type: ignore[attr-defined]
        return log_instant_event

    def _cache_event(self, event_name: str, metadata: Any) -> None:
        layer, result = _CACHE_EVENTS[event_name]
        counts = self.totals["cache"].setdefault(layer, {})
        counts[result] = counts.get(result, 0) + 1
        metadata = metadata if isinstance(metadata, dict) else {}
        live = self._threads.here()
        self._rank.slot.event(
            "cache",
            compile_id=live.compile_id,
            layer=layer,
            state=result,
            key=str(metadata.get("key") or "")[:16],
            bypass_reason=clean(str(metadata.get("cache_bypass_reason") or ""), 200),
        )

    def _remember(self, compile_id: str, frame: str) -> None:
        if len(self.frames) >= _KNOWN_FRAMES:
            self.frames.pop(next(iter(self.frames)))
        self.frames[compile_id] = frame


def frame_name(name: str, file: str, line: int) -> str:
    """`forward@model.py:31`."""
    return f"{name}@{os.path.basename(file)}:{line}"


def _end(live: LiveThread, name: str) -> None:
    """A region ends that is not the innermost one: those inside it have ended unseen. One that never began changes nothing."""
    for depth in reversed(range(len(live.regions))):
        if live.regions[depth][0] == name:
            del live.regions[depth:]
            return


def _code_under_compilation() -> CodeType | None:
    """`code` of torch._dynamo.convert_frame._compile, a few frames up; None when it is not there."""
    frame = sys._getframe(2)
    for _ in range(_WALK_FRAMES):
        if frame.f_code.co_name == "_compile":
            code = frame.f_locals.get("code")
            return code if hasattr(code, "co_firstlineno") else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _inside_another_compile() -> bool:
    """Whether two frames on the stack are torch's `_compile`: the one that begins now, and one around it."""
    frame, seen = sys._getframe(1).f_back, 0
    while frame is not None and seen < 2:
        seen += frame.f_code.co_name == "_compile"
        frame = frame.f_back
    return seen == 2


def _ordinal(compile_id: str) -> int:
    """How many times this frame was compiled before: C of "F/C" or "!A/F/C"."""
    last = compile_id.rpartition("/")[2]
    return int(last) if last.isdigit() and "/" in compile_id else 0


def _own_seconds(metrics: Any, seconds: float) -> dict[str, float]:
    """torch's times of a compile, which contain each other (dynamo > aot > inductor > triton), without what is inside each."""
    spent = {name: (getattr(metrics, field, None) or 0) / 1e6 for name, field in _SECONDS.items()}
    if not any(spent.values()):
        spent["dynamo"] = seconds  # a compile that failed early
    inside = 0.0
    for name in ("triton", "inductor", "aot", "dynamo"):
        whole = spent[name]
        spent[name] = max(0.0, whole - inside)
        inside = max(whole, inside)
    return spent


def _users_line(graph_break: Any) -> str:
    """`model.py:31` of the innermost line of a graph break that is not torch's or the standard library's; "" when there is none."""
    for line in reversed(getattr(graph_break, "user_stack", None) or ()):
        if not is_torch_or_stdlib(line.filename):
            return f"{os.path.basename(line.filename)}:{line.lineno}"
    return ""


def _fingerprint(metrics: Any) -> str:
    """Equal for equal graphs on every rank: no device index, no cache key."""
    fields = ("graph_op_count", "graph_node_count", "graph_input_count", "guard_count", "graph_node_shapes")
    parts = [getattr(metrics, "co_name", ""), os.path.basename(str(getattr(metrics, "co_filename", ""))), getattr(metrics, "co_firstlineno", 0)]
    parts += [getattr(metrics, field, None) for field in fields]
    return hashlib.sha1(repr(parts).encode(), usedforsecurity=False).hexdigest()[:12]
