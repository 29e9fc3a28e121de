"""The `groups` record: every process group of torch's registry, with its ranks, timeout and generation.

A group that is destroyed and made again under its name gets the next generation: sequence numbers start anew then.
A group that torch checks (TORCH_DISTRIBUTED_DEBUG=DETAIL) comes with the numbers that tell its operations apart in gloo's recorder, which then
knows no names: gloo numbers what a process makes, first the group's backend, then the one that the checks of it run in. Run on torch 2.13.
Timeouts come with the line that set them (`set_at`), and with the extensions that torch gives NCCL groups for a while (Inductor, after a
compile that the cache has saved): those are in no recorder entry.
"""

from __future__ import annotations

from rankwatch.agent import compat
from rankwatch.agent.clock import clock
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

MAX_EXTENSIONS = 8
MAX_NAMES = 4096  # groups that are gone, of which the generation is kept: a job may make one for each batch, under a new name each


class Groups:
    """Follows torch's registry. `publish` gets the record whenever something changed; no group is kept alive by this."""

    def __init__(self, world: Any, publish: Callable[[dict[str, Any]], None], checks: Callable[[], bool] = lambda: False) -> None:
        """checks: whether torch checks the collectives of groups that are made now."""
        self._world = world
        self._publish = publish
        self._checks = checks
        self._gloos = 0  # what this process has made of gloo so far
        self._creating: str | None = None
        self._live: dict[str, tuple[int, dict[str, Any]]] = {}  # name -> (id of the group object, its entry)
        self._generations: dict[str, int] = {}
        self._given: dict[str, tuple[str, float | None]] = {}  # what the caller asked for, until torch's registry tells
        self._set_at: dict[str, str] = {}  # name -> line of the job that has set its timeout
        self._extensions: list[list[float]] = []  # [seconds, wall_ns], newest last
        self._joining: tuple[float | None, str] = (None, "")  # timeout of init_process_group, and its line
        self._shown: dict[str, Any] | None = None

    @property
    def creating(self) -> bool:
        """Whether a group is being created right now: torch's status must not be read meanwhile."""
        return self._creating is not None

    def join_starts(self, timeout_s: float | None, set_at: str) -> None:
        """init_process_group has been called with this timeout, on this line of the job."""
        self._joining = (timeout_s, set_at)
        self.refresh()

    def creation_starts(self, name: str, ranks: Sequence[int], timeout_s: float | None, set_at: str = "") -> None:
        """A group of `ranks` (global) is about to be created."""
        self._creating = name
        self._given[name] = (compress(ranks), timeout_s)
        self._set_at[name] = set_at
        self.refresh()

    def creation_ends(self) -> None:
        """It was created, or it failed."""
        self._creating = None
        self.refresh()

    def timeout_changed(self, group: Any, set_at: str) -> None:
        """A group's timeout (of `group` as callers give it) was set anew on this line."""
        if name := self.name_of(group):
            self._set_at[name] = set_at
        self.refresh()

    def extended(self, seconds: float) -> None:
        """torch has lengthened the timeout of what NCCL groups issue from now on, until the first of that has completed."""
        if any("nccl" in entry["backend"] for _identity, entry in self._live.values()):
            found = [*self._extensions, [seconds, clock.wall_ns()]]
            if len(found) > MAX_EXTENSIONS:  # the two oldest as one: none of the seconds is lost
                found = [[found[0][0] + found[1][0], found[1][1]], *found[2:]]
            self._extensions = found
            self.refresh()

    def refresh(self) -> None:
        """Look at torch's registry and publish if it differs from what was shown. A few microseconds a group."""
        names = dict(self._world.pg_names)
        for name in set(self._live) - {str(name) for name in names.values()}:
            del self._live[name]
            self._given.pop(name, None)
            self._set_at.pop(name, None)
        for group, name in names.items():
            self._follow(group, str(name))
        if len(self._given) > len(self._live):  # also of groups that this rank is no member of, or that failed
            for name in [name for name in self._given if name not in self._live and name != self._creating]:
                del self._given[name]
                self._set_at.pop(name, None)
        # the default group first: should the record be too long, its end is what is left out
        entries = sorted((entry for _identity, entry in self._live.values()), key=lambda entry: (entry["desc"] != "default_pg", entry["created_wall_ns"]))
        creating = self._creating
        made_of, made_timeout_s = self._given.get(creating, ("", None)) if creating is not None else ("", None)
        record = {
            "creating": creating, "creating_ranks": made_of, "creating_timeout_s": made_timeout_s,
            "creating_set_at": self._set_at.get(creating, "") if creating is not None else "", "join_timeout_s": self._joining[0],
            "join_set_at": self._joining[1], "extensions": self._extensions, "total": len(entries), "groups": entries,
        }  # fmt: skip
        if record != self._shown:
            self._shown = {**record, "groups": [dict(entry) for entry in entries]}  # the list of extensions is never changed in place
            self._publish(record)

    def name_of(self, group: Any) -> str:
        """Of a group as callers give it, None for the default one; "" when it is not in torch's registry."""
        if group is None:
            return next((name for name, (_identity, entry) in self._live.items() if entry["desc"] == "default_pg"), "")
        return str(self._world.pg_names.get(group, ""))

    def knows(self, name: str) -> bool:
        """Whether there is a group of this name now."""
        return name in self._live

    def forget(self) -> None:
        """Publish again at the next refresh, whatever was shown (the slot was emptied)."""
        self._shown = None

    def _follow(self, group: Any, name: str) -> None:
        identity, entry = self._live.get(name, (0, {}))
        if identity != id(group):
            self._generations[name] = self._generations.pop(name, -1) + 1  # the newest is the last one
            if len(self._generations) > MAX_NAMES + len(self._live):
                del self._generations[next(known for known in self._generations if known not in self._live)]
            entry = {
                "name": name,
                "desc": str(getattr(group, "group_desc", "") or ""),
                "backend": self._backend_of(group),
                "ranks": "",
                "timeout_s": None,
                "generation": self._generations[name],
                "created_wall_ns": clock.wall_ns(),
            }
            checked = self._checks()
            numbers, self._gloos = numbered(entry["backend"], checked, self._gloos)
            if checked:
                entry["checked"] = numbers
            self._live[name] = (id(group), entry)
        ranks = self._world.pg_group_ranks.get(group)
        given_ranks, given_timeout_s = self._given.get(name, ("", None))
        entry["ranks"] = compress(ranks) if ranks else given_ranks
        entry["timeout_s"] = compat.timeout_s(group) or given_timeout_s
        entry["set_at"] = self._set_at.get(name, "")

    def _backend_of(self, group: Any) -> str:
        found = self._world.pg_map.get(group)
        backend = str(found[0]) if found else ""
        if backend in ("", "undefined"):
            backend = str(getattr(self._world, "pg_backend_config", {}).get(group, ""))
        return backend


def numbered(backend: str, checked: bool, first: int) -> tuple[list[int], int]:
    """([the number of a group's gloo, -1 for none, then those of its checks], the next free number). backend: "gloo", "cpu:gloo,cuda:nccl".

    Source: torch 2.9-2.14, distributed_c10d._new_process_group_helper: one backend for all devices, or one for each.
    """
    names = [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]
    own, checks, free = -1, [], first
    for name in names[:1] if len(set(names)) == 1 else names:
        if name == "gloo":
            own, free = free, free + 1
        if checked and name != "mpi":
            checks.append(free)
            free += 1
    return [own, *checks], free
