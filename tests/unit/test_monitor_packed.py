"""A closed incident in memory: small, and its document the same."""

import dataclasses
import pickle

import build_status
import pytest

from rankwatch.monitor.diagnose.stacks import group_stacks
from rankwatch.monitor.incidents import _resume
from rankwatch.monitor.packed import Packed, packed
from rankwatch.report import incident as incident_report


def closed_one():
    picture = build_status.stuck_status()
    incident = picture.open_incidents[0]
    verdict = incident.verdict
    groups = group_stacks(incident.stacks, verdict.culprit_ranks, verdict.waiting_ranks)
    open_one = dataclasses.replace(incident, stack_groups=groups)
    kept = incident_report.picture(open_one, picture)
    over = dataclasses.replace(verdict, verdict="recovered")
    closed = dataclasses.replace(open_one, verdict=over, closed_at=build_status.NOW + 5, closed_wall_at=build_status.WALL + 5, kept=kept)
    return closed, dataclasses.replace(picture, open_incidents=(), closed_incidents=(closed,))


def test_a_packed_incident_has_the_same_document():
    closed, status = closed_one()
    assert incident_report.to_json(closed, status)["stack_groups"]
    assert incident_report.to_json(packed(closed), status) == incident_report.to_json(closed, status)


def test_packing_twice_is_packing_once():
    closed, _ = closed_one()
    once = packed(closed)
    assert packed(once) is once


def test_a_packed_incident_that_goes_on_has_its_stacks_and_their_groups_again():
    closed, status = closed_one()
    again = dataclasses.replace(closed.verdict, verdict="slow", since=build_status.NOW + 5.5)
    snapshot = dataclasses.replace(status.snapshot, now=build_status.NOW + 6, wall_at=build_status.WALL + 6)
    resumed = _resume(packed(closed), again, snapshot, snapshot.now, snapshot.ranks())
    assert resumed.stacks == closed.stacks
    assert resumed.stack_groups == closed.stack_groups
    assert type(resumed.stacks) is dict


def test_a_large_value_is_a_copy_and_a_small_one_itself():
    values = {"large": list(range(1000)), "small": ["x"]}
    mapping = Packed(values)
    assert dict(mapping) == values
    assert list(mapping) == ["large", "small"]
    assert len(mapping) == 2
    assert mapping["small"] is values["small"]
    assert mapping["large"] is not mapping["large"]
    assert sum(map(len, filter(None, mapping._packed.values()))) < len(pickle.dumps(values))
    with pytest.raises(KeyError):
        mapping["absent"]
    assert mapping.get("absent") is None


def test_an_empty_mapping_packs():
    assert dict(Packed({})) == {}
