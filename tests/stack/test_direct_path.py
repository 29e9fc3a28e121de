"""What a launcher tells Alertmanager and webhooks itself, with a real Alertmanager: without Prometheus, beside it, at any number of ranks, at a sudden end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import build_status
import pytest
from jobs import Job, wait_for
from paging import Webhook, alertmanager, alerts_in, flushed, get, prometheus, query, send
from prometheus_server import free_port

from rankwatch.config import Options
from rankwatch.notify.direct import Direct

pytestmark = [pytest.mark.stack]
JOB = build_status.job().job_id


@contextmanager
def killed_at_the_end(job: Job) -> Iterator[None]:
    """Ranks that outlive their launcher are ended."""
    pids = job.rank_pids()
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def unix(stamp: str) -> float:
    return datetime.fromisoformat(stamp[:19] + "+00:00").timestamp()


def rules() -> str:
    return subprocess.run([sys.executable, "-m", "rankwatch", "rules", "export"], capture_output=True, text=True, check=True).stdout


def stuck_of(ranks: int, incidents: int = 1) -> Any:
    """A picture in which so many ranks are stuck, in so many incidents."""
    found = [
        build_status.stuck_incident(
            id=f"20261130T031149Z-{number}",
            verdict=build_status.stuck_verdict(key=f"absent:{number}", culprit_ranks=tuple(range(ranks))),
            hosts={rank: f"node{rank // 8}" for rank in range(ranks)},
        )
        for number in range(incidents)
    ]
    return build_status.stuck_status(open_incidents=tuple(found))


def test_a_thousand_ranks_that_are_stuck_in_many_incidents_are_one_notification(tmp_path: Path) -> None:
    with Webhook() as webhook, alertmanager(tmp_path, webhook.address) as manager:
        direct = Direct(Options(alertmanager=(manager,)), print)
        direct.look(stuck_of(1000, incidents=16))
        direct.look(stuck_of(1001, incidents=17))
        assert direct.flush(20)
        flushed(manager, webhook, "sentinel")
        (page,) = webhook.pages("/pager", JOB)
        (alert,) = page["alerts"]
        assert alert["labels"] == {"alertname": "RankwatchStuck", "severity": "critical", "verdict": "stuck", "job_id": JOB}
        assert len(alert["annotations"]["summary"]) < 500
        assert "on node0,node1,node2,...(12" in alert["annotations"]["summary"]


def test_with_labels_of_the_job_the_alert_of_the_rule_is_silent(tmp_path: Path) -> None:
    with Webhook() as webhook, alertmanager(tmp_path, webhook.address) as manager:
        direct = Direct(Options(alertmanager=(manager,), labels={"drill": "true"}), print)
        direct.look(stuck_of(1))
        assert direct.flush(20)
        wait_for(lambda: webhook.pages("/pager", JOB), 20, "the launcher's alert")
        send(manager, {"alertname": "RankwatchStuck", "severity": "critical", "verdict": "stuck", "job_id": JOB})
        flushed(manager, webhook, "sentinel")
        (page,) = webhook.pages("/pager", JOB)
        assert page["commonLabels"].items() >= {"drill": "true", "via": "launcher"}.items()


@pytest.mark.ranks
def test_a_stuck_rank_pages_without_prometheus_and_the_page_outlives_the_launcher(tmp_path: Path) -> None:
    with Webhook() as webhook, alertmanager(tmp_path, webhook.address) as manager:
        options = ("--listen", "off", "--owner", "speech", "--alertmanager", manager, "--webhook", f"http://{webhook.address}/chat")
        with Job(tmp_path, "trouble.py", "stopped", "--timeout", "300", nproc=2, options=options, torchrun=("--master-port", str(free_port()))) as job:
            page = wait_for(lambda: webhook.alerts("/pager", "firing"), 60, "a page")[0]
            incident = job.incident(10, verdict="stuck", culprit_ranks=[1])
            assert page["annotations"]["summary"] == f"Job {page['labels']['job_id']} is stuck: rank 1 on {incident['hosts']['1']}, cause stopped."
            text = page["annotations"]["description"].splitlines()
            assert text[0].startswith(f"Incident {incident['id']}, domain {incident['domain']}, open since 20")
            assert text[1].startswith("rank 1 ")
            assert text[2:4] == ["Waiting: rank 0.", "Owner: speech."]
            assert text[4].startswith(f"Next: {job.run_dir}/incidents/{incident['id']}/report.txt on {incident['hosts']['1']} has the stack")
            chat = wait_for(lambda: [doc for path, doc in webhook.sent if path == "/chat"], 10, "the webhook is told")[0]
            assert chat["text"].startswith(f"STUCK job {page['labels']['job_id']}, rank 1 on {incident['hosts']['1']}: rank 1 ")
            assert (chat["change"], chat["incident"], chat["culprit_ranks"], chat["severity"]) == ("opened", incident["id"], [1], "critical")

            with killed_at_the_end(job):
                killed_at = datetime.now().timestamp()
                job.process.kill()
                job.process.wait(10)
                (alert,) = alerts_in(manager)
                assert unix(alert["endsAt"]) - killed_at > 9 * 60
        assert "chat" not in (job.run_dir / "run.json").read_text()
        assert "/chat" not in job.text


def test_rule_and_launcher_together_are_one_page_and_one_end(tmp_path: Path) -> None:
    target = f"127.0.0.1:{free_port()}"
    with Webhook() as webhook, alertmanager(tmp_path, webhook.address) as manager, prometheus(tmp_path, target, rules(), manager) as server:
        options = ("--listen", target, "--alertmanager", manager)
        with Job(tmp_path, "trouble.py", "stopped", "--timeout", "300", nproc=2, options=options, torchrun=("--master-port", str(free_port()))) as job:
            page = wait_for(lambda: webhook.alerts("/pager", "firing"), 60, "a page")[0]
            job_id = page["labels"]["job_id"]
            wait_for(lambda: query(server, 'ALERTS{alertname="RankwatchStuck",alertstate="firing"}'), 30, "the rule fires too")
            sent = rb"prometheus_notifications_sent_total\{[^}]*\} [1-9]"
            wait_for(lambda: re.search(sent, get(f"{server}/metrics") or b""), 30, "Alertmanager has the rule's alert")
            assert len(alerts_in(manager)) == 1
            flushed(manager, webhook, "together")
            assert len(webhook.pages("/pager", job_id)) == 1
            os.kill(job.incident(10, verdict="stuck")["pids"]["1"], signal.SIGCONT)
            wait_for(lambda: [doc for doc in webhook.pages("/pager", job_id) if doc["status"] == "resolved"], 60, "it is over")
            job.end()
            flushed(manager, webhook, "over")
            assert [doc["status"] for doc in webhook.pages("/pager", job_id)] == ["firing", "resolved"]


def test_a_crash_between_two_scrapes_is_one_alert(tmp_path: Path) -> None:
    target = f"127.0.0.1:{free_port()}"
    with Webhook() as webhook, alertmanager(tmp_path, webhook.address) as manager, prometheus(tmp_path, target, rules(), manager, every_s=15) as server:
        options = ("--listen", target, "--alertmanager", manager)
        with Job(tmp_path, "trouble.py", "crashed", nproc=3, options=options, torchrun=("--master-port", str(free_port()))) as job:
            assert job.end() == 1
            found = wait_for(lambda: webhook.alerts("/tickets", "firing"), 20, "a ticket")
            flushed(manager, webhook, "crash")
            assert len(found) == len(webhook.alerts("/tickets", "firing")) == 1
            assert found[0]["annotations"]["summary"].startswith(f"Job {found[0]['labels']['job_id']} has lost a rank: rank 2 on ")
            assert not query(server, 'ALERTS{alertname="RankwatchFailed"}')


def test_an_alertmanager_that_answers_nothing_holds_nobody_up(tmp_path: Path) -> None:
    said: list[str] = []
    address = f"http://127.0.0.1:{free_port()}"
    direct = Direct(Options(alertmanager=(address,)), said.append)
    direct.look(replace(stuck_of(1)))
    direct.finish()
    assert not direct.flush(0.3)
    assert said[-1] == f"not told how the job ended, it has not answered within 0.3 s: alertmanager {address}"
