"""Finished compiles: the totals (the `compile` record, described in probes/compile.py) and the events compile_end and recompile_limit."""

from __future__ import annotations

from rankwatch.agent.clock import clock
from rankwatch.agent.compiling.asked import Asked
from rankwatch.agent.compiling.breaks import Breaks
from rankwatch.agent.compiling.configured import Configured
from rankwatch.agent.compiling.live import LiveCompiles
from rankwatch.agent.compiling.names import digest, fingerprint, frame_name, ordinal
from rankwatch.agent.compiling.records import SECONDS, fail_at, fields_of, first_words, outcome_of, own_seconds, seconds_of
from rankwatch.agent.compiling.texts import Texts
from rankwatch.agent.compiling.work import Work
from rankwatch.agent.guard import guarded
from rankwatch.agent.sources import is_torch_or_stdlib
from rankwatch.agent.threads import clean
from rankwatch.wire.phases import PHASES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank
    from rankwatch.agent.threads import LiveThread

_KNOWN_FRAMES = 1024
_SHOWN_FRAMES = 8
_LIMITED_FRAMES = 16
_REASON_BYTES = 300
_PHASE_LEAST_NS = 1_000_000
_WRITE_LEAST_NS = 1_000_000_000  # between two writes of the totals here, while heartbeats come: they write what is left, twice a second
_BEATS_STOPPED_NS = 2_000_000_000
_WORST = ("hit", "disabled", "bypass", "miss")
_CACHE_EVENTS = {f"{prefix}_{result}": (layer, result) for prefix, layer in (("fx_graph_cache", "fx"), ("autograd_cache", "aot")) for result in _WORST}


class Compiles:
    """Everything that the compile probe knows of this process."""

    def __init__(self, rank: Rank, probe: Probe, utils: Any) -> None:
        self._rank, self._probe, self._utils = rank, probe, utils
        self.configured = Configured(utils)
        self.live = LiveCompiles(probe, rank.threads, utils)
        self.asked = Asked(probe, self.configured, self.write)
        self.work = Work(probe, rank.threads, self.live.spent_ns)
        self._texts = Texts(rank.slot)
        self._breaks = Breaks(rank.slot, self._texts, utils)
        guard = guarded(probe)
        rank.on_step.append(guard(self.configured.stepped))
        self.beat, self.last_words = guard(self.beat), guard(self.last_words)  # type: ignore[method-assign]
        self.by_frame: dict[str, list[Any]] = {}
        self._longest: dict[str, list[Any]] = {}  # the _SHOWN_FRAMES entries of by_frame with most seconds
        self._least = 0.0  # seconds that none of them is below
        self._changes = self._written = 0  # of the totals
        self._written_ns = self._beat_ns = 0
        self.totals: dict[str, Any] = {
            "frames": 0,
            "library": 0,
            "backward": 0,
            "runtime": 0,
            "recompiles": 0,
            "failures": 0,
            "skipped": 0,
            "graphs": 0,
            **self.work.fields(),
            "graph_breaks": 0,
            "last_break": "",
            "limit_hits": 0,
            "limited": [],
            "limit": None,
            "seconds": dict.fromkeys(SECONDS, 0.0),
            "phases": {},
            "last_reason": "",
            "cache": {},
            "by_frame": {},
            "last": None,
            "texts_dropped": 0,
        }

    def wrap_finished(self, previous: Any) -> Any:
        """The hook of every finished compile: forward, backward and run-time batches."""
        finished = guarded(self._probe)(self.finished)

        def log_compilation_event(metrics: Any) -> Any:
            finished(metrics)
            return previous(metrics)

        return log_compilation_event

    def finished(self, metrics: Any) -> None:
        """Count a CompilationMetrics and write the event."""
        fields = fields_of(metrics)
        get = fields.get
        compile_id = str(get("compile_id") or "")
        kind = "runtime" if get("is_runtime") else "backward" if get("is_forward") is False else "forward"
        name, file, line = get("co_name"), get("co_filename"), get("co_firstlineno") or 0
        frame = self.live.frames.get(compile_id, "")
        if name and not (frame.startswith(f"{name}@") and frame.endswith(f":{line}")):
            frame = frame_name(name, file or "?", line)
        live, started_ns, own_ns = self.live.take(compile_id)
        fail_reason, fail_type = get("fail_reason") or "", get("fail_type")
        seconds, times = (get("duration_us") or 0) / 1e6, seconds_of(fields)
        operations, cache_size = get("graph_op_count") or 0, get("cache_size")
        if kind == "forward":  # the others may end on a thread of autograd's
            self.configured.look(clock.now_ns())
        outcome = outcome_of(fail_type, fail_reason, live.one_graph and bool(started_ns))
        library = kind == "forward" and bool(file) and not operations and outcome in ("", "skipped") and is_torch_or_stdlib(str(file))
        mark = fingerprint(fields) if kind == "forward" and operations else ""
        self._count(compile_id, kind, library, outcome, operations)
        self._count_seconds(times, seconds)
        if frame and not library and kind != "runtime":
            self._count_frame(frame, kind == "forward" and not outcome, seconds, cache_size or 0, mark)
        reason, recompile_key = self._recompile_reason(get("recompile_reason") or "", live if started_ns else None, compile_id, frame)
        if reason:
            self.totals["last_reason"] = reason
        self.totals["last"] = {
            "compile_id": compile_id,
            "frame": frame,
            "kind": kind,
            "seconds": round(seconds, 3),
            "ok": not fail_reason,
            "recompile_reason": reason,
            "wall_ns": clock.wall_ns(),
        }
        self._breaks.read(frame, compile_id)
        if outcome == "skipped":
            self._breaks.skipped(metrics, frame, compile_id)
        self._rank.last_graph_break = self._breaks.last
        shared = {"compile_id": compile_id, "frame": frame, "recompile_key": recompile_key, "step": self._rank.steps_done()}
        if outcome == "limit":
            self._limit_hit(frame, fail_reason, reason, shared)
        elif not library:
            shown = clean(first_words(fail_reason), _REASON_BYTES) if fail_reason else ""
            self._rank.slot.event(
                "compile_end",
                **shared,
                compile_kind=kind,
                library=False,
                started_mono_ns=started_ns,
                duration_s=round(seconds, 4),
                phases={PHASES[n]: round(spent / 1e9, 3) for n, spent in enumerate(own_ns) if spent > _PHASE_LEAST_NS},
                ok=not fail_reason,
                fail_type=fail_type,
                fail_reason=shown,
                fail_at=fail_at(fields, frame) if outcome == "failures" else "",
                fail_key=self._texts.add("failure", fail_reason, shown, compile_id, frame) if outcome == "failures" else "",
                recompile_reason=reason,
                cache_size=cache_size,
                accumulated_cache_size=get("accumulated_cache_size"),
                limit=self.configured.recompile_limit,
                graph_ops=operations,
                graph_nodes=get("graph_node_count"),
                graph_inputs=get("graph_input_count"),
                guards=get("guard_count"),
                fingerprint=mark,
                kernels=live.kernels if started_ns else 0,
                cache=dict(live.cache) if started_ns else {},
                bypass_reason=live.bypass_reason if started_ns else "",
                times={name: round(spent, 4) for name, spent in times.items()},
                cudagraph_skip_reason=clean(get("cudagraph_skip_reason") or "", 200),
            )
        if started_ns:  # what comes after in the same root belongs to no compile
            live.cache, live.kernels, live.bypass_reason = {}, 0, ""
        self._changes += 1
        now_ns = clock.now_ns()
        if outcome in ("limit", "failures") or now_ns - self._written_ns >= _WRITE_LEAST_NS or now_ns - self._beat_ns >= _BEATS_STOPPED_NS:
            self.write()
        self._texts.send()
        if kind == "forward" and not library and operations:
            for tell in self._rank.on_compiled:
                tell(compile_id, frame)
        elif outcome == "skipped" and not library:
            for tell in self._rank.on_skipped:
                tell(compile_id, frame)

    def write(self) -> None:
        """Write the totals; again where they have changed meanwhile, so that of two threads that write none leaves an old copy as the newest."""
        changes = -1
        while changes != self._changes:
            changes = self._changes
            self._write()
            self._written, self._written_ns = changes, clock.now_ns()

    def _write(self) -> None:
        totals = self.totals
        longest = sorted(self._longest.items(), key=lambda item: -item[1][1])
        totals["by_frame"] = {frame: [count, round(seconds, 3), mark, size] for frame, (count, seconds, mark, size) in longest}
        totals["phases"] = {name: round(spent / 1e9, 3) for name, spent in zip(PHASES, self.live.spent_ns) if spent}  # noqa: B905 - same length
        totals["graph_breaks"], totals["last_break"] = self._breaks.count, self._breaks.last
        totals["texts_dropped"] = self._texts.dropped
        totals.update(self.work.fields())
        totals["limit"] = self.configured.recompile_limit
        totals.update(self.asked.fields())
        self._rank.slot.write_json("compile", totals)

    def beat(self) -> None:
        """Twice a second: totals that wait, what changes without a compile, and texts that wait."""
        self._beat_ns = clock.now_ns()
        if self.work.look() or self._written != self._changes:
            self.write()
        self.asked.look()
        self._texts.send()

    def last_words(self) -> None:
        """At the end of the process."""
        if self._written != self._changes:
            self.write()
        self._texts.send(at_the_end=True)

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
        """Count a look; of several in one compile the worst one is the compile's."""
        layer, result = _CACHE_EVENTS[event_name]
        counts = self.totals["cache"].setdefault(layer, {})
        counts[result] = counts.get(result, 0) + 1
        live = self._rank.threads.here()
        live.cache[layer] = max(live.cache.get(layer, result), result, key=_WORST.index)
        if result == "bypass" and isinstance(metadata, dict):
            live.bypass_reason = clean(str(metadata.get("cache_bypass_reason") or ""), 200)

    def _recompile_reason(self, reason: str, live: LiveThread | None, compile_id: str, frame: str) -> tuple[str, str]:
        """(first line of the newest reason, key of the text with the reasons of all versions that failed)."""
        shown = clean(reason, _REASON_BYTES) if reason else ""
        if not shown:
            return "", ""
        whole = reason
        if live is not None and live.code is not None:
            new = self._utils.guard_failures.get(live.code, ())[live.reason_place :]
            whole = "\n".join(map(str, new)) or reason
        return shown, self._texts.add("recompile", whole, shown, compile_id, frame)

    def _count(self, compile_id: str, kind: str, library: bool, outcome: str, operations: int) -> None:
        totals = self.totals
        if library:
            totals["library"] += 1
        elif outcome in ("skipped", "failures"):
            totals[outcome] += 1
        elif not outcome:
            totals["frames" if kind == "forward" else kind] += 1
            totals["recompiles"] += kind == "forward" and ordinal(compile_id) > 0
        totals["graphs"] += kind == "forward" and operations > 0

    def _count_seconds(self, times: dict[str, float], seconds: float) -> None:
        totals = self.totals["seconds"]
        for name, spent in own_seconds(times, seconds).items():
            totals[name] = round(totals[name] + spent, 6)

    def _count_frame(self, frame: str, compiled: bool, seconds: float, cache_size: int, mark: str) -> None:
        entry = self.by_frame.get(frame)
        if entry is None:
            if len(self.by_frame) >= _KNOWN_FRAMES:
                del self.by_frame[next(name for name in self.by_frame if name not in self._longest)]
            entry = self.by_frame[frame] = [0, 0.0, "", 0]
        entry[0] += compiled
        entry[1] += seconds
        entry[3] = max(entry[3], cache_size)
        if mark:
            entry[2] = digest(f"{entry[2]}{mark}") if entry[2] else mark
        if len(self._longest) < _SHOWN_FRAMES or entry[1] >= self._least:
            self._longest[frame] = entry
            if len(self._longest) > _SHOWN_FRAMES:
                shortest = min(self._longest, key=lambda name: self._longest[name][1])
                self._least = self._longest.pop(shortest)[1]

    def _limit_hit(self, frame: str, fail_reason: str, reason: str, shared: dict[str, Any]) -> None:
        """The frame compiles no more. torch's record of it has no sizes: the frame's newest compile had one version less than there are now."""
        self.totals["limit_hits"] += 1
        if frame not in self.totals["limited"] and len(self.totals["limited"]) < _LIMITED_FRAMES:
            self.totals["limited"].append(frame)
        limit_type = "accumulated_recompile_limit" if "accumulated" in fail_reason else "recompile_limit"
        entry, limit = self.by_frame.get(frame), self.configured.value(limit_type)
        size = entry[3] + 1 if entry and entry[0] else None
        if limit_type == "recompile_limit" and isinstance(limit, int):
            size = max(size or 0, limit)
        if entry and size:
            entry[3] = size
        self._rank.slot.event("recompile_limit", **shared, limit_type=limit_type, limit=limit, last_reason=reason, cache_size=size)
