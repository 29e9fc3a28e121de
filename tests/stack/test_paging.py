"""From a stopped rank to what the person on call reads: rankwatch, Prometheus, Alertmanager and a webhook, all of them real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
from jobs import Job, wait_for
from paging import Webhook, query, stack
from prometheus_server import free_port

pytestmark = [pytest.mark.stack, pytest.mark.ranks]

HOLD_S = 12


def test_a_stuck_rank_pages_once_and_the_page_outlives_the_launcher(tmp_path: Path) -> None:
    rules = subprocess.run([sys.executable, "-m", "rankwatch", "rules", "export", "--hold", f"{HOLD_S}s"], capture_output=True, text=True, check=True).stdout
    target = f"127.0.0.1:{free_port()}"
    options = ("--listen", target, "--owner", "speech")
    with (
        Webhook() as webhook,
        Job(tmp_path, "trouble.py", "stopped", "--timeout", "300", nproc=2, options=options) as job,
        stack(tmp_path, target, rules, webhook.address) as prometheus,
    ):
        page = wait_for(lambda: webhook.alerts("/pager", "firing"), 60, "a page")[0]
        ranks = job.rank_pids()
        incident = job.incident(10, verdict="stuck", culprit_ranks=[1])
        host = incident["hosts"]["1"]
        assert page["labels"].items() >= {"alertname": "RankwatchStuck", "severity": "critical", "verdict": "stuck"}.items()
        assert page["annotations"]["summary"] == f"Job {page['labels']['job_id']} is stuck: rank 1 on {host}, cause stopped."
        text = page["annotations"]["description"]
        assert text.startswith(f"Incident {incident['id']}, domain {incident['domain']}, open since 20"), text
        assert "Ranks in a collective: 1, the oldest for " in text
        assert "; the timeout comes in 4m " in text
        assert "\nOwner: speech.\n" in text
        address = text.partition("\n")[0].rpartition(": ")[2]
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert "rank 1" in answer.read().decode()

        try:
            job.process.kill()
            resolved = wait_for(lambda: webhook.alerts("/pager", "resolved"), 60, "the page is resolved at last")[0]
        finally:
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        last_look = float(query(prometheus, "max_over_time(timestamp(up == 1)[10m:1s])")[0]["value"][1])
        held_s = datetime.fromisoformat(resolved["endsAt"][:19] + "+00:00").timestamp() - last_look
        assert HOLD_S - 2 <= held_s <= HOLD_S + 8, held_s
        assert "rank 1 on" in resolved["annotations"]["summary"]
        assert "The launcher reports no more" in resolved["annotations"]["description"]
        assert {path for path, _doc in webhook.sent} == {"/pager"}
        assert len(webhook.alerts("/pager", "firing")) == 1
        assert not query(prometheus, 'ALERTS{alertstate="firing"}')
