"""What NCCL's watchdog prints, by its order."""

from rankwatch.model import Watchdog
from rankwatch.monitor.watchdog_log import FIRST_BYTES, MAX_LINE, MAX_LINES, RankLog, fold

CAUGHT = (
    "[rank0]:[E1130 05:10:23.665685619 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=754, OpType=ALLREDUCE, NumelIn=2099200, NumelOut=2099200, Timeout(ms)=18000) ran for 18080 milliseconds before timing out."
)
DOWN = "[rank0]:[E1130 05:10:33.2 ProcessGroupNCCL.cpp:764] [Rank 0] To avoid data inconsistency, we are taking the entire process down."
ABORTS = "[rank0]:[I1130 05:13:54.3 NCCLUtils.cpp:397] Aborting ncclComm_ 0xb41bff0 with reason: No abort reason provided."
START = "node0:677:774 [0] NCCL INFO comm 0xb41bff0 rank 0 nRanks 2 cudaDev 0 busId 60 - Abort START"
COMPLETE = "node0:677:774 [0] NCCL INFO comm 0xb41bff0 rank 0 nRanks 2 cudaDev 0 busId 60 - Abort COMPLETE"


def test_a_timeout_its_operation_and_the_end_are_told_in_order():
    found = fold(Watchdog(readable=True), CAUGHT, 10.0)
    assert (found.fired_at, found.seq, found.op, found.ends_at, found.aborts_at) == (10.0, 754, "allreduce", None, None)
    assert found.lines[0].startswith("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=754")
    found = fold(found, f"{CAUGHT}\n{DOWN}\n", 20.0)
    assert (found.fired_at, found.ends_at, len(found.lines)) == (10.0, 20.0, 2)


def test_words_of_several_releases_mean_the_same():
    older = "[rank3]:[E ProcessGroupNCCL.cpp:1536] [PG 0 Rank 3] Timeout at NCCL work: 754, last enqueued NCCL work: 756, last completed NCCL work: 753."
    newer = "[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 754 PG status: last enqueued work: 756"
    assert [fold(Watchdog(), line, 3.0).fired_at for line in (older, newer)] == [3.0, 3.0]


def test_an_abort_begins_and_ends():
    found = fold(Watchdog(), f"{ABORTS}\n{START}", 5.0)
    assert (found.aborts_at, found.aborted_at) == (5.0, None)
    assert fold(found, COMPLETE, 6.0).aborted_at == 6.0


def test_a_stuck_watchdog_that_the_heartbeat_monitor_sees_has_fired():
    line = "[rank0]:[E] [PG ID 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
    assert fold(Watchdog(), line, 7.0).fired_at == 7.0


def test_other_lines_and_the_exceptions_that_repeat_the_words_change_nothing():
    text = f"step 754 loss 1.0\nterminate called\n  what():  [Rank 0] {CAUGHT}\n[rank0]:[E] Process group watchdog thread terminated with exception: {CAUGHT}\n"
    assert fold(Watchdog(readable=True), text, 1.0) == Watchdog(readable=True)


def test_lines_are_bounded():
    found = fold(Watchdog(), "\n".join(f"{DOWN} {'x' * 900} {n}" for n in range(50)), 1.0)
    assert len(found.lines) == 1  # all alike once they are cut
    found = fold(Watchdog(), "\n".join(f"{n} {DOWN}" for n in range(50)), 1.0)
    assert len(found.lines) == MAX_LINES
    assert max(map(len, found.lines)) <= MAX_LINE


def test_a_log_is_read_from_where_the_read_before_ended_in_whole_lines(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_text("early\n" + "y" * FIRST_BYTES + "\nlast\nhal")
    log = RankLog((str(path), "", str(path)))
    assert log.known is True
    assert log.read().endswith("\nlast\n")
    assert "early" not in log._rest[str(path)]
    with path.open("a") as file:
        file.write("f\nmore\n")
    assert log.read() == "half\nmore\n"
    assert log.read() == ""
    path.write_text("anew\n")
    assert log.read() == "anew\n"


def test_a_log_that_is_not_there_says_nothing(tmp_path):
    assert RankLog((str(tmp_path / "none"),)).read() == ""
    assert RankLog(("", "")).known is False
