"""`--on-stuck exit`: what calls for it, when, what is recorded, and how torchrun is told. No process, no torch."""

import dataclasses
import io
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rankwatch.config import Options
from rankwatch.launcher import supervision as sv
from rankwatch.launcher.end_processes import end_processes
from rankwatch.launcher.torchrun import supervised
from rankwatch.model import Action, Group, Incident, JobInfo, NodeReport, Process, RankState, Status, Verdict
from rankwatch.monitor import loop
from rankwatch.monitor.action import ExitRequest, consider, unhealable
from rankwatch.monitor.on_stuck import OnStuck
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.workers import Worker, Workers
from rankwatch.notify import lines
from rankwatch.report import markdown, page, text
from rankwatch.report.incident import to_json

VERDICT = Verdict(
    key="a0-hang-1", verdict="stuck", cause="mismatch", domain="user_code", culprit_ranks=(1,), waiting_ranks=(0,), since=90.0, summary="rank 1 calls barrier"
)
LIMITS = Limits()


def incident(verdict=VERDICT, name="x-1"):
    return Incident(id=name, verdict=verdict, opened_at=92.0, opened_wall_at=1092.0, updated_wall_at=1092.0, history=())


@pytest.mark.parametrize(
    ("verdict", "cause", "acts"),
    [
        ("stuck", "mismatch", True),
        ("stuck", "group_order_deadlock", True),
        ("stuck", "stopped", True),
        ("diverged", "mismatch", True),
        ("failed", "exited", True),
        ("failed", "killed", True),
        ("slow", "mismatch", False),
        ("stuck", "not_entered", False),
        ("stuck", "compiling", False),
        ("stuck", "gil_held", False),
        ("stuck", "data_loading", False),
        ("stuck", "checkpointing", False),
        ("stuck", "uninterruptible", False),
        ("stuck", "store_wait", False),
        ("stuck", "all_entered", False),
        ("stuck", "debugger", False),
        ("timeout_imminent", "mismatch", False),
        ("straggler", "not_entered", False),
        ("recovered", "mismatch", False),
    ],
)
def test_only_what_cannot_heal_calls_for_the_end(verdict, cause, acts):
    assert unhealable(dataclasses.replace(VERDICT, verdict=verdict, cause=cause)) is acts


def test_doubt_never_ends_a_job():
    assert not unhealable(dataclasses.replace(VERDICT, confidence="likely"))
    assert not unhealable(dataclasses.replace(VERDICT, confidence="partial"))
    assert not unhealable(dataclasses.replace(VERDICT, unknown_ranks=(7,)))


def steps(timeline, verdict=VERDICT, limits=LIMITS):
    """The steps of a timeline of (now, gathering, written)."""
    intent, found = None, []
    for now, gathering, written in timeline:
        intent, step = consider(intent, (incident(verdict),), now, gathering, written, limits)
        found.append(step)
    return found


def test_it_stands_for_three_seconds_then_the_evidence_is_awaited_then_it_acts():
    assert steps([(100, False, False), (102.9, False, False), (103, False, False), (103.2, False, False), (103.5, False, True)]) == [
        "wait", "wait", "mark", "wait", "act",
    ]  # fmt: skip


def test_evidence_that_is_still_fetched_is_awaited():
    assert steps([(100, True, False), (104, True, False), (108, True, False), (109, False, False), (109.1, False, True)]) == [
        "wait", "wait", "wait", "mark", "act",
    ]  # fmt: skip


def test_a_disk_that_hangs_delays_it_by_ten_seconds_and_no_more():
    assert steps([(100, False, False), (103, False, False), (112.9, False, False), (113, False, False)]) == ["wait", "mark", "wait", "act_incomplete"]


def test_a_stopped_process_gets_a_minute_to_be_continued():
    stopped = dataclasses.replace(VERDICT, cause="stopped")
    assert steps([(100, False, False), (159, False, False), (160, False, False), (160.3, False, True)], stopped) == ["wait", "wait", "mark", "act"]


def test_a_finding_that_changes_or_goes_starts_anew():
    intent, _ = consider(None, (incident(),), 100.0, False, False, LIMITS)
    other = incident(dataclasses.replace(VERDICT, culprit_ranks=(2,)))
    intent, step = consider(intent, (other,), 104.0, False, False, LIMITS)
    assert (intent.since, step) == (104.0, "wait")
    assert consider(intent, (), 105.0, False, False, LIMITS) == (None, "wait")
    assert consider(None, (dataclasses.replace(incident(), closed_at=99.0),), 105.0, False, False, LIMITS) == (None, "wait")


# -- the monitor -----------------------------------------------------------------------------------------------------------

WORKERS = Workers(0, 0, 2, 1, "host", None, "", (Worker(0, 0, 2_000_000_100), Worker(1, 1, 2_000_000_101)))


class FakeReader:
    suspicious = False

    def __init__(self, workers):
        self.workers, self.started_at = workers, time.monotonic()

    def read(self, wants=(), urgent=False, final=False):
        group = Group("0", "default_pg", "gloo", (0, 1), 1800.0)
        return NodeReport("host", tuple(RankState(n, n, "host", process=Process(2_000_000_100 + n, True), groups=(group,)) for n in (0, 1)))

    def raw_recorders(self, ranks):
        return {rank: {"fr_trace_json": b'{"entries":[]}'} for rank in ranks}

    def take_events(self):
        return []

    def pids(self):
        return {}

    def socket_of(self, number):
        return ""

    def close(self):
        pass


def monitor_of(tmp_path, monkeypatch, on_stuck, **limits):
    monkeypatch.setattr(loop, "Reader", FakeReader)
    monkeypatch.setattr(loop, "diagnose", lambda state, snapshot, now, limits: (state, (VERDICT,), ()))
    job = JobInfo("job", str(tmp_path), ("rankwatch",), "host", 2, 1, 0, {}, {}, time.time())
    made = loop.Monitor(Options(listen="off", on_stuck=on_stuck), job, Limits.from_options(None, {"exit_hold_s": 0.01, **limits}), io.StringIO())
    made._take_workers(WORKERS)
    return made


def look_until(made, condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        made._tick()
        time.sleep(0.02)


def test_the_request_comes_after_the_evidence_is_on_disk_and_the_action_is_recorded_everywhere(tmp_path, monkeypatch):
    made = monitor_of(tmp_path, monkeypatch, "exit")
    seen = []
    acted = made._cases.act
    monkeypatch.setattr(made._cases, "act", lambda *args: (seen.append(sorted(p.name for p in tmp_path.glob("incidents/*/*"))), acted(*args)))
    look_until(made, lambda: made.exit_request is not None)
    assert {"incident.json", "report.txt", "fr"} <= set(seen[0])
    why = "rankwatch ended the workers (--on-stuck exit): rank 1 calls barrier"
    request = made.exit_request
    assert (request.attempt, request.culprit_ranks, request.why) == (0, (1,), why)
    for _ in range(3):
        made._tick()
    assert made.exit_request is request
    assert made._writer.flush(10)
    assert made._announcer.flush(10)
    (document,) = [json.loads(path.read_text()) for path in tmp_path.glob("incidents/*/incident.json")]
    assert (document["action"]["taken"], document["action"]["why"]) == ("exit", why)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["taken"], event["culprit_ranks"]) for event in events if event["event"] == "action"] == [("exit", [1])]
    assert sum(" ACTION taken=exit rank=1 cause=mismatch why=" in line for line in made._announcer._out.getvalue().splitlines()) == 1
    made._exits.close()


def test_observe_asks_for_nothing(tmp_path, monkeypatch):
    made = monitor_of(tmp_path, monkeypatch, "observe")
    for _ in range(20):
        made._tick()
    assert made.exit_request is None
    assert made.status.open_incidents[0].action is None
    made._exits.close()


def test_a_disk_that_hangs_is_waited_for_and_named(tmp_path, monkeypatch):
    made = monitor_of(tmp_path, monkeypatch, "exit", exit_evidence_s=0.3)
    monkeypatch.setattr(made._writer, "mark", threading.Event)
    began = time.monotonic()
    look_until(made, lambda: made.exit_request is not None)
    assert time.monotonic() - began >= 0.3
    assert made.exit_request.why.endswith("; the evidence was not complete on disk within 0.3 s")
    made._exits.close()


# -- what people see -------------------------------------------------------------------------------------------------------


def test_the_action_stands_in_every_report():
    taken = dataclasses.replace(incident(), action=Action("exit", 1100.0, "rankwatch ended the workers (--on-stuck exit): x"))
    status = Status(JobInfo("job", "/run", (), "host", 2, 1, 0, {}, {}, 1000.0), None)
    document = to_json(taken, status)
    assert document["action"] == {"taken": "exit", "at": 1100.0, "why": "rankwatch ended the workers (--on-stuck exit): x"}
    assert "action   00:18:20Z rankwatch ended the workers (--on-stuck exit): x" in text.render(document)
    assert "rankwatch ended the workers (--on-stuck exit): x" in page.render(document)
    assert "Action: 00:18:20Z" in markdown.render(document)
    assert json.loads(lines.action(taken, status, as_json=True))["taken"] == "exit"
    assert lines.action(incident(), status) == ""
    assert to_json(incident(), status)["action"] is None


# -- the launcher ----------------------------------------------------------------------------------------------------------


class Healthy:
    """torchrun's agent, whose workers run on."""

    def _rendezvous(self, worker_group): ...
    def _start_workers(self, worker_group): ...
    def _stop_workers(self, worker_group): ...

    def _monitor_workers(self, worker_group):
        return SimpleNamespace(state=SimpleNamespace(name="HEALTHY"), failures={})


class FakeMonitor:
    def __init__(self):
        self.exit_request = None
        self.reasons = []

    def ending(self, reason):
        self.reasons.append(reason)


def supervision_with(monitor):
    made = sv.Supervision(Options(), Limits(), (), {}, print)
    made._attempt, made._pids, made._monitor = 0, {0: 2_000_000_100, 1: 2_000_000_101}, monitor
    return made


def test_a_request_is_taken_once_and_only_for_the_attempt_that_runs():
    monitor = FakeMonitor()
    made = supervision_with(monitor)
    assert made.exit_request() is None
    monitor.exit_request = ExitRequest(1, "x-1", (1,), "why")
    assert made.exit_request() is None
    monitor.exit_request = request = ExitRequest(0, "x-1", (1,), "why")
    assert made.exit_request() is request
    assert made.exit_request() is None
    made.failing({0: -15}, 0.0)
    assert monitor.reasons == ["rankwatch ends the workers (--on-stuck exit)"]


def test_the_judges_order_is_obeyed_once_and_for_the_attempt_that_runs():
    acts = OnStuck(LIMITS, None)
    acts.obey(1, (5,), "rank 5 calls barrier")
    assert acts.request == ExitRequest(1, "", (5,), "rank 5 calls barrier")
    acts.obey(1, (6,), "another")
    assert acts.request.culprit_ranks == (5,)
    acts.obey(2, (6,), "another")
    assert acts.request == ExitRequest(2, "", (6,), "another")


def test_workers_that_fail_by_themselves_are_torchruns():
    monitor = FakeMonitor()
    made = supervision_with(monitor)
    made._failed_rank = 1
    monitor.exit_request = ExitRequest(0, "x-1", (1,), "why")
    assert made.exit_request() is None


def test_without_torchs_names_the_workers_get_signals(monkeypatch):
    """The poll then says what torch said: the next one sees the workers dead."""
    monitor = FakeMonitor()
    monitor.exit_request = ExitRequest(0, "x-1", (1,), "why")
    made, sent, said = supervision_with(monitor), [], []
    monkeypatch.setattr(sv, "end_processes", lambda pids, kill_after_s: sent.append((pids, kill_after_s)))
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.agent.server.api", None)
    agent = supervised(Healthy, made, KeyboardInterrupt, said.append)()
    assert agent._monitor_workers(SimpleNamespace(workers=[])).state.name == "HEALTHY"
    end = time.monotonic() + 10
    while not sent:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sent == [((2_000_000_100, 2_000_000_101), 30.0)]
    assert "supervision impaired" in said[0]


def test_a_child_that_ignores_sigterm_is_killed():
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as deaf, subprocess.Popen(["sleep", "60"]) as plain:
        deaf.stdout.readline()
        end_processes((deaf.pid, plain.pid), 0.3)
        assert (deaf.wait(20), plain.wait(20)) == (-signal.SIGKILL, -signal.SIGTERM)
        end_processes((deaf.pid, plain.pid), 0.3)


@pytest.mark.parametrize("value", ["observe", "exit"])
def test_the_option_is_read_from_every_layer(value, tmp_path):
    from rankwatch.config import load

    file = tmp_path / "c.toml"
    file.write_text(f'on-stuck = "{value}"\n')
    assert load((), {}, [str(file)]).on_stuck == value
    assert load((), {"RANKWATCH_ON_STUCK": value}, []).on_stuck == value
    assert load([("on-stuck", value)], {}, []).on_stuck == value
    assert load((), {}, []).on_stuck == "observe"
