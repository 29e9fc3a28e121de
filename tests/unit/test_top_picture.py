"""The picture of `top` and `status`: what it shows at every size, and that nothing in a document can hurt a terminal."""

import json

import build_status
import pytest
from build_pictures import WALL, compiling, row, stuck
from golden import check
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwatch.commands.live import picture, rank_grid
from rankwatch.report import state

SIZES = {4: (1, 1), 64: (8, 43), 16384: (2048, 16379)}


def drawn(doc, compiles=None, width=100, height=None, note=""):
    return picture.plain(picture.draw(doc, compiles or {}, width, height, note))


@pytest.mark.parametrize("world", SIZES)
def test_the_plain_table(world):
    nodes, rank = SIZES[world]
    check(f"top_{world}.txt", drawn(stuck(world, nodes, rank)))


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 10)])
def test_it_fits_the_screen_and_names_the_culprit_at_every_size(world, size):
    nodes, rank = SIZES[world]
    width, height = size
    lines = picture.draw(stuck(world, nodes, rank), {}, width, height, "q quits")
    rows = picture.plain(lines).splitlines()
    assert len(rows) <= height
    assert max(map(len, rows)) <= width
    assert f"rank {rank}" in "\n".join(rows)
    assert rows[-1] == "q quits"


@pytest.mark.parametrize("world", SIZES)
def test_the_map_is_on_an_80_by_24_screen(world):
    nodes, rank = SIZES[world]
    text = drawn(stuck(world, nodes, rank), width=80, height=24)
    assert "a letter is" in text
    cells = [line.split("  ", 1)[1] for line in text.splitlines() if line.strip()[:1].isdigit() and set(line.split("  ", 1)[-1]) <= set("!w ")]
    assert "".join(cells).count("!") == 1, text


def test_a_real_document_is_drawn():
    text = drawn(state.to_json(build_status.stuck_status()))
    assert text.startswith("STUCK  job 48213  8 ranks on 1 node  for 9m44s  step 24")
    assert "culprit: not_entered" in text
    assert "train.py:31:load_batch" in text


def test_compiles_under_way_show_what_peers_took_and_what_is_left():
    doc, compiles = compiling(8, "2-3", (2, 3))
    text = drawn(doc, compiles)
    assert "torch.compile: starting" in text
    assert "ranks 2-3     [#######   ] about 14 s left  forward@model.py:31: inductor 41 s, peers took 55 s" in text
    late = {**compiles, "now": [{**one, "elapsed_s": 70.0, "eta_s": 0.0} for one in compiles["now"]]}
    assert "15 s over  forward@model.py:31: inductor 70 s, peers took 55 s" in drawn(doc, late)


def test_without_a_compile_document_the_state_tells_the_split():
    doc, _ = compiling(8, "3", (3,))
    doc["compile"] = [{"rank": 3, "now": [{"frame": "f@m.py:1", "phase": "inductor", "elapsed_s": 41.0, "split": 2, "splits": 4}]}]
    assert "[##        ] f@m.py:1: inductor 41 s, split 2 of 4" in drawn(doc)


def test_of_a_large_job_only_ranks_that_stand_out_are_listed():
    doc = stuck(64, 8, 43)
    doc["ranks"] += [row(50, 8, lag=2), row(51, 8, phase="data_wait", label="data wait")]
    table = [line.split()[0] for line in drawn(doc).splitlines() if "node00" in line]
    assert table == ["43", "50", "51"]


def test_a_node_that_does_not_answer_and_a_probe_that_is_off_are_told():
    doc = stuck(64, 8, 43)
    doc["nodes"] = [{"node": "node0005", "ranks": "", "report_age_s": 12.0, "silent_ranks": "40-47", "problem": "timed out"}]
    doc["run"]["capabilities"]["collectives"] = "TORCH_FR_BUFFER_SIZE=0 in the job's environment"
    text = drawn(doc)
    assert "node0005 has not answered for 12 s (timed out): ranks 40-47 are unknown" in text
    assert "collectives: TORCH_FR_BUFFER_SIZE=0" in text


def test_what_ranks_say_moves_no_cursor():
    doc = stuck(4, 1, 1)
    evil = "x\x1b[2J\x07\x9b31m\u202e\r\nEND"
    doc["headline"] = doc["ranks"][0]["detail"] = doc["ranks"][0]["node"] = doc["run"]["job_id"] = evil
    doc["incidents"]["open"][0]["cause"] = doc["waiting"]["rows"][0]["reason"] = doc["run"]["run_dir"] = evil
    doc["phases"] = {evil: "0", "running": "1"}
    doc["run"]["capabilities"] = {evil: evil}
    compiles = {"now": [{"rank": 1, "frame": evil, "phase": evil, "elapsed_s": 1.0, "detail": evil}], "regime": {"name": evil}}
    text = drawn(doc, compiles, note=evil)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "x\\x1b[2J\\x07\\x9b31m\\u202e END" in text


def places(value, path=()):
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


DOCUMENT, COMPILES = compiling(4, "1", (1,))
DOCUMENT["incidents"] = stuck(4, 1, 1)["incidents"]
RUBBISH = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=8), st.lists(st.integers(), max_size=3), st.just({"a": 1}))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([path for path in places(DOCUMENT) if path]), RUBBISH)
def test_a_document_with_anything_at_one_place_is_drawn_or_refused(path, rubbish):
    doc = json.loads(json.dumps(DOCUMENT))
    inner = doc
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = rubbish
    try:
        rows = drawn(doc, COMPILES, 80, 24).splitlines()
    except ValueError:  # ranks that cannot be read: the commands say so
        assert path[0] in ("phases", "odd")
        return
    assert len(rows) <= 24
    assert max(map(len, rows), default=0) <= 80


def test_an_ended_run_has_no_map():
    doc = {
        "state": "done",
        "headline": "The job has ended with exit code 0.",
        "run": {"job_id": "7", "world_size": 2, "nnodes": 1, "started_at": WALL - 9},
        "as_of": WALL,
    }
    assert drawn(doc).splitlines()[:2] == [
        "DONE  job 7  2 ranks on 1 node  lasted 9 s                                                 03:12:44Z",
        "The job has ended with exit code 0.",
    ]


class TestGrid:
    @pytest.mark.parametrize("world", [1, 2, 7, 8, 100, 1000, 4097, 16384, 100_000])
    @pytest.mark.parametrize("size", [(80, 5), (200, 16), (40, 3)])
    def test_every_rank_is_in_a_cell_and_the_grid_fits(self, world, size):
        grid = rank_grid.build(world, 0, {"running": range(world), "dead": (world - 1,)}, *size)
        assert len(grid.rows) <= size[1]
        assert grid.rows[-1].cells[-1] == "dead"
        label = len(str(world - 1)) + 2
        assert all(label + len(row.cells) + (len(row.cells) - 1) // grid.group <= size[0] for row in grid.rows)

    def test_a_cell_is_a_node_where_ranks_do_not_fit(self):
        grid = rank_grid.build(16384, 8, {"running": range(16384)}, 200, 16)
        assert grid.caption == "a letter is the worst of one node, 8 ranks"
        assert len(grid.rows[0].cells) == 128
        assert grid.rows[1].first == 1024

    def test_nodes_of_six_ranks_stay_whole(self):
        grid = rank_grid.build(6 * 500, 6, {"running": range(3000)}, 80, 5)
        assert grid.caption == "a letter is the worst of 12 nodes, 72 ranks" or "nodes" in grid.caption
        assert int(grid.caption.split(", ")[1].split()[0]) % 6 == 0

    def test_of_one_node_ranks_stand_in_groups_as_they_lie_on_nodes(self):
        assert rank_grid.build(16, 4, {"running": range(16)}, 80, 5).group == 4

    @pytest.mark.parametrize(
        ("phases", "letter"),
        [
            ({"running": range(5), "collective_wait": range(5, 8)}, "."),
            ({"running": range(3), "collective_wait": range(3, 8)}, "w"),
            ({"collective_wait": range(7), "compiling": (7,)}, "c"),
            ({"compiling": range(7), "culprit": (7,)}, "!"),
            ({"running": range(7)}, "_"),
            ({"running": range(7), "of_a_later_release": (7,)}, "*"),
        ],
    )
    def test_a_cell_shows_the_most_telling_thing(self, phases, letter):
        grid = rank_grid.build(8 * 4096, 8, {phase: [rank + 8 * node for rank in ranks for node in range(4096)] for phase, ranks in phases.items()}, 80, 64)
        assert {rank_grid.letter(phase) for row in grid.rows for phase in row.cells} == {letter}
