"""The scrape configurations in a real Prometheus: jobs are found as they start, and gone soon after a kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import Job, children_of, wait_for
from paging import query
from prometheus_server import free_port

from rankwatch.export import discovery_files as files

LAUNCH = Path(__file__).parents[2] / "launch" / "prometheus"
CONFIGURATIONS = sorted(LAUNCH.glob("*.yml"))
BAR_S = 120.0

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_a_configuration_is_one_that_prometheus_reads_with_our_rules(path: Path) -> None:
    done = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout
    (scrape,) = yaml.safe_load(path.read_text())["scrape_configs"]
    assert scrape["honor_labels"] is True


def test_the_pace_of_both_configurations_keeps_the_two_minutes() -> None:
    """file_sd: a launcher looks for what is stale each time that it renews its own file, Prometheus on NFS each refresh_interval."""
    paces = {}
    for path in CONFIGURATIONS:
        (scrape,) = yaml.safe_load(path.read_text())["scrape_configs"]
        (found,) = scrape.get("http_sd_configs") or scrape["file_sd_configs"]
        paces[path.name] = float(found["refresh_interval"].rstrip("s"))
    assert files.gone_within_s(paces["http_sd.yml"]) <= BAR_S
    assert files.gone_within_s(files.REFRESH_S + paces["file_sd.yml"]) <= BAR_S


def test_a_port_that_is_taken_is_refused_since_prometheus_asks_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        command = [sys.executable, "-m", "rankwatch", "targets", "--listen", listen, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert f"--listen {listen}: the port is taken by pid {os.getpid()} (" in done.stderr


@pytest.mark.ranks
def test_a_job_is_found_both_ways_and_gone_both_ways_after_a_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "sd"
    folder.mkdir()
    options = ("--sd-dir", str(folder), "--listen", "127.0.0.1:0", "--job-id", "48213", "--label", "team=speech")
    with _service(folder) as service, _job(tmp_path, *options) as job, _prometheus(tmp_path, folder, service) as address:
        (up,) = wait_for(lambda: query(address, 'up{job="http"} == 1'), 60, f"found by http_sd\n{job.text}")
        assert up["metric"].items() >= {"job_id": "48213", "label_team": "speech"}.items()
        (file,) = folder.glob("rankwatch_48213_*.json")
        assert up["metric"]["node"] == json.loads(file.read_text())[0]["labels"]["node"]
        wait_for(lambda: query(address, 'up{job="files",job_id="48213"} == 1'), 30, "found by file_sd")
        wait_for(lambda: query(address, 'rankwatch_world_size{job="files",job_id="48213"} == 1'), 30, "scraped")
        _kill_9(job, guard=False)
        wait_for(lambda: not _targets(address), 30, "no target is left")
        assert not list(folder.glob("*.json"))


@pytest.mark.ranks
@pytest.mark.slow_ranks
def test_of_a_node_that_died_as_a_whole_no_target_is_left_after_two_minutes(tmp_path: Path) -> None:
    """All defaults. Nothing of the launcher is left that could tidy up; the service asks nobody to."""
    folder = tmp_path / "sd"
    folder.mkdir()
    options = ("--sd-dir", str(folder), "--listen", "127.0.0.1:0")
    with _service(folder) as service, _job(tmp_path, *options) as job, _prometheus(tmp_path, folder, service, 15) as address:
        wait_for(lambda: len(query(address, "up == 1")) == 2, 90, f"found both ways\n{job.text}")
        _kill_9(job, guard=True)
        began = time.monotonic()
        assert _targets(address)
        wait_for(lambda: not _targets(address), BAR_S, "no target is left")
        print(f"\ngone {time.monotonic() - began:.0f} s after the kill")
        assert not list(folder.glob("*.json")), "file_sd alone is served too"


def _job(tmp_path: Path, *options: str) -> Job:
    return Job(tmp_path, "many_nodes.py", "trained", "--seconds", "300", nproc=1, options=options, torchrun=("--standalone",))


@contextmanager
def _service(folder: Path) -> Iterator[str]:
    """`rankwatch targets`; its address."""
    listen = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "rankwatch", "targets", "--listen", listen, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert f"at http://{listen}/targets" in said, said
            yield f"http://{listen}/targets"
            with urllib.request.urlopen(f"http://{listen}/targets", timeout=10) as answer:
                assert (answer.headers["Content-Type"], json.load(answer)) == ("application/json", [])
            process.terminate()
            assert process.wait(10) == 0
            assert os.listdir(folder) == []
        finally:
            process.kill()


@contextmanager
def _prometheus(tmp_path: Path, folder: Path, service: str, refresh_s: int = 1) -> Iterator[str]:
    """Both configurations in one server, as jobs `http` and `files`; only addresses and the pace are changed."""
    scrapes = []
    for name in ("http", "files"):
        (scrape,) = yaml.safe_load((LAUNCH / f"{name.removesuffix('s')}_sd.yml").read_text())["scrape_configs"]
        (found,) = scrape.get("http_sd_configs") or scrape["file_sd_configs"]
        found["refresh_interval"] = f"{refresh_s}s"
        if "url" in found:
            found["url"] = service
        else:
            found["files"] = [file.replace("/shared/rankwatch-sd", str(folder)) for file in found["files"]]
        scrapes.append({**scrape, "job_name": name, "scrape_interval": "1s"})
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": scrapes}))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address={address}"]
    with (tmp_path / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


def _targets(address: str) -> list[dict[str, Any]]:
    with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{address}/api/v1/targets?state=active", timeout=10) as answer:
        return list(json.load(answer)["data"]["activeTargets"])
    return [{"health": "Prometheus does not answer"}]


def _kill_9(job: Job, guard: bool) -> None:
    """The launcher, and its ranks; guard: also the shell that waits for the launcher's end, all before it."""
    ours = children_of(job.process.pid)
    if guard:
        guards = [pid for pid in ours if b"rankwatch-target" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(guards) == 1
        os.kill(guards[0], signal.SIGKILL)
    job.process.kill()
    job.process.wait(10)
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            if b"rankwatch-target" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
