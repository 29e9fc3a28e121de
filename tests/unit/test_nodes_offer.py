"""What one launcher lets its judge read. The real server on loopback, the requests that a judge makes."""

import base64
import json
import time

import pytest
from launchers import LONG_S, SECRET, Launcher, state

from rankwatch.model import NodeReport, Want
from rankwatch.monitor.nodes import nudging, questions, recorders
from rankwatch.monitor.nodes.connection import Connection, Names
from rankwatch.monitor.nodes.delta import Receiver
from rankwatch.monitor.nodes.offer import Offer
from rankwatch.monitor.nodes.values import Shift
from rankwatch.serve.http import split_target


@pytest.fixture
def launcher():
    running = Launcher(ranks=(8, 9))
    yield running
    running.stop()


def get(launcher, target, secret=SECRET):
    connection = Connection(("127.0.0.1",), launcher.server.port, secret, Names())
    try:
        answer = connection.get(f"/peer/v1/{target}", time.monotonic() + LONG_S, 64 << 20)
    finally:
        connection.close()
    return answer.status, json.loads(answer.body) if answer.status == 200 else answer.body.decode()


def test_a_launcher_says_who_it_is(launcher):
    launcher.put()
    status, told = get(launcher, "hello")
    assert status == 200
    assert told.keys() == {"schema", "version", "nonce", "node", "time", "mono"}
    assert (told["schema"], told["version"], told["nonce"], told["node"]) == (1, "0.1.0", "nonce-1", "node1")


@pytest.mark.parametrize("route", ["hello", "report?events=0", "taken?put=1", "recorder?ranks=8", "nudge?node=3"])
def test_nothing_is_told_or_noted_without_the_secret(launcher, route):
    nudges = []
    launcher.offer.on_nudge = nudges.append
    launcher.put(final=True)
    assert get(launcher, route, "another")[0] == 401
    assert launcher.offer.asked_at is None
    assert not launcher.offer.final_taken.is_set()
    assert nudges == []


def test_the_report_is_what_was_put_last(launcher):
    launcher.put(steps=1)
    launcher.put(steps=2)
    receiver = Receiver()
    receiver.apply(get(launcher, "report?events=0")[1], Shift(0.0, 0.0))
    assert [rank.steps for rank in receiver.report(0.0).ranks] == [2, 2]
    assert launcher.offer.asked_at is not None


def test_a_second_answer_holds_only_what_has_changed(launcher):
    launcher.put(steps=1, events_lost=7)
    first = get(launcher, "report?events=0")[1]
    launcher.offer.put(NodeReport("node1", (state(8, at=1.0, steps=2, events_lost=7), state(9, at=1.0, steps=2, events_lost=7)), 1), ())
    second = get(launcher, f"report?events=0&base={first['seq']}")[1]
    assert second["base"] == first["seq"]
    assert second["ranks"]["8"].keys() == {"heartbeat_at", "steps"}


def test_a_launcher_that_has_not_looked_yet_says_so(launcher):
    assert get(launcher, "report?events=0") == (503, "no report yet\n")
    assert launcher.offer.asked_at is not None


@pytest.mark.parametrize("query", ["base=-1", "base=x", "events=1e9", "events=99999999999999999999", "stacks=0-99999999", "ping=a"])
def test_a_question_that_makes_no_sense_is_refused(launcher, query):
    launcher.put()
    assert get(launcher, f"report?{query}")[0] == 400
    assert launcher.offer.take_wants() == ()


def test_wants_are_taken_once_and_only_of_local_ranks(launcher):
    woken = []
    launcher.offer.on_wants = lambda: woken.append(True)
    launcher.put()
    get(launcher, "report?events=0")
    assert woken == []
    for _ in range(3):
        get(launcher, "report?events=0&stacks=7-9&native=8&recorder=0-63&ping=9")
    why = "the judge of the job asks for it"
    expected = {Want("stacks", (8, 9), why), Want("native_stack", (8,), why), Want("recorder", (8, 9), why), Want("ping", (9,), why)}
    taken = launcher.offer.take_wants()
    assert set(taken) == expected
    assert len(taken) == 4
    assert launcher.offer.take_wants() == ()
    assert len(woken) == 3


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("http://node0:27435", "http://node0:27435"),
        ("https://[fd00::1]:8443/job", "https://[fd00::1]:8443/job"),
        ("javascript:alert(1)", ""),
        ("http://node0/%3Cscript%3E", ""),
        ("http://" + "x" * 600, ""),
        ("http://[broken", ""),
        ("", ""),
    ],
)
def test_the_judges_page_is_kept_where_it_can_be_shown(launcher, told, kept):
    launcher.put()
    get(launcher, f"report?events=0&judge={told}")
    assert launcher.offer.judge_url == kept


def test_the_judges_page_stays_known(launcher):
    launcher.put()
    get(launcher, "report?events=0&judge=http://node0:27435")
    get(launcher, "report?events=0")
    assert launcher.offer.judge_url == "http://node0:27435"


def test_events_are_told_after_the_loop_has_changed_its_own(launcher):
    event = {"kind": "compile", "rank": 8, "wall_ns": 1}
    launcher.put(events=[event])
    event.clear()
    assert get(launcher, "report?events=0")[1]["events"] == [{"kind": "compile", "rank": 8, "wall_ns": 1}]


def test_the_final_report_is_taken_once_the_judge_has_it(launcher):
    launcher.put()
    before = get(launcher, "report?events=0")[1]["put"]
    launcher.put(final=True)
    answer = get(launcher, "report?events=0")[1]
    assert answer["final"] is True
    get(launcher, f"taken?put={before}")  # what it confirms is older
    get(launcher, "taken?put=999")  # and this was never sent
    assert not launcher.offer.final_taken.is_set()
    get(launcher, f"taken?put={answer['put']}")
    assert launcher.offer.final_taken.is_set()


def test_who_waits_for_a_report_to_arrive_waits_for_this_one(launcher):
    launcher.put()
    older = get(launcher, "report?events=0")[1]["put"]
    launcher.put(steps=5)
    taken = launcher.offer.taken()
    get(launcher, f"taken?put={older}")
    assert not taken.is_set()
    get(launcher, f"taken?put={get(launcher, 'report?events=0')[1]['put']}")
    assert taken.is_set()
    assert not launcher.offer.taken().is_set()


def test_recorders_are_given_of_local_ranks(launcher):
    asked = []

    def give(ranks):
        asked.append(list(ranks))
        return {8: {"fr_trace_json": b"{}"}}

    launcher.put()
    launcher.offer.recorders(give)
    assert get(launcher, "recorder?ranks=7-9") == (200, {"8": {"fr_trace_json": base64.b64encode(b"{}").decode()}})
    assert asked == [[8, 9]]
    assert get(launcher, "recorder?ranks=0-16")[0] == 400
    assert get(launcher, "recorder?ranks=x")[0] == 400


def test_recorders_are_bounded(monkeypatch):
    monkeypatch.setattr(recorders, "MAX_RAW_BYTES", 100)
    told = recorders.encode({rank: {"nccl": bytes(40)} for rank in (3, 1, 2)})
    assert list(told) == ["1", "2"]
    assert len(recorders.encode({rank: {} for rank in range(50)})) == recorders.MAX_RANKS


def test_recorders_of_another_launcher_are_read_with_care():
    text = base64.b64encode(b"{}").decode()
    assert recorders.decode({"8": {"nccl": text, "../../etc": text}, "9": 3, "10": {"nccl": text}}, [8, 9]) == {8: {"nccl": b"{}"}}
    for rubbish in ([], None, {"8": {"nccl": 7}}, {"8": {"nccl": "%%%"}}):
        with pytest.raises(ValueError):
            recorders.decode(rubbish, [8])


def test_a_nudge_reaches_the_judge(launcher):
    nudges = []
    launcher.offer.on_nudge = nudges.append
    assert Offer.nudge(launcher.peer(), SECRET, 3, LONG_S) == ""
    assert Offer.nudge(launcher.peer(addresses=("127.0.0.9", "127.0.0.1")), SECRET, 4, LONG_S) == ""
    assert nudges == [3, 4]
    assert nudging.REFUSES in Offer.nudge(launcher.peer(), "another", 3, LONG_S)
    assert Offer.nudge(launcher.peer(addresses=()), SECRET, 3, LONG_S) == "the judge has no address"
    assert get(launcher, "nudge")[0] == 400
    launcher.stop()
    assert "connection refused" in Offer.nudge(launcher.peer(port=1), SECRET, 3, LONG_S)


def test_questions_fit_into_a_request_line():
    """The server takes lines of 4,096 bytes."""
    scattered = range(0, 131072, 1000)
    wants = dict.fromkeys(("stacks", "native_stack", "recorder", "ping"), scattered)
    target = questions.report(1 << 61, 1 << 61, wants, "http://" + "x" * 500)
    assert len(target) < 4000
    assert questions.report(None, 0, {}, "") == "/peer/v1/report?events=0"
    assert questions.report(7, 5, {"stacks": [9, 8, 12], "ping": []}, "") == "/peer/v1/report?events=5&base=7&stacks=8-9,12"
    order = questions.Order("k" * 64, tuple(scattered), "\u20ac#&=% " * 500)
    assert len(questions.report(1 << 61, 1 << 61, wants, "http://" + "x" * 500, order)) < 4000


@pytest.mark.parametrize("why", ["rank 2 calls barrier; it is 100 % = #11 & more", "\u20ac \n", ""])
def test_an_order_comes_out_as_it_went_in(why):
    target = questions.report(7, 5, {"stacks": [9]}, "", questions.Order("a1b2", (2, 3), why))
    assert "stacks" not in target  # what is seen of the ranks is on disk already
    found = questions.order(split_target(target)[1])
    assert found == questions.Order("a1b2", (2, 3), why.replace("\n", ""))


def test_no_order_is_none_and_one_that_cannot_be_read_is_an_error():
    assert questions.order({"events": "0", "why": "no key"}) is None
    with pytest.raises(ValueError, match="is no rank"):
        questions.order({"end": "key", "culprits": "all"})


def test_an_order_is_noted_only_where_its_key_is_the_judges(launcher):
    launcher.put()
    ordered = questions.report(None, 0, {}, "", questions.Order("right", (8,), "it cannot heal")).removeprefix(questions.ROOT)
    assert get(launcher, ordered)[0] == 200
    assert launcher.offer.take_order() is None  # no judge is known
    launcher.offer.is_judges = lambda key: key == "right"
    assert get(launcher, ordered, "another")[0] == 401
    assert launcher.offer.take_order() is None
    assert get(launcher, ordered)[0] == 200
    assert launcher.offer.take_order() == questions.Order("right", (8,), "it cannot heal")
    assert launcher.offer.take_order() is None


def test_an_open_path_shows_nothing():
    """/metrics and /healthz need no token elsewhere; here there are none."""
    assert all(path.startswith("/peer/v1/") for path in Offer("n", "v").routes())
