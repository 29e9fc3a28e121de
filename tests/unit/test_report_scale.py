"""What is shown of many ranks, nodes and incidents stays small, and names those that nobody sees."""

from dataclasses import replace

from build_status import job, stuck_incident, stuck_status, stuck_verdict
from build_world import LargeJob, without

from rankwatch import shown
from rankwatch.model import Status
from rankwatch.report import state, status

SILENT = tuple(range(8, 16))


def silent_status(**changes):
    """64 ranks on 8 nodes; node 1 does not answer, and the others wait for its ranks."""
    snapshot = without(LargeJob(64, "asleep", 11).look(20.0), {1: 40.0})
    waiting = tuple(rank for rank in range(64) if rank not in SILENT)
    verdict = stuck_verdict(cause="unknown", domain="node", culprit_ranks=SILENT, waiting_ranks=waiting, unknown_ranks=SILENT, at="", confidence="partial")
    incident = stuck_incident(verdict=verdict, stacks={}, stack_groups=(), hosts=dict.fromkeys(SILENT, "node0001"), pids={})
    picture = Status(job(world_size=64, nnodes=8, node="node0000"), snapshot, (verdict,), (incident,), state="stuck")
    return replace(picture, **changes)


def test_silent_culprits_are_ringed_on_the_map_and_shown_without_a_report():
    doc = state.to_json(silent_status())
    assert doc["culprits"] == "8-15"
    assert doc["phases"]["no_report"] == "8-15"
    assert doc["ranks_seen"] == 56
    assert doc["stuck"] == ""  # of ranks that are seen


def test_a_node_that_does_not_answer_comes_first_among_the_nodes():
    doc = state.to_json(silent_status())
    assert doc["nodes"][0] == {"node": "node0001", "ranks": "", "report_age_s": 40.0, "silent_ranks": "8-15", "problem": "timed out"}
    assert doc["nodes"][1] == {"node": "node0000", "ranks": "0-7", "report_age_s": 0.0}
    assert "does not answer (timed out); 8-15 unknown" in status.render(silent_status())


def test_of_very_many_open_incidents_the_gravest_are_shown_and_all_are_counted():
    one = stuck_incident()
    slow = tuple(replace(one, id=f"s{number}", verdict=replace(one.verdict, verdict="slow", key=f"s{number}")) for number in range(500))
    doc = state.to_json(stuck_status(open_incidents=(*slow, one)))
    assert len(doc["incidents"]["open"]) == state.MAX_OPEN
    assert doc["incidents"]["num_open"] == 501
    assert doc["incidents"]["open"][0]["id"] == one.id
    page = status.render(stuck_status(open_incidents=(*slow, one)))
    assert "437 more are open, none of them graver" in page
    assert len(page.encode()) < 1_000_000


def test_the_views_of_one_picture_are_worked_out_once():
    picture = stuck_status()
    views = shown.rank_views(picture)
    assert shown.rank_views(replace(picture, restarts=3)) is views
    other = shown.rank_views(replace(picture, verdicts=(), open_incidents=()))
    assert views[1].culprit
    assert not other[1].culprit
    assert shown.rank_views(Status(picture.job, None)) == {}


def test_a_page_of_thousands_of_ranks_is_small():
    picture = silent_status(snapshot=LargeJob(2048, "asleep", 11, entries=2).look(20.0), job=job(world_size=2048, nnodes=256, node="node0000"))
    assert len(status.render(picture).encode()) < 100_000
