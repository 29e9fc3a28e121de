"""The judge pulls other launchers: what it makes of every kind of answer, and of nodes that come, go and fall silent. Real sockets on loopback.

What is asked when is in test_nodes_turns.py, with a clock of its own; here a pull or a round is waited for by its event.
"""

import gzip
import json
import queue
import threading
import time
from dataclasses import replace

import pytest
from launchers import LONG_S, SECRET, Launcher, Stranger, raw, says, silence, trickle

from rankwatch.model import NodeReport, Process, Want
from rankwatch.monitor.nodes import pull, questions, schedule
from rankwatch.monitor.nodes.connection import Names
from rankwatch.monitor.nodes.peer import Peer
from rankwatch.monitor.nodes.pull import Puller
from rankwatch.monitor.nodes.pulled import Pulled

SHORT_S = 0.2


@pytest.fixture
def start():
    """Starts launchers and strangers; ends them."""
    running = []

    def begin(answer=None, **options):
        running.append(Stranger(answer, **options) if answer is not None else Launcher(**options))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def pulled(peer, secret=SECRET):
    return Pulled(peer, secret, Names(), time.monotonic, time.time)


def once(node, wants=None, url="", confirm=False):
    """One pull of one node, as a round shows it."""
    events = node.pull(wants or {}, url, confirm)
    node.shown = node.newest
    node.close()
    return events


def problem_of(start, answer, **peer):
    stranger = start(answer)
    node = pulled(stranger.peer(**peer))
    assert once(node) == []
    assert node.report(time.monotonic()).ranks == ()
    assert node.state(time.monotonic()).failures == 1
    return node.problem.replace(f"127.0.0.1:{stranger.port}", "ADDRESS")


def answer_of(launcher, **changes):
    """What a launcher would answer, with changes."""
    document = {**launcher.offer._sender.answer(None, 0, launcher.clock(), launcher.wall()), "put": 1, **changes}
    return says(json.dumps(document))


# -- one pull ------------------------------------------------------------------------------------------------------------------


def test_a_node_is_pulled_and_its_ranks_are_known(start):
    launcher = start(ranks=(8, 9))
    launcher.put(steps=3)
    node = pulled(launcher.peer())
    once(node, url="http://node0:27435")
    report = node.report(time.monotonic())
    assert [(rank.rank, rank.steps, rank.node) for rank in report.ranks] == [(8, 3, "node1"), (9, 3, "node1")]
    assert (report.node, report.group_rank, report.silent_ranks, report.problem) == ("node1", 1, (), "")
    assert launcher.offer.judge_url == "http://node0:27435"
    state = node.state(time.monotonic())
    assert (state.node, state.problem, state.pulls, state.failures) == ("node1", "", 1, 0)
    assert state.address == f"127.0.0.1:{launcher.server.port}"
    assert state.bytes > 0


def test_times_are_the_judges_whatever_the_nodes_clocks_say(start):
    """An hour ahead by the wall, booted a day earlier."""
    launcher = start(ahead_s=3600.0, mono_ahead_s=86400.0)
    before = time.monotonic()
    launcher.put(collectives_at=launcher.clock())
    node = pulled(launcher.peer())
    once(node)
    now = time.monotonic()
    state, (rank, _) = node.state(now), node.report(now).ranks
    slack_s = state.clock_error_s + 0.001
    assert state.clock_offset_s == pytest.approx(-3600.0, abs=slack_s)
    assert before - slack_s <= rank.heartbeat_at <= now + slack_s
    assert before - slack_s <= rank.collectives_at <= now + slack_s
    assert node.report(now).clock_offset_s == 0.0  # wall times are the judge's already
    assert 0.0 <= node.report(now).report_age_s <= now - before + slack_s


def test_only_what_has_changed_is_sent_again(start):
    launcher = start(ranks=tuple(range(8, 40)))
    launcher.put(agent_detail="x" * 100)
    node = pulled(launcher.peer())
    once(node)
    first = node.state(0.0).bytes
    launcher.offer.put(node.newest.report, ())
    once(node)
    assert node.state(0.0).bytes < first * 1.9
    assert [rank.rank for rank in node.newest.report.ranks] == list(range(8, 40))


def test_events_come_once_each_and_losses_are_counted(start):
    launcher = start(ranks=(8, 9))
    node = pulled(launcher.peer())
    launcher.put(events=[{"kind": "compile", "rank": 8, "n": n} for n in range(3)])
    assert [event["n"] for event in once(node)] == [0, 1, 2]
    assert once(node) == []
    launcher.put(events=[{"kind": "compile", "rank": 9, "n": 3}, {"kind": "other", "rank": 77}, {"kind": "none"}])
    assert [event["n"] for event in once(node)] == [3]  # the others are of no rank of this node
    launcher.put(events=[{"kind": "compile", "rank": 8, "n": n} for n in range(600)])
    assert [event["n"] for event in once(node)] == list(range(88, 600))
    assert node.state(0.0).events_lost == 88


def test_a_node_cannot_speak_for_another_ones_ranks(start):
    launcher = start(ranks=(8, 9))
    launcher.put()
    node = pulled(launcher.peer(ranks=(9, 10)))
    once(node)
    assert [rank.rank for rank in node.report(time.monotonic()).ranks] == [9]


def test_a_restarted_node_goes_on_where_its_judge_has_nothing_of_it(start):
    """The same announcement, another history: the whole is asked for in the same pull."""
    launcher = start()
    for steps in range(40):
        launcher.put(steps=steps)
    node = pulled(launcher.peer())
    once(node)
    fresh = Launcher(nonce=launcher.nonce)
    launcher.start(routes=fresh.offer.routes())
    fresh.put(steps=7)
    node.peer = launcher.peer()
    once(node)
    assert node.problem == ""
    assert [rank.steps for rank in node.report(time.monotonic()).ranks] == [7, 7]
    fresh.stop()


def test_the_whole_is_asked_for_when_the_history_shall_be_shorter(start):
    launcher = start()
    launcher.put(events=[{"kind": "compile", "rank": 8}])
    node = pulled(launcher.peer())
    assert len(once(node)) == 1
    node.calls_kept = 512
    assert once(node) == []
    assert len(node.report(time.monotonic()).ranks) == 2


def test_the_next_address_is_tried_where_another_launcher_answers(start):
    """Two machines have a bridge of the same address."""
    other = start(group_rank=5)
    other.put()
    launcher = start(listen=f"127.0.0.2:{other.server.port}")
    launcher.put(steps=4)
    node = pulled(launcher.peer(addresses=("127.0.0.1", "127.0.0.2")))
    once(node)
    assert node.problem == (f"another launcher answers at 127.0.0.1:{other.server.port}: this one has restarted, or the address is another machine's")
    assert node.replaced
    assert not node.refused
    once(node)
    assert node.problem == ""
    assert node.state(0.0).address == f"127.0.0.2:{other.server.port}"
    assert node.reached.addresses == ("127.0.0.2", "127.0.0.1")


def test_an_announcement_with_another_port_is_followed(start):
    launcher = start()
    launcher.put(steps=1)
    node = pulled(launcher.peer())
    once(node)
    launcher.start()
    node.peer = launcher.peer()
    once(node)
    assert node.problem == ""
    assert node.state(0.0).address.endswith(f":{launcher.server.port}")


def test_a_silent_node_costs_one_try(start, monkeypatch):
    monkeypatch.setattr(schedule, "TRY_S", SHORT_S)
    assert problem_of(start, silence) == "ADDRESS did not answer in time"


def test_a_trickling_node_costs_one_try(start, monkeypatch):
    monkeypatch.setattr(schedule, "TRY_S", SHORT_S)
    assert problem_of(start, trickle) == "ADDRESS did not answer in time"


def test_a_node_that_refuses_connections_is_told(start):
    stranger = start(silence)
    stranger.stop()
    node = pulled(stranger.peer())
    once(node)
    assert node.problem == f"127.0.0.1:{stranger.port}: connection refused"


def test_a_node_with_another_secret_is_told(start):
    launcher = start(secret="another")
    node = pulled(launcher.peer())
    once(node)
    assert node.problem == f"127.0.0.1:{launcher.server.port} refuses this judge's secret: it waits for the newest one"
    assert node.refused


def test_a_node_whose_page_fails_is_told(start):
    launcher = start()
    launcher.start(routes={"/peer/v1/report": lambda request: 1 // 0})
    node = pulled(launcher.peer())
    once(node)
    assert node.problem == f"127.0.0.1:{launcher.server.port} answers 500: this page failed: ZeroDivisionError"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (says("<html>"), "ADDRESS answers with what is no JSON (JSONDecodeError)"),
        (says(b"\xff\xfe\xfd"), "ADDRESS answers with what is no JSON (UnicodeDecodeError)"),
        (says("[" * 100_000), "ADDRESS answers with what is no JSON (RecursionError)"),
        (says("[1]"), "ADDRESS answers with what is no JSON object"),
        (says('{"schema": 1}', status="503 Busy\x1b[2J"), 'ADDRESS answers 503: {"schema": 1}'),
        (says(b"x" * ((8 << 20) + 1)), "ADDRESS answers with 8388609 bytes, more than the 8388608 that are taken"),
        (says(gzip.compress(bytes(9 << 20)), "Content-Encoding: gzip"), "ADDRESS answers with more than 8388608 bytes once unpacked"),
        (raw(b"\x16\x03\x01\x02\r\n\r\n"), "what answers at ADDRESS does not speak HTTP"),
        (says('{"schema": 1, "nonce": "nonce-2"}'), "its answer has no time 'mono'"),
        (says('{"schema": 1, "nonce": "nonce-2", "mono": NaN, "wall": 1}'), "ADDRESS answers with what is no JSON (ValueError)"),
        (says('{"schema": 1, "nonce": "nonce-2", "mono": 1e400, "wall": 1}'), "its answer has no time 'mono'"),
        (says('{"schema": 1, "nonce": "nonce-2", "mono": true, "wall": 1}'), "its answer has no time 'mono'"),
        (says('{"schema": 1, "nonce": ["nonce-2"], "mono": 1.0, "wall": 1.0}'), None),
    ],
)
def test_what_is_no_report_becomes_the_nodes_problem(start, answer, problem):
    found = problem_of(start, answer)
    assert found == problem if problem is not None else found


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": {"8": {"process": {"pid": "x"}}}},
        {"ranks": {"8": 3}},
        {"ranks": []},
        {"ranks": {"-1": {}}},
        {"ranks": {"8" * 40: {}}},
        {"events": [3], "events_seq": "x"},
        {"events": None},
        {"node": 7},
        {"ending": ["x"]},
        {"read_mono": "yesterday"},
        {"read_mono": None},
        {"seq": 1e308},
        {"base": 12},
        {"mono": 1e308, "wall": -1e308},
        {"kinds": {"1": 1}},
    ],
)
def test_a_damaged_report_becomes_the_nodes_problem(start, changes):
    launcher = start(group_rank=2, ranks=(16, 17), nonce="nonce-2")
    launcher.put()
    assert problem_of(start, answer_of(launcher, **changes))


def test_an_answer_may_say_more_than_is_known(start):
    launcher = start(group_rank=2, ranks=(16, 17), nonce="nonce-2")
    launcher.put()
    node = pulled(start(answer_of(launcher, mood="fine", put="x")).peer())
    once(node)
    assert node.problem == ""


def test_problems_are_short(start):
    assert len(problem_of(start, says("x" * 100_000, status="500 No"))) < 400


# -- silence -------------------------------------------------------------------------------------------------------------------


def test_a_node_that_does_not_answer_any_more_is_unknown_after_ten_seconds(start):
    launcher = start()
    launcher.put()
    node = pulled(launcher.peer())
    once(node)
    launcher.stop()
    once(node)
    now = time.monotonic()
    assert len(node.report(now + 8.0).ranks) == 2
    assert node.report(now + 8.0).report_age_s >= 8.0
    gone = node.report(now + schedule.STALE_S + 0.1)
    assert (gone.ranks, gone.silent_ranks) == ((), (8, 9))
    assert gone.report_age_s > schedule.STALE_S
    assert gone.problem == f"127.0.0.1:{node.peer.port}: connection refused"


def test_a_node_that_is_asked_in_vain_says_since_when_long_before_it_is_silent(start):
    launcher = start()
    launcher.put()
    node = pulled(launcher.peer())
    once(node)
    assert (node.report(time.monotonic()).failing_since, node.report(time.monotonic()).problem) == (None, "")
    launcher.stop()
    before = time.monotonic()
    once(node)
    once(node)
    report = node.report(time.monotonic())
    assert before <= report.failing_since <= time.monotonic()
    assert (len(report.ranks), report.problem) == (2, f"127.0.0.1:{node.peer.port}: connection refused")
    launcher.start()
    node.peer = launcher.peer()
    once(node)
    assert (node.report(time.monotonic()).failing_since, node.report(time.monotonic()).problem) == (None, "")


def test_an_order_reaches_every_node_with_the_next_pull(start, slow_rounds):
    launchers = [start(group_rank=rank, ranks=(8 * rank,)) for rank in (1, 2)]
    for launcher in launchers:
        launcher.put()
        launcher.offer.is_judges = lambda key: key == "key"
    puller = slow_rounds(*(launcher.peer() for launcher in launchers)).puller
    puller.pull_now(LONG_S)
    assert [launcher.offer.take_order() for launcher in launchers] == [None, None]
    puller.order(questions.Order("key", (8,), "it cannot heal"))
    puller.pull_now(LONG_S)
    assert [launcher.offer.take_order().why for launcher in launchers] == ["it cannot heal"] * 2


def test_a_node_whose_loop_stands_still_is_silent(start):
    """Its server still answers, with what was seen a minute ago."""
    launcher = start()
    launcher.stands_still_s = 60.0
    launcher.put()
    launcher.stands_still_s = 0.0
    node = pulled(launcher.peer())
    once(node)
    report = node.report(time.monotonic())
    assert (report.ranks, report.silent_ranks) == ((), (8, 9))
    assert 59.0 < report.report_age_s < 60.0 + LONG_S


def test_a_new_node_is_not_silent_yet(start):
    node = pulled(start(silence).peer())
    assert (node.report(node.since + 1.0).ranks, node.report(node.since + 1.0).silent_ranks) == ((), ())
    assert node.report(node.since + schedule.STALE_S + 0.1).silent_ranks == (16, 17)
    assert node.state(node.since).report_age_s is None


def test_the_last_word_of_a_node_stays_true(start):
    launcher = start()
    node = pulled(launcher.peer())
    launcher.put(ending="SIGTERM to the launcher")
    once(node)
    assert not launcher.offer.final_taken.is_set()
    ended = tuple(replace(rank, process=Process(rank.process.pid, alive=False, exit_code=0)) for rank in node.newest.report.ranks)
    launcher.offer.put(NodeReport("node1", ended, 1), (), "SIGTERM to the launcher", final=True)
    once(node)
    assert launcher.offer.final_taken.is_set()
    launcher.stop()
    once(node)
    later = node.report(time.monotonic() + 3600.0)
    assert [(rank.rank, rank.process.exit_code) for rank in later.ranks] == [(8, 0), (9, 0)]
    assert later.report_age_s == 0.0
    state = node.state(time.monotonic())
    assert (state.final, state.problem, state.failures, state.ending) == (True, "", 0, "SIGTERM to the launcher")


def test_a_last_word_about_living_processes_grows_old(start):
    launcher = start()
    launcher.put(final=True)
    node = pulled(launcher.peer())
    once(node)
    assert node.report(time.monotonic() + 3600.0).silent_ranks == (8, 9)


# -- numbers -------------------------------------------------------------------------------------------------------------------


def test_numbers_that_no_page_can_show_are_refused_and_the_node_is_well_again(start):
    launcher = start()
    launcher.put()
    for wrong in ({"seq": 10**400}, {"ranks": {"8": {"rank": 8, "steps": -(10**400)}}}, {"ranks": {"8": {"rank": 8, "compile_totals": {"failures": 10**400}}}}):
        stranger = start(answer_of(launcher, **wrong))
        node = pulled(launcher.peer(port=stranger.port))
        once(node)
        assert "a number of at most 64 bits is wanted" in node.problem
        node.peer = launcher.peer()
        once(node)
        assert node.problem == ""


def test_an_event_that_no_file_can_hold_is_left_out(start):
    launcher = start()
    launcher.put()
    events = [{"kind": "a", "rank": 8, "n": 1}, {"kind": "b", "rank": 8, "n": 10**30}, {"kind": "c", "rank": 8, "wall_ns": "now"}]
    stranger = start(answer_of(launcher, events=events))
    assert [event["kind"] for event in once(pulled(launcher.peer(port=stranger.port)))] == ["a"]
    stranger = start(says(json.dumps({"schema": 1, "nonce": launcher.nonce, "mono": 1.0, "wall": 1.0, "events": [{"n": float("inf")}]})))
    node = pulled(launcher.peer(port=stranger.port))
    assert once(node) == []
    assert node.problem.endswith("answers with what is no JSON (ValueError)")


# -- the puller ----------------------------------------------------------------------------------------------------------------


class Judge:
    """A Puller with what it has called back."""

    def __init__(self, *peers, secret=SECRET, workers=32, **options):
        self.rounds, self.said = queue.Queue(), []
        self.puller = Puller(secret, self.said.append, lambda: "http://node0:1", lambda: self.rounds.put(None), workers=workers, **options)
        self.puller.set_peers(peers)
        self.puller.start()

    def round(self):
        """Wait for the next round to be over."""
        self.rounds.get(timeout=LONG_S)
        return self.reports()

    def reports(self):
        return {report.group_rank: report for report in self.puller.reports(time.monotonic())}

    def until(self, true):
        """Rounds, until something is true."""
        for _ in range(20):
            if true():
                return
            self.rounds.get(timeout=LONG_S)
        raise AssertionError("20 rounds, and it is not true")


@pytest.fixture
def judge(monkeypatch):
    """Makes judges whose rounds follow each other quickly."""
    monkeypatch.setattr(schedule, "PERIOD_S", 0.05)
    monkeypatch.setattr(schedule, "HURRY_S", 0.05)
    monkeypatch.setattr(schedule, "SLOW_S", LONG_S)  # this machine may be busy
    monkeypatch.setattr(schedule, "BACKOFF_MOST_S", 0.05)
    monkeypatch.setattr(schedule, "NUDGE_GAP_S", 0.0)
    monkeypatch.setattr("rankwatch.monitor.nodes.turns.NEW_AFTER_S", 0.01)
    running = []

    def make(*peers, **options):
        running.append(Judge(*peers, **options))
        return running[-1]

    yield make
    for each in running:
        each.puller.stop()
    for thread in threading.enumerate():
        if thread.name.startswith("rankwatch-pull"):
            thread.join(LONG_S)
            assert not thread.is_alive()


@pytest.fixture
def slow_rounds(judge, monkeypatch):
    """The first round comes at once, no other one by itself."""
    monkeypatch.setattr(schedule, "PERIOD_S", 600.0)
    monkeypatch.setattr(schedule, "HURRY_S", 600.0)
    return judge


def test_a_round_brings_every_nodes_report_in_order(start, judge):
    launchers = [start(group_rank=number, ranks=(8 * number, 8 * number + 1)) for number in (3, 1, 2)]
    for launcher in launchers:
        launcher.put()
    its = judge(*(launcher.peer() for launcher in launchers))
    reports = its.round()
    assert list(reports) == [1, 2, 3]
    assert [[rank.rank for rank in report.ranks] for report in reports.values()] == [[8, 9], [16, 17], [24, 25]]
    assert [state.group_rank for state in its.puller.states()] == [1, 2, 3]
    assert launchers[0].offer.judge_url == "http://node0:1"


def test_reports_change_between_rounds_only(start, slow_rounds):
    launcher = start()
    launcher.put(steps=1)
    its = slow_rounds(launcher.peer())
    assert its.round()[1].ranks[0].steps == 1
    launcher.put(steps=2)
    arrived = threading.Event()
    launcher.offer.on_wants = arrived.set
    its.puller.ask([Want("stacks", (8,), "")])  # a pull between two rounds
    assert arrived.wait(LONG_S)
    assert its.reports()[1].ranks[0].steps == 1
    its.puller.pull_now(LONG_S)
    assert its.reports()[1].ranks[0].steps == 2


def test_one_silent_node_does_not_delay_the_others(start, judge):
    launcher, mute = start(), start(silence)
    launcher.put(steps=1)
    its = judge(launcher.peer(), mute.peer())
    assert len(its.round()[1].ranks) == 2  # after the try of the silent one is over
    for steps in range(2, 6):
        launcher.put(steps=steps)
        its.until(lambda steps=steps: its.reports()[1].ranks[0].steps == steps)
    states = its.puller.states()
    assert states[1].pulls <= 2  # all that came in within its second try
    assert states[0].failures == 0
    assert states[1].problem == f"127.0.0.1:{mute.port} did not answer in time"


def test_a_node_leaves_and_comes_back(start, judge):
    first, second = start(), start(group_rank=2, ranks=(16, 17))
    first.put()
    second.put()
    its = judge(first.peer(), second.peer())
    assert list(its.round()) == [1, 2]
    its.puller.set_peers([first.peer()])
    assert list(its.reports()) == [1]
    its.puller.set_peers([first.peer(), second.peer()])
    its.until(lambda: len(its.reports()[2].ranks) == 2)


def test_a_node_is_back_when_its_listener_is(start, judge):
    launcher = start()
    launcher.put()
    its = judge(launcher.peer())
    its.round()
    port = launcher.server.port
    launcher.stop()
    its.until(lambda: "connection refused" in its.puller.states()[0].problem)
    launcher.listen = f"127.0.0.1:{port}"
    launcher.start()
    assert launcher.server.port == port
    its.until(lambda: its.puller.states()[0].problem == "")


def test_a_node_with_a_new_nonce_starts_afresh(start, judge):
    launcher = start()
    launcher.put(steps=5)
    its = judge(launcher.peer())
    its.round()
    fresh = start(nonce="nonce-of-the-next-attempt")
    its.puller.set_peers([fresh.peer()])
    assert its.reports()[1].ranks == ()  # what its former attempt said is not true of this one
    fresh.put(steps=1)
    its.until(lambda: its.reports()[1].ranks and its.reports()[1].ranks[0].steps == 1)
    its.puller.set_peers([fresh.peer()])
    assert its.reports()[1].ranks[0].steps == 1  # an announcement that is seen again changes nothing


def test_a_judge_with_another_secret_is_told_to_look_for_the_nodes_anew(start, judge):
    launcher, refused = start(), threading.Event()
    launcher.put()
    its = judge(launcher.peer(), secret="of-the-next-attempt")
    its.puller.on_refused = refused.set
    assert refused.wait(LONG_S)
    assert its.reports()[1].ranks == ()
    launcher.start(secret="of-the-next-attempt")
    its.puller.set_peers([launcher.peer()])
    its.until(lambda: len(its.reports()[1].ranks) == 2)
    assert its.puller.states()[0].problem == ""


def test_wants_reach_the_node_that_has_the_rank_at_once(start, slow_rounds):
    first, second = start(), start(group_rank=2, ranks=(16, 17))
    first.put()
    second.put()
    its = slow_rounds(first.peer(), second.peer())
    its.round()
    woken = threading.Event()
    second.offer.on_wants = woken.set
    its.puller.ask([Want("stacks", (3, 16, 17), "who holds it up"), Want("ping", (17,), "")])
    assert woken.wait(LONG_S)
    assert {(want.kind, want.ranks) for want in second.offer.take_wants()} == {("stacks", (16, 17)), ("ping", (17,))}
    assert first.offer.take_wants() == ()


def test_a_want_is_passed_on_once_for_each_time_it_is_asked(start, slow_rounds):
    launcher = start()
    launcher.put()
    its = slow_rounds(launcher.peer())
    its.round()
    for _ in range(5):
        its.puller.ask([Want("stacks", (8,), "")])
    its.puller.pull_now(LONG_S)
    assert [want.kind for want in launcher.offer.take_wants()] == ["stacks"]
    its.puller.pull_now(LONG_S)
    its.puller.pull_now(LONG_S)
    assert launcher.offer.take_wants() == ()


def test_a_want_that_did_not_arrive_is_passed_on_again(start, judge):
    launcher = start()
    launcher.put()
    its = judge(launcher.peer())
    its.round()
    port = launcher.server.port
    launcher.stop()
    its.until(lambda: its.puller.states()[0].problem)
    its.puller.ask([Want("stacks", (8,), "")])
    failed = its.puller.states()[0].failures
    its.until(lambda: its.puller.states()[0].failures > failed + 1)
    woken = threading.Event()
    launcher.offer.on_wants = woken.set
    launcher.listen = f"127.0.0.1:{port}"
    launcher.start()
    assert woken.wait(LONG_S)


def test_a_nudge_brings_the_nodes_news_to_the_judge(start, slow_rounds):
    launcher = start()
    launcher.put(steps=1)
    its = slow_rounds(launcher.peer())
    its.round()
    launcher.put(steps=2)
    taken = launcher.offer.taken()
    its.puller.nudge(7)  # nobody
    its.puller.nudge(1)
    assert its.round()[1].ranks[0].steps == 2
    assert taken.wait(LONG_S)


def test_pull_now_returns_when_all_news_is_in(start, slow_rounds):
    launchers = [start(group_rank=number, ranks=(number,)) for number in range(1, 6)]
    for launcher in launchers:
        launcher.put(steps=1)
    its = slow_rounds(*(launcher.peer() for launcher in launchers))
    its.round()
    for launcher in launchers:
        launcher.put(steps=2, events=[{"kind": "rank_exited", "rank": launcher.group_rank}], ending="done")
    its.puller.pull_now(LONG_S)
    assert [report.ranks[0].steps for report in its.reports().values()] == [2] * 5
    assert sorted(event["rank"] for event in its.puller.take_events()) == [1, 2, 3, 4, 5]
    assert its.puller.take_events() == []
    assert its.puller.ending() == "done"
    assert its.rounds.empty()  # who has waited knows it


def test_pull_now_waits_no_longer_than_its_deadline(start, slow_rounds, monkeypatch):
    holding, launcher = threading.Event(), start()
    launcher.put()
    its = slow_rounds(launcher.peer())
    its.round()
    monkeypatch.setattr(schedule, "TRY_S", LONG_S)
    launcher.offer.on_wants = lambda: holding.wait(LONG_S)
    its.puller.ask([Want("ping", (8,), "")])
    its.puller.pull_now(0.05)
    holding.set()


def test_a_puller_that_does_not_run_waits_for_nothing(start):
    puller = Puller(SECRET, [].append, str, lambda: None)
    puller.pull_now(LONG_S)
    puller.set_peers([start(silence).peer()])
    puller.pull_now(LONG_S)
    assert puller.reports(time.monotonic())[0].ranks == ()
    puller.stop()
    puller.start()
    puller.stop()
    assert puller.recorders([16], LONG_S) == {}


def test_nodes_of_another_schema_are_named_in_one_line(start, judge):
    other = {"schema": 2, "nonce": "nonce-2"}
    strangers = [start(says(json.dumps(other))) for _ in range(2)]
    peers = [replace(stranger.peer(), group_rank=number, node=f"node0{number}") for number, stranger in enumerate(strangers, 4)]
    its = judge(*peers)
    its.until(lambda: its.said)
    its.until(lambda: its.puller.states()[0].pulls > 3)
    assert its.said == ["node04 and 1 more run rankwatch 0.3.0 with report schema 2, this is 0.1.0 with 1: their ranks are unknown; install the same version"]
    assert its.puller.states()[0].problem == "it runs rankwatch 0.3.0 with report schema 2, this is 0.1.0 with 1"


def test_recorders_of_remote_ranks_are_fetched(start, slow_rounds):
    first, second = start(), start(group_rank=2, ranks=(16, 17))
    for launcher in (first, second):
        launcher.put()
        launcher.offer.recorders(lambda ranks: {rank: {"nccl": b"%d" % rank} for rank in ranks})
    its = slow_rounds(first.peer(), second.peer())
    its.round()
    assert its.puller.recorders([8, 17, 99], LONG_S) == {8: {"nccl": b"8"}, 17: {"nccl": b"17"}}
    second.stop()
    assert its.puller.recorders([17], 0.0) == {17: {"nccl": b"17"}}  # fetched a moment ago


def test_recorders_can_be_asked_for_without_waiting(start, slow_rounds):
    launcher, given, asked = start(), threading.Event(), threading.Event()

    def give(ranks):
        given.set()
        asked.wait(LONG_S)
        return {rank: {"nccl": b"{}"} for rank in ranks}

    launcher.put()
    launcher.offer.recorders(give)
    its = slow_rounds(launcher.peer())
    its.round()
    assert its.puller.recorders([8], 0.0) == {}
    asked.set()
    assert given.wait(LONG_S)
    assert its.puller.recorders([8], LONG_S) == {8: {"nccl": b"{}"}}


def test_there_are_no_more_threads_than_nodes(start, judge):
    launchers = [start(group_rank=number, ranks=(number,)) for number in range(1, 7)]
    for launcher in launchers:
        launcher.put()
    its = judge(launchers[0].peer())
    its.round()
    threads = lambda: sum(thread.name == "rankwatch-pull-node" for thread in threading.enumerate())  # noqa: E731
    assert threads() == 1
    few = judge(*(launcher.peer() for launcher in launchers), workers=2)
    few.until(lambda: all(report.ranks for report in few.reports().values()))
    assert threads() <= 3


def test_a_callback_that_fails_does_not_end_the_pulling(start, judge):
    launcher, calls = start(), queue.Queue()
    launcher.put()

    def fails():
        calls.put(None)
        raise RuntimeError("the loop is gone")

    its = judge(launcher.peer())
    its.puller._came = fails
    for _ in range(3):
        calls.get(timeout=LONG_S)
    assert its.said == ["monitor error: RuntimeError: the loop is gone (after a round of pulls); the job is not affected"]


def test_events_of_a_loop_that_does_not_take_them_are_bounded(start, judge, monkeypatch):
    monkeypatch.setattr(pull, "MAX_EVENTS", 10)
    launcher = start()
    launcher.put(events=[{"kind": "compile", "rank": 8, "n": n} for n in range(25)])
    its = judge(launcher.peer())
    its.round()
    assert [event["n"] for event in its.puller.take_events()] == list(range(15, 25))
    assert its.puller.events_dropped == 15


def test_a_pull_under_way_is_cut_when_the_puller_stops(start, slow_rounds, monkeypatch):
    monkeypatch.setattr(schedule, "TRY_S", LONG_S * 3)
    asked = threading.Event()

    def mute(connection, stranger):
        asked.set()
        return silence(connection, stranger)

    its = slow_rounds(start(mute).peer())
    assert asked.wait(LONG_S)
    its.puller.stop()
    for thread in threading.enumerate():
        if thread.name.startswith("rankwatch-pull"):
            thread.join(LONG_S / 2)
            assert not thread.is_alive()


# -- launchers that --peers lists ------------------------------------------------------------------------------------------------


def listed(launcher, number):
    """As the list gives it: where it listens, nothing else."""
    return Peer(number, "127.0.0.1", ("127.0.0.1",), launcher.server.port, "", "")


def test_launchers_that_are_listed_say_which_group_rank_and_ranks_they_have(start, judge):
    """The places in the list are others: c10d sorts addresses as texts."""
    launchers = [start(group_rank=number, ranks=(8 * number, 8 * number + 1)) for number in (2, 3, 1)]
    for launcher in launchers:
        launcher.put(events=[{"kind": "compile", "rank": launcher.ranks[0]}])
    its = judge(*(listed(launcher, number) for number, launcher in enumerate(launchers, 1)))
    its.until(lambda: all(report.ranks for report in its.reports().values()))
    assert {number: [rank.rank for rank in report.ranks] for number, report in its.reports().items()} == {1: [8, 9], 2: [16, 17], 3: [24, 25]}
    assert [state.group_rank for state in its.puller.states()] == [1, 2, 3]
    assert sorted(event["rank"] for event in its.puller.take_events()) == [8, 16, 24]


def test_a_launcher_that_is_listed_is_nudged_by_its_own_group_rank(start, slow_rounds):
    launchers = [start(group_rank=number, ranks=(8 * number,)) for number in (2, 1)]
    for launcher in launchers:
        launcher.put(steps=1)
    its = slow_rounds(*(listed(launcher, number) for number, launcher in enumerate(launchers, 1)))
    its.until(lambda: all(report.ranks for report in its.reports().values()))
    launchers[0].put(steps=2)
    its.puller.nudge(2)
    its.until(lambda: its.reports()[2].ranks[0].steps == 2)


@pytest.mark.parametrize(
    ("group_rank", "ranks", "problem"),
    [
        (1, (16,), "it says that it is node 1, which 127.0.0.1 is"),
        (2, (8, 16), "it speaks for rank 8 of another node"),
        (2, (0, 1), "it speaks for ranks 0-1 of another node"),
        (0, (16,), "it says that it is node 0 of 3"),
        (77, (16,), "it says that it is node 77 of 3"),
    ],
)
def test_no_launcher_that_is_listed_takes_the_place_of_another_one(start, judge, group_rank, ranks, problem):
    first, second = start(group_rank=1, ranks=(8,)), start(group_rank=group_rank, ranks=ranks)
    first.put()
    its = judge(listed(first, 1), listed(second, 2), own_ranks=(0, 1))
    its.until(lambda: its.reports()[1].ranks)
    second.put()
    its.until(lambda: its.puller.states()[1].problem == problem)
    assert [rank.rank for rank in its.reports()[1].ranks] == [8]
    assert its.reports()[2].ranks == ()


def test_the_judge_does_not_ask_itself(start, judge):
    """Its own line is not known where its machine has other addresses than those that are listed."""
    itself, other = start(group_rank=0), start(group_rank=1)
    itself.offer.judges = True
    other.put()
    its = judge(listed(itself, 2), listed(other, 1))
    its.until(lambda: len(its.puller.states()) == 1 and its.reports()[1].ranks)
    its.puller.set_peers([listed(itself, 2), listed(other, 1)])
    assert [state.node for state in its.puller.states()] == ["127.0.0.1"]
    assert itself.offer.asked_at is None


def test_another_jobs_launcher_is_no_node_of_this_one(start, judge):
    launcher, refused = start(secret="of another job"), threading.Event()
    launcher.put()
    its = judge(listed(launcher, 1), refusal="it is another job's launcher")
    its.puller.on_refused = refused.set
    assert refused.wait(LONG_S)
    assert its.reports()[1].ranks == ()
    assert its.puller.states()[0].problem == f"127.0.0.1:{launcher.server.port} refuses this judge's secret: it is another job's launcher"


def test_members_are_told_which_line_is_the_judges(start, judge):
    launcher, told = start(), queue.Queue()
    launcher.offer.on_judge_line = told.put
    launcher.put()
    its = judge()
    its.puller.line = 4
    its.puller.set_peers([listed(launcher, 1)])
    assert told.get(timeout=LONG_S) == 4
