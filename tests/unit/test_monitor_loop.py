"""The loop's wiring: a reader that the test feeds, everything behind it real. No process, no torch."""

import dataclasses
import io
import json
import os
import threading
import time

import pytest

from rankwatch.config import Options
from rankwatch.model import Collective, Group, JobInfo, NodeReport, Process, RankState
from rankwatch.monitor import loop, outside, writer
from rankwatch.monitor.loop import Monitor
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.workers import Worker, Workers

WORKERS = Workers(0, 0, 2, 1, "host", None, "", (Worker(0, 0, 2_000_000_100), Worker(1, 1, 2_000_000_101)))
GROUP = Group("0", "default_pg", "gloo", (0, 1), 1800.0)


def until(condition, deadline_s=10.0):
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.01)
    return found


class FakeReader:
    """Reports what the test has put into `ranks`."""

    ranks = ()
    made = []
    suspicious = False

    def __init__(self, workers):
        self.workers = workers
        self.started_at = time.monotonic()
        self.calls = []
        self.exits = {}
        self.closed = False
        FakeReader.made.append(self)

    def read(self, wants=(), urgent=False, final=False):
        self.calls.append((urgent, final))
        now = time.monotonic()
        return NodeReport("host", tuple(dataclasses.replace(rank, heartbeat_at=now) if rank.process.alive else rank for rank in FakeReader.ranks))

    def exited(self, exits):
        self.exits.update(exits)
        FakeReader.ranks = tuple(
            dataclasses.replace(rank, process=Process(rank.process.pid, alive=False, exit_code=exits[rank.rank], exited_at=time.monotonic()))
            if rank.rank in exits
            else rank
            for rank in FakeReader.ranks
        )

    def exited_pid(self, pid, code):
        pass

    def raw_recorders(self, ranks):
        return {rank: {"fr_trace_json": b'{"entries":[]}'} for rank in ranks}

    def take_events(self):
        return [{"kind": "compiled", "wall_ns": 1_000_000_000, "rank": 1, "frame": "f"}] if len(self.calls) == 1 else []

    def pids(self):
        return {}

    def socket_of(self, number):
        return ""

    def close(self):
        self.closed = True


def rank(number, enqueued=10, completed=10, **fields):
    collectives = tuple(
        Collective("0", 0, seq, "all_reduce", ((4,),), ((4,),), ("Float",), time.time(), 1800.0, done=seq <= completed)
        for seq in range(max(1, enqueued - 5), enqueued + 1)
    )
    process = Process(2_000_000_100 + number, alive=True, state="S", cpu_s=1.0, tree_cpu_s=1.0)
    known = {"enqueued": {"0": enqueued}, "completed": {"0": completed}, "groups": (GROUP,), "collectives": collectives, "collectives_at": time.monotonic()}
    return RankState(number, number, "host", process=process, steps=30, last_step_at=time.monotonic(), **{**known, **fields})


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "Reader", FakeReader)
    FakeReader.ranks, FakeReader.made = (rank(0), rank(1)), []
    job = JobInfo("job", str(tmp_path), ("rankwatch", "torchrun", "x.py"), "host", 2, 1, 0, {"rankwatch": "0"}, {}, time.time())
    out = io.StringIO()
    made = Monitor(Options(listen="off"), job, Limits.from_options(None, {}), out)
    made.out, made.run_dir = out, tmp_path
    yield made
    made._thread.stop()
    made._exits.close()


def events(monitor):
    assert monitor._writer.flush(10)
    return [json.loads(line) for line in (monitor.run_dir / "events.jsonl").read_text().splitlines()]


def said(monitor):
    assert monitor._announcer.flush(10)
    return monitor.out.getvalue().splitlines()


def test_a_look_publishes_a_status_and_logs_the_ranks_events(monitor):
    monitor._take_workers(WORKERS)
    monitor._tick()
    assert monitor.status.snapshot.world_size == 2
    assert monitor.status.health.polls == 1
    assert monitor.status.state == "running"
    assert [event["event"] for event in events(monitor)] == ["workers_started", "compiled"]
    assert events(monitor)[1] == {"at": 1.0, "event": "compiled", "rank": 1, "frame": "f"}
    assert json.loads((monitor.run_dir / "run.json").read_text())["world_size"] == 2


def test_the_gap_between_looks_is_measured(monitor):
    monitor._take_workers(WORKERS)
    monitor._tick()
    assert monitor.status.snapshot.gap_s == 0.0
    monitor._looked_at -= 100
    monitor._tick()
    assert 100 <= monitor.status.snapshot.gap_s < 110


def test_a_failure_is_judged_written_and_told_before_the_call_returns(monitor):
    monitor.start()
    monitor.workers_started(WORKERS)
    until(lambda: monitor.status.health.polls >= 2)
    FakeReader.ranks = (rank(0, enqueued=11), rank(1))
    monitor.workers_failing({1: -9}, 5.0)
    assert FakeReader.made[0].exits == {1: -9}
    assert (True, False) in FakeReader.made[0].calls
    incident = monitor.status.open_incidents[0]
    assert (incident.verdict.verdict, incident.verdict.cause, incident.verdict.culprit_ranks) == ("failed", "killed", (1,))
    place = monitor.run_dir / "incidents" / incident.id
    assert sorted(os.listdir(place)) == ["fr", "incident.json", "index.html", "report.txt"]
    assert json.loads((place / "incident.json").read_text())["verdict"] == "failed"
    monitor.ending("torchrun stops the workers after rank 1 failed")
    monitor.workers_stopped("torchrun stops the workers after rank 1 failed")
    monitor.stop(1)
    lines = monitor.out.getvalue().splitlines()
    assert sum(" FAILED rank=1 " in line for line in lines) == 1
    assert any("FAILED: rank 1" in line for line in lines)
    assert json.loads((monitor.run_dir / "run.json").read_text())["exit_code"] == 1
    assert monitor.status.state == "failed"


def test_an_end_that_was_planned_blames_nobody(monitor):
    monitor.start()
    monitor.workers_started(WORKERS)
    until(lambda: monitor.status.health.polls >= 1)
    monitor.ending("SIGINT to the launcher")
    monitor.workers_failing({0: -2, 1: -2}, 5.0)
    monitor.stop(1)
    assert monitor.status.open_incidents == ()
    assert not any("FAILED" in line for line in monitor.out.getvalue().splitlines())


def test_stop_after_success_is_quick_and_says_the_last_line(monitor):
    monitor.start()
    monitor.workers_started(WORKERS)
    until(lambda: monitor.status.health.polls >= 1)
    began = time.monotonic()
    monitor.stop(0)
    assert time.monotonic() - began < 2.0
    assert FakeReader.made[0].calls[-1] == (False, True)
    assert monitor.out.getvalue().splitlines()[-1].startswith("[rankwatch] done ")
    assert monitor.status.state == "done"


def test_a_job_that_is_over_before_the_first_look_leaves_its_record_and_its_last_line(monitor, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(monitor._web, "start", lambda: never.wait(0.6))  # past what the end of a longer job waits for
    FakeReader.ranks = tuple(
        dataclasses.replace(rank(number), agent="silent", process=Process(2_000_000_100 + number, alive=False, exit_code=0)) for number in (0, 1)
    )
    monitor.start()
    monitor.workers_started(WORKERS)
    monitor.stop(0)
    document = json.loads((monitor.run_dir / "run.json").read_text())
    assert (document["exit_code"], document["state"], document["ended_at"] is not None) == (0, "done", True)
    first, last = monitor.out.getvalue().splitlines()
    words = "watching 2 ranks on 1 node; compile, ddp, collectives, steps, cudagraph, memory: the ranks ended before they reported, stacks unknown; status off"
    assert words in first
    assert last.startswith("[rankwatch] done ")


def test_a_fault_of_ours_is_counted_said_once_and_ends_nothing(monitor, monkeypatch):
    monitor._take_workers(WORKERS)
    monkeypatch.setattr(FakeReader, "read", lambda self, *how: 1 / 0)
    for _ in range(3):
        monitor._thread.guarded(monitor._tick)
    assert monitor.status.health.errors == 3
    assert "ZeroDivisionError" in monitor.status.health.last_error
    assert sum("monitor error: ZeroDivisionError" in line for line in said(monitor)) == 1
    monkeypatch.undo()


def test_twenty_faults_in_a_row_switch_supervision_off_with_one_line(monitor, monkeypatch):
    monitor._take_workers(WORKERS)
    monkeypatch.setattr(FakeReader, "read", lambda self, *how: 1 / 0)
    for _ in range(25):
        monitor._thread.guarded(monitor._tick)
    assert monitor.status.health.errors == 20
    assert sum("supervision off" in line for line in said(monitor)) == 1
    monkeypatch.undo()


def test_a_restart_begins_with_fresh_judgement_and_keeps_closed_incidents(monitor):
    monitor._take_workers(WORKERS)
    monitor._tick()
    monitor._look_at_failure({1: 3}, time.monotonic() + 1)
    assert len(monitor.status.open_incidents) == 1
    monitor._end("torchrun stops the workers after rank 1 failed")
    monitor._restart(1)
    assert (monitor.status.state, monitor.status.restarts, FakeReader.made[0].closed) == ("restarting", 1, True)
    assert monitor.status.open_incidents == ()
    assert (len(monitor.status.closed_incidents), monitor.status.closed_incidents[0].final) == (1, False)
    monitor._tick()
    FakeReader.ranks = (rank(0), rank(1))
    monitor._take_workers(dataclasses.replace(WORKERS, attempt=1))
    for _ in range(3):
        monitor._tick()
    assert monitor.status.open_incidents == ()
    assert monitor.status.snapshot.attempt == 1
    assert monitor.status.snapshot.ending == ""
    assert len(monitor.status.closed_incidents) == 1


def loss(monitor):
    """Rank 1 has gone, rank 0 is left: an open incident."""
    monitor._take_workers(WORKERS)
    monitor._tick()
    monitor._look_at_failure({1: 3}, time.monotonic() + 1)
    return monitor.status.open_incidents[0]


def test_the_last_rewrite_says_how_the_job_ended_and_shows_the_ranks_from_before(monitor):
    incident = loss(monitor)
    monitor._end("SIGINT to the launcher")
    FakeReader.ranks = tuple(dataclasses.replace(one, stage="exiting", steps=99) for one in FakeReader.ranks)
    monitor._tick()
    monitor._finish(1, time.monotonic() + 2)
    place = monitor.run_dir / "incidents" / incident.id
    document = json.loads((place / "incident.json").read_text())
    assert (document["job"]["exit_code"], document["job"]["ending"], document["job"]["state"]) == (1, "SIGINT to the launcher", "failed")
    assert document["job"]["ended_at"] == pytest.approx(time.time(), abs=5)
    assert (document["ranks"]["0"]["steps"], document["ranks"]["0"]["stage"]) == (30, "joined")
    assert "with exit code 1 (SIGINT to the launcher)" in (place / "report.txt").read_text()
    assert "with exit code 1 (SIGINT to the launcher)" in (place / "index.html").read_text()


def test_what_a_restart_ends_reads_as_restarted(monitor):
    incident = loss(monitor)
    monitor._end("torchrun stops the workers after rank 1 failed")
    monitor._restart(1)
    assert monitor._writer.flush(10)
    document = json.loads((monitor.run_dir / "incidents" / incident.id / "incident.json").read_text())
    assert (document["job"]["state"], document["job"]["attempt"], document["job"]["ending"]) == (
        "restarting",
        1,
        "torchrun stops the workers after rank 1 failed",
    )
    assert "torchrun restarted the workers (attempt 1) after" in document["summary"]
    assert document["ranks"]["0"]["stage"] == "joined"
    assert (document["verdict"], document["closed_at"]) == ("failed", None), "the new attempt has not got anywhere yet"
    assert [change["verdict"] for change in document["history"]] == ["failed"]
    assert not any(" RECOVERED " in line for line in said(monitor))
    FakeReader.ranks = tuple(dataclasses.replace(rank(number), steps=0, completed={}) for number in (0, 1))
    monitor._take_workers(dataclasses.replace(WORKERS, attempt=1))
    monitor._tick()
    assert not any(" RECOVERED " in line for line in said(monitor))
    FakeReader.ranks = (rank(0), rank(1))
    for _ in range(2):
        monitor._tick()
    (line,) = (line for line in said(monitor) if " RECOVERED " in line)
    assert " rank=1 " in line
    assert " by=restart attempt=1 " in line
    assert monitor._writer.flush(10)
    document = json.loads((monitor.run_dir / "incidents" / incident.id / "incident.json").read_text())
    assert (document["verdict"], [change["verdict"] for change in document["history"]]) == ("recovered", ["failed", "recovered"])
    assert document["closed_at"] is not None


@pytest.mark.parametrize(("exit_code", "verdict"), [(1, "failed"), (0, "recovered")])
def test_a_restart_that_gets_nowhere_is_no_recovery_unless_the_job_ends_well(monitor, exit_code, verdict):
    incident = loss(monitor)
    monitor._end("torchrun stops the workers after rank 1 failed")
    monitor._restart(1)
    FakeReader.ranks = tuple(dataclasses.replace(rank(number), steps=0, completed={}) for number in (0, 1))
    monitor._take_workers(dataclasses.replace(WORKERS, attempt=1))
    monitor._tick()
    monitor._restart(2)
    monitor._take_workers(dataclasses.replace(WORKERS, attempt=2))
    monitor._tick()
    monitor._finish(exit_code, time.monotonic() + 2)
    document = json.loads((monitor.run_dir / "incidents" / incident.id / "incident.json").read_text())
    assert document["verdict"] == verdict
    assert not any(" RECOVERED " in line for line in said(monitor))


def test_calls_before_the_start_and_after_the_end_return(monitor):
    monitor.workers_failing({0: 1}, 0.1)
    monitor.ending("x")
    monitor.stop(0)
    monitor.restarting(1)
    monitor.workers_started(WORKERS)


def test_the_incident_command_gets_the_document_on_stdin(monitor, tmp_path, monkeypatch):
    got = []
    done = threading.Event()

    def run(change, incident_id, document, reason, path):
        got.append((change, incident_id, json.loads(document())))
        done.set()

    monkeypatch.setattr(monitor._command, "run", run)
    monitor._take_workers(WORKERS)
    monitor._tick()
    monitor._look_at_failure({1: 3}, time.monotonic() + 1)
    assert done.wait(10)
    assert (got[0][0], got[0][2]["verdict"]) == ("opened", "failed")


def test_alertmanager_and_webhook_are_told_by_the_judge_alone(monitor, monkeypatch):
    """What is open at each look, each change, the end of the job; nothing while another launcher judges."""

    class Told:
        def __init__(self):
            self.calls = []
            self.tells = True
            self.counts = {}

        def look(self, status):
            self.calls.append(("look", [incident.verdict.verdict for incident in status.open_incidents]))

        def rest(self):
            self.calls.append(("rest",))

        def changed(self, kind, incident, status, reason=""):
            self.calls.append((kind, reason))

        def finish(self):
            self.calls.append(("finish",))

        def flush(self, timeout_s):
            return True

    told = monitor._outside.direct = monitor._cases._direct = Told()
    monitor._take_workers(WORKERS)
    monitor._tick()
    monitor._look_at_failure({1: 3}, time.monotonic() + 1)
    assert told.calls[:3] == [("look", []), ("opened", ""), ("look", ["failed"])]
    monitor._finish(1, time.monotonic() + 2)
    assert told.calls[-2:] == [("closed", "job_ended"), ("finish",)]
    monitor._cases.speaks = False
    monitor._cases.tell((), monitor.status)
    assert told.calls[-1] == ("rest",)


def test_the_end_of_the_job_closes_every_open_incident_for_the_command(monitor, monkeypatch):
    last = []
    monkeypatch.setattr(monitor._command, "finish", last.extend)
    monkeypatch.setattr(monitor._command, "run", lambda *told: None)
    monitor._take_workers(WORKERS)
    monitor._tick()
    monitor._look_at_failure({1: 3}, time.monotonic() + 1)
    monitor._finish(1, time.monotonic() + 2)
    ((incident_id, change, reason, document),) = [(call.incident_id, call.change, call.reason, json.loads(call.document())) for call in last]
    assert (change, reason) == ("closed", "job_ended")
    assert (document["id"], document["verdict"], document["final"], document["closed_by"]) == (incident_id, "failed", True, "job_ended")
    assert document["job"]["exit_code"] == 1
    assert document["closed_at"] == document["job"]["ended_at"]
    events = [json.loads(line) for line in (monitor.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in events if event["event"] == "incident_closed"] == ["job_ended"]


def test_another_node_of_the_job_writes_below_nodes(monitor):
    monitor._take_workers(dataclasses.replace(WORKERS, group_rank=1, node="node/05"))
    assert monitor._writer.flush(10)
    assert [name.rsplit("-", 1)[0] for name in os.listdir(monitor.run_dir / "nodes")] == ["node_05"]


@pytest.mark.parametrize(("fallback", "run"), [(True, "fallback"), (False, "")])
def test_a_run_directory_that_hangs_at_the_end_is_told_and_no_file_is_named_that_is_not_there(monitor, tmp_path, monkeypatch, fallback, run):
    """The last lines name the fallback where it took the files, else no place, and say that files are missing."""
    gate, real = threading.Event(), writer.replace_file

    def write(path, data, mode):
        if not fallback or not path.startswith(str(tmp_path / "fallback")):
            gate.wait(30)
        real(path, data, mode)

    monkeypatch.setattr(writer, "replace_file", write)
    monkeypatch.setattr(loop, "LAST_HUNG_S", 0.0)
    monkeypatch.setattr(loop, "LATE_FILES_S", 0.3)
    (tmp_path / "fallback").mkdir()
    monitor._writer._fallback_parent = str(tmp_path / "fallback")
    monitor._take_workers(WORKERS)
    monitor._tick()
    monitor._finish(1, time.monotonic() + 2.0)
    lines = said(monitor)
    gate.set()
    (done,) = [line for line in lines if line.startswith("[rankwatch] done ")]
    assert (f"run={tmp_path / run}" in done) is fallback
    assert any("not everything could be written to" in line for line in lines) is not fallback
    assert not any(f"run directory: {tmp_path}\n" in line for line in lines)


class Elsewhere:
    """The part of a member whose judge is elsewhere. It answers what the test has set, and nothing else."""

    judges, sets_pace, may_act, store, problem = False, False, True, (0, 0), ""
    judge, judge_node = "worker-0", "worker-0"
    judge_has_ended = gone = told = False
    spoken, endings = True, ()

    def offer(self, *_report):
        pass

    def merge(self, snapshot):
        return snapshot

    def take_events(self):
        return []

    def take_order(self):
        return None

    def take_wants(self):
        return ()

    def ask(self, wants, suspected):
        pass

    def tell_news(self, nodes):
        pass

    def tell_open(self, incidents, wall_at):
        pass

    def tell_end(self, failed, wait_s):
        pass

    def pull_now(self, deadline_s):
        pass

    def hand_over(self, wait_s):
        pass

    def recorders(self, ranks):
        return {}

    def last_words(self):
        return []

    def take_endings(self):
        taken, self.endings = self.endings, ()
        return taken

    def spoken_for(self, now):
        return self.spoken

    def judge_is_gone(self, since):
        return self.gone

    def judge_has_told(self, now):
        return self.told

    def stop(self):
        pass


def as_member(monitor):
    monitor._take_workers(dataclasses.replace(WORKERS, group_rank=1))
    part = monitor._nodes.together = Elsewhere()
    monitor._nodes._speak(False, monitor.status, anew=True)
    return part


def test_a_member_whose_judge_has_vanished_speaks(monitor):
    part = as_member(monitor)
    part.spoken = False
    monitor._tick()
    assert any("has stopped asking: this one judges its own ranks" in line for line in said(monitor))


def test_a_member_that_ends_does_not_begin_to_speak(monitor):
    part = as_member(monitor)
    monitor._end("rankwatch ends the workers (--on-stuck exit)")
    part.spoken = False
    monitor._tick()
    assert said(monitor) == []
    assert not monitor._cases.speaks


@pytest.mark.parametrize(("gone", "lines"), [(True, " FAILED rank=1 "), (False, "[rankwatch] worker-0 has ended; its log tells of the whole job")])
def test_how_a_members_job_has_failed_is_said_by_it_or_by_the_judge_that_has_ended(monitor, gone, lines):
    part = as_member(monitor)
    part.gone, part.told = gone, not gone
    monitor._tick()
    monitor._look_at_failure({1: 3}, time.monotonic() + 1)
    monitor._finish(1, time.monotonic() + 2)
    told = said(monitor)
    assert any(lines in line for line in told)
    if not gone:
        assert len(told) == 1


def test_a_node_that_has_left_is_told_with_what_goes_on(monitor):
    monitor._take_workers(dataclasses.replace(WORKERS, nnodes=2))
    part = monitor._nodes.together = Elsewhere()
    part.spoken, part.endings = False, ({"kind": "ending", "node": "worker-2", "reason": "SIGTERM to the launcher"},)
    monitor._tick()
    monitor._take_workers(dataclasses.replace(WORKERS, attempt=1))
    assert "[rankwatch] worker-2 has left: SIGTERM to its launcher; the job goes on with 2 ranks on 1 node" in said(monitor)
    assert monitor._writer.flush(10)
    assert json.loads((monitor.run_dir / "run.json").read_text())["nnodes"] == 1


@pytest.fixture
def archiving(monitor, tmp_path):
    """The same, with --archive-dir and --external-url."""
    (tmp_path / "shared").mkdir()
    options = Options(listen="off", archive_dir=str(tmp_path / "shared"), external_url="https://pages.example/rw")
    made = Monitor(options, dataclasses.replace(monitor.status.job, run_dir=str(tmp_path / "out")), Limits.from_options(None, {}), monitor.out)
    made.out = monitor.out
    yield made
    made._thread.stop()
    made._exits.close()


def test_what_is_told_is_the_page_of_this_run_in_a_folder_that_no_other_run_has(archiving, tmp_path):
    (tmp_path / "shared" / "job-out").mkdir()
    archiving._take_workers(WORKERS)
    (name,) = set(os.listdir(tmp_path / "shared")) - {"job-out"}
    assert name.startswith("job-out-")
    archiving._take_workers(dataclasses.replace(WORKERS, attempt=1))
    assert archiving.status.job.archive_url == archiving.status.job.status_url == f"https://pages.example/rw/{name}/"
    archiving._tick()
    archiving._finish(0, time.monotonic() + 0.2)
    assert archiving._outside.archive.flush(10)
    assert os.listdir(tmp_path / "shared" / name) == ["index.html"]
    assert any(f"; status https://pages.example/rw/{name}/ " in line for line in said(archiving))


def test_another_node_of_the_job_takes_no_folder_of_the_archive(archiving, tmp_path):
    archiving._take_workers(dataclasses.replace(WORKERS, group_rank=1))
    archiving._tick()
    archiving._finish(0, time.monotonic() + 0.2)
    assert os.listdir(tmp_path / "shared") == []
    assert archiving.status.job.archive_url == archiving.status.job.status_url == ""


@pytest.mark.parametrize("exit_code", [0, 1])
def test_an_archive_that_hangs_at_the_end_is_told_after_the_pages_to_people_have_gone(archiving, monkeypatch, exit_code):
    gate, begun, order = threading.Event(), threading.Event(), []
    flush, tell = archiving._outside.archive.flush, archiving._outside.direct.flush
    monkeypatch.setattr(archiving._outside.archive, "flush", lambda most_s: (order.append("archive"), flush(most_s))[1])
    monkeypatch.setattr(archiving._outside.direct, "flush", lambda most_s: (order.append("direct"), tell(most_s))[1])
    monkeypatch.setattr(outside, "ARCHIVE_WAIT_S", 0.1)
    archiving._take_workers(WORKERS)
    archiving._outside.archive.put("index.html", lambda: begun.set() or b"%d" % gate.wait(30))
    assert begun.wait(10), "the next version would take its place"
    archiving._tick()
    archiving._finish(exit_code, time.monotonic() + 0.2)
    gate.set()
    assert order == ["direct", "archive"]
    assert [line for line in said(archiving) if "not everything could be copied to" in line]


def test_no_wait_at_the_end_is_longer_than_what_the_launcher_grants(archiving, monkeypatch):
    """Whatever was late before: the bound is one for all."""
    waits = []
    monkeypatch.setattr(archiving._outside.archive, "flush", lambda most_s: waits.append(most_s) or True)
    monkeypatch.setattr(archiving._outside.direct, "flush", lambda most_s: waits.append(most_s) or True)
    archiving._take_workers(WORKERS)
    long_ago = time.monotonic() - 60
    archiving._outside.wait(long_ago, loop.LATE_FILES_S, time.monotonic())
    assert waits == [0.0, 0.0]
