"""--textfile-dir: the file that node_exporter reads."""

import os
import stat
import time

import build_status
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from rankwatch import whole_files
from rankwatch.export import textfile
from rankwatch.export.textfile import Textfile, file_name, stale


def written(tmp_path, status=None, final=False, level="auto"):
    Textfile(str(tmp_path), level, time.time).write(status or build_status.stuck_status(), final)
    (path,) = tmp_path.iterdir()
    return path


def test_it_holds_what_a_scrape_shows_and_is_readable_for_all(tmp_path):
    old = os.umask(0o077)
    try:
        path = written(tmp_path)
    finally:
        os.umask(old)
    assert path.name == "rankwatch_48213_node05.prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    samples = [sample for family in parse_text(path.read_text()) for sample in family.samples]
    assert {sample.labels["job_id"] for sample in samples} == {"48213"}
    assert all(sample.timestamp is None for sample in samples), "node_exporter refuses a file with timestamps"
    assert ("rankwatch_rank_stuck", "1", 1.0) in {(sample.name, sample.labels.get("rank"), sample.value) for sample in samples}


@pytest.mark.parametrize("node", ["a\nb 1", "a\r\x0b\u2028b", "kn\u00f6ten", "\udcff"])
def test_a_node_of_any_name_leaves_a_file_that_can_be_parsed(tmp_path, node):
    path = written(tmp_path, build_status.stuck_status(job=build_status.job(node=node)))
    assert path.read_bytes().split(b"\n")[1].startswith(b"# HELP ")
    assert list(parse_text(path.read_text()))


def test_the_last_one_says_that_it_is_the_last(tmp_path):
    failed = build_status.crashed_status(state="failed", exit_code=1)
    path = written(tmp_path, failed, final=True)
    assert path.read_text().startswith("# rankwatch final ")
    assert 'rankwatch_job_state{job_id="48213"} 6.0' in path.read_text()


def test_no_version_explains_a_metric_in_other_words_than_another(tmp_path):
    helps = [line.split(" ", 3)[3] for line in written(tmp_path).read_text().splitlines() if line.startswith("# HELP ")]
    assert len(helps) > 50
    assert set(helps) == {"rankwatch metrics --describe tells."}


def test_the_level_is_the_one_of_the_option(tmp_path):
    assert "rankwatch_compiled_frames_total" not in written(tmp_path, level="low").read_text()


@pytest.mark.parametrize(
    ("job", "node", "name"),
    [
        ("991_7", "gpu-05.cluster", "rankwatch_991_7_gpu-05.cluster.prom"),
        ("../x", "a/b", "rankwatch_x_a_b.prom"),
        ("", "", "rankwatch_unknown_unknown.prom"),
    ],
)
def test_names_stay_in_the_directory(job, node, name):
    assert file_name(job, node) == name


@pytest.mark.parametrize(
    ("name", "head", "age_s", "gone"),
    [
        ("rankwatch_1_a.prom", b"# rankwatch running a 1\n", 3000, False),
        ("rankwatch_1_a.prom", b"# rankwatch running a 1\n", 3700, True),
        ("rankwatch_1_a.prom", b"# rankwatch final a 1\n", 500, False),
        ("rankwatch_1_a.prom", b"# rankwatch final a 1\n", 700, True),
        ("rankwatch_1_a.prom", b"# HELP somebody's own", 1e6, False),
        ("rankwatch_1_a.prom.bak", b"# rankwatch final a 1\n", 1e6, False),
        ("other.prom", b"# rankwatch final a 1\n", 1e6, False),
        (".rankwatch-0badcafe.tmp", b"", 60, False),
        (".rankwatch-0badcafe.tmp", b"", 3700, True),
    ],
)
def test_only_files_of_launchers_that_are_gone_are_stale(name, head, age_s, gone):
    assert stale(name, head, age_s) is gone


def test_a_sweep_removes_stale_files_and_nothing_else(tmp_path):
    for name, text in (("rankwatch_old_a.prom", "# rankwatch final a 1\n"), ("rankwatch_new_a.prom", "# rankwatch running a 1\n"), ("theirs.prom", "x 1\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "rankwatch_folder.prom").mkdir()
    (tmp_path / "rankwatch_link.prom").symlink_to(tmp_path / "theirs.prom")
    later = time.time() + 700
    Textfile(str(tmp_path), "low", lambda: later).sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rankwatch_folder.prom", "rankwatch_link.prom", "rankwatch_new_a.prom", "theirs.prom"]


def test_a_sweep_of_no_directory_is_quiet(tmp_path):
    Textfile(str(tmp_path / "none"), "low", time.time).sweep()


def test_a_write_into_no_directory_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Textfile(str(tmp_path / "none"), "low", time.time).write(build_status.stuck_status(), False)


def test_a_full_disk_leaves_the_file_before_and_no_remains(tmp_path, monkeypatch):
    path = written(tmp_path)
    before = path.read_bytes()

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, final=True)
    assert list(tmp_path.iterdir()) == [], "what it said while the job ran is not how the job ended"


def test_a_finished_job_is_kept_for_long_enough_to_be_scraped():
    assert textfile.FINAL_KEPT_S >= 5 * 60
