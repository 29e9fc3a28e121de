"""Durations of NCCL's recorder as time on the device and as bus bandwidth."""

import json
from pathlib import Path

import pytest

from rankwatch.model import Group
from rankwatch.monitor import device_times
from rankwatch.monitor.device_times import Bandwidth, DeviceTimes, bucket_of, bus_factor, kind_of

TIMED = json.loads((Path(__file__).parents[1] / "support" / "data" / "recorded" / "nccl_12_healthy_timed.json").read_text())
GROUP = Group("0", "default_pg", "nccl", (0, 1), 600.0)
MIB = 1 << 20


def entry(seq, ms=None, op="nccl:all_reduce", sizes=((262144,),), out=None, dtype="Float", record=None, retired=True, group="0", p2p=False):
    found = {
        "collective_seq_id": seq, "input_dtypes": [dtype], "input_sizes": sizes, "is_p2p": p2p, "op_id": seq, "output_dtypes": [dtype],
        "output_sizes": out or sizes, "p2p_seq_id": 0, "pg_id": 0, "process_group": [group, "default_pg"], "profiling_name": op,
        "record_id": seq - 1 if record is None else record, "retired": retired, "state": "completed" if retired else "started",
    }  # fmt: skip
    return found if ms is None else {**found, "duration_ms": ms}


def answer(*entries):
    """As torch writes it: sorted keys, no blanks."""
    return json.dumps({"entries": entries, "pg_status": {}, "version": "2.10"}, sort_keys=True, separators=(",", ":")).encode()


def read(times, *entries):
    found = times.scan(answer(*entries))
    times.learn(found)
    return found


def joined(groups, **by_rank):
    """(sums of each rank, bandwidth) after one reading of ranks r0, r1, ..."""
    moved, known, came = Bandwidth(), {}, {}
    for name, entries in by_rank.items():
        rank = int(name[1:])
        known[rank] = DeviceTimes()
        came[rank] = (read(known[rank], *entries), groups)
    moved.join(came, known)
    return {rank: times.sums(moved, groups) for rank, times in known.items()}, moved


def test_a_recorded_job_moves_what_its_late_rank_took():
    """Two H200 over NVLink, 8 MB: rank 0 waits 5 ms a step for rank 1, whose own durations are the transfer."""
    moved, known, came = Bandwidth(), {0: DeviceTimes(), 1: DeviceTimes()}, {}
    for rank, times in known.items():
        found = times.scan(TIMED[str(rank)].encode())
        times.learn(found)
        came[rank] = (found, (GROUP,))
    moved.join(came, known)
    (large, small), (large_1, _) = known[0].sums(moved, (GROUP,)), known[1].sums(moved, (GROUP,))
    assert (large.op, large.size_bucket, large.count, large.bytes, large.whole) == ("all_reduce", "1-16MiB", 10, 10 * 8396800, True)
    assert (small.size_bucket, small.count) == ("<64KiB", 1)
    assert large.device_s == pytest.approx(0.0196, abs=1e-4)
    assert large_1.device_s == pytest.approx(0.00190, abs=5e-5)  # 22 of them
    assert large.bus_bytes_per_s == large_1.bus_bytes_per_s == pytest.approx(1.0e11, rel=0.1)
    assert large.bus_bytes == 10 * 8396800  # 2 (n - 1) / n of two ranks is 1
    assert large.bus_s < large_1.device_s < large.device_s / 10


def test_bandwidth_is_that_of_the_rank_that_came_last():
    sums, _ = joined((GROUP,), r0=[entry(1, ms=5.0), entry(2, ms=0.1)], r1=[entry(1, ms=0.1), entry(2, ms=9.0)])
    assert [each.device_s for ranks in sums.values() for each in ranks] == pytest.approx([0.0051, 0.0091])
    assert sums[0][0].bus_bytes_per_s == pytest.approx(MIB / 1e-4)


@pytest.mark.parametrize(
    ("op", "sizes", "out", "factor", "size"),
    [
        ("nccl:all_reduce", [[1024]], [[1024]], 1.5, 4096),
        ("nccl:_all_gather_base", [[256]], [[1024]], 0.75, 4096),  # of what all bring together
        ("nccl:_reduce_scatter_base", [[1024]], [[256]], 0.75, 4096),
        ("nccl:all_to_all", [[1024]], [[1024]], 0.75, 4096),
        ("nccl:broadcast", [[1024]], [[1024]], 1.0, 4096),
        ("nccl:reduce", [[1024]], [[1024]], 1.0, 4096),
        ("nccl:all_gather", [[256]], [[256]] * 4, 0.75, 4096),
        ("nccl:allreduce_coalesced", [[512], [512]], [[512], [512]], 1.5, 4096),
    ],
)
def test_operations_count_as_in_nccl_tests(op, sizes, out, factor, size):
    kind = kind_of(entry(1, op=op, sizes=sizes, out=out))
    assert (kind.bytes, bus_factor(kind.op, 4)) == (size, factor)


def test_what_has_no_bus_bandwidth_is_only_counted():
    assert bus_factor("all_reduce_barrier", 8) is None
    assert bus_factor("all_reduce", 1) is None
    sums, _ = joined((GROUP,), r0=[entry(0, ms=2.0, op="nccl:send 0->1", p2p=True, record=4)], r1=[entry(0, ms=1.0, op="nccl:recv 1<-0", p2p=True, record=4)])
    assert [(each.op, each.count, each.bus_bytes_per_s) for each in (*sums[0], *sums[1])] == [("send", 1, None), ("recv", 1, None)]


def test_element_types_have_their_sizes():
    assert [kind_of(entry(1, sizes=[[8]], dtype=dtype)).bytes for dtype in ("BFloat16", "Float", "Double", "Float8_e4m3fn", "Byte")] == [16, 32, 64, 8, 8]


def test_size_buckets_have_names():
    assert [bucket_of(size) for size in (0, 65535, 65536, MIB, 16 * MIB, 256 * MIB)] == ["<64KiB", "<64KiB", "64KiB-1MiB", "1-16MiB", "16-256MiB", ">=256MiB"]


def test_an_operation_is_counted_once_and_when_it_is_over():
    times = DeviceTimes()
    assert [each.seq for each in read(times, entry(1, ms=1.0), entry(2, retired=False), entry(3, ms=1.0), entry(4, retired=False))] == [1, 3]
    assert [each.seq for each in read(times, entry(1, ms=1.0), entry(2, ms=2.0), entry(3, ms=1.0), entry(4, retired=False))] == [2]
    assert read(times, entry(3, ms=1.0), entry(4, ms=4.0), entry(5, retired=False)) == [(4, kind_of(entry(4, sizes=[[262144]])), 0.004)]
    assert times.sums(Bandwidth(), (GROUP,))[0].count == 4


def test_without_timing_nothing_is_known():
    times = DeviceTimes()
    assert read(times, entry(1), entry(2)) == []
    assert times.sums(Bandwidth(), (GROUP,)) == ()


def test_a_recorder_that_was_reset_is_read_from_its_start():
    times = DeviceTimes()
    read(times, *(entry(seq, ms=1.0, record=seq + 500) for seq in range(1, 4)))
    assert [each.seq for each in read(times, entry(1, ms=1.0, record=0))] == [1]


def test_a_group_of_several_nodes_gives_a_lower_bound():
    wide = Group("0", "default_pg", "nccl", (0, 1, 2, 3), 600.0)
    sums, _ = joined((wide,), r0=[entry(1, ms=2.0)], r1=[entry(1, ms=1.0)])
    assert (sums[0][0].whole, sums[0][0].bus_bytes_per_s) == (False, pytest.approx(1.5 * MIB / 1e-3))


def test_readings_of_different_moments_meet_later():
    moved, known = Bandwidth(), {0: DeviceTimes(), 1: DeviceTimes()}
    moved.join({0: (read(known[0], entry(1, ms=3.0), entry(2, ms=3.0)), (GROUP,))}, known)
    assert known[0].sums(moved, (GROUP,))[0].bus_bytes_per_s is None
    moved.join({1: (read(known[1], entry(2, ms=1.0), entry(3, ms=1.0)), (GROUP,))}, known)
    assert known[0].sums(moved, (GROUP,))[0].bus_bytes_per_s == pytest.approx(MIB / 1e-3)
    assert known[0].sums(moved, (GROUP,))[0].bus_bytes == MIB  # the first was never read of rank 1


def test_ranks_that_bring_different_sizes_have_no_one_figure():
    sums, _ = joined((GROUP,), r0=[entry(1, ms=1.0)], r1=[entry(1, ms=1.0, sizes=[[7]])])
    assert sums[0][0].bus_bytes_per_s is None


def test_another_process_under_a_rank_is_not_joined_with_the_one_before():
    moved, known = Bandwidth(), {0: DeviceTimes(), 1: DeviceTimes()}
    moved.join({0: (read(known[0], entry(1, ms=1.0)), (GROUP,))}, known)
    moved.forget(0)
    moved.join({1: (read(known[1], entry(1, ms=1.0)), (GROUP,))}, known)
    assert known[1].sums(moved, (GROUP,))[0].bus_bytes_per_s is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(device_times, "MAX_OPEN", 50)
    times, moved = DeviceTimes(), Bandwidth()
    many = [entry(seq, ms=1.0, group=str(seq % 40), op=f"nccl:op{seq % 3}") for seq in range(1, 400)]
    groups = tuple(Group(str(n), "", "nccl", (0, 1), 60.0) for n in range(40))
    found = read(times, *many)
    moved.join({0: (found, groups)}, (0, 1))
    sums = times.sums(moved, groups)
    assert len(sums) == device_times.MAX_SUMS + 1
    assert sums[0].group == device_times.OTHER
    assert sum(each.count for each in sums) == 399
    lone = [entry(seq, ms=1.0) for seq in range(1000, 1400)]
    moved.join({0: (read(times, *lone), groups)}, (0, 1))
    assert max(len(row) for meeting in moved._meetings.values() for row in meeting.open.values()) <= 50


def test_odd_answers_raise_nothing():
    times = DeviceTimes()
    for text in (
        b"",
        b"{}",
        b'"duration_ms":',
        b'{"collective_seq_id":x,"duration_ms":y,"input_dtypes":',
        answer(entry(1, ms=1.0)).replace(b'"pg_id":', b'"pg":'),
    ):
        assert times.scan(text) == []
