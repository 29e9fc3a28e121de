"""promtool finds nothing to say about what rankwatch exports, at any level, in a scrape or in a file; node_exporter's file outlives a failed job."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import build_status
import pytest
from jobs import Job

from rankwatch.export.prometheus import Exporter
from rankwatch.export.textfile import Textfile

pytestmark = pytest.mark.stack
BUILDS = (build_status.stuck_status, build_status.compiling_status, build_status.crashed_status, build_status.healthy_status)


def lint(text: str) -> tuple[int, str]:
    found = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=30)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("level", ["low", "default", "full"])
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_scrape_is_clean(build, level: str) -> None:  # type: ignore[no-untyped-def]
    assert lint(Exporter(level).render(build(), "")[0].decode()) == (0, "")


def test_a_textfile_is_clean(tmp_path: Path) -> None:
    Textfile(str(tmp_path), "full", time.time).write(build_status.stuck_status(), True)
    (path,) = tmp_path.iterdir()
    assert lint(path.read_text()) == (0, "")


@pytest.mark.ranks
def test_the_file_of_a_job_that_failed_outlives_it_and_says_so(tmp_path: Path) -> None:
    """Without it nobody sees the end of a job that dies between two scrapes."""
    folder = tmp_path / "textfiles"
    folder.mkdir()
    options = ("--textfile-dir", str(folder), "--job-id", "doomed_7", "--listen", "off")
    with Job(tmp_path, "trouble.py", "killed", nproc=2, options=options, torchrun=("--standalone",)) as job:
        assert job.end(120) != 0
    (path,) = folder.iterdir()
    assert path.name.startswith("rankwatch_doomed_7_")
    text = path.read_text()
    assert text.startswith("# rankwatch final ")
    assert 'rankwatch_job_state{job_id="doomed_7"} 6.0' in text
    assert 'rankwatch_verdict{job_id="doomed_7",verdict="failed"} 1.0' in text
    assert lint(text) == (0, "")
