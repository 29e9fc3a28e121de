"""Before any rank runs: what torchrun waits for is said now and then."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

from rankwatch.launcher.meeting import Meeting, describe


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.event = threading.Event()

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self.event.set()


def test_what_is_waited_for_is_said_when_it_takes_long():
    said = Said()
    meeting = Meeting(said, said_at_s=(0.01,))
    meeting.begin(lambda: "node 0 at node05:29500")
    assert said.event.wait(20)
    meeting.end()
    assert said.lines == ["no rank runs yet: torchrun has waited for 0 s for node 0 at node05:29500"]


def test_a_handler_that_cannot_be_read_costs_only_the_words():
    said = Said()
    meeting = Meeting(said, said_at_s=(0.01,))
    meeting.begin(lambda: SimpleNamespace().settings)
    assert said.event.wait(20)
    meeting.end()
    assert said.lines == ["no rank runs yet: torchrun has waited for 0 s for its rendezvous (AttributeError when it was looked at)"]


def test_after_the_last_rank_it_is_said_that_they_have_ended():
    said = Said()
    meeting = Meeting(said, said_at_s=(0.01,))
    meeting.begin(lambda: "the launchers of the other nodes", "the ranks of this node have ended")
    assert said.event.wait(20)
    meeting.end()
    assert said.lines == ["the ranks of this node have ended: torchrun has waited for 0 s for the launchers of the other nodes"]


def test_nothing_is_said_of_a_wait_that_is_over():
    said = Said()
    meeting = Meeting(said, said_at_s=(60.0,))
    meeting.begin(lambda: "anything")
    meeting.end()
    assert said.lines == []


def handler(backend="c10d", **attributes):
    return SimpleNamespace(get_backend=lambda: backend, get_run_id=lambda: "job7", **attributes)


def test_a_dynamic_rendezvous_tells_who_has_come():
    settings = SimpleNamespace(min_nodes=4, max_nodes=4, timeout=SimpleNamespace(join=timedelta(seconds=600)))
    holder = SimpleNamespace(state=SimpleNamespace(participants={"a": 0, "b": 1}))
    assert describe(handler(_settings=settings, _state_holder=holder)) == "other nodes: 2 of 4 are here (c10d rendezvous, id job7); it gives up after 600 s"
    settings.max_nodes, settings.min_nodes = 8, 2
    assert describe(handler(_settings=settings, _state_holder=holder)) == "more nodes, 2 of 2 to 8 are here (c10d rendezvous, id job7)"


def test_a_static_rendezvous_tells_where_node_0_is_expected():
    found = handler("static", master_addr="node05", master_port=29500, rank=1, world_size=2, timeout=timedelta(seconds=900))
    assert describe(found) == "node 0 at node05:29500: this is node 1 of 2 (static rendezvous, id job7); it gives up after 900 s"
    found.rank = 0
    assert describe(found).startswith("the other nodes: this is node 0 of 2")


def test_an_unknown_rendezvous_is_named():
    assert describe(handler("etcd")) == "other nodes (etcd rendezvous, id job7)"
