"""The pages: self-contained, small, complete without scripts, bounded at any world size."""

import dataclasses
import re

import build_status
import pytest

from rankwatch.model import Group, JobSnapshot, NodeReport, WaitedOn
from rankwatch.report import incident, page, rank_map, status, text

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
    for words in ("rank 3 recompiles", "forward@model.py:31", "collective wait", "incidents/20261130T031211Z-1/", "default_pg", "<noscript>"):
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
    assert '<i class="phase k-culprit"></i>culprit: not_entered' in rendered
    assert '<i class="phase k-running"></i>' not in rendered
    assert '<rect class="k-culprit"' in rendered
    assert '<span class="badge slow">waited on</span>' in rendered
    assert "What rankwatch cannot see" not in rendered


def test_a_compile_under_way_stands_in_the_table_of_finished_ones():
    rendered = status.render(build_status.compiling_status())
    assert "<th>under way</th>" in rendered
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
    assert '<i class="phase k-no_report"></i>no report' in rendered
    assert "8-15" in rendered


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
