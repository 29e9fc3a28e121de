"""A running job in the programs that people use: promtool and Prometheus read its metrics, Chromium shows its incident page."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from jobs import Job, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.ranks]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def status_url(job: Job) -> str:
    line = wait_for(lambda: next((line for line in job.lines() if "status http" in line), None), 60, "the first line")
    match = re.search(r"status (http://\S+)", line)
    assert match
    return match.group(1).rstrip("/")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_stuck_job_is_seen_by_promtool_prometheus_and_chromium(tmp_path: Path) -> None:
    """One job for all three, since starting it is the expensive part."""
    with Job(tmp_path, "trouble.py", "asleep", "--timeout", "60", nproc=2) as job:
        url = status_url(job)
        doc = job.incident(90, verdict="stuck", culprit_ranks=[1])

        page = get(f"{url}/metrics")
        lint = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, timeout=30)
        assert (lint.returncode, lint.stdout + lint.stderr) == (0, ""), lint.stdout + lint.stderr
        assert "rankwatch_verdict{" in page
        assert get(f"{url}/healthz").strip() != ""
        state = json.loads(get(f"{url}/api/v1/state"))
        assert state["state"] == "stuck"
        assert json.loads(get(f"{url}/api/v1/incidents"))

        port = free_port()
        config = tmp_path / "prometheus.yml"
        target = url.removeprefix("http://")
        config.write_text(f"scrape_configs:\n- job_name: rankwatch\n  scrape_interval: 1s\n  static_configs:\n  - targets: ['{target}']\n")
        arguments = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{port}"]
        prometheus = subprocess.Popen(["prometheus", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            query = urllib.parse.quote("rankwatch_rank_stuck == 1")

            def answer() -> list[dict[str, dict[str, str]]]:
                try:
                    return json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?query={query}"))["data"]["result"]  # type: ignore[no-any-return]
                except OSError:
                    return []

            result = wait_for(answer, 30, "Prometheus has the stuck rank")
            assert [series["metric"]["rank"] for series in result] == ["1"]
        finally:
            prometheus.kill()
            prometheus.wait(10)

        html = job.run_dir / "incidents" / doc["id"] / "index.html"
        for where in (html.as_uri(), f"{url}/"):
            dom = chromium_dom(where, tmp_path)
            assert "rank 1" in dom, dom[:2000]
            assert "load_batch_that_never_comes" in dom, dom[:2000]


def chromium_dom(url: str, tmp_path: Path) -> str:
    """The page's document after its scripts ran."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    profile = f"--user-data-dir={tmp_path}/chromium"
    done = subprocess.run(["chromium", *flags.split(), profile, "--timeout=8000", "--dump-dom", url], capture_output=True, text=True, timeout=90)
    return done.stdout
