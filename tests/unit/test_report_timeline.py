"""What every rank did over the last ten minutes: bounded while it is gathered, right and readable when it is shown."""

from dataclasses import replace

import build_status
import pytest

from rankwatch import shown
from rankwatch.model import PhaseLook
from rankwatch.monitor import published, timeline
from rankwatch.monitor.incidents import Book
from rankwatch.report import incident, page, text
from rankwatch.report import timeline as drawn

AT = 1_000_000.0


def views(*kinds):
    return {rank: shown.RankView(rank, kind, None, "", False, False, False, None, None, 0.0, None, kind, kind) for rank, kind in enumerate(kinds) if kind}


def seen(*rows, world=None):
    """(seconds, kinds of the ranks) -> looks."""
    looks = ()
    for at, *kinds in rows:
        looks = timeline.extended(looks, views(*kinds), world or len(kinds), AT + at)
    return looks


def test_only_looks_that_differ_are_kept():
    looks = seen((0, "running", "running"), (1, "running", "running"), (2, "running", "compiling"))
    assert [(look.at_wall - AT, look.kinds) for look in looks] == [(0, (("running", "0-1"),)), (2, (("compiling", "1"), ("running", "0")))]
    assert looks[0].seen_wall == AT + 1


def test_ranks_that_nobody_reports_are_no_report():
    assert seen((0, "running", None, None))[0].kinds == (("no_report", "1-2"), ("running", "0"))


def test_what_ended_more_than_ten_minutes_ago_is_forgotten_and_what_began_before_is_not():
    looks = seen((0, "starting"), (100, "running"), (500, "compiling"), (900, "running"))
    assert [look.at_wall - AT for look in looks] == [100, 500, 900]


def test_a_job_that_changes_at_every_look_is_bounded():
    looks = seen(*((number * 0.5, "running" if number % 2 else "collective_wait") for number in range(2000)))
    assert len(looks) == timeline.MAX_LOOKS


def test_a_wall_clock_that_is_set_back_starts_anew():
    assert [look.at_wall - AT for look in seen((100, "running"), (5, "compiling"))] == [5]


@pytest.mark.parametrize(("world_size", "after_s", "due"), [(8, 0.5, False), (8, 1.0, True), (16_384, 30.0, False), (16_384, 33.0, True), (8, -3.0, True)])
def test_large_jobs_are_looked_at_less_often(world_size, after_s, due):
    looks = (PhaseLook(AT - 300, (("running", "0-7"),), AT),)
    assert timeline.due(looks, world_size, AT + after_s) is due
    assert timeline.due((), world_size, AT)


def test_the_status_gathers_it():
    before = build_status.healthy_status()
    after = published.status(before, before.snapshot, (), Book(), before.health, "", "", None)
    assert after.timeline == (PhaseLook(build_status.WALL, (("running", "0-7"),), build_status.WALL),)
    soon = published.status(after, replace(before.snapshot, wall_at=build_status.WALL + 0.5), (), Book(), before.health, "", "", None)
    assert soon.timeline is after.timeline


LOOKS = seen(
    (0, "running", "running", "running"),
    (200, "running", "compiling", "running"),
    (260, "running", "running", "running"),
    (540, "culprit", *["collective_wait"] * 2),
)


class TestRows:
    def test_ranks_that_did_the_same_share_a_row_and_the_first_asked_for_comes_first(self):
        found = drawn.rows(LOOKS, [0, 2, 1], AT + 600)
        assert found["rows"][0] == {"ranks": "0", "spans": [[AT, "running"], [AT + 540, "culprit"]]}
        assert [row["ranks"] for row in found["rows"]] == ["0", "2", "1"]
        assert drawn.rows(seen((0, "running", "running")), [1, 0], AT + 5)["rows"] == [{"ranks": "0-1", "spans": [[AT, "running"]]}]

    def test_a_rank_that_no_look_holds_is_no_report(self):
        assert drawn.rows(LOOKS, [9], AT + 600)["rows"][0]["spans"] == [[AT, "no_report"]]

    def test_it_begins_ten_minutes_before_the_end(self):
        found = drawn.rows(LOOKS, [1], AT + 830)
        assert found["from"] == AT + 230
        assert found["rows"][0]["spans"] == [[AT + 230, "compiling"], [AT + 260, "running"], [AT + 540, "collective_wait"]]

    def test_what_came_after_the_picture_is_not_in_it(self):
        assert drawn.rows(LOOKS, [0], AT + 300)["rows"][0]["spans"] == [[AT, "running"]]

    def test_rows_and_spans_are_bounded(self):
        busy = seen(*((number, *(("running", "compiling")[(number + rank) % 2 or rank == number % 40] for rank in range(40))) for number in range(500)))
        found = drawn.rows(busy, range(40), AT + 500)
        assert len(found["rows"]) <= drawn.MAX_ROWS
        assert all(len(row["spans"]) <= drawn.MAX_SPANS for row in found["rows"])

    def test_without_looks_there_is_nothing(self):
        assert drawn.rows((), [0], AT) == {}
        assert drawn.lines({}) == []
        assert drawn.chart({}) is None


def test_the_text_shows_the_very_end():
    first, row, *_, legend = drawn.lines(drawn.rows(LOOKS, [0], AT + 541))
    assert row.startswith("0  ....")
    assert row.endswith("!")
    assert first.split() == [shown.utc(AT, date=False), shown.utc(AT + 541, date=False)]
    assert legend == ". running, ! culprit"


def test_the_chart_covers_the_time_without_gaps():
    chart = drawn.chart(drawn.rows(LOOKS, [1], AT + 600))
    (_, _, bars), *_ = chart.rows
    assert [bar.kind for bar in bars] == ["running", "compiling", "running", "collective_wait"]
    assert bars[0].x == 0
    assert bars[-1].x + bars[-1].width == pytest.approx(chart.width, abs=0.5)


@pytest.mark.parametrize("broken", [{"rows": 3}, {"from": "x", "to": 2, "rows": []}, {"from": 1, "to": 2, "rows": [3, {"spans": [[1]]}]}, {"from": 2, "to": 1}])
def test_a_part_that_is_not_what_it_should_be_is_no_part(broken):
    assert drawn.lines(broken) == []
    assert drawn.chart(broken) is None


def test_an_incident_tells_it_in_every_form_and_keeps_it_once_it_is_over():
    at = build_status.WALL
    looks = (PhaseLook(at - 100, (("running", "0-7"),), at - 61), PhaseLook(at - 60, (("collective_wait", "0,2-7"), ("culprit", "1")), at))
    picture = build_status.stuck_status(timeline=looks)
    document = incident.to_json(picture.open_incidents[0], picture)
    assert [row["ranks"] for row in document["timeline"]["rows"]] == ["1", "0,2-7"]
    assert "The last ten minutes" in text.render(document)
    assert 'class="time"' in page.render(document)
    over = replace(picture.open_incidents[0], kept=incident.picture(picture.open_incidents[0], picture), closed_at=build_status.NOW + 9, closed_wall_at=at + 9)
    assert incident.to_json(over, build_status.healthy_status())["timeline"] == document["timeline"]
