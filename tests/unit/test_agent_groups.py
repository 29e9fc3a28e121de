"""The list of process groups, from a registry like torch's."""

from __future__ import annotations

import json
from typing import Any

from rankwatch.agent.groups import Groups
from rankwatch.agent.heartbeat import shorten_status, with_entries


class World:
    """torch's registry: three dictionaries keyed by group objects."""

    def __init__(self) -> None:
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}

    def add(self, name: str, ranks: list[int], desc: str = "undefined", backend: str = "gloo", registered: bool = True) -> Any:
        class Group:
            group_desc = desc

        group = Group()
        self.pg_map[group], self.pg_names[group], self.pg_backend_config[group] = (backend, None), name, "cpu:gloo"
        if registered:
            self.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}
        return group

    def remove(self, group: Any) -> None:
        for table in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config):
            table.pop(group, None)  # type: ignore[attr-defined]


def groups(world: World) -> tuple[Groups, list[dict[str, Any]]]:
    shown: list[dict[str, Any]] = []
    return Groups(world, lambda record: shown.append(json.loads(json.dumps(record)))), shown


def test_groups_are_listed_with_compressed_ranks_the_default_first() -> None:
    world = World()
    world.add("1", [0, 2, 3])
    world.add("0", [0, 1, 2, 3], desc="default_pg")
    followed, shown = groups(world)
    followed.refresh()
    listed = [(g["name"], g["desc"], g["backend"], g["ranks"], g["generation"]) for g in shown[-1]["groups"]]
    assert listed == [("0", "default_pg", "gloo", "0-3", 0), ("1", "undefined", "gloo", "0,2-3", 0)]


def test_nothing_is_published_while_nothing_changes() -> None:
    world = World()
    world.add("0", [0, 1])
    followed, shown = groups(world)
    followed.refresh()
    followed.refresh()
    assert len(shown) == 1


def test_a_group_made_again_is_the_next_generation() -> None:
    world = World()
    followed, shown = groups(world)
    for _ in range(3):
        group = world.add("0", [0, 1], desc="default_pg")
        followed.refresh()
        world.remove(group)
        followed.refresh()
    made = [record["groups"][0]["generation"] for record in shown if record["groups"]]
    assert made == [0, 1, 2]
    assert shown[-1]["groups"] == []


def test_a_group_replaced_between_two_looks_is_the_next_generation() -> None:
    world = World()
    followed, shown = groups(world)
    first = world.add("0", [0])
    followed.refresh()
    world.remove(first)
    second = world.add("0", [0])
    assert second is not first
    followed.refresh()
    assert shown[-1]["groups"][0]["generation"] == 1


def test_a_group_in_creation_is_named_with_what_the_caller_asked_for() -> None:
    """torch registers the ranks of a new group after it has been made."""
    world = World()
    followed, shown = groups(world)
    followed.creation_starts("0", [0, 1, 2], 77.0)
    assert followed.creating
    assert (shown[-1]["creating"], shown[-1]["groups"]) == ("0", [])
    group = world.add("0", [0, 1, 2], registered=False)
    followed.creation_ends()
    assert not followed.creating
    assert (shown[-1]["creating"], shown[-1]["groups"][0]["ranks"], shown[-1]["groups"][0]["timeout_s"]) == (None, "0-2", 77.0)
    world.pg_group_ranks[group] = {0: 0, 1: 1, 2: 2}
    followed.refresh()
    assert shown[-1]["groups"][0]["ranks"] == "0-2"


def test_an_undefined_backend_is_told_by_its_configuration() -> None:
    world = World()
    world.add("0", [0], backend="undefined")
    followed, shown = groups(world)
    followed.refresh()
    assert shown[-1]["groups"][0]["backend"] == "cpu:gloo"


def test_no_group_is_kept_alive() -> None:
    import gc
    import weakref

    world = World()
    group = world.add("0", [0])
    followed, _shown = groups(world)
    followed.refresh()
    gone = weakref.ref(group)
    world.remove(group)
    del group
    gc.collect()
    assert gone() is None


def test_a_status_that_fits_is_passed_on_as_it_is() -> None:
    assert shorten_status(b'{"pg_status":{}, "version":"2.10"}', 100) == b'{"pg_status":{}, "version":"2.10"}'


def test_a_status_that_is_too_long_keeps_as_many_groups_as_fit() -> None:
    status = {"pg_config": {}, "pg_status": {str(n): {"last_enqueued_collective": str(n)} for n in range(500)}}
    data = shorten_status(json.dumps(status).encode(), 1000)
    kept = json.loads(data)["pg_status"]
    assert len(data) <= 1000
    assert len(kept) > 15
    assert list(kept) == [str(n) for n in range(len(kept))]


def test_a_registry_entry_without_a_backend_does_not_fail() -> None:
    world = World()
    group = world.add("0", [0])
    world.pg_map.pop(group)
    world.pg_backend_config.clear()
    followed, shown = groups(world)
    followed.refresh()
    assert shown[-1]["groups"][0]["backend"] == ""


def test_the_ranks_of_a_group_in_creation_are_told_and_go_with_it() -> None:
    world = World()
    followed, shown = groups(world)
    followed.creation_starts("1", [0, 2], None)
    assert (shown[-1]["creating"], shown[-1]["creating_ranks"]) == ("1", "0,2")
    followed.creation_ends()
    assert (shown[-1]["creating"], shown[-1]["creating_ranks"]) == (None, "")


def test_a_group_is_named_as_callers_give_it() -> None:
    world = World()
    world.add("0", [0, 1], desc="default_pg")
    other = world.add("4", [0, 1])
    followed, _shown = groups(world)
    followed.refresh()
    assert (followed.name_of(None), followed.name_of(other), followed.name_of(object())) == ("0", "4", "")


def test_last_words_hold_the_newest_entries_that_fit() -> None:
    entries = [{"collective_seq_id": n, "profiling_name": "gloo:all_reduce", "input_sizes": [[n]], "frames": ["x" * 500]} for n in range(1, 31)]
    recorder = json.dumps({"entries": entries, "pg_status": {}}).encode()
    status = b'{"pg_status":{"0":{"last_enqueued_collective":"30"}}}'
    said = with_entries(status, recorder, 8000)
    assert [entry["collective_seq_id"] for entry in json.loads(said)["entries"]] == list(range(15, 31))
    assert json.loads(said)["pg_status"] == {"0": {"last_enqueued_collective": "30"}}
    assert b"frames" not in said
    short = with_entries(status, recorder, 300)
    assert len(short) <= 300
    assert [entry["collective_seq_id"] for entry in json.loads(short)["entries"]] == [29, 30]
    assert with_entries(status, b'{"entries":[]}', 8000) == status


def test_the_line_that_set_a_timeout_is_told_and_goes_with_its_group() -> None:
    world = World()
    followed, shown = groups(world)
    followed.join_starts(900.0, "train.py:9:main")
    assert (shown[-1]["join_timeout_s"], shown[-1]["join_set_at"]) == (900.0, "train.py:9:main")
    followed.creation_starts("1", [0, 1], 60.0, "train.py:12:main")
    assert (shown[-1]["creating_timeout_s"], shown[-1]["creating_set_at"]) == (60.0, "train.py:12:main")
    group = world.add("1", [0, 1])
    followed.creation_ends()
    assert (shown[-1]["creating_timeout_s"], shown[-1]["creating_set_at"]) == (None, "")
    assert shown[-1]["groups"][0]["set_at"] == "train.py:12:main"
    followed.timeout_changed(group, "train.py:40:epoch")
    assert shown[-1]["groups"][0]["set_at"] == "train.py:40:epoch"
    followed.timeout_changed(object(), "train.py:41:epoch")
    world.remove(group)
    followed.refresh()
    world.add("1", [0, 1])
    followed.refresh()
    assert shown[-1]["groups"][0]["set_at"] == ""


def test_extensions_are_told_where_nccl_is_and_keep_their_sum() -> None:
    world = World()
    followed, shown = groups(world)
    world.add("0", [0, 1], backend="gloo")
    followed.refresh()
    followed.extended(30.0)
    assert shown[-1]["extensions"] == []
    world.add("1", [0, 1], backend="nccl")
    followed.refresh()
    for _ in range(12):
        followed.extended(30.0)
    assert len(shown[-1]["extensions"]) == 8
    assert sum(seconds for seconds, _wall_ns in shown[-1]["extensions"]) == 360.0


def test_numbers_of_gloo_are_told_of_groups_that_torch_checks_alone() -> None:
    """What was made and is gone again is counted as well, and so is a group of the same name."""
    world, shown = World(), list[dict[str, Any]]()
    level = ["INFO"]
    followed = Groups(world, lambda record: shown.append(json.loads(json.dumps(record))), lambda: level[0] == "DETAIL")
    world.add("0", [0, 1], desc="default_pg")
    followed.refresh()
    assert "checked" not in shown[-1]["groups"][0]
    level[0] = "DETAIL"
    gone = world.add("1", [0, 1])
    followed.refresh()
    world.remove(gone)
    followed.refresh()
    world.add("2", [0, 1], backend="cpu:gloo,cuda:nccl")
    world.add("1", [0, 1], backend="nccl")
    followed.refresh()
    assert {group["name"]: group.get("checked") for group in shown[-1]["groups"]} == {"0": None, "2": [3, 4, 5], "1": [-1, 6]}
