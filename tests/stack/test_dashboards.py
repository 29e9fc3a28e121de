"""Every query of every dashboard: read by promtool, and answered by a Prometheus that scrapes real jobs."""

from __future__ import annotations

import json
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
COMPILES, HANGS = "48213", "48214"

NOT_HERE = {
    r"rankwatch_(device_memory|gpu|rank_gpu)_": "no GPU",
    r"rankwatch_collective_(device_seconds|bus_bandwidth)": "only NCCL's collectives are timed",
    r"rankwatch_cudagraph_": "no CUDA graphs without a GPU",
    r"changes\(rankwatch_job_restarts_total": "nothing is restarted",
    r"rankwatch_compile_cache_events": "only inductor looks into caches, and its C++ compiler takes minutes",
    r"\bALERTS\b": "no rules are loaded; the alerts have tests of their own",
    r"topk\(20, time\(\) - .*compile_start": "nothing compiles any more when it is asked",
    r"rankwatch_notifications_total": "nobody is told of these jobs, so nothing of it fails",
    r"rankwatch_world_size\{[^}]*\}\[\$__range:1m\]": "looks once a full minute, which a job of half a minute may miss",
}
"""What two healthy CPU jobs and one hang have no data for, and why."""


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    """As rules, which promtool parses in every version; JSON is YAML."""
    rules = [{"record": f"query:{at}", "expr": in_place(query, COMPILES, 1800)} for at, query in enumerate(QUERIES)]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", "--lint=none", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.slow_ranks  # a rate needs two scrapes of a series, and the job may end a moment after its last one appears
@pytest.mark.stack
@pytest.mark.ranks
def test_every_query_has_data_of_real_jobs(tmp_path: Path) -> None:
    """A job that compiles again and again, then one that hangs; a query without data in both is in NOT_HERE, or it is wrong."""
    began = time.time()
    with Prometheus(tmp_path) as prometheus:
        for name in ("compiles", "hangs"):
            (tmp_path / name).mkdir()
        options = ("--probe", "numerics=1")
        with Job(tmp_path / "compiles", "compile_cases.py", "storm", "aot_eager", "12", nproc=2, options=options, env={"SLURM_JOB_ID": COMPILES}) as job:
            prometheus.follow({address(job): {"cluster": "north"}})
            assert job.end(240) == 0, job.text
        with Job(tmp_path / "hangs", "trouble.py", "asleep", "--timeout", "60", nproc=2, env={"SLURM_JOB_ID": HANGS}) as job:
            prometheus.follow({address(job): {"cluster": "north"}})
            job.incident(90, verdict="stuck", culprit_ranks=[1])
            stuck = f'rankwatch_rank_stuck{{job_id="{HANGS}"}} == 1'
            wait_for(lambda: prometheus.now(stuck), 30, "Prometheus has the stuck rank")
            ends = {job_id: last_seen(prometheus, job_id, began) for job_id in (COMPILES, HANGS)}
        silent = [query for query in QUERIES if not any(answers(prometheus, query, job_id, began, end) for job_id, end in ends.items())]
    unexpected = [f"{query.where}: {query.expression}" for query in silent if not any(re.search(pattern, query.expression) for pattern in NOT_HERE)]
    assert unexpected == []


def address(job: Job) -> str:
    """Where it exports metrics: host:port."""
    line = wait_for(lambda: next((line for line in job.lines() if "status http" in line), None), 60, "the first line")
    found = re.search(r"status http://([^\s/]+)", line)
    assert found
    return found[1]


def last_seen(prometheus: Prometheus, job_id: str, began: float) -> float:
    """When the job's last sample was scraped, unix seconds."""
    series = prometheus.over(f'timestamp(rankwatch_world_size{{job_id="{job_id}"}})', began, time.time(), 1)
    return max(float(value) for one in series for _, value in one["values"])


def in_place(query: Asked, job_id: str, range_s: float) -> str:
    """Its expression as Grafana would send it at a scrape interval of a second."""
    return filled(query.expression, {"cluster": ".*", "job_id": job_id, "small_job": job_id, "rank": "1"}, range_s, 1, 1)


def answers(prometheus: Prometheus, query: Asked, job_id: str, began: float, end: float) -> int:
    """Number of series."""
    expression = in_place(query, job_id, end - began)
    return len(prometheus.now(expression, end) if query.now else prometheus.over(expression, began, end, 1))
