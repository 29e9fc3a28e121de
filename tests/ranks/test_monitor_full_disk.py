"""A run directory on a file system that is really full."""

import os
import subprocess

import pytest

from rankwatch.monitor.writer import Writer

pytestmark = pytest.mark.ranks


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs (needs root and CAP_SYS_ADMIN): {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_one_line_and_no_file(small_disk, tmp_path):
    (tmp_path / "temp").mkdir()
    said = []
    writer = Writer(str(small_disk), said.append, fallback_parent=str(tmp_path / "temp"))
    writer.append("events.jsonl", b'{"event":"start"}\n')
    writer.append("events.jsonl", b"x" * 100_000 + b"\n")
    writer.write("incidents/1/incident.json", b"{}")
    assert writer.flush(20)
    assert (small_disk / "events.jsonl").read_bytes() == b'{"event":"start"}\n'
    assert len(said) == 1
    assert "No space left on device; files go to" in said[0]
    assert os.path.getsize(os.path.join(writer.root, "events.jsonl")) == 100_001
    assert os.path.exists(os.path.join(writer.root, "incidents/1/incident.json"))
    assert writer.dropped == 0
