"""Every query of every dashboard: read by promtool, and answered by a Prometheus that scrapes a real job."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from pathlib import Path

import pytest
from jobs import Job, wait_for
from prometheus_server import Prometheus

from dashboards.build.queries import Asked, asked, filled

ROOT = Path(__file__).parents[2]
BOARDS = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "dashboards").glob("rankwatch-*.json"))]
QUERIES = [query for board in BOARDS for query in asked(board)]
JOB_ID = "48213"

NOT_HERE = {
    r"rankwatch_(device_memory|gpu|rank_gpu)_": "no GPU",
    r"rankwatch_collective_(device_seconds|bus_bandwidth)": "only NCCL's collectives are timed",
    r"rankwatch_cudagraph_": "no CUDA graphs without a GPU",
    r"changes\(rankwatch_job_restarts_total": "nothing is restarted",
    r"rankwatch_compile_cache_events": "only inductor looks into caches, and its C++ compiler takes minutes",
    r"\bALERTS\b": "no rules are loaded; the alerts have tests of their own",
    r"topk\(20, time\(\) - .*compile_start": "nothing compiles any more when it is asked",
    r"rankwatch_notifications_total": "nobody is told of these jobs, so nothing of it fails",
}
"""What a CPU job that compiles, trains and hangs need not have data for, and why."""


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    """As rules, which promtool parses in every version; JSON is YAML."""
    rules = [{"record": f"query:{at}", "expr": in_place(query, 1800)} for at, query in enumerate(QUERIES)]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", "--lint=none", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.stack
@pytest.mark.ranks
def test_every_query_has_data_of_a_real_job(tmp_path: Path) -> None:
    """It compiles again and again, then hangs until this test ends it: a query that stays without data is in NOT_HERE, or it is wrong."""
    began = time.time()
    options = ("--probe", "numerics=1", "--stuck-after", "5")
    with Prometheus(tmp_path) as prometheus, Job(tmp_path, "storm_then_hang.py", nproc=2, options=options, env={"SLURM_JOB_ID": JOB_ID}) as job:
        prometheus.follow({address(job): {"cluster": "north"}})
        job.incident(180, verdict="stuck", culprit_ranks=[1])
        stuck = f'rankwatch_rank_stuck{{job_id="{JOB_ID}",rank="1"}} == 1'
        wait_for(lambda: prometheus.now(stuck), 60, "Prometheus has the stuck rank")
        silent = still_silent(prometheus, [query for query in QUERIES if not without_data_here(query)], began, 120)
        assert not silent, "\n".join([*(f"no data: {query.where}: {query.expression}" for query in silent), job.text[-3000:]])


def address(job: Job) -> str:
    """Where it exports metrics: host:port."""
    line = wait_for(lambda: next((line for line in job.lines() if "status http" in line), None), 120, "the first line")
    found = re.search(r"status http://([^\s/]+)", line)
    assert found
    return found[1]


def without_data_here(query: Asked) -> bool:
    return any(re.search(pattern, query.expression) for pattern in NOT_HERE)


def still_silent(prometheus: Prometheus, queries: list[Asked], began: float, deadline_s: float) -> list[Asked]:
    """Those that had no data by the deadline; []: all have had some. The job lives, so that every series of it gets the two samples that a rate needs."""
    deadline = time.monotonic() + deadline_s
    while (queries := [query for query in queries if not answers(prometheus, query, began)]) and time.monotonic() < deadline:
        time.sleep(0.3)
    return queries


def in_place(query: Asked, range_s: float) -> str:
    """Its expression as Grafana would send it at a scrape interval of a second."""
    return filled(query.expression, {"cluster": ".*", "job_id": JOB_ID, "small_job": JOB_ID, "rank": "1"}, range_s, 1, 1)


def answers(prometheus: Prometheus, query: Asked, began: float) -> int:
    """Number of series from `began` until now; until the next full minute for one that looks only there, where samples up to five minutes old count."""
    end = time.time()
    if ":1m]" in query.expression:
        end = 60 * math.ceil(end / 60)
    expression = in_place(query, end - began)
    return len(prometheus.now(expression, end) if query.now else prometheus.over(expression, began, end, 1))
