"""/api/v1/incidents stays small: of very many incidents the gravest are whole, the others a row each, and all are counted."""

import json
from dataclasses import replace

import pytest
from build_status import job, stuck_incident, stuck_status

from rankwatch.config import Options
from rankwatch.model import Change
from rankwatch.monitor.files import RunFiles, as_json
from rankwatch.monitor.web import Web
from rankwatch.monitor.writer import Writer
from rankwatch.report import incident_list, state
from rankwatch.serve.http import Request


def incident(number, verdict="slow", ranks=7, **more):
    one = stuck_incident()
    judged = replace(one.verdict, verdict=verdict, key=f"a0-hang-{number}", waiting_ranks=tuple(range(1, ranks)))
    return replace(one, id=f"20261130T031244Z-{number}", verdict=judged, history=(Change(1.0, verdict, "not_entered", (0,)),), opened_wall_at=number, **more)


def test_few_incidents_are_all_whole_open_ones_first_and_of_the_closed_ones_the_newest_first():
    closed = tuple(incident(number, closed_at=1.0) for number in (1, 2))
    document = incident_list.to_json(stuck_status(open_incidents=(incident(3), incident(4)), closed_incidents=closed))
    assert [one["id"].rpartition("-")[2] for one in document["incidents"]] == ["3", "4", "2", "1"]
    assert (document["more"], document["num_incidents"]) == ([], 4)


def test_of_very_many_the_gravest_are_whole_and_the_others_a_row_each():
    many = tuple(incident(number, "stuck" if number == 7 else "slow") for number in range(2048))
    document = incident_list.to_json(stuck_status(open_incidents=many, closed_incidents=(incident(5000, "failed", closed_at=1.0),)))
    whole = [one["id"] for one in document["incidents"]]
    assert len(whole) == incident_list.MAX_WHOLE
    assert whole[0].endswith("Z-7")
    assert whole[1:] == [f"20261130T031244Z-{number}" for number in range(2048 - incident_list.MAX_WHOLE + 1, 2048)]
    assert document["num_incidents"] == 2049
    assert len(document["more"]) == incident_list.MAX_ROWS
    assert not {row["id"] for row in document["more"]}.intersection(whole)


@pytest.mark.parametrize("incidents", [80])
def test_incidents_and_state_of_16384_ranks_stay_below_their_bounds(incidents):
    many = tuple(incident(number, "stuck", ranks=16_384) for number in range(incidents))
    picture = stuck_status(open_incidents=many, job=job(world_size=16_384, nnodes=2048))
    body = as_json(incident_list.to_json(picture), indent=None)
    assert len(body) < incident_list.MAX_WHOLE_BYTES + 1_000_000
    assert json.loads(body)["num_incidents"] == incidents
    assert len(as_json(state.to_json(picture), indent=None)) < 1_000_000


def test_one_that_is_larger_than_the_bound_is_whole_all_the_same(monkeypatch):
    monkeypatch.setattr(incident_list, "MAX_WHOLE_BYTES", 100)
    document = incident_list.to_json(stuck_status(open_incidents=(incident(1), incident(2))))
    assert [len(document["incidents"]), len(document["more"])] == [1, 1]


def test_one_incident_is_given_whole_by_its_id(tmp_path):
    many = tuple(incident(number) for number in range(100))
    web = Web(Options(listen="off"), RunFiles(Writer(str(tmp_path), print)), lambda: stuck_status(open_incidents=many), print)
    route = web.routes()["/api/v1/incidents"]
    (found,) = json.loads(route(Request("/api/v1/incidents", {"id": "20261130T031244Z-3"})).payload)["incidents"]
    assert found["id"] == "20261130T031244Z-3"
    assert found["stacks"]
    for unknown in ("", "20261130T031244Z-3000", "../run.json"):
        assert route(Request("/api/v1/incidents", {"id": unknown})).status == 404
