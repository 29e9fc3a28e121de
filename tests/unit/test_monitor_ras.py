"""NCCL's RAS: its recorded text is understood, one poll proves nothing, other jobs' answers are let go."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from rankwatch.model import Ras, RasProblem, RasRank
from rankwatch.monitor import ras
from rankwatch.monitor.ras import RasWatch, agreed, ours, parse, question

RECORDED = json.loads((Path(__file__).parents[1] / "support" / "data" / "ras" / "nccl_ras.json").read_text())
LAGGARD = next(text for text in RECORDED["texts"] if "operation 751" in text and "process 2260" in text)
HEALTHY = next(text for text in RECORDED["texts"] if text.startswith("NCCL") and "RUNNING      OK" in text)
INCOMPLETE = next(text for text in RECORDED["texts"] if "Missing communicator data from 1 job process" in text)
OTHERS = """NCCL version 2.28.9 compiled with CUDA 13.0

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators... (0.000s)
=============

Errors
======

Warnings
========

#0-0 (8276c01eda3d5869) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 751
  Rank 2 has not launched any operations -- GPU 2 managed by process 7 on node 192.0.2.3
"""


def answer(text: str) -> Ras:
    return Ras("refused", 0.0) if not text.startswith("NCCL") else parse(text, 0.0)


def told(case: str) -> list[tuple[float, Ras | None]]:
    """What two polls in a row say, over a recorded job."""
    before, found = None, []
    for at, number in RECORDED["polls"][case]:
        newest = answer(RECORDED["texts"][number])
        found.append((at, agreed(before, newest)))
        before = newest
    return found


def test_a_rank_that_has_not_come_is_named_by_its_launches():
    assert parse(LAGGARD, 7.0) == Ras(
        "problems",
        7.0,
        (
            RasProblem(
                "MISMATCH",
                "Communicator ranks have different AllReduce operation counts",
                "8276c01eda3d5869",
                (RasRank(0, 2260, "0", "192.0.2.2", launched=751), RasRank(1, 2261, "1", "192.0.2.2", launched=748)),
            ),
        ),
        2,
    )


def test_a_healthy_answer_is_ok_and_counts_its_processes():
    assert parse(HEALTHY, 0.0) == Ras("ok", 0.0, processes=2)


def test_a_process_that_does_not_answer_its_peers_is_named():
    found = parse(INCOMPLETE, 0.0)
    assert [(problem.kind, problem.what, [entry.pid for entry in problem.ranks]) for problem in found.problems] == [
        ("INCOMPLETE", "Missing communicator data from 1 job process", [2279]),
        ("INCOMPLETE", "Missing communicator data from 1 rank", [2279]),
    ]


def test_ranks_that_are_told_together_and_one_that_has_launched_nothing():
    found = parse(OTHERS, 0.0)
    assert found.processes == 4
    assert [(entry.comm_rank, entry.launched) for entry in found.problems[0].ranks] == [(2, 0)]


@pytest.mark.parametrize("text", ["", "HTTP/1.1 400 Bad Request", "{}", "NCCL version 2.99\n", "Job summary\n\x00\xff"])
def test_what_is_no_such_text_is_unread(text):
    assert parse(text, 0.0).state == "unread"


def test_a_healthy_job_looks_uneven_at_times_and_never_twice():
    single = [parse(RECORDED["texts"][number], 0.0) for _at, number in RECORDED["polls"]["12"] if RECORDED["texts"][number].startswith("NCCL")]
    assert sum(each.state == "problems" for each in single) == 6
    assert [at for at, each in told("12") if each is not None and each.state == "problems"] == []


@pytest.mark.parametrize(("case", "until"), [("01", 3.5), ("08", 3.5), ("10c", 3.5)])
def test_a_rank_that_is_missing_is_told_by_the_second_poll(case, until):
    assert next(at for at, each in told(case) if each is not None and each.state == "problems") <= until


def test_a_kernel_that_does_not_end_is_not_seen():
    assert {each.state for at, each in told("06") if each is not None and 0 < at < 16} == {"ok"}


def test_ranks_are_named_by_the_pids_of_their_processes():
    found = ours(parse(LAGGARD, 0.0), {0: 2260, 1: 2261})
    assert [(entry.rank, entry.launched) for entry in found.problems[0].ranks] == [(0, 751), (1, 748)]


def test_an_answer_about_another_jobs_processes_is_let_go():
    found = ours(parse(LAGGARD, 0.0), {0: 71, 1: 72})
    assert (found.state, found.problems) == ("foreign", ())
    assert "another job" in found.note


class Server:
    """Speaks RAS's text to one client, and raises on what NCCL's own client would not send."""

    def __init__(self, text: str) -> None:
        self.error: BaseException | None = None
        self._text = text
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()
        assert self.error is None, self.error

    def _serve(self) -> None:
        try:
            peer, _ = self._listener.accept()
            with peer:
                peer.settimeout(10)
                for expected, reply in ((b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL 2\n"), (b"TIMEOUT 1\n", b"OK\n"), (b"STATUS\n", self._text.encode())):
                    assert self._line(peer) == expected
                    for at in range(0, len(reply), 300):
                        peer.sendall(reply[at : at + 300])
        except BaseException as error:
            self.error = error

    def _line(self, peer: socket.socket) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            part = peer.recv(1)
            assert part, f"the client has gone after {line!r}"
            line += part
        return line


def test_the_client_speaks_as_nccls_own_does():
    server = Server(LAGGARD)
    assert question(server.address) == LAGGARD
    server.close()


def test_another_program_at_that_port_is_told_from_ras():
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(100)
            peer.sendall(b"SSH-2.0-x\n")

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(OSError, match="not NCCL's RAS"):
        question(f"127.0.0.1:{listener.getsockname()[1]}")
    thread.join(10)
    listener.close()


def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(ras, "ANSWER_S", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(TimeoutError):
        question(f"127.0.0.1:{listener.getsockname()[1]}")
    listener.close()


def look(watch: RasWatch, pids: dict[int, int] | None = None) -> Ras | None:
    """One look with the question answered at once."""
    watch.look(pids or {0: 2260, 1: 2261})
    if watch._job is not None:
        assert watch._job.wait(10)
    return watch.look(pids or {0: 2260, 1: 2261})


def test_ras_is_asked_every_two_seconds_and_believed_at_the_second_time():
    now, asked = [100.0], []

    def ask(address: str) -> str:
        asked.append(address)
        return LAGGARD

    watch = RasWatch({}, ask, lambda: now[0])
    assert look(watch) is None
    now[0] += 1.0
    assert look(watch) is None
    now[0] += 1.5
    found = look(watch)
    assert found is not None
    assert (found.state, [entry.rank for entry in found.problems[0].ranks]) == ("problems", [0, 1])
    assert asked == ["localhost:28028"] * 2
    watch.close()


def test_the_jobs_own_address_is_used_and_its_switch_is_heard():
    asked = []
    watch = RasWatch({"NCCL_RAS_ADDR": "localhost:29999"}, lambda address: asked.append(address) or HEALTHY)
    assert look(watch) is not None
    assert asked == ["localhost:29999"]
    watch.close()
    off = RasWatch({"NCCL_RAS_ENABLE": "0"}, lambda address: pytest.fail("nobody may be asked")).look({})
    assert off is not None
    assert (off.state, off.note) == ("off", "NCCL_RAS_ENABLE=0 is set in the job's environment")


@pytest.mark.parametrize(("error", "state"), [(ConnectionRefusedError(111, "refused"), "refused"), (TimeoutError("not within 5 s"), "silent")])
def test_no_answer_is_said(error, state):
    def ask(address: str) -> str:
        raise error

    watch = RasWatch({}, ask)
    found = look(watch)
    assert found is not None
    assert found.state == state
    assert "localhost:28028" in found.note
    watch.close()
