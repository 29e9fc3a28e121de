"""/metrics holds the picture and nothing else: parsed by the client library, counted against the budget."""

import dataclasses
import math
import os

import build_status
import prometheus_client.metrics
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from rankwatch.export.prometheus import Exporter
from rankwatch.model import MonitorHealth, NodeReport, Process, Status
from rankwatch.wire.signals import BY_NAME

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def series(status, level="auto", exporter=None):
    """{(name, frozenset of labels without job_id): value}"""
    body, _ = (exporter or Exporter(level)).render(status, "")
    return {
        (sample.name, frozenset((key, value) for key, value in sample.labels.items() if key != "job_id")): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def value(status, name, **labels):
    return series(status).get((name, frozenset(labels.items())))


def test_the_text_format_parses_into_the_names_of_the_table():
    names = {name for name, _ in series(build_status.stuck_status())}
    assert names <= set(BY_NAME)
    assert len(names) > 50


def test_openmetrics_is_served_when_asked_for_and_says_the_same():
    body, content_type = Exporter().render(build_status.stuck_status(), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    found = {
        (sample.name, frozenset((key, text) for key, text in sample.labels.items() if key != "job_id")): sample.value
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
    }
    assert found == series(build_status.stuck_status())


def test_every_series_carries_the_job():
    body, _ = Exporter().render(build_status.stuck_status(), "")
    assert all(sample.labels["job_id"] == "48213" for family in parse_text(body.decode()) for sample in family.samples)


def test_no_created_series_and_the_process_wide_switch_stays_as_it_was():
    before = (prometheus_client.metrics._use_created, dict(os.environ))
    body, _ = Exporter().render(build_status.stuck_status(), OPENMETRICS)
    assert b"_created" not in body
    assert (prometheus_client.metrics._use_created, dict(os.environ)) == before


@pytest.mark.parametrize(("level", "budget"), [("low", 12), ("default", 60), ("full", 120)])
@pytest.mark.parametrize("build", [build_status.stuck_status, build_status.compiling_status, build_status.crashed_status])
def test_a_rank_with_everything_filled_stays_within_the_budget(build, level, budget):
    status = build()
    per_rank = {}
    for name, labels in series(status, level):
        rank = dict(labels).get("rank")
        if rank is not None and name != "rankwatch_incident_info":
            per_rank[rank] = per_rank.get(rank, 0) + 1
    assert len(per_rank) == status.job.world_size
    assert max(per_rank.values()) <= budget
    assert min(per_rank.values()) >= 9


def test_auto_is_low_for_a_very_large_job():
    status = build_status.stuck_status(job=build_status.job(world_size=4096))
    assert value(status, "rankwatch_rank_up", rank="1") == 1
    assert value(status, "rankwatch_rank_steps_total", rank="1") == 24
    assert not any(name == "rankwatch_compiled_frames_total" for name, _ in series(status))


class TestStuck:
    status = build_status.stuck_status()

    def test_culprit_and_victims_are_told_apart(self):
        assert [value(self.status, "rankwatch_rank_stuck", rank=str(rank)) for rank in range(8)] == [0, 1, 0, 0, 0, 0, 0, 0]
        assert [value(self.status, "rankwatch_rank_waiting", rank=str(rank)) for rank in range(8)] == [1, 0, 1, 1, 1, 1, 1, 1]

    def test_the_culprit_lags_and_the_others_wait(self):
        assert [value(self.status, "rankwatch_collective_lag", rank=str(rank)) for rank in (0, 1)] == [0, 1]
        assert [value(self.status, "rankwatch_rank_phase", rank=str(rank)) for rank in (0, 1)] == [3, 1]
        assert value(self.status, "rankwatch_collective_inflight_seconds", rank="0") == 60
        assert value(self.status, "rankwatch_collective_timeout_ratio", rank="0") == pytest.approx(0.1)

    def test_the_verdict_is_a_state_set(self):
        found = {dict(labels)["verdict"]: number for (name, labels), number in series(self.status).items() if name == "rankwatch_verdict"}
        assert found == {"slow": 0, "stuck": 1, "timeout_imminent": 0, "failed": 0, "diverged": 0, "straggler": 0, "recovered": 0}

    def test_the_incident_says_it_all_in_its_labels(self):
        labels = {"incident": "20261130T031149Z-1", "verdict": "stuck", "cause": "not_entered", "domain": "user_code", "rank": "1", "node": "node05"}
        assert value(self.status, "rankwatch_incident_info", **labels) == 1

    def test_an_escalated_incident_counts_for_each_verdict_it_reached(self):
        assert value(self.status, "rankwatch_incidents_total", verdict="slow") == 1
        assert value(self.status, "rankwatch_incidents_total", verdict="stuck") == 1
        assert value(self.status, "rankwatch_incidents_total", verdict="failed") == 0

    def test_the_stack_capture_is_counted_by_result(self):
        assert value(self.status, "rankwatch_stack_dumps_total", result="failed") == 1
        assert value(self.status, "rankwatch_stack_dumps_total", result="timeout") == 0


def test_a_compiling_rank_shows_as_compiling_and_is_not_stuck():
    status = build_status.compiling_status()
    assert value(status, "rankwatch_rank_phase", rank="3") == 2
    assert value(status, "rankwatch_compile_active", rank="3") == 1
    assert value(status, "rankwatch_compile_start_timestamp_seconds", rank="3") == build_status.WALL - 41
    assert value(status, "rankwatch_compile_active", rank="0") == 0
    assert value(status, "rankwatch_job_compile_skew_seconds") == 41
    assert value(status, "rankwatch_rank_stuck", rank="3") == 0


def test_compile_ddp_and_cudagraph_totals_are_exported():
    status = build_status.healthy_status()
    assert value(status, "rankwatch_compile_seconds_total", rank="0", stage="inductor") == 40.5
    assert value(status, "rankwatch_recompiles_total", rank="0") == 1
    assert value(status, "rankwatch_graph_breaks_total", rank="0") == 2
    assert value(status, "rankwatch_compile_cache_events_total", cache="fx", result="hit") == 16
    assert value(status, "rankwatch_ddp_graph_splits", rank="0") == 4
    assert value(status, "rankwatch_ddp_graph_split_hash", rank="0") == 0x0123456789AB
    assert value(status, "rankwatch_cudagraph_pool_bytes", rank="0") == 268435456


def test_a_model_that_fits_one_bucket_has_one_split():
    record = {"status": "single_bucket", "splits": 1, "fingerprint": "c0ffee", "buckets": [{"bytes": 5000, "n_params": 2}], "calls": 1, "failures": 0}
    status = Status(job=build_status.job(), snapshot=build_status.snapshot((build_status.rank_state(0, ddp=record),)), state="running")
    assert value(status, "rankwatch_ddp_graph_splits", rank="0") == 1
    assert value(status, "rankwatch_ddp_graph_split_hash", rank="0") == 0xC0FFEE


def test_split_hashes_that_differ_in_the_last_of_48_bits_stay_apart():
    ranks = tuple(build_status.rank_state(rank, ddp={"splits": 2, "fingerprint": f"{(1 << 48) - 1 - rank:x}"}) for rank in range(2))
    status = Status(job=build_status.job(), snapshot=build_status.snapshot(ranks), state="running")
    assert value(status, "rankwatch_ddp_graph_split_hash", rank="0") == 2**48 - 1
    assert value(status, "rankwatch_ddp_graph_split_hash", rank="1") == 2**48 - 2


def test_a_dead_rank_stays_at_up_0():
    status = build_status.crashed_status()
    assert [value(status, "rankwatch_rank_up", rank=str(rank)) for rank in range(4)] == [0, 0, 0, 0]
    assert value(status, "rankwatch_rank_phase", rank="2") == 8
    assert value(status, "rankwatch_rank_phase_start_timestamp_seconds", rank="2") == build_status.WALL - 2


def test_no_series_outlives_its_rank():
    clock = Clock()
    exporter = Exporter(clock=clock)
    assert ("rankwatch_rank_up", frozenset({("rank", "7")})) in series(build_status.healthy_status(), exporter=exporter)
    clock.now += 2
    fewer = build_status.healthy_status(snapshot=build_status.snapshot((build_status.rank_state(0),)))
    assert ("rankwatch_rank_up", frozenset({("rank", "7")})) not in series(fewer, exporter=exporter)
    clock.now += 2
    between = build_status.healthy_status(snapshot=None, state="restarting")
    found = series(between, exporter=exporter)
    assert found[("rankwatch_job_state", frozenset())] == 3
    assert not any("rank" in dict(labels) for _, labels in found)


def test_a_closed_incident_vanishes_but_stays_counted_when_the_list_forgets_it():
    clock = Clock()
    exporter = Exporter(clock=clock)
    series(build_status.stuck_status(), exporter=exporter)
    clock.now += 2
    found = series(build_status.healthy_status(), exporter=exporter)
    assert not any(name in ("rankwatch_incident_info", "rankwatch_incident_open_timestamp_seconds") for name, _ in found)
    assert found[("rankwatch_incidents_total", frozenset({("verdict", "stuck")}))] == 1
    assert found[("rankwatch_lost_rank_seconds_total", frozenset())] == 420


def test_recovered_shows_for_a_minute():
    def closed(seconds_ago):
        return dataclasses.replace(build_status.stuck_incident(), closed_at=build_status.NOW - seconds_ago, closed_wall_at=build_status.WALL - seconds_ago)

    assert value(build_status.healthy_status(closed_incidents=(closed(59),)), "rankwatch_verdict", verdict="recovered") == 1
    assert value(build_status.healthy_status(closed_incidents=(closed(61),)), "rankwatch_verdict", verdict="recovered") == 0


def test_at_most_sixteen_incidents_are_exported():
    incidents = tuple(dataclasses.replace(build_status.stuck_incident(), id=f"i-{number}") for number in range(40))
    found = series(build_status.stuck_status(open_incidents=incidents))
    assert sum(name == "rankwatch_incident_info" for name, _ in found) == 16


def test_a_failed_probe_is_0_and_one_switched_off_is_absent():
    probes = {"compile": {"status": "failed"}, "ddp": {"status": "missing"}, "steps": {"status": "off"}, "collectives": {"status": "armed"}}
    status = build_status.healthy_status(snapshot=build_status.snapshot((build_status.rank_state(0, probes=probes),)))
    assert value(status, "rankwatch_probe_up", rank="0", probe="compile") == 0
    assert value(status, "rankwatch_probe_up", rank="0", probe="ddp") == 0
    assert value(status, "rankwatch_probe_up", rank="0", probe="collectives") == 1
    assert value(status, "rankwatch_probe_up", rank="0", probe="steps") is None
    assert value(status, "rankwatch_probe_ranks_down", probe="compile") == 1


def test_what_nobody_has_seen_gives_no_sample():
    bare = dataclasses.replace(
        build_status.rank_state(0),
        process=None,
        groups=(),
        collectives=(),
        enqueued={},
        completed={},
        compile_totals={},
        ddp={},
        cudagraph={},
        heartbeat_at=None,
        last_step_at=None,
        step_s=None,
    )
    names = {name for name, labels in series(build_status.healthy_status(snapshot=build_status.snapshot((bare,))))}
    assert not names & {
        "rankwatch_rank_up",
        "rankwatch_collective_seq",
        "rankwatch_compiled_frames_total",
        "rankwatch_ddp_graph_splits",
        "rankwatch_rank_last_step_timestamp_seconds",
    }


def test_numbers_that_a_rank_made_up_do_not_break_the_scrape():
    totals = {"frames": "many", "recompiles": math.nan, "seconds": [1], "cache": {"fx": {"hit": None}, 3: 4}, "graph_breaks": True}
    rank = build_status.rank_state(0, compile_totals=totals, ddp={"splits": None, "fingerprint": "no digits"}, probes={"x\ny": {}})
    status = build_status.healthy_status(snapshot=build_status.snapshot((rank,)))
    found = series(status)
    assert ("rankwatch_compiled_frames_total", frozenset({("rank", "0")})) not in found
    assert ("rankwatch_recompiles_total", frozenset({("rank", "0")})) not in found


def test_hostile_labels_are_escaped():
    status = build_status.stuck_status(job=build_status.job(job_id='a"b\\c\nd\ud800', labels={"team-1": 'x"y'}))
    body, _ = Exporter().render(status, OPENMETRICS)
    info = next(family for family in parse_openmetrics(body.decode()) if family.name == "rankwatch_job_info").samples[0]
    assert info.labels["job_id"] == 'a"b\\c\nd\\ud800'
    assert info.labels["label_team_1"] == 'x"y'


def test_a_node_that_does_not_judge_exports_its_own_ranks_only():
    reports = tuple(
        NodeReport(f"node{index}", tuple(build_status.rank_state(rank) for rank in range(4 * index, 4 * index + 4)), group_rank=index) for index in range(2)
    )
    snapshot = dataclasses.replace(build_status.snapshot(()), world_size=8, nodes=reports)
    second = series(build_status.healthy_status(job=build_status.job(node="node1", nnodes=2), snapshot=snapshot))
    assert {dict(labels)["rank"] for _, labels in second if "rank" in dict(labels)} == {"4", "5", "6", "7"}
    assert not any(name == "rankwatch_job_state" for name, _ in second)
    first = series(build_status.healthy_status(job=build_status.job(node="node0", nnodes=2), snapshot=snapshot))
    assert ("rankwatch_job_state", frozenset()) in first
    one_host = dataclasses.replace(snapshot, nodes=tuple(dataclasses.replace(report, node="node0") for report in reports))
    judge = series(build_status.healthy_status(job=build_status.job(node="node0", nnodes=2), snapshot=one_host))
    assert {dict(labels)["rank"] for _, labels in judge if "rank" in dict(labels)} == {"0", "1", "2", "3"}


def test_several_scrapers_within_a_second_get_the_same_bytes():
    clock = Clock()
    exporter = Exporter(clock=clock)
    first = exporter.render(build_status.healthy_status(), "")[0]
    clock.now += 0.9
    busier = build_status.healthy_status(health=MonitorHealth(polls=7))
    assert exporter.render(busier, "")[0] is first
    clock.now += 0.2
    assert b"rankwatch_monitor_polls_total{" in exporter.render(busier, "")[0]
    assert exporter.render(busier, "")[0] is not first


def test_a_new_verdict_shows_at_once_despite_the_cache():
    exporter = Exporter(clock=Clock())
    exporter.render(build_status.healthy_status(), "")
    assert b'rankwatch_rank_stuck{job_id="48213",rank="1"} 1.0' in exporter.render(build_status.stuck_status(), "")[0]


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="metrics level 'all'"):
        Exporter("all")


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({}, 1),
        ({"stage": "joining"}, 0),
        ({"stage": "left"}, 7),
        ({"process": Process(pid=1, alive=False)}, 8),
        ({"heartbeat_at": build_status.NOW - 11}, 9),
        ({"agent": "silent", "agent_detail": "no slot"}, 9),
        ({"compiling": (build_status.compiling_activity(phase="cudagraph_record"),)}, 6),
        ({"compiling": (build_status.compiling_activity(),), "heartbeat_at": build_status.NOW - 60}, 2),
    ],
)
def test_phases(changes, phase):
    status = build_status.healthy_status(snapshot=build_status.snapshot((build_status.rank_state(0, **changes),)))
    assert value(status, "rankwatch_rank_phase", rank="0") == phase


def test_a_collective_that_has_finished_since_the_last_full_read_is_not_in_flight():
    rank = build_status.waiting_rank(0, completed={"0": 26}, enqueued={"0": 30})
    status = build_status.healthy_status(snapshot=build_status.snapshot((rank,)))
    assert value(status, "rankwatch_collective_inflight_seconds", rank="0") == 0
    assert value(status, "rankwatch_rank_phase", rank="0") == 1
