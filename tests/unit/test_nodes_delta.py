"""What goes from a node to its judge: the whole once, then what has changed; and what the judge makes of any answer at all."""

import copy
import json
from dataclasses import fields, replace

import pytest
from any_reports import JSON, KINDS, field_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch.model import KIND_BYTES, Calls, Collective, Group, NodeReport, Process, RankState, Stack
from rankwatch.monitor.nodes import delta, growth
from rankwatch.monitor.nodes.codec import Shift
from rankwatch.monitor.nodes.delta import CodecError, Gap, Receiver, SchemaError, Sender, calls_kept, entries_sent

STILL = Shift(0.0, 0.0)
NOW, WALL = 5000.0, 1_796_000_000.0
FIELDS = [each.name for each in fields(RankState) if each.name != "rank"]
FEW = settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Link:
    """A node and its judge. `pull` is one question and its answer as it goes over the wire."""

    def __init__(self, *ranks: RankState, receiver: Receiver | None = None, nonce: str = "a", now: float = NOW) -> None:
        self.sender, self.receiver, self.now = Sender(nonce), receiver or Receiver(), now
        self.put(*ranks)

    def put(self, *ranks: RankState, events: list | tuple = (), ending: str = "", final: bool = False) -> None:
        self.now += 1.0
        self.sender.update(NodeReport("node05", ranks, 3, gpu_note="no GPU"), self.now, WALL, ending, final, events)

    def answer(self) -> dict:
        return json.loads(json.dumps(self.sender.answer(self.receiver.base, self.receiver.events_after, self.now, WALL)))

    def pull(self, shift: Shift = STILL) -> dict:
        document = self.answer()
        self.events = self.receiver.apply(document, shift)
        return document

    def ranks(self) -> tuple[RankState, ...]:
        return self.receiver.report(0.0).ranks


def used(state: RankState) -> RankState:
    """With the meaning of those numbers alone that its histories hold."""

    def own(calls: Calls) -> Calls:
        numbers = {int.from_bytes(calls.kinds[at : at + KIND_BYTES], "little") for at in range(0, len(calls.kinds), KIND_BYTES)}
        return replace(calls, known={number: calls.known[number] for number in numbers if number in calls.known})

    return replace(state, calls={name: own(calls) for name, calls in state.calls.items()})


def entries(first: int, last: int, done_to: int) -> tuple[Collective, ...]:
    return tuple(Collective("0", 0, n, "all_reduce", ((n % 3,),), created_wall_at=WALL + n, done=n <= done_to) for n in range(first, last + 1))


def history(first: int, *numbers: int, generation: int = 0) -> Calls:
    return Calls(generation, first, b"".join(number.to_bytes(KIND_BYTES, "little") for number in numbers), KINDS)


PERIODS = st.builds(
    lambda first, last, period: history(first, *(n % period for n in range(first, last))), st.integers(1, 9), st.integers(4, 30), st.sampled_from((3, 3, 5))
)
GROWING = {
    "collectives": st.builds(entries, st.integers(1, 6), st.integers(3, 9), st.integers(0, 9)),
    "calls": st.dictionaries(st.sampled_from("01"), PERIODS),
}


# -- what is sent


def test_the_first_answer_is_the_whole_with_who_it_is_from():
    link = Link(RankState(8, steps=4), RankState(9))
    document = link.pull()
    assert (document["schema"], document["base"], document["nonce"], document["node"], document["group_rank"]) == (1, None, "a", "node05", 3)
    assert (document["mono"], document["wall"], document["read_mono"]) == (NOW + 1.0, WALL, NOW + 1.0)
    assert document["ranks"] == {"8": {"rank": 8, "steps": 4}, "9": {"rank": 9}}
    assert link.receiver.report(1.5) == NodeReport("node05", (RankState(8, steps=4), RankState(9)), 3, 1.5, 0.0, "no GPU")


def test_a_node_that_has_not_looked_yet_has_no_ranks():
    receiver = Receiver()
    document = Sender("a").answer(None, 0, NOW, WALL)
    assert receiver.apply(document, STILL) == []
    assert (receiver.report(0.0).ranks, receiver.read_at) == ((), None)


def test_only_fields_that_have_changed_are_sent():
    process, groups = Process(4, True, cpu_s=1.0), (Group("0", "", "gloo", (0, 1), 600.0),)
    link = Link(RankState(0, process=process, groups=groups, steps=3), RankState(1, steps=3))
    link.pull()
    link.put(RankState(0, process=replace(process), groups=groups, steps=4, heartbeat_at=7.0), RankState(1, steps=3))
    document = link.pull()
    assert document["ranks"] == {"0": {"steps": 4, "heartbeat_at": 7.0}}
    assert [document[part] for part in ("gone", "entries", "calls", "kinds", "forms")] == [{}] * 5
    assert link.ranks() == (RankState(0, process=process, groups=groups, steps=4, heartbeat_at=7.0), RankState(1, steps=3))


def test_a_field_that_has_its_default_again_is_named():
    link = Link(RankState(0, group_in_creation="7", compiling=(), enqueued={"0": 3}))
    link.pull()
    link.put(RankState(0))
    assert link.pull()["gone"] == {"0": ["group_in_creation", "enqueued"]}
    assert link.ranks() == (RankState(0),)


def test_nothing_is_sent_where_nothing_has_changed():
    link = Link(RankState(0, steps=3))
    first = link.pull()
    link.put(RankState(0, steps=3))
    again = link.pull()
    assert (again["seq"], again["ranks"], again["base"]) == (first["seq"], {}, first["seq"])


def test_changes_between_two_answers_add_up():
    link = Link(RankState(0))
    link.pull()
    for steps in range(5):
        link.put(RankState(0, steps=steps, heartbeat_at=1.0))
    assert link.pull()["ranks"] == {"0": {"steps": 4, "heartbeat_at": 1.0}}


def test_an_answer_that_was_lost_costs_nothing_but_its_changes():
    link = Link(RankState(0))
    link.pull()
    link.put(RankState(0, steps=1))
    link.answer()
    link.put(RankState(0, steps=1, heartbeat_at=2.0))
    document = link.pull()
    assert document["base"] is not None
    assert document["ranks"] == {"0": {"steps": 1, "heartbeat_at": 2.0}}


def test_a_base_that_is_too_old_or_not_known_gets_the_whole():
    link = Link(RankState(0))
    base = link.pull()["seq"]
    for steps in range(1, 35):
        link.put(RankState(0, steps=steps))
        link.answer()
    for asked in (base, base + 1000, 0, -5):
        document = link.sender.answer(asked, 0, NOW, WALL)
        assert (document["base"], document["ranks"]) == (None, {"0": {"rank": 0, "steps": 34}})


def test_ranks_that_come_and_go_are_told_with_the_whole():
    link = Link(RankState(0), RankState(1))
    link.pull()
    link.put(RankState(1), RankState(2))
    assert link.pull()["base"] is None
    assert link.ranks() == (RankState(1), RankState(2))


def test_another_attempts_sender_never_goes_on_from_this_ones_answers():
    link = Link(RankState(0, steps=5))
    link.pull()
    later = Link(RankState(0, steps=1), receiver=link.receiver, nonce="b", now=NOW + 60.0)
    assert later.pull()["base"] is None
    assert later.ranks() == (RankState(0, steps=1),)


# -- what grows


def test_of_the_entries_only_new_and_changed_ones_are_described():
    link = Link(RankState(0, collectives=entries(1, 64, 63)))
    link.pull()
    link.put(RankState(0, collectives=entries(4, 66, 64)))
    document = link.pull()
    assert document["entries"]["0"]["seq"] == [64, 65, 66]
    assert len(document["entries"]["0"]["order"]) <= 2
    assert link.ranks()[0].collectives == entries(4, 66, 64)
    link.put(RankState(0))
    link.pull()
    assert link.ranks() == (RankState(0),)


def test_two_equal_entries_stay_two():
    link = Link(RankState(0, collectives=entries(1, 2, 2) * 2))
    link.pull()
    assert link.ranks()[0].collectives == entries(1, 2, 2) * 2


def test_of_a_history_only_what_has_been_added_is_sent():
    link = Link(RankState(0, calls={"0": history(1, *[1, 2] * 500), "1": history(1, 3)}))
    link.pull()
    link.put(RankState(0, calls={"0": history(101, *[1, 2] * 450, 4), "1": history(1, 3)}))
    document = link.pull()
    assert set(document["calls"]["0"]["lines"]) == {"0"}
    assert (document["calls"]["0"]["lines"]["0"]["from"], len(document["calls"]["0"]["lines"]["0"]["kinds"])) == (1001, 8)
    assert list(document["kinds"]) == ["4"]
    assert used(link.ranks()[0]).calls == used(RankState(0, calls={"0": history(101, *[1, 2] * 450, 4), "1": history(1, 3)})).calls


def test_a_number_that_was_withdrawn_is_sent_with_what_follows_it():
    link = Link(RankState(0, calls={"0": history(1, 1, 2, 3, 4)}))
    link.pull()
    link.put(RankState(0, calls={"0": history(1, 1, 2, 0, 4, 5)}))
    assert link.pull()["calls"]["0"]["lines"]["0"]["from"] == 3
    assert link.ranks()[0].calls["0"].kinds == history(1, 1, 2, 0, 4, 5).kinds


def test_the_history_of_a_group_that_was_made_anew_replaces_the_old_one():
    link = Link(RankState(0, calls={"0": history(1, 1, 2), "1": history(1, 1)}))
    link.pull()
    link.put(RankState(0, calls={"0": history(1, 1, 2, 3, generation=1)}))
    link.pull()
    assert {name: (calls.generation, calls.first, calls.last) for name, calls in link.ranks()[0].calls.items()} == {"0": (1, 1, 3)}


def test_what_a_number_means_is_sent_once_a_node():
    link = Link(RankState(0, calls={"0": history(1, 1, 2)}), RankState(1, calls={"0": history(1, 1, 2)}))
    assert list(link.pull()["kinds"]) == ["1", "2"]
    link.put(RankState(0, calls={"0": history(1, 1, 2, 1)}), RankState(1, calls={"0": history(1, 1, 2, 2)}))
    assert link.pull()["kinds"] == {}


def test_a_judge_of_many_ranks_keeps_the_newest_calls():
    assert (calls_kept(8), calls_kept(16384)) == (4096, 1024)
    link = Link(RankState(0, calls={"0": history(1, *[1] * 10)}), receiver=Receiver(calls=4))
    link.pull()
    assert (link.ranks()[0].calls["0"].first, link.ranks()[0].calls["0"].last) == (7, 10)
    link.put(RankState(0, calls={"0": history(1, *[1] * 10, 2)}))
    link.pull()
    assert (link.ranks()[0].calls["0"].first, link.ranks()[0].calls["0"].last) == (8, 11)
    link.put(RankState(0, calls={"0": history(1, 1, 1, 3, *[1] * 10)}))
    link.pull()
    assert link.ranks()[0].calls["0"].last == 13


@settings(FEW, max_examples=80)
@given(st.data())
def test_whatever_happens_and_whichever_answers_are_lost_the_judge_has_what_the_node_has(data):
    states = {rank: RankState(rank) for rank in (0, 1)}
    link = Link(*states.values())
    for _ in range(data.draw(st.integers(1, 6))):
        for rank in data.draw(st.sets(st.sampled_from((0, 1)))):
            name = data.draw(st.sampled_from(("collectives", "calls")) | st.sampled_from(FIELDS))
            states[rank] = replace(states[rank], **{name: data.draw(GROWING.get(name, st.nothing()) | field_values(name))})
        link.put(*states.values())
        if data.draw(st.booleans()):
            link.answer()
        else:
            link.pull()
            assert tuple(map(used, link.ranks())) == tuple(map(used, states.values()))
        if data.draw(st.integers(0, 9)) == 9:
            link.receiver.base = None


# -- bounds


def test_a_report_that_is_too_large_leaves_the_history_of_calls_out_first_and_says_so(monkeypatch):
    monkeypatch.setattr(delta, "MAX_BYTES", 4000)
    state = RankState(0, steps=3, collectives=entries(1, 20, 20), calls={"0": history(1, *[1] * 1500)})
    link = Link(state)
    document = link.pull()
    assert document["cut"] == ["calls", "kinds"]
    assert link.ranks() == (replace(state, calls={}),)
    link.put(replace(state, steps=4))
    assert link.pull()["ranks"] == {"0": {"steps": 4}}
    link.put(replace(state, steps=5, collectives=entries(1, 300, 0)))
    assert link.pull()["cut"] == ["calls", "entries", "forms", "kinds"]
    assert link.ranks() == (replace(state, steps=5, calls={}, collectives=()),)
    link.put(replace(state, steps=5, stack=Stack(1, 2.0, text="x" * 5000)))
    assert link.pull()["cut"] == ["calls", "earlier_stack", "entries", "forms", "kinds", "native_stack", "stack"]
    assert link.ranks() == (RankState(0, steps=5),)


def test_a_history_is_shortened_where_a_node_has_very_many(monkeypatch):
    monkeypatch.setattr(delta, "CALLS_BYTES", 0)
    link = Link(RankState(0, calls={"0": history(1, *[1] * 300)}))
    link.pull()
    assert (link.ranks()[0].calls["0"].first, link.ranks()[0].calls["0"].last) == (45, 300)


def test_in_a_large_job_a_rank_sends_its_newest_finished_entries_and_every_open_one():
    assert [entries_sent(ranks) for ranks in (8, 2048, 4096, 16384, 1 << 20)] == [64, 64, 32, 16, 16]
    found = (Collective("1", 0, 1, "broadcast"), *entries(1, 30, 28), Collective("1", 0, 2, "broadcast", done=True))
    link = Link()
    link.sender = Sender("a", entries=4, calls=3)
    link.put(RankState(0, collectives=found, calls={"0": history(1, 1, 2, 1, 2, 1)}))
    link.pull()
    assert link.ranks()[0].collectives == (found[0], *entries(25, 30, 28), found[-1])
    assert (link.ranks()[0].calls["0"].first, link.ranks()[0].calls["0"].last) == (3, 5)


def test_a_node_with_very_many_kinds_of_calls_begins_anew(monkeypatch):
    monkeypatch.setattr(delta, "MAX_KINDS", 4)
    link = Link(RankState(0, collectives=entries(1, 9, 9), calls={"0": history(1, 1, 2, 3)}))
    link.pull()
    state = RankState(0, collectives=entries(2, 10, 9), calls={"0": history(1, 1, 2, 3, 4)})
    link.put(state)
    assert link.pull()["base"] is None
    assert tuple(map(used, link.ranks())) == (used(state),)


def test_events_come_once_and_in_order_and_those_that_were_too_many_are_counted():
    link = Link(RankState(0))
    link.put(RankState(0), events=[{"kind": "a", "rank": 0}, {"kind": "b", "rank": 0}])
    link.pull()
    assert [event["kind"] for event in link.events] == ["a", "b"]
    link.pull()
    assert link.events == []
    link.put(RankState(0), events=[{"n": n} for n in range(600)])
    link.pull()
    assert [event["n"] for event in link.events] == list(range(88, 600))
    assert link.receiver.events_lost == 88


def test_events_that_do_not_fit_into_one_answer_follow_in_the_next(monkeypatch):
    monkeypatch.setattr(delta, "EVENTS_BYTES", 20)
    link = Link(RankState(0))
    link.put(RankState(0), events=[{"n": n} for n in range(5)])
    seen = []
    for _ in range(4):
        link.pull()
        seen += [event["n"] for event in link.events]
    assert seen == [0, 1, 2, 3, 4]
    assert link.receiver.events_lost == 0


def test_an_event_that_is_changed_after_it_was_handed_over_is_sent_as_it_was():
    link, event = Link(RankState(0)), {"kind": "a"}
    link.put(RankState(0), events=[event])
    event.pop("kind")
    link.pull()
    assert link.events == [{"kind": "a"}]


def test_the_end_of_a_node_is_told_with_every_answer():
    link = Link(RankState(0))
    link.put(RankState(0), ending="SIGTERM to the launcher", final=True)
    link.pull()
    assert (link.receiver.ending, link.receiver.final) == ("SIGTERM to the launcher", True)


# -- the judge's side


def test_times_of_fields_events_and_of_the_report_are_shifted():
    link = Link(RankState(0, heartbeat_at=10.0, collectives=entries(1, 1, 1)))
    link.put(RankState(0, heartbeat_at=10.0, collectives=entries(1, 1, 1)), events=[{"wall_ns": 5_000_000_000, "mono_ns": 1, "started_mono_ns": 2}])
    link.pull(Shift(100.0, -2.0))
    assert link.ranks()[0].heartbeat_at == 110.0
    assert link.ranks()[0].collectives[0].created_wall_at == WALL - 1.0
    assert link.events == [{"wall_ns": 3_000_000_000, "mono_ns": 100_000_000_001, "started_mono_ns": 100_000_000_002}]
    assert link.receiver.read_at == NOW + 102.0


def test_the_whole_is_asked_for_once_the_clocks_have_moved_by_more_than_50_ms():
    link = Link(RankState(0, stage_since=10.0))
    link.pull(Shift(100.0, 0.0))
    link.put(RankState(0, stage_since=10.0, steps=1))
    link.pull(Shift(100.04, 0.0))
    assert link.receiver.base is not None
    link.pull(Shift(100.06, 0.0))
    assert (link.receiver.base, link.ranks()[0].stage_since) == (None, 110.0)
    link.pull(Shift(100.06, 0.0))
    assert (link.receiver.base is not None, link.ranks()[0].stage_since) == (True, 110.06)


def test_clocks_that_keep_jumping_have_the_whole_asked_for_every_sixteenth_answer():
    link, asked = Link(RankState(0)), 0
    for number in range(64):
        link.pull(Shift(float(number % 2), 0.0))
        asked += link.receiver.base is None
    assert asked == 4


def test_an_answer_to_another_state_is_a_gap_and_the_whole_closes_it():
    link = Link(RankState(0, steps=1))
    link.pull()
    link.put(RankState(0, steps=2))
    late = link.answer()
    link.pull()
    link.put(RankState(0, steps=3))
    with pytest.raises(Gap):
        link.receiver.apply(late, STILL)
    assert (link.receiver.base, link.ranks()) == (None, (RankState(0, steps=2),))
    link.pull()
    assert link.ranks() == (RankState(0, steps=3),)


def test_another_nonce_with_the_same_number_is_a_gap():
    link = Link(RankState(0))
    link.pull()
    with pytest.raises(Gap):
        link.receiver.apply({**link.answer(), "nonce": "b"}, STILL)


@pytest.mark.parametrize("part", ["entries", "calls"])
def test_entries_or_calls_that_go_on_from_what_is_not_here_are_a_gap(part):
    link = Link(RankState(0, collectives=entries(1, 9, 9), calls={"0": history(1, 1, 2), "1": history(1, 1)}))
    link.pull()
    link.put(RankState(0, collectives=entries(1, 10, 10), calls={"0": history(1, 1, 2, 3), "1": history(1, 1)}))
    document = link.answer()
    if part == "entries":
        document["entries"]["0"]["order"] = [[500, 3]]
    else:
        document["calls"]["0"]["lines"]["0"].update({"first": 40, "from": 50})
    before = link.ranks()
    with pytest.raises(Gap):
        link.receiver.apply(document, STILL)
    assert (link.receiver.base, link.ranks()) == (None, before)


@pytest.mark.parametrize("schema", [2, None, "1", [1]])
def test_another_schema_is_said_with_its_number(schema):
    with pytest.raises(SchemaError) as refused:
        Receiver().apply({"schema": schema}, STILL)
    assert refused.value.schema == (schema if schema == 2 else None)


@pytest.mark.parametrize("document", [None, [], 3, {}, {"schema": 1}, {"schema": 1, "base": None}, {"schema": 1, "base": {}}])
def test_what_is_no_answer_is_refused(document):
    receiver = Receiver()
    with pytest.raises((CodecError, Gap)):
        receiver.apply(document, STILL)
    assert receiver.base is None


WHOLE = Link(RankState(3, steps=1, collectives=entries(1, 3, 3), calls={"0": history(1, 1, 2)}, groups=(Group("0", "", "gloo", (0,), None),)))
WHOLE.put(*WHOLE.sender._newest[0].ranks, events=[{"kind": "a"}])
DOCUMENT = WHOLE.answer()
PLACES = [(name,) for name in DOCUMENT if name != "schema"]
PLACES += [
    ("ranks", "3"),
    ("ranks", "3", "steps"),
    ("ranks", "3", "groups"),
    ("calls", "3"),
    ("calls", "3", "lines"),
    ("calls", "3", "lines", "0"),
    ("calls", "3", "names"),
]
PLACES += [("calls", "3", "lines", "0", name) for name in ("generation", "first", "from", "kinds")] + [
    ("kinds", "1"),
    ("kinds", "x"),
    ("ranks", "x"),
    ("gone", "3"),
]
PLACES += [("entries", "3"), *(("entries", "3", name) for name in ("order", "new", "of", "seq", "at", "state", "took")), ("forms", "0"), ("forms", "x")]


@settings(FEW, max_examples=150)
@given(st.sampled_from(PLACES), JSON | st.lists(st.lists(st.integers(-3, 2**70), min_size=2, max_size=2), max_size=2))
def test_any_json_in_any_place_is_taken_or_refused_wholly(place, value):
    link, document = Link(RankState(3, steps=9)), copy.deepcopy(DOCUMENT)
    link.pull()
    before, at = link.receiver.report(0.0), document
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    try:
        link.receiver.apply(document, STILL)
    except (CodecError, Gap):
        assert link.receiver.base is None
        assert link.receiver.report(0.0) == before


@pytest.mark.parametrize("wrong", [[[0, 1 << 40]], [[0, -(1 << 40)], [0, 1 << 40]], [[0, 0]], [[0]], [0], 3, [["0", 1]], [[0, True]]])
def test_a_judge_is_not_made_to_build_more_entries_than_any_rank_has(wrong):
    document = copy.deepcopy(DOCUMENT)
    for part in ("order", "new"):
        with pytest.raises(CodecError):
            Receiver().apply({**document, "entries": {"3": {**document["entries"]["3"], part: wrong}}}, STILL)


def test_entries_that_come_in_any_order_are_put_into_it(monkeypatch):
    for most in (64, 0):
        monkeypatch.setattr(growth, "MAX_RUNS", most)
        first, second = entries(1, 60, 60), entries(30, 90, 60)
        link = Link(RankState(0, collectives=first[::2] + first[1::2]))
        link.pull()
        link.put(RankState(0, collectives=second[::-1]))
        link.pull()
        assert link.ranks()[0].collectives == second[::-1]


def test_more_ranks_than_a_node_has_are_refused():
    with pytest.raises(CodecError, match="more ranks"):
        Receiver().apply({**DOCUMENT, "ranks": {str(rank): {} for rank in range(1025)}}, STILL)
