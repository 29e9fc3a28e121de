"""The table of collectives: time on the devices, bus bandwidth."""

from rankwatch.export import samples
from rankwatch.model import CollectiveSum, Group, JobInfo, JobSnapshot, NodeReport, RankState, Status
from rankwatch.report import collectives, state

GROUP = Group("0", "default_pg", "nccl", (0, 1), 600.0)


def rank(number, *sums):
    return RankState(rank=number, node="node0", groups=(GROUP,), collective_sums=sums, collectives_at=99.0, lost_collectives=7)


def status(*ranks):
    job = JobInfo("j1", "/runs/j1", ("train.py",), "node0", len(ranks), 1, 0, {}, {}, 1_796_000_000.0)
    return Status(job, JobSnapshot(100.0, 1_796_000_100.0, len(ranks), 0, (NodeReport("node0", ranks),)), state="running")


def large(device_s, rate=9.6e10, **more):
    return CollectiveSum("0", "all_reduce", "1-16MiB", 300, 300 << 23, device_s, rate, 300.0 * (1 << 23), 0.026, **{"whole": True, **more})


BOTH = status(rank(0, large(0.62), CollectiveSum("0", "send", "<64KiB", 4, 400, 0.001)), rank(1, large(0.026)))


def test_ranks_are_joined_and_the_one_with_the_least_time_is_named():
    first, second = collectives.rows(BOTH)
    assert first == {
        "operation": "all_reduce", "size": "1-16MiB", "group": "default_pg", "count": 300, "device_s_least": 0.026, "device_s_most": 0.62,
        "least_rank": 1, "bus_bytes_per_s": 9.6e10, "bus_bytes_per_s_mean": 300 * (1 << 23) / 0.026, "whole": True,
    }  # fmt: skip
    assert (second["operation"], second["bus_bytes_per_s"]) == ("send", None)
    assert state.to_json(BOTH)["collectives"] == [first, second]


def test_the_table_reads_well():
    lines = collectives.table(collectives.rows(BOTH))
    assert lines[0] == "operation   size     group       count  on the device        bus bandwidth  comes last"
    assert lines[1] == "all_reduce  1-16MiB  default_pg  300    26.0 ms to 620.0 ms  96.0 GB/s      rank 1"
    assert lines[2] == "send        <64KiB   default_pg  4      1.0 ms               -              -"
    assert lines[3:] == [collectives.NOTE]


def test_a_lower_bound_is_said_to_be_one():
    (row,) = collectives.rows(status(rank(0, large(0.1, whole=False)), rank(1, large(0.1, rate=9.9e10, whole=False))))
    assert collectives.cells(row)[4:] == ("100.0 ms", "at least 99.0 GB/s", "-")


def test_without_durations_there_is_no_table():
    assert collectives.table(collectives.rows(status(rank(0), rank(1)))) == []


def test_a_large_job_is_sampled():
    many = status(*(rank(number, large(1.0 + number)) for number in range(4096)))
    (row,) = collectives.rows(many)
    assert (row["least_rank"], row["count"]) == (0, 300)


def test_metrics_have_a_series_a_rank_and_one_for_each_operation_and_size():
    slower = status(rank(0, large(0.62), large(0.1, rate=1e9)), rank(1, large(0.026)))
    found = {(name, labels): value for name, labels, value in samples.samples(slower, samples.Ledger(), 0.0) if name.startswith("rankwatch_collective_")}
    assert found["rankwatch_collective_device_seconds_total", ("0",)] == 0.72
    assert found["rankwatch_collective_bus_bandwidth_bytes_per_second", ("all_reduce", "1-16MiB")] == 1e9  # the slowest group's
    assert found["rankwatch_collective_records_lost_total", ("1",)] == 7
