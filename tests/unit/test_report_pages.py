"""The pages: self-contained, small, complete without scripts, bounded at any world size."""

import dataclasses
import re

import build_status
import pytest

from rankwatch.model import Group, JobSnapshot, NodeReport, Process, WaitedOn
from rankwatch.report import alike, incident, page, rank_map, state, status, text

BUILDS = [build_status.stuck_status, build_status.compiling_status, build_status.crashed_status]


def page_of(picture):
    return page.render(incident.to_json(picture.open_incidents[0], picture))


def with_long_stacks(picture):
    opened = picture.open_incidents[0]
    stacks = {rank: dataclasses.replace(stack, text="x" * 150_000) for rank, stack in opened.stacks.items()}
    return dataclasses.replace(picture, open_incidents=(dataclasses.replace(opened, stacks=stacks),))


@pytest.mark.parametrize("build", BUILDS)
def test_a_page_of_a_few_ranks_is_small_and_loads_nothing(build):
    rendered = page_of(build())
    assert len(rendered) < 300_000
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|url\(\s*["']?http|@import|<link|<img|<iframe""", rendered)
    assert rendered.startswith("<!doctype html>")


def test_an_incident_links_to_the_jobs_status_page_where_there_is_one():
    document = incident.to_json(build_status.stuck_status().open_incidents[0], build_status.stuck_status())
    assert '<a href="../../index.html">job 48213</a>' in page.render(document)
    assert "../../" not in page.render(document, home="")


def test_a_status_page_in_the_archive_links_to_no_file_that_stays_behind():
    assert 'href="run.json"' in status.render(build_status.stuck_status(), live=False)
    assert "run.json" not in status.render(build_status.stuck_status(), live=False, files=False)


def test_long_stacks_do_not_blow_the_page_up():
    rendered = page_of(with_long_stacks(build_status.stuck_status()))
    assert len(rendered) < 300_000
    assert "... more in stacks/" in rendered


def test_the_page_names_everything_without_scripts():
    rendered = re.sub(r"<script.*?</script>", "", page_of(build_status.stuck_status()), flags=re.DOTALL)
    for words in ("load_batch", "rank 1 has not entered", "Look at load_batch", "0,<wbr>2-7", "py-spy --native timed out", "default_pg", "incident.json"):
        assert words in rendered


def test_the_nonce_reaches_the_script():
    picture = build_status.stuck_status()
    assert '<script nonce="abc">' in page.render(incident.to_json(picture.open_incidents[0], picture), nonce="abc")
    assert '<script nonce="abc">' in status.render(picture, nonce="abc")


def test_both_pages_follow_the_readers_colour_scheme():
    picture = build_status.stuck_status()
    assert "prefers-color-scheme:dark" in page_of(picture)
    assert "prefers-color-scheme:dark" in status.render(picture)


def test_the_culprits_stack_stands_beside_the_largest_other_group():
    picture = build_status.stuck_status()
    culprit, waiting = page.stack_views(incident.to_json(picture.open_incidents[0], picture))
    assert (culprit.ranks, waiting.ranks, waiting.number) == ("1", "0,2-7", 7)
    assert [frame.place for _, frames in culprit.runs for frame in frames if frame.differs] == ["train.py:58"]
    assert [frame.place for _, frames in waiting.runs for frame in frames if frame.differs] == ["train.py:61"]


def test_three_library_frames_fold_and_the_innermost_stays():
    picture = build_status.compiling_status()
    culprit = page.stack_views(incident.to_json(picture.open_incidents[0], picture))[0]
    assert [(hidden, len(frames)) for hidden, frames in culprit.runs] == [(False, 1), (True, 3), (False, 3)]


def test_equal_stacks_differ_nowhere():
    document = {"stack_groups": [{"ranks": "0", "frames": ["f (/a.py:1)"], "role": "culprit"}, {"ranks": "1", "frames": ["f (/a.py:1)"], "role": "waiting"}]}
    assert not [frame for view in page.stack_views(document) for _, frames in view.runs for frame in frames if frame.differs]


def test_the_status_page_is_complete_without_scripts():
    rendered = re.sub(r"<script.*?</script>", "", status.render(build_status.compiling_status()), flags=re.DOTALL)
    for words in ("rank 3 recompiles", "forward@model.py:31", "waiting", "incidents/20261130T031211Z-1/", "default_pg", "<noscript>"):
        assert words in rendered
    assert "http-equiv" not in rendered


@pytest.mark.parametrize("build", [*BUILDS, build_status.healthy_status])
@pytest.mark.parametrize("changes", [{}, {"snapshot": None}])
def test_the_status_page_renders_partial_pictures(build, changes):
    assert "rankwatch" in status.render(build(**changes))


def test_a_member_of_a_job_of_many_nodes_says_where_the_job_is_judged():
    rendered = status.render(build_status.healthy_status(judge="http://node0:27435"))
    assert "The whole job is judged elsewhere: http://node0:27435." in rendered


def test_the_culprit_of_an_open_incident_is_not_calmly_running():
    rendered = status.render(build_status.stuck_status())
    assert '<i class="phase k-culprit" aria-hidden="true">!</i>culprit: not_entered' in rendered
    assert '<i class="phase k-running"' not in rendered
    assert '<li class="card culprit">' in rendered
    assert '<span class="badge slow">waited on</span>' in rendered
    assert "What rankwatch cannot see" not in rendered


def test_a_compile_under_way_stands_in_the_table_of_finished_ones():
    rendered = status.render(build_status.compiling_status())
    assert '<th scope="col">under way</th>' in rendered
    assert '<span class="mono">forward@model.py:31</span> inductor, 41 s, split 2 of 4' in rendered
    assert "culprit: compiling" in rendered


def test_frames_of_rankwatch_are_library_frames():
    frames = ["_on (/opt/rankwatch/agent/probes/compile.py:3)", "main (/home/a/train.py:1)"]
    view = page.stack_views({"stack_groups": [{"ranks": "0", "frames": frames, "role": "culprit"}]})[0]
    assert [frame.library for _, run in view.runs for frame in run] == [True, False]


def test_ranks_nobody_reports_look_like_nothing_else():
    picture = build_status.stuck_status()
    picture = dataclasses.replace(picture, job=build_status.job(world_size=16))
    rendered = status.render(picture)
    assert '<i class="phase k-no_report" aria-hidden="true">?</i>no report' in rendered
    assert "8-15" in rendered


def test_the_head_says_what_is_stuck_what_to_do_and_how_long_is_left():
    head = status.render(build_status.stuck_status()).partition("</header>")[0]
    for words in ("rank 1 has not entered", "What to do", "Look at load_batch in train.py:31", "the watchdog ends the job in", ">9m00s<", "index.html"):
        assert words in head
    assert "540 s" not in head  # said once, by the countdown


def test_a_timeout_that_cannot_be_told_is_unknown_and_none_is_not_said():
    verdict = build_status.stuck_verdict(timeout_left_s=None, timeout_known=False)
    unknown = build_status.stuck_status(open_incidents=(build_status.stuck_incident(verdict=verdict),), verdicts=(verdict,))
    assert ">unknown</b>" in status.render(unknown)
    assert "the watchdog ends the job" not in status.render(build_status.healthy_status())


def test_ranks_that_do_the_same_are_one_row_told_apart_by_their_stacks():
    doc = state.to_json(build_status.stuck_status(job=build_status.job(world_size=16)))
    assert [(row["ranks"], row["label"], row["detail"], row["place"]) for row in doc["alike"]] == [
        ("1", "culprit: not_entered", "train.py:31:load_batch", ""),
        ("8-15", "no report", "what they do is not known", ""),
        ("0,2-7", "waiting", "all_reduce seq 26 of default_pg", "train.py:61:train_step"),
    ]
    assert [row["ranks"] for row in state.to_json(build_status.healthy_status())["alike"]] == ["0-7"]


def test_very_many_groups_are_bounded_and_all_are_counted():
    rows = [alike.Alike((rank,), "compiling", "compiling", f"f{rank}", "", False) for rank in range(500)]
    listed = alike.to_json(rows)
    assert len(listed) == alike.MAX_ROWS
    assert sum(row["number"] for row in listed) == 500
    assert listed[-1]["detail"] == "477 more groups"


def test_the_last_state_as_a_file_has_no_script_and_leads_to_files_beside_it():
    rendered = status.render(build_status.stuck_status(), live=False)
    assert "<script" not in rendered
    assert 'href="incidents/20261130T031149Z-1/index.html"' in rendered
    assert 'href="run.json"' in rendered
    assert "data-deadline" not in rendered
    assert "the last state, as of" in rendered


def test_a_job_that_has_ended_says_how_and_of_what():
    rendered = status.render(build_status.crashed_status())
    head = rendered.partition("</header>")[0]
    assert "The job has ended with exit code 1. rank 2 crashed: ValueError: bad shard 17" in head
    assert "the watchdog ends the job" not in head


def test_a_rank_that_has_ended_well_is_not_called_dead():
    ended = build_status.rank_state(0, world=1, process=Process(pid=1, alive=False, exit_code=0))
    picture = build_status.healthy_status(snapshot=build_status.snapshot((ended,), world_size=1), job=build_status.job(world_size=1))
    (row,) = state.to_json(picture)["ranks"]
    assert (row["phase"], row["label"], row["kind"]) == ("dead", "ended", "shutdown")


def test_a_closed_incident_is_told_in_the_past():
    closed = dataclasses.replace(build_status.stuck_incident(), closed_at=build_status.NOW, closed_wall_at=build_status.WALL)
    rendered = status.render(build_status.healthy_status(closed_incidents=(closed,)))
    assert "rank 1 had not entered all_reduce seq 26 of default_pg" in rendered
    assert "watchdog ends the job in 540 s" not in rendered


COMPILES = {
    "regime": {"name": "compiles_for_ever", "words": "forward@model.py:31 is recompiled again and again"},
    "advice": [{"words": "Mark x dynamic", "setting": "mark_dynamic(x, 0)"}],
    "now": [{"rank": 3, "frame": "forward@model.py:31", "phase": "inductor", "elapsed_s": 41.0, "peers": "0-2", "peers_took_s": 60.0, "eta_s": 19.0}],
    "divergence": [{"kind": "lone_recompile", "words": "rank 3 alone recompiled <forward>"}],
    "ddp": {"groups": [{"ranks": "0-3", "status": "split", "splits": 2, "buckets": [{"bytes": 1e6}, {"bytes": 2e6}]}]},
}


def test_who_compiles_what_stands_beside_what_peers_took_and_where_ranks_differ():
    rendered = status.render(build_status.healthy_status(compile=COMPILES))
    for words in (
        "compiles for ever: forward@model.py:31 is recompiled", "Mark x dynamic (mark_dynamic(x, 0))", "ranks 0-2 took 60 s, about 19 s left",
        "recompiled alone</b>: rank 3 alone recompiled &lt;forward&gt;", "ranks 0-3: 2 splits of 1.00, 2.00 MB",
    ):  # fmt: skip
        assert words in rendered


@pytest.mark.parametrize("broken", [{"regime": 3}, {"now": [{}], "ddp": {"groups": [{}]}}, {"now": 3, "divergence": [4], "advice": [{}]}])
def test_a_compile_document_of_any_form_is_shown_as_far_as_it_goes(broken):
    assert "torch.compile" in status.render(build_status.healthy_status(compile=broken))


def test_memory_and_cuda_graphs_that_are_equal_are_one_row():
    assert status.memory(state.to_json(build_status.stuck_status())) == [("0-7", 4, 268435456, "")]


def test_an_old_document_without_the_newer_parts_is_shown():
    rendered = page.render(
        {"verdict": "stuck", "culprit_ranks": [1], "waiting_ranks": [0], "summary": "s", "run": {"world_size": 2}, "nodes": 7, "timeline": 3}
    )
    assert "The last ten minutes" not in rendered


WORLD = 16_384


def huge():
    everyone = tuple(range(WORLD))
    groups = (Group("0", "default_pg", "nccl", everyone, 600.0),)
    ranks = [
        dataclasses.replace(
            build_status.rank_state(rank) if rank == 777 else build_status.waiting_rank(rank),
            groups=groups,
            stack=None,
            node=f"node{rank // 8:04d}",
        )
        for rank in everyone
    ]
    nodes = tuple(NodeReport(f"node{index:04d}", tuple(ranks[8 * index : 8 * index + 8]), group_rank=index) for index in range(WORLD // 8))
    verdict = build_status.stuck_verdict(
        culprit_ranks=(777,),
        waiting_ranks=tuple(rank for rank in everyone if rank % 3 and rank != 777),
        group=WaitedOn("0", "default_pg", everyone, "all_reduce", 26),
    )
    opened = build_status.stuck_incident(verdict=verdict, hosts={777: "node0097"}, pids={777: 4242})
    snapshot = JobSnapshot(now=build_status.NOW, wall_at=build_status.WALL, world_size=WORLD, attempt=0, nodes=nodes)
    return build_status.stuck_status(job=build_status.job(world_size=WORLD, nnodes=WORLD // 8, node="node0000"), snapshot=snapshot, open_incidents=(opened,))


def test_16k_ranks_stay_bounded_everywhere():
    picture = huge()
    document = incident.to_json(picture.open_incidents[0], picture)
    assert len(document["waiting_ranks"]) > 10_000
    assert len(text.render(document)) < 20_000
    assert len(page.render(document)) < 300_000
    assert len(status.render(picture)) < 100_000
    assert '<td class="n">777</td>' in status.render(picture)


class TestRankMap:
    def test_few_ranks_are_numbered_cells(self):
        found = rank_map.build(8, {"running": range(8), "dead": [3]}, [3])
        assert [cell.kind for cell in found.cells] == ["running"] * 3 + ["dead"] + ["running"] * 4
        assert [cell.rank for cell in found.cells if cell.culprit] == [3]

    def test_ranks_stand_by_their_nodes_up_to_512(self):
        nodes = [(f"node{number}", range(8 * number, 8 * number + 8)) for number in range(1, 8)]
        found = rank_map.build(64, {"running": range(64), "no_report": range(8, 16)}, [17], nodes=nodes)
        assert [name for _, _, name in found.labels] == [*(f"node{number}" for number in range(1, 8)), "no node known"]
        assert sorted(cell.rank for cell in found.cells) == list(range(64))
        assert len({(cell.x, cell.y) for cell in found.cells}) == 64
        letters = {cell.rank: cell.letter for cell in found.cells}
        assert (letters[0], letters[8], letters[17]) == ("", "?", "!")
        assert found.words == "56 running, 8 no report; culprit: rank 17"

    def test_no_two_cells_of_the_largest_grid_touch(self):
        found = rank_map.build(512, {}, [], nodes=[(f"n{number}", range(8 * number, 8 * number + 8)) for number in range(64)])
        assert len({(cell.x, cell.y) for cell in found.cells}) == 512
        assert found.width <= rank_map.WIDTH

    def test_one_node_needs_no_label(self):
        assert rank_map.build(8, {}, [], nodes=[("a", range(8))]).labels == ()

    def test_many_ranks_are_runs(self):
        found = rank_map.build(16_384, {"running": range(16_384), "dead": [3]}, [3])
        assert {layer.kind for layer in found.layers} == {"running", "dead"}
        assert next(layer.path for layer in found.layers if layer.kind == "dead") == "M3 0.5h1"
        assert found.rings == ((3, 0),)
        assert sum(len(layer.path) for layer in found.layers) < 2_000

    def test_every_rank_is_drawn_once(self):
        found = rank_map.build(1_000, {"running": range(0, 1_000, 2)}, [])
        drawn = sum(int(length) for layer in found.layers for length in re.findall(r"h(\d+)", layer.path))
        assert drawn == 1_000

    def test_ranks_beyond_the_world_are_ignored_and_no_world_gives_no_map(self):
        assert rank_map.build(2, {"dead": [7]}, [9]).cells[1].kind == "other"
        assert rank_map.build(0, {}, []) is None
