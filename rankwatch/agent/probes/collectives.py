"""Joining and leaving the process group: the claim, the worker server, the heartbeat and the list of groups.

Wraps functions that create and destroy groups; no collective is touched. Reading collectives is the launcher's part, through the server.
"""

from __future__ import annotations

import functools
import os
import sys

from rankwatch.agent import compat, ownership, worker_server
from rankwatch.agent.clock import clock
from rankwatch.agent.crash import calling, described
from rankwatch.agent.groups import Groups
from rankwatch.agent.guard import Probe, guarded
from rankwatch.agent.heartbeat import Heartbeat
from rankwatch.wire import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rankwatch.agent.rank import Rank

MAX_MEETINGS = 256


def arm(rank: Rank, probe: Probe, c10d: Any) -> None:
    """Wrap the group functions of torch.distributed.distributed_c10d. With the probe off only the claim and the lifecycle remain."""
    watch = probe.on
    lifecycle = probe if watch else _always_on(probe)
    membership = _Membership(rank, lifecycle, c10d, watch)
    init, reason = compat.INIT_GROUP.find(c10d)
    if init is None:
        probe.report("missing", reason)
        return
    _replace(c10d, "init_process_group", init, membership.wrap_init(init))
    lost = []
    for target, wrap in (
        (compat.DESTROY_GROUP, membership.wrap_destroy),
        (compat.NEW_GROUP, membership.wrap_creation),
        (compat.SPLIT_GROUP, membership.wrap_split),
        (compat.SET_TIMEOUT, membership.wrap_timeout),
        (compat.EXTEND_TIMEOUT, membership.wrap_extension),
        (compat.MONITORED_BARRIER, membership.wrap_barrier),
    ):
        function, reason = target.find(c10d)
        if function is None:
            lost.append(reason)
        else:
            _replace(c10d, target.path, function, wrap(function))
    if watch:
        probe.report("armed", "; ".join(lost))


class _Membership:
    def __init__(self, rank: Rank, probe: Probe, c10d: Any, watch: bool) -> None:
        self._rank, self._probe, self._c10d, self._watch = rank, probe, c10d, watch
        self._groups: Groups | None = None
        self._server: worker_server.WorkerServer | None = None
        self._beat: Heartbeat | None = None
        self._notes: list[str] = []
        self._meetings: dict[str, int] = {}  # group -> calls of monitored_barrier
        self._sees_creation = False
        self._world, reason = compat.world(c10d)
        if reason:
            self._notes.append(f"no list of groups: {reason}")
        guard = guarded(probe)
        self._entering, self._entered, self._failed = guard(self._entering), guard(self._entered), guard(self._failed)  # type: ignore[method-assign]
        self._left, self._timeout_set, self._extended = guard(self._left), guard(self._timeout_set), guard(self._extended)  # type: ignore[method-assign]
        self._creating, self._created = guard(self._creating), guard(self._created)  # type: ignore[method-assign]
        self._elsewhere_ends = guard(self._elsewhere_ends)  # type: ignore[method-assign]
        self._meeting, self._met = guard(self._meeting), guard(self._met)  # type: ignore[method-assign]
        rank.on_exit.append(self._stop)

    # -- the wrappers: each calls torch exactly once, with what it got, and gives on what it gave or raised

    def wrap_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            ours = self._entering(args, kwargs)
            try:
                result = init(*args, **kwargs)
            except BaseException as error:
                if ours:
                    self._failed(error)
                else:
                    self._elsewhere_ends()
                raise
            if ours:
                self._entered()
            else:
                self._elsewhere_ends()
            return result

        return init_process_group

    def wrap_destroy(self, destroy: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            try:
                return destroy(*args, **kwargs)
            finally:
                self._left()

        return destroy_process_group

    def wrap_creation(self, create: Callable[..., Any]) -> Callable[..., Any]:
        self._sees_creation = True

        @functools.wraps(create)
        def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            self._creating(args, kwargs)
            try:
                return create(*args, **kwargs)
            finally:
                self._created()

        return _new_process_group_helper

    def wrap_split(self, split: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(split)
        def split_group(*args: Any, **kwargs: Any) -> Any:
            self._creating((0, None, (), None, None, "split_group"), {})
            try:
                return split(*args, **kwargs)
            finally:
                self._created()

        return split_group

    def wrap_timeout(self, change: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(change)
        def _set_pg_timeout(*args: Any, **kwargs: Any) -> Any:
            try:
                return change(*args, **kwargs)
            finally:
                self._timeout_set(args, kwargs)

        return _set_pg_timeout

    def wrap_extension(self, extend: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(extend)
        def _add_ephemeral_timeout_for_all_pgs(*args: Any, **kwargs: Any) -> Any:
            result = extend(*args, **kwargs)
            self._extended(args, kwargs)
            return result

        return _add_ephemeral_timeout_for_all_pgs

    def wrap_barrier(self, barrier: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(barrier)
        def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
            self._meeting(args, kwargs)
            try:
                return barrier(*args, **kwargs)
            finally:
                self._met()

        return monitored_barrier

    # -- what they tell

    def _entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Claim the slot, unless the group is another world's or there is one already (torch will refuse that)."""
        if self._c10d.is_initialized():
            return False
        given = {**dict(zip(compat.INIT_GROUP.parameters, args)), **kwargs}  # noqa: B905 - fewer arguments than parameters
        asked_rank, asked_world = given.get("rank", -1), given.get("world_size", -1)
        started = self._rank.environ
        elsewhere = ownership.joins_another_world(started, asked_rank, asked_world)
        elsewhere = elsewhere or any(os.environ.get(name, value) != value for name, value in started.items())
        join = {
            "ours": not elsewhere, "rank": _number(asked_rank, "RANK"), "world_size": _number(asked_world, "WORLD_SIZE"), "store": _store(given),
            "shared": os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and given.get("store") is None, "since_mono_ns": clock.now_ns(),
            "reached": False if self._sees_creation else None,
        }  # fmt: skip
        if elsewhere:  # it may be a world of the job's own; where all are in such a call, it is the job's own mistake
            self._rank.join = join
            self._rank.show_stage()
            return False
        if not self._rank.claim():
            return False
        self._rank.join = join
        if self._watch and self._world is not None and self._groups is None:
            self._groups = Groups(self._world, lambda record: self._rank.slot.write_json("groups", record), lambda: compat.checks_collectives(self._c10d))
            self._rank.on_claim.append(self._groups.forget)
        self._meetings, self._rank.barrier = {}, None
        if self._groups is not None:
            backend = str(given.get("backend") or ("nccl" if "cuda" in str(given.get("device_id") or "") else ""))
            asked_s = compat.seconds_of(given.get("timeout"))
            self._groups.join_starts(asked_s if asked_s is not None else compat.default_timeout_s(self._c10d, backend), calling())
        self._rank.enter("joining")
        return True

    def _entered(self) -> None:
        if self._watch:
            self._start_server()
            if self._beat is None:
                self._beat = Heartbeat(self._rank, self._probe, self._c10d, self._groups)
                self._notes += self._beat.notes
            if self._groups is not None:
                self._groups.refresh()
            self._probe.report("armed", "; ".join(self._notes))
        self._rank.join = None
        self._rank.enter("joined")

    def _failed(self, error: BaseException) -> None:
        if self._groups is not None:
            self._groups.creation_ends()
        trace = error.__traceback__
        exception = described(error, trace.tb_next if trace is not None else None)  # without our own frame
        exception["where"] = calling() or exception["where"]
        self._rank.enter("join_failed", exception)

    def _elsewhere_ends(self) -> None:
        if self._rank.join is not None:
            self._rank.join = None
            self._rank.show_stage()

    def _left(self) -> None:
        if self._groups is not None:
            self._groups.refresh()
        if self._rank.claimed and self._rank.stage == "joined" and not self._c10d.is_initialized():
            self._rank.enter("left")

    def _creating(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._rank.join is not None and not self._rank.join["reached"]:
            self._rank.join["reached"] = True  # the store has answered; what follows is between the ranks
            self._rank.show_stage()
        if self._groups is None or not self._rank.claimed:
            return
        given = {**dict(zip(compat.NEW_GROUP.parameters, args)), **kwargs}  # noqa: B905 - as above
        ranks = [int(rank) for rank in given.get("global_ranks_in_group") or range(int(given.get("group_size") or 0))]
        self._groups.creation_starts(str(given.get("group_name", "?")), ranks, compat.seconds_of(given.get("timeout")), calling())

    def _created(self) -> None:
        if self._groups is not None and self._groups.creating:
            self._groups.creation_ends()

    def _meeting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """gloo's monitored_barrier is made of point-to-point calls: no recorder shows it."""
        if self._groups is None or not self._rank.claimed:
            return
        given = {**dict(zip(compat.MONITORED_BARRIER.parameters, args)), **kwargs}  # noqa: B905 - as above
        name = self._groups.name_of(given.get("group"))
        asked_s = compat.seconds_of(given.get("timeout"))
        if name not in self._meetings and len(self._meetings) >= MAX_MEETINGS:  # within a world, the number that is a group's name never comes again
            self._meetings = {known: calls for known, calls in self._meetings.items() if not known.isdigit() or self._groups.knows(known)}
        self._meetings[name] = self._meetings.get(name, 0) + 1
        self._rank.barrier = {
            "group": name, "calls": self._meetings[name], "inside": True, "since_mono_ns": clock.now_ns(),
            "timeout_s": asked_s if asked_s is not None else compat.default_timeout_s(self._c10d),  # not the group's own
        }  # fmt: skip
        self._rank.show_stage()

    def _met(self) -> None:
        if self._rank.barrier is not None and self._rank.barrier["inside"]:
            self._rank.barrier["inside"] = False
            self._rank.show_stage()

    def _timeout_set(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._groups is not None:
            given = {**dict(zip(compat.SET_TIMEOUT.parameters, args)), **kwargs}  # noqa: B905 - as above
            self._groups.timeout_changed(given.get("group"), calling())

    def _extended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(compat.EXTEND_TIMEOUT.parameters, args)), **kwargs}  # noqa: B905 - as above
        seconds = compat.seconds_of(given.get("timeout"))
        if self._groups is not None and seconds:
            self._groups.extended(seconds)

    def _start_server(self) -> None:
        if self._server is not None:
            return
        server_class, reason = compat.worker_server(self._c10d)
        name = env.socket_name(self._rank.rank)
        if server_class is not None:
            try:
                self._server, reason = worker_server.start(server_class, os.path.join(self._rank.slot_dir, name))
            except (OSError, RuntimeError) as error:
                reason = f"{error}"
        if self._server is None:
            self._notes.append(f"no worker server: {reason}")
        else:
            self._rank.show_socket(name)

    def _stop(self) -> None:
        if self._beat is not None:
            self._beat.stop()
            if self._rank.failed:
                self._beat.last_words()
        if self._server is not None:
            self._server.stop()


def _number(given: object, name: str) -> int | None:
    """Rank or world size of a call of init_process_group: the argument, else what the environment says."""
    if isinstance(given, int) and given >= 0:
        return given
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _store(given: dict[str, Any]) -> str:
    """Where that call looks for the store: "node05:29500"; "" for a store object."""
    if given.get("store") is not None:
        return ""
    method = str(given.get("init_method") or "")
    if method and not method.startswith("env:"):
        return method.partition("?")[0][:200]
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _replace(module: Any, name: str, old: Any, new: Any) -> None:
    """Rebind `name` in torch.distributed.distributed_c10d, and in torch.distributed where that has bound it already."""
    setattr(module, name, new)
    package = sys.modules.get("torch.distributed")
    if package is not None and getattr(package, name, None) is old:
        setattr(package, name, new)


def _always_on(probe: Probe) -> Probe:
    """A stand-in for a probe that is off: the claim must work without it."""
    return Probe(probe.name, lambda: None)
