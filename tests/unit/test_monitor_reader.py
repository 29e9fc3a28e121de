"""What Reader makes of slots, worker servers and processes: fakes for all three, a clock that the test moves."""

import json
import socket
import threading
import time

import pytest

from rankwatch.model import Process, Want, Watchdog
from rankwatch.monitor.reader import Reader
from rankwatch.monitor.workers import Worker, Workers
from rankwatch.wire import layout
from rankwatch.wire.env import slot_name, socket_name

WALL = 1_796_018_525.0
PIDS = {0: 2_000_000_100, 1: 2_000_000_101}  # above pid_max: never a real process


class FakeProcesses:
    """Every process is alive unless it is in `gone`."""

    def __init__(self, clock):
        self.clock = clock
        self.gone = {}
        self.suspects = set()

    def look(self, pid, start_ticks=None, suspect=False):
        (self.suspects.add if suspect else self.suspects.discard)(pid)
        return Process(pid, alive=pid not in self.gone, state="" if pid in self.gone else "S", exited_at=self.gone.get(pid))


class FakeServer:
    """Answers as torch's worker server does; `silent` accepts and says nothing."""

    def __init__(self, path, answers):
        self.answers = answers
        self.asked = []
        self.silent = False
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen(16)
        self.held = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            if self.silent:
                self.held.append(connection)
                continue
            with connection:
                target = connection.recv(4096).split()[1].decode()
                self.asked.append(target.removeprefix("/handler/"))
                body = json.dumps(sorted(self.answers)).encode() if target == "/handler/" else self.answers[target.removeprefix("/handler/").split("?")[0]]
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def close(self):
        self.socket.close()
        for connection in self.held:
            connection.close()


class Rank:
    """A rank's slot and server."""

    def __init__(self, directory, number):
        self.path = directory / slot_name(number)
        self.bytes = bytearray(layout.SLOT_BYTES)
        header = layout.pack_header(number, 0)
        self.bytes[: len(header)] = header
        self.seq = 0
        self.save()
        self.server = FakeServer(directory / socket_name(number), {"ping": b"pong", "fr_trace_json": b"{}", "wait_counter_values": b"{}"})
        self.number = number

    def put(self, name, record, mono_s=0.0):
        self.seq += 1
        data = layout.pack(self.seq, int(mono_s * 1e9), json.dumps(record).encode())
        at = layout.RECORDS[name].offset + (self.seq % 2) * layout.RECORDS[name].copy_bytes
        self.bytes[at : at + len(data)] = data
        self.save()

    def save(self):
        self.path.write_bytes(self.bytes)

    def join(self, backend="gloo", groups=1):
        self.put("owner", {"pid": PIDS[self.number], "start_ticks": 5, "state": "claimed", "torch": "2.13.0"})
        self.put("lifecycle", {"stage": "joined", "since_mono_ns": 1, "exception": None})
        entries = [
            {"name": str(n), "desc": "d", "backend": backend, "ranks": "0-1", "timeout_s": 60, "generation": 0, "created_wall_ns": 0} for n in range(groups)
        ]
        self.put("groups", {"creating": None, "groups": entries})

    def beat(self, at, enqueued, completed):
        self.put("heartbeat", {"pg_status": {"0": {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}}}, at)

    def record(self, *seqs, done):
        entries = [
            {
                "collective_seq_id": seq,
                "record_id": seq,
                "pg_id": 0,
                "process_group": ["0", "d"],
                "profiling_name": "gloo:all_reduce",
                "retired": seq <= done,
                "time_created_ns": int(WALL * 1e9),
            }
            for seq in seqs
        ]
        self.server.answers["fr_trace_json"] = json.dumps({"entries": entries}).encode()


class Job:
    def __init__(self, directory, history="auto", stderr=""):
        self.now = 100.0
        self.ranks = [Rank(directory, number) for number in PIDS]
        self.processes = FakeProcesses(lambda: self.now)
        workers = tuple(Worker(number, number, pid, stderr=stderr) for number, pid in PIDS.items())
        start = Workers(0, 0, 2, 1, "host", str(directory), "", workers, history=history)
        self.reader = Reader(start, clock=lambda: self.now, wall=lambda: WALL, processes=self.processes)

    def at(self, now, **how):
        self.now = now
        report = self.reader.read(**how)
        end = time.monotonic() + 10
        while any(rank.busy is not None and not rank.busy.done for rank in self.reader._ranks.values() if not self.ranks[rank.worker.rank].server.silent):
            assert time.monotonic() < end
            time.sleep(0.005)
        return {rank.rank: rank for rank in report.ranks}


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.reader.close()
    for rank in made.ranks:
        rank.server.close()


def test_a_rank_that_has_not_imported_torch_is_not_silent_while_the_process_of_the_mark_lives(job):
    rank = job.ranks[0]
    rank.put("owner", {"pid": 2_000_000_300, "start_ticks": 5, "state": "loaded"})
    found = job.at(131)[0]
    assert (found.agent, found.agent_detail, found.stage) == ("loaded", "loaded; torch is not imported yet", "starting")
    assert found.process.pid == PIDS[0]  # below a shell the mark may be any Python's
    job.processes.gone[2_000_000_300] = 132.0
    assert job.at(133)[0].agent == "silent"


def test_a_rank_is_silent_until_it_claims_and_the_reason_comes_after_thirty_seconds(job):
    assert (job.at(101)[0].agent, job.at(101)[0].agent_detail) == ("silent", "agent has not reported yet")
    assert job.at(131)[0].agent_detail.startswith("agent did not load within 30 s")
    job.ranks[0].put("owner", {"pid": PIDS[0], "start_ticks": 5, "state": "armed"})
    job.ranks[1].join()
    ranks = job.at(132)
    assert (ranks[0].agent, ranks[1].agent, ranks[1].stage) == ("armed", "claimed", "joined")


def test_without_a_slot_directory_ranks_are_off_with_the_reason():
    reader = Reader(Workers(0, 0, 1, 1, "host", None, "no space", (Worker(0, 0, 2_000_000_100),)), clock=lambda: 1.0, processes=FakeProcesses(lambda: 1.0))
    rank = reader.read().ranks[0]
    assert (rank.agent, rank.agent_detail, rank.process.alive) == ("off", "no space", True)


def test_numbers_come_from_the_heartbeat_without_asking_the_rank(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(101, 7, 7)
    ranks = job.at(101)
    assert (ranks[0].enqueued, ranks[0].completed, ranks[0].heartbeat_at) == ({"0": 7}, {"0": 7}, 101.0)
    job.ranks[0].server.asked.clear()
    job.ranks[0].beat(101.5, 9, 9)
    assert job.at(101.5)[0].enqueued == {"0": 9}
    assert job.ranks[0].server.asked == []


def test_an_operation_that_stays_open_for_a_second_makes_all_recorders_be_read(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 5, 5)
    job.at(100)
    job.ranks[0].record(5, 6, done=5)
    job.ranks[1].record(5, done=5)
    for rank in job.ranks:
        rank.server.asked.clear()
    job.ranks[0].beat(101, 6, 5)
    job.at(101)
    assert "fr_trace_json" not in job.ranks[0].server.asked
    assert job.processes.suspects == set()
    job.ranks[0].beat(102, 6, 5)
    job.ranks[1].beat(102, 5, 5)
    job.at(102.1)
    assert "fr_trace_json" in job.ranks[0].server.asked
    assert "fr_trace_json" in job.ranks[1].server.asked
    ranks = job.at(102.6)
    assert [(c.seq, c.done) for c in ranks[0].collectives] == [(5, True), (6, False)]
    assert ranks[0].ping_ok is True
    assert job.processes.suspects == {PIDS[1]}  # the other one waits itself
    job.reader.read([Want("stacks", (0,), "suspects")])
    assert job.processes.suspects == {PIDS[0], PIDS[1]}


def test_recorders_are_not_read_again_within_a_second(job, monkeypatch):
    monkeypatch.setattr("rankwatch.monitor.asking.COST_FACTOR", 0.0)  # what a read has cost on a busy machine is another reason to wait
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 6, 5)
    for now in (100, 101.5):
        job.at(now)
    asked = job.ranks[0].server.asked.count("fr_trace_json")
    job.at(101.8)
    assert job.ranks[0].server.asked.count("fr_trace_json") == asked
    job.at(103.5)
    assert job.ranks[0].server.asked.count("fr_trace_json") == asked + 1


def test_an_operation_that_completes_in_time_is_no_suspicion(job):
    for rank in job.ranks:
        rank.join()
    for now, completed in ((100, 5), (100.9, 6), (101.8, 7), (102.7, 8)):
        job.ranks[0].beat(now, completed + 1, completed)
        job.ranks[1].beat(now, completed, completed)
        job.at(now)
    assert job.ranks[0].server.asked.count("fr_trace_json") <= 1  # the slow history
    assert job.processes.suspects == set()


def test_wanted_recorders_are_read(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 5, 5)
    job.at(100)
    job.at(101.5)
    for rank in job.ranks:
        rank.beat(103, 5, 5)
        rank.server.asked.clear()
    job.at(103, wants=(Want("recorder", (1,), "why"),))
    assert job.ranks[0].server.asked == []
    assert "fr_trace_json" in job.ranks[1].server.asked


def test_a_stale_heartbeat_is_followed_by_a_ping(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 5, 5)
    job.at(100)
    job.ranks[1].beat(104, 5, 5)
    job.at(104)
    assert "ping" in job.ranks[0].server.asked
    assert "ping" not in job.ranks[1].server.asked
    assert job.at(104.5)[0].ping_ok is True


def test_a_silent_rank_delays_nobody(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 5, 5)
    job.at(100)
    job.ranks[0].server.silent = True
    job.ranks[1].server.asked.clear()
    began = time.monotonic()
    job.at(104)
    assert "ping" in job.ranks[1].server.asked
    assert time.monotonic() - began < 0.9
    assert job.reader._ranks[0].busy.wait(5)
    job.now = 104.5
    assert job.reader.read().ranks[0].ping_ok is False


def test_nccl_status_is_polled_once_a_second_and_paused_while_a_group_is_created(job):
    rank = job.ranks[0]
    rank.server.answers["dump_nccl_trace_json"] = json.dumps({"pg_status": {"0": {"last_enqueued_collective": "4", "last_completed_collective": "3"}}}).encode()
    rank.join("nccl")
    job.at(100)
    assert job.at(100.5)[0].enqueued == {"0": 4}
    rank.server.asked.clear()
    job.at(100.6)
    assert rank.server.asked == []
    job.at(101.1)
    assert rank.server.asked == ["dump_nccl_trace_json?includecollectives=false"]
    rank.put("groups", {"creating": "1", "groups": [{"name": "0", "backend": "nccl", "ranks": "0-1"}]})
    rank.server.asked.clear()
    assert job.at(103)[0].group_in_creation == "1"
    assert not any("nccl" in target for target in rank.server.asked)


def nccl(*entries, last=4):
    counts = {"last_enqueued_collective": str(last), "last_started_collective": str(last), "last_completed_collective": str(last)}
    return json.dumps({"pg_status": {"0": counts}, "entries": entries}, sort_keys=True, separators=(",", ":")).encode()


def timed(seq, ms):
    return {
        "collective_seq_id": seq, "duration_ms": ms, "input_dtypes": ["Float"], "input_sizes": [[262144]], "is_p2p": False, "op_id": seq,
        "output_dtypes": ["Float"], "output_sizes": [[262144]], "p2p_seq_id": 0, "pg_id": 0, "process_group": ["0", "d"],
        "profiling_name": "nccl:all_reduce", "record_id": seq, "retired": True, "state": "completed", "time_created_ns": int(WALL * 1e9), "timeout_ms": 60000,
    }  # fmt: skip


def test_nccl_entries_are_not_read_on_a_timer_where_torch_makes_no_promise(job):
    """Up to 2.13 a read may meet an operation that is being freed."""
    job.ranks[0].server.answers["dump_nccl_trace_json"] = nccl(timed(4, 1.0))
    job.ranks[0].join("nccl")
    for now in (100, 106, 112):
        job.at(now)
    assert set(job.ranks[0].server.asked) == {"", "dump_nccl_trace_json?includecollectives=false"}


@pytest.mark.parametrize("history", ["auto", "on", "off"])
def test_nccl_entries_tell_device_time_and_bandwidth_of_the_node(tmp_path, history):
    job = Job(tmp_path, history)
    for rank, ms in zip(job.ranks, (5.0, 0.1), strict=True):
        rank.server.answers["dump_nccl_trace_json"] = nccl(timed(3, ms), timed(4, ms))
        rank.join("nccl")
        rank.put("owner", {"pid": PIDS[rank.number], "start_ticks": 5, "state": "claimed", "torch": "2.14.0" if history == "auto" else "2.11.0"})
    job.at(100)
    found = job.at(100.5)
    if history == "off":
        assert [rank.collective_sums for rank in found.values()] == [(), ()]
    else:
        sums = [rank.collective_sums[0] for rank in found.values()]
        assert [(each.op, each.count, each.device_s, each.whole) for each in sums] == [("all_reduce", 2, 0.01, True), ("all_reduce", 2, 0.0002, True)]
        assert [each.bus_bytes_per_s for each in sums] == [pytest.approx(262144 * 4 / 1e-4)] * 2
    job.reader.close()
    for rank in job.ranks:
        rank.server.close()


def test_what_nccls_watchdog_prints_is_read_while_ranks_wait(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_text(
        "[rank0]:[E1130 05:13:40.4 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)\n"
    )
    job = Job(tmp_path, stderr=str(log))
    job.ranks[0].server.answers["dump_nccl_trace_json"] = json.dumps(
        {"pg_status": {"0": {"last_enqueued_collective": "4", "last_completed_collective": "3"}}}
    ).encode()
    job.ranks[0].join("nccl")
    assert job.at(100)[0].watchdog == Watchdog(readable=True)
    for now in (100.5, 101.0, 101.6):
        assert job.at(now)[0].watchdog.fired_at is None  # nobody waits for long
    job.at(102.1)
    end = time.monotonic() + 10
    while (found := job.at(102.6)[0].watchdog).fired_at is None:
        assert time.monotonic() < end
    assert (found.seq, found.op, len(found.lines)) == (4, "allreduce", 1)
    assert job.at(102.6)[1].watchdog == Watchdog(readable=True)  # it is in no NCCL group: its log is not read
    job.reader.close()
    for rank in job.ranks:
        rank.server.close()


def test_another_process_under_the_slot_starts_with_nothing_remembered(job):
    rank = job.ranks[0]
    rank.join()
    rank.record(5, 6, done=6)
    job.at(100, urgent=True)
    assert len(job.at(100.2)[0].collectives) == 2
    rank.server.answers["fr_trace_json"] = b"{}"
    rank.put("owner", {"pid": 2_000_000_999, "start_ticks": 6, "state": "armed"})
    ranks = job.at(100.4)
    assert (ranks[0].collectives, ranks[0].process.pid) == ((), 2_000_000_999)


def test_exit_codes_belong_to_processes_that_are_gone(job):
    job.ranks[0].join()
    job.reader.exited({0: -9})
    assert job.at(100)[0].process.exit_code is None
    job.processes.gone[PIDS[0]] = 100.0
    ranks = job.at(100.1)
    assert (ranks[0].process.alive, ranks[0].process.exit_code) == (False, -9)
    assert job.reader.pids() == {1: PIDS[1]}


def test_the_exception_of_a_dead_rank_comes_from_its_slot(job):
    job.ranks[0].join()
    job.ranks[0].put("lifecycle", {"stage": "exiting", "since_mono_ns": 1, "exception": {"type": "ValueError", "message": "m", "where": "a.py:1:f"}})
    job.processes.gone[PIDS[0]] = 100.0
    crash = job.at(100)[0].crash
    assert (crash.type, crash.where, crash.source) == ("ValueError", "a.py:1:f", "the rank's own exit")


def test_the_last_look_asks_nobody(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 6, 5)
    job.at(100)
    for rank in job.ranks:
        rank.server.asked.clear()
    job.at(110, final=True)
    assert [rank.server.asked for rank in job.ranks] == [[], []]


def test_last_words_in_the_slot_of_a_crashed_rank_are_its_newest_collectives(job):
    """Its server stops in the same moment; what it called is known all the same, and kept for the report."""
    words = {
        "pg_status": {"0": {"last_enqueued_collective": "6", "last_completed_collective": "6"}},
        "entries": [
            {"collective_seq_id": 7, "pg_id": 0, "process_group": ["0", "d"], "profiling_name": "gloo:all_reduce", "input_sizes": [[400]], "retired": False}
        ],
    }
    rank = job.ranks[0]
    rank.join()
    rank.beat(100.0, 6, 6)
    job.at(100.0)
    rank.put("lifecycle", {"stage": "exiting", "since_mono_ns": int(100.2e9), "exception": {"type": "RuntimeError", "message": "Connection closed by peer"}})
    rank.put("heartbeat", words, 100.3)
    state = job.at(100.5)[0]
    assert [(c.seq, c.input_sizes) for c in state.collectives if c.seq == 7] == [(7, ((400,),))]
    assert state.collectives_at == 100.3
    assert json.loads(job.reader.raw_recorders([0])[0]["last_words"])["entries"][0]["collective_seq_id"] == 7


def test_calls_are_kept_on_a_timer_for_as_long_as_the_group_is_the_same(job):
    for rank in job.ranks:
        rank.join()
        rank.beat(100, 3, 3)
    job.ranks[0].record(1, 2, 3, done=3)
    job.at(100)
    job.ranks[0].record(3, 4, 5, done=5)
    for now in (101, 103, 104.9):
        job.ranks[0].beat(now, 5, 5)
        job.at(now)
    assert (job.at(104.9)[0].calls["0"].first, job.at(104.9)[0].calls["0"].last) == (1, 3)
    job.at(105.2)
    calls = job.at(105.7)[0].calls["0"]
    assert (calls.first, calls.last, calls.kinds.count(0)) == (1, 5, 0)
    again = {"name": "0", "desc": "d", "backend": "gloo", "ranks": "0-1", "timeout_s": 60, "generation": 1, "created_wall_ns": int((WALL + 1) * 1e9)}
    job.ranks[0].put("groups", {"creating": None, "groups": [again]})
    assert job.at(106)[0].calls == {}


def test_an_answer_that_is_newer_than_the_list_of_groups_is_taken_once_the_list_is_known(job):
    """The recorder shows a group that was made while it answered: its calls do not go to the one of that name before."""
    rank = job.ranks[0]
    rank.join()
    rank.record(1, 2, done=2)
    job.at(100)
    entries = json.loads(rank.server.answers["fr_trace_json"])["entries"]
    new = [{**entries[0], "pg_id": 1, "record_id": 9, "profiling_name": "gloo:barrier", "time_created_ns": int((WALL + 5) * 1e9)}]
    rank.server.answers["fr_trace_json"] = json.dumps({"entries": [*entries, *new]}).encode()
    job.at(106)
    before = job.at(106.2)[0].calls["0"]
    assert (before.generation, before.last, {call.op for call in before.known.values()} >= {"all_reduce"}) == (0, 2, True)
    again = {"name": "0", "desc": "d", "backend": "gloo", "ranks": "0-1", "timeout_s": 60, "generation": 1, "created_wall_ns": int((WALL + 4) * 1e9)}
    rank.put("groups", {"creating": None, "groups": [again]})
    new.append({**new[0], "collective_seq_id": 2, "record_id": 10})
    rank.server.answers["fr_trace_json"] = json.dumps({"entries": [*entries, *new]}).encode()
    job.at(112)
    after = job.at(112.2)[0].calls["0"]
    assert (after.generation, after.first, after.last) == (1, 2, 2)
