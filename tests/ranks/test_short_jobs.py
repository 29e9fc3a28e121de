"""Jobs that are over before a monitor has begun to look: their record and their last line are there, and a script that is not there is named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("short.py", 0, "the ranks ended before they reported"),
        ("absent.py", 1, "Python could not start the script: absent.py does not exist in {here}"),
    ],
)
def test_a_job_of_a_moment_leaves_its_record_and_its_last_line(tmp_path, script, code, said):
    (tmp_path / "short.py").write_text("print('hello')\n")
    (tmp_path / "rankwatch.toml").write_text("[limit]\nnotce_s = 3\n")
    command = [sys.executable, "-m", "rankwatch", "--run-dir", "run", "torchrun", "--standalone", "--nproc-per-node", "1", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[rankwatch] ")]
    assert sum(line.startswith("[rankwatch] done ") for line in lines) == 1
    assert any(said.format(here=tmp_path) in line for line in lines), done.stderr
    if sys.version_info >= (3, 11):
        assert "rankwatch.toml: limit: 'notce_s=3' is not accepted; there is no limit notce_s (did you mean notice_s?)" in lines[0]
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (document["exit_code"], document["ended_at"] is not None) == (code, True)
