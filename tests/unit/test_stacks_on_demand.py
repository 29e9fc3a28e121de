"""What the launcher answers: itself, the state, stacks of ranks here and elsewhere, one dump at a time."""

import dataclasses
import json
import threading
import time

import pytest
from build_status import LOAD, NOW, WAIT, healthy_status, stack, stuck_status

from rankwatch.model import Stack
from rankwatch.monitor import on_demand
from rankwatch.monitor.on_demand import Found, OnDemand
from rankwatch.monitor.stacks import Target
from rankwatch.monitor.workers import Worker, Workers
from rankwatch.serve.control import ControlError

LOCAL = range(8)
WORKERS = Workers(0, 0, 8, 1, "node05", None, "", tuple(Worker(rank, rank, 21106 + rank) for rank in LOCAL))


class Capture:
    """Dumps at once, or when `go_on` is set."""

    def __init__(self):
        self.taken = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Semaphore(0)

    def capture(self, target, native=False):
        self.taken.append((target.rank, native))
        self.entered.release()
        assert self.go_on.wait(10)
        return stack(target.pid, LOAD if target.rank == 1 else WAIT)


class Files:
    def control(self, document):
        raise AssertionError("without a slot directory nothing is listened on")


class Job:
    """A launcher's OnDemand over a status that the test replaces."""

    def __init__(self, status, elsewhere=()):
        self.status = status
        self.elsewhere = frozenset(elsewhere)
        self.token_at = "/run/token"
        self.asked = []
        self.was_asked = threading.Event()
        self.capture = Capture()
        self.on_demand = OnDemand(lambda: self.status, self.find, self.capture, Files(), print, lambda: self.token_at)
        self.on_demand.begin(WORKERS)

    def find(self, ranks, native):
        self.asked.append((tuple(ranks), native))
        self.was_asked.set()
        return Found(tuple(Target(rank, 21106 + rank) for rank in ranks if rank not in self.elsewhere), self.elsewhere & set(ranks))

    def stacks(self, **request):
        return self.on_demand.answer({"do": "stacks", **request})


@pytest.fixture
def job():
    made = Job(stuck_status())
    yield made
    made.capture.go_on.set()
    made.on_demand.stop()


def test_stacks_are_grouped_the_culprit_first(job):
    answer = job.stacks()
    assert [(group["ranks"], group["role"], group["frames"][0]) for group in answer["groups"]] == [
        ("1", "culprit", "load_batch (/home/alice/proj/train.py:31)"),
        ("0,2-7", "waiting", "_engine_run_backward (/venv/lib/python3.11/site-packages/torch/autograd/graph.py:841)"),
    ]
    assert [row["rank"] for row in answer["ranks"]] == list(LOCAL)
    assert all(row["text"] and not row["error"] for row in answer["ranks"])
    json.dumps(answer, allow_nan=False)


def test_only_the_ranks_that_are_asked_for_are_read(job):
    job.stacks(ranks="1,3-4", native=True)
    assert sorted(job.capture.taken) == [(1, True), (3, True), (4, True)]


@pytest.mark.parametrize(
    ("ranks", "words"), [("8", "rank 8 is not in this job of 8 ranks"), ("x", "'x' is no rank"), ("0-99999999", "no range"), ("0-200", "at most 128 ranks")]
)
def test_ranks_that_cannot_be_are_refused_before_any_dump(job, ranks, words):
    with pytest.raises(ControlError, match=words):
        job.stacks(ranks=ranks) if ranks != "0-200" else job.stacks(ranks="0-127,128-200")
    assert job.capture.taken == []


def test_while_a_dump_is_under_way_another_one_is_refused(job):
    job.capture.go_on.clear()
    first = threading.Thread(target=lambda: job.stacks(ranks="0"))
    first.start()
    assert job.capture.entered.acquire(timeout=10)
    with pytest.raises(ControlError, match="another dump is under way"):
        job.stacks(ranks="1")
    job.capture.go_on.set()
    first.join(10)
    assert job.stacks(ranks="1")["ranks"][0]["text"]


def test_a_dump_that_outlives_its_deadline_is_told_and_keeps_others_away_until_it_ends(job):
    job.capture.go_on.clear()
    (row,) = job.stacks(ranks="0", deadline_s=0.05)["ranks"]
    assert (row["text"], row["error"]) == (None, "no answer within the time")
    with pytest.raises(ControlError, match="an earlier dump has not ended yet"):
        job.stacks(ranks="0")
    job.capture.go_on.set()
    assert all(unfinished.wait(10) for unfinished in job.on_demand._unfinished)
    assert job.stacks(ranks="0")["ranks"][0]["text"]


def test_a_dump_that_finds_nothing_says_why(job):
    job.capture.capture = lambda target, native: Stack(target.pid, NOW, error="py-spy may not read process 21106: \x1b[31m")
    (row,) = job.stacks(ranks="0")["ranks"]
    assert row["error"] == "py-spy may not read process 21106: \\x1b[31m"


def test_a_rank_whose_process_is_gone_is_told(job):
    job.find = None
    job.on_demand._find = lambda ranks, native: Found()
    (row,) = job.stacks(ranks="3")["ranks"]
    assert row["error"] == "its process is gone"


def test_a_loop_that_does_not_answer_is_told(job):
    job.on_demand._find = lambda ranks, native: None
    with pytest.raises(ControlError, match="the monitor has not answered in time"):
        job.stacks(ranks="3")


def test_ranks_of_other_nodes_are_read_from_their_reports_once_a_fresh_stack_is_there(monkeypatch):
    monkeypatch.setattr(on_demand, "LOOK_EVERY_S", 0.01)
    job = Job(stuck_status(), elsewhere=(6, 7))  # its picture has stacks of NOW, long before this question
    answered = []
    asking = threading.Thread(target=lambda: answered.append(job.stacks(ranks="5-7", deadline_s=10)))
    asking.start()
    assert job.was_asked.wait(10)
    snapshot = job.status.snapshot
    at = time.monotonic() + 1
    ranks = tuple(dataclasses.replace(state, stack=stack(21106 + state.rank, WAIT, at)) if state.rank == 6 else state for state in snapshot.nodes[0].ranks)
    ranks = tuple(dataclasses.replace(state, stack=Stack(21113, at, error="process is gone")) if state.rank == 7 else state for state in ranks)
    job.status = dataclasses.replace(job.status, snapshot=dataclasses.replace(snapshot, nodes=(dataclasses.replace(snapshot.nodes[0], ranks=ranks),)))
    asking.join(15)
    assert [(row["rank"], bool(row["text"]), row["error"]) for row in answered[0]["ranks"]] == [(5, True, ""), (6, True, ""), (7, False, "process is gone")]
    job.on_demand.stop()


def test_a_node_that_sends_no_stack_is_told():
    job = Job(healthy_status(), elsewhere=(6,))
    (row,) = job.stacks(ranks="6", deadline_s=0.05)["ranks"]
    assert row["error"] == "its node has sent no stack within the time"
    job.on_demand.stop()


def test_of_a_large_job_those_that_verdicts_name_are_asked_by_default():
    status = stuck_status()
    job = Job(dataclasses.replace(status, job=dataclasses.replace(status.job, world_size=4096)))
    answer = job.stacks()
    assert [row["rank"] for row in answer["ranks"]] == [1, 0, 2, 3, 4, 5, 6, 7]
    assert answer["left_out"]
    job.on_demand.stop()


def test_a_launcher_says_who_it_is_and_how_the_job_does(job):
    info = job.on_demand.answer({"do": "info"})
    assert (info["state"], info["verdict"], info["ranks"], info["judge"]) == ("stuck", "stuck", "0-7", "")
    assert info["run"]["run_dir"].endswith("48213")
    assert "hf_abcdef" not in json.dumps(info)
    assert info["token_file"] == "/run/token"


def test_state_and_compile_documents_are_those_of_the_api(job):
    assert job.on_demand.answer({"do": "state"})["odd"] == "1"
    with pytest.raises(ControlError, match="no rank has compiled anything yet"):
        job.on_demand.answer({"do": "compile"})
    job.status = dataclasses.replace(job.status, compile={"run": {}, "now": []})
    assert job.on_demand.answer({"do": "compile"}) == {"run": {}, "now": []}


def test_what_is_not_known_is_refused(job):
    with pytest.raises(ControlError, match="does not know 'shutdown'"):
        job.on_demand.answer({"do": "shutdown"})
