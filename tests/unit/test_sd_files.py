"""Scrape targets as files: their form, when one is stale, and the folder that others write into too."""

import json
import os

import pytest

from rankwatch.export import discovery_files as files


def _group(**changes):
    return {"targets": ["node05:27435"], "labels": {"job_id": "48213", "node": "node05"}, **changes}


def test_a_killed_launcher_is_gone_from_prometheus_within_two_minutes():
    """Asked every 15 s (http_sd), or looked after by a launcher that renews its own file (file_sd)."""
    assert files.gone_within_s(15.0) == 90
    assert files.gone_within_s(files.REFRESH_S + 10.0) == 115


def test_a_living_launcher_is_never_stale_though_it_misses_one_renewal():
    assert files.STALE_S > 2 * files.REFRESH_S


@pytest.mark.parametrize(("age_s", "gone"), [(0, False), (70, False), (70.5, True), (1e6, True), (-3600, False)])
def test_stale_is_what_was_not_renewed_for_70_s_by_the_clock_of_the_file_system(age_s, gone):
    assert files.stale({"rankwatch_1_a_2.json": 1000.0}, 1000.0 + age_s) == (("rankwatch_1_a_2.json",) if gone else ())


@pytest.mark.parametrize(
    ("job_id", "node", "name"),
    [
        ("48213", "node05", "rankwatch_48213_node05_27435.json"),
        ("a/../b", "n 1", "rankwatch_a-..-b_n-1_27435.json"),
        ("", "..", "rankwatch_x_x_27435.json"),
        ("x" * 300, "y" * 300, f"rankwatch_{'x' * 80}_{'y' * 80}_27435.json"),
    ],
)
def test_a_name_tells_job_node_and_port_and_leads_nowhere_else(job_id, node, name):
    assert files.file_name(job_id, node, 27435) == name
    assert os.sep not in name


def test_a_target_carries_job_and_node_and_offers_the_labels_of_the_run():
    (group,) = json.loads(files.document("node05:27435", "http", "48213", "node05", {"team": "speech", "no label": "x"}))
    assert group == {"targets": ["node05:27435"], "labels": {"job_id": "48213", "node": "node05", "__meta_rankwatch_label_team": "speech"}}
    (group,) = json.loads(files.document("[fd00::5]:27435", "https", "48213", "node05", {}))
    assert group["labels"]["__scheme__"] == "https"
    assert files.groups(json.dumps([group]).encode()) == [group]


def test_whoever_writes_there_cannot_send_prometheus_to_other_paths():
    strange = _group(labels={"job_id": "1", "__metrics_path__": "/admin", "__param_x": "1", "__address__": "other:1", "__meta_rankwatch_label_team": "a"})
    assert files.groups(json.dumps([strange]).encode()) == [_group(labels={"job_id": "1", "__meta_rankwatch_label_team": "a"})]


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[1]", "[[]]", "null", "[" * 100_000,
        json.dumps([{"targets": "node05:1"}]),
        json.dumps([{"labels": {}}]),
        json.dumps([_group(targets=["http://node05:1/x"])]),
        json.dumps([_group(targets=["node05"])]),
        json.dumps([_group(targets=["user@node05:1"])]),
        json.dumps([_group(labels={"a b": "c"})]),
        json.dumps([_group(labels={"a": 1})]),
        json.dumps([_group(labels={"__scheme__": "file"})]),
    ],
)  # fmt: skip
def test_what_is_no_target_file_is_refused(text):
    with pytest.raises((ValueError, RecursionError)):
        files.groups(text.encode())


def test_only_regular_files_of_our_name_are_looked_at(tmp_path):
    (tmp_path / "rankwatch_1_a_1.json").write_text(json.dumps([_group()]))
    (tmp_path / "others.json").write_text("[]")
    (tmp_path / ".rankwatch_1_b_1.json.ab").write_text("[]")
    (tmp_path / "rankwatch_1_dir_1.json").mkdir()
    (tmp_path / "rankwatch_1_link_1.json").symlink_to(tmp_path / "others.json")
    os.mkfifo(tmp_path / "rankwatch_1_pipe_1.json")
    assert set(files.listing(str(tmp_path))) == {"rankwatch_1_a_1.json"}


def test_what_cannot_be_read_is_left_out_with_its_reason_and_the_rest_stays(tmp_path):
    (tmp_path / "rankwatch_1_a_1.json").write_text(json.dumps([_group()]))
    (tmp_path / "rankwatch_1_b_1.json").write_text("no json")
    (tmp_path / "rankwatch_1_c_1.json").write_text(json.dumps([_group()]) + " " * files.MAX_BYTES)
    (tmp_path / "rankwatch_1_d_1.json").symlink_to("rankwatch_1_a_1.json")
    os.mkfifo(tmp_path / "rankwatch_1_e_1.json")
    names = [f"rankwatch_1_{letter}_1.json" for letter in "abcdef"]
    found, refused = files.read(str(tmp_path), names)
    assert found == [_group()]
    assert list(refused) == names[1:5], "one that has gone meanwhile is no news"


def test_renewing_tells_the_time_of_the_file_system_and_misses_what_is_gone(tmp_path):
    path = tmp_path / "rankwatch_1_a_1.json"
    path.write_text("[]")
    os.utime(path, (1.0, 1.0))
    at = files.renew(str(path))
    assert at == path.stat().st_mtime > 1.0
    assert files.remove(str(path))
    assert files.remove(str(path)), "removing what is gone is done"
    with pytest.raises(FileNotFoundError):
        files.renew(str(path))
