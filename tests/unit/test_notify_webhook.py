"""What a webhook is sent: a text for people, fields for programs, nothing that pages nobody, no secrets."""

from __future__ import annotations

import json

import build_status
import pytest

from rankwatch.model import Change
from rankwatch.notify import webhook

INCIDENT = build_status.stuck_incident()
STATUS = build_status.stuck_status()


def sent(kind="opened", reason="", incident=INCIDENT, host="chat.example", **changes):
    return json.loads(webhook.body(kind, reason, incident, build_status.stuck_status(**changes), host))


def test_the_text_says_who_where_why_and_where_to_look():
    text = sent(job=build_status.job(labels={"owner": "speech"}))["text"].splitlines()
    assert text[0].startswith("STUCK job 48213, rank 1 on node05: rank 1 ")
    assert text[-2:] == ["Owner: speech", f"Report: {STATUS.job.run_dir}/incidents/{INCIDENT.id}/report.txt"]


def test_the_fields_are_those_of_the_incident():
    doc = sent("escalated")
    assert (doc["schema"], doc["change"], doc["verdict"], doc["cause"], doc["domain"]) == (1, "escalated", "stuck", "not_entered", "user_code")
    assert (doc["culprit_ranks"], doc["culprits"], doc["waiting"], doc["severity"], doc["hosts"]) == ([1], 1, 7, "critical", ["node05"])
    assert doc["report"].endswith("/report.txt")


@pytest.mark.parametrize(("reason", "word"), [("recovered", "RECOVERED"), ("restart", "RESTARTED"), ("merge", "MERGED"), ("job_ended", "JOB ENDED")])
def test_an_end_says_how_it_has_ended(reason, word):
    doc = sent("closed", reason)
    assert doc["text"].startswith(f"{word} job 48213, rank 1 on node05: ")
    assert doc["reason"] == reason
    assert doc["timeout_left_s"] is None


def test_slack_gets_the_text_alone_with_its_signs_escaped():
    judged = build_status.stuck_verdict(summary="rank 1 is in <lambda> & waits")
    doc = sent(incident=build_status.stuck_incident(verdict=judged), host="hooks.slack.com")
    assert list(doc) == ["text"]
    assert "rank 1 is in &lt;lambda&gt; &amp; waits" in doc["text"]


def test_only_what_pages_is_told():
    slow = build_status.compiling_incident()
    assert webhook.tells("opened", INCIDENT)
    assert not webhook.tells("opened", slow)
    assert not webhook.tells("closed", slow)
    assert webhook.tells(
        "closed", build_status.stuck_incident(history=(Change(1.0, "stuck", "not_entered", (1,)), Change(2.0, "recovered", "not_entered", (1,))))
    )


def test_a_secret_stays_here():
    judged = build_status.stuck_verdict(summary="raised: token=abc123secret", advice=("unset API_KEY=abc123secret",))
    assert "abc123secret" not in json.dumps(sent(incident=build_status.stuck_incident(verdict=judged)))


def test_ten_thousand_ranks_are_a_short_message():
    many = build_status.stuck_verdict(culprit_ranks=tuple(range(0, 20000, 2)), waiting_ranks=tuple(range(1, 20000, 2)), summary="x " * 9000)
    assert len(webhook.body("opened", "", build_status.stuck_incident(verdict=many), STATUS, "chat.example")) < 30_000
