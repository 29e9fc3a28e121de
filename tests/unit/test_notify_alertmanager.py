"""The alerts that a launcher posts: the labels of the rules, posted again each minute, resolved late enough for Prometheus to have seen the end too."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import datetime

import build_status
import pytest

from rankwatch.commands.alerts import document
from rankwatch.commands.alerts.table import ALERTS
from rankwatch.model import Change
from rankwatch.notify import alertmanager, pages
from rankwatch.notify.alertmanager import FIRES_FOR_S, HOLD_S, REPOST_S, RESOLVE_AFTER_S, RESOLVED_KEPT_S, Board

WALL = build_status.WALL


def incident(verdict="stuck", cause="not_entered", domain="user_code", **changes):
    judged = build_status.stuck_verdict(verdict=verdict, cause=cause, domain=domain)
    return build_status.stuck_incident(verdict=judged, **changes)


def look(board, incidents, now, labels=(), **changes):
    status = build_status.stuck_status(open_incidents=tuple(incidents), **changes)
    return alertmanager.look(board, incidents, status, dict(labels), now, WALL + now)


def posted(board, now=0.0):
    return json.loads(alertmanager.body(board, WALL + now))


def unix(stamp):
    return datetime.fromisoformat(stamp).timestamp()


# -- what it says --------------------------------------------------------------------------------------------------------


def test_its_labels_are_those_of_the_rule():
    (alert,) = posted(look(Board(), [incident()], 0.0))
    (rule,) = (rule for rule in document.rule_file(document.Settings())["groups"][0]["rules"] if rule.get("alert") == "RankwatchStuck")
    assert alert["labels"] == {**rule["labels"], "alertname": "RankwatchStuck", "job_id": "48213"}


def test_it_has_a_rule_for_each_of_its_names_and_severities():
    direct = {pages.STUCK, pages.TIMEOUT, pages.TIMEOUT_AT_WORK, pages.DIVERGED, pages.FAILED, pages.FAILED_BY_ITSELF}
    rules = {(alert.name, alert.severity, alert.verdict) for alert in ALERTS if alert.verdict and alert.verdict != "straggler"}
    assert {(page.name, page.severity, page.verdict) for page in direct} == rules


def test_a_cluster_that_is_given_is_a_label_of_the_rule_too():
    (alert,) = posted(look(Board(), [incident()], 0.0, {"cluster": "west"}))
    assert alert["labels"]["cluster"] == "west"
    assert "via" not in alert["labels"]


def test_other_labels_say_that_the_launcher_has_sent_it():
    (alert,) = posted(look(Board(), [incident()], 0.0, {"drill": "true", "severity": "none"}))
    assert alert["labels"] == {
        "alertname": "RankwatchStuck", "severity": "critical", "verdict": "stuck", "job_id": "48213", "drill": "true", "via": "launcher"
    }  # fmt: skip


def test_its_text_says_who_where_why_and_what_to_do():
    (alert,) = posted(look(Board(), [incident()], 0.0, job=build_status.job(labels={"owner": "speech"}, status_url="http://node05:27435")))
    told = alert["annotations"]
    assert told["summary"] == "Job 48213 is stuck: rank 1 on node05, cause not_entered."
    lines = told["description"].splitlines()
    assert lines[0].endswith(": http://node05:27435/incidents/20261130T031149Z-1/")
    assert "Owner: speech." in lines
    assert re.fullmatch(r"Next: /scratch/\S+/incidents/20261130T031149Z-1/report.txt on node05 has the stack and what to do\. .*", lines[-1])
    assert alert["generatorURL"] == "http://node05:27435/incidents/20261130T031149Z-1/"


def test_a_page_on_loopback_is_no_link():
    (alert,) = posted(look(Board(), [incident()], 0.0, job=build_status.job(status_url="http://127.0.0.1:27435")))
    assert "127.0.0.1" not in json.dumps(alert)


def test_a_secret_in_the_summary_stays_here():
    judged = build_status.stuck_verdict(summary="rank 1 raised: password=hunter2secret")
    (alert,) = posted(look(Board(), [build_status.stuck_incident(verdict=judged)], 0.0))
    assert "hunter2secret" not in json.dumps(alert)


@pytest.mark.parametrize(
    ("found", "severities"),
    [
        ([("failed", "crashed", "user_code")], ["ticket"]),
        ([("failed", "killed", "node")], ["critical"]),
        ([("failed", "crashed", "user_code"), ("failed", "killed", "node")], ["critical"]),
        ([("timeout_imminent", "compiling", "user_code")], ["warning"]),
        ([("timeout_imminent", "not_entered", "user_code")], ["critical"]),
        ([("stuck", "mismatch", "user_code"), ("diverged", "mismatch", "user_code")], ["critical", "critical"]),
        ([("slow", "compiling", "user_code"), ("straggler", "unknown", "node")], []),
    ],
)
def test_it_is_as_grave_as_the_rule_says(found, severities):
    incidents = [incident(*each, id=f"{number}") for number, each in enumerate(found)]
    assert [alert["labels"]["severity"] for alert in posted(look(Board(), incidents, 0.0))] == severities


def test_it_begins_when_it_pages_not_when_it_was_noticed():
    history = (Change(WALL - 120, "slow", "not_entered", (1,)), Change(WALL - 3, "stuck", "not_entered", (1,)))
    (alert,) = posted(look(Board(), [incident(history=history)], 0.0))
    assert unix(alert["startsAt"]) == pytest.approx(WALL - 3, abs=0.01)


# -- when it is posted ---------------------------------------------------------------------------------------------------


def test_nothing_is_due_while_nothing_pages():
    board = look(Board(), [incident("slow")], 0.0)
    assert not board.due
    assert not board.rows


def test_it_is_due_at_once_then_each_minute():
    board = look(Board(), [incident()], 0.0)
    assert board.due
    assert [(board := look(board, [incident()], now)).due for now in (0.5, REPOST_S - 1, REPOST_S, REPOST_S + 1)] == [False, False, True, False]


def test_it_is_due_when_another_rank_is_blamed():
    board = look(Board(), [incident()], 0.0)
    renamed = build_status.stuck_incident(verdict=build_status.stuck_verdict(culprit_ranks=(2,)))
    assert look(board, [renamed], 1.0).due


def test_it_outlives_the_launcher_as_long_as_the_rules_do_and_a_little():
    (alert,) = posted(look(Board(), [incident()], 0.0), now=7.0)
    assert unix(alert["endsAt"]) == pytest.approx(WALL + 7 + FIRES_FOR_S, abs=0.01)
    assert f"{HOLD_S / 60:g}m" == document.DEFAULT_HOLD
    assert FIRES_FOR_S > HOLD_S + REPOST_S


# -- its end -------------------------------------------------------------------------------------------------------------


def test_once_it_is_over_it_is_posted_no_more_until_it_is_resolved():
    board = look(look(Board(), [incident()], 0.0), [], 50.0)
    for now in (50.5, REPOST_S, 50 + RESOLVE_AFTER_S - 1):
        board = look(board, [], now)
        assert not board.due
        assert posted(board) == []
    board = look(board, [], 50 + RESOLVE_AFTER_S)
    assert board.due
    (alert,) = posted(board, now=300.0)
    assert unix(alert["endsAt"]) == pytest.approx(WALL + 50 + RESOLVE_AFTER_S, abs=0.01)


def test_what_is_over_is_not_opened_anew_by_the_post_of_another():
    other = incident("failed", "killed", "node", id="2")
    board = look(look(Board(), [incident()], 0.0), [other], 1.0)
    assert [alert["labels"]["alertname"] for alert in posted(board)] == ["RankwatchFailed"]


def test_one_that_comes_back_before_it_is_resolved_goes_on():
    board = look(look(Board(), [incident()], 0.0), [], 10.0)
    board = look(board, [incident()], 12.0)
    assert board.due
    assert len(posted(board)) == 1
    assert not look(board, [incident()], 12 + RESOLVE_AFTER_S).due


def test_a_resolved_one_is_repeated_for_some_minutes_and_then_forgotten():
    board = look(look(Board(), [incident()], 0.0), [], 1.0)
    board = look(board, [], 1 + RESOLVE_AFTER_S)
    assert len(look(board, [], RESOLVE_AFTER_S + RESOLVED_KEPT_S).rows) == 1
    assert not look(board, [], 1 + RESOLVE_AFTER_S + RESOLVED_KEPT_S).rows


def test_a_death_that_is_a_ticket_lasts_as_long_as_the_rule_counts_it():
    board = look(look(Board(), [incident("failed", "crashed")], 0.0), [], 1.0)
    assert not look(board, [], HOLD_S).due
    assert look(board, [], 1 + HOLD_S).due


def test_at_the_end_of_the_job_what_fires_stays_and_what_is_over_is_resolved():
    board = look(look(Board(), [incident()], 0.0), [incident("failed", "killed", "node", id="2")], 1.0)
    board = alertmanager.ended(board, 5.0, WALL + 5)
    assert board.due
    ends = {alert["labels"]["alertname"]: unix(alert["endsAt"]) - WALL for alert in posted(board, now=5.0)}
    assert ends == pytest.approx({"RankwatchStuck": 5.0, "RankwatchFailed": 5 + FIRES_FOR_S}, abs=0.01)


def test_at_the_end_of_a_healthy_job_nothing_is_posted():
    assert not alertmanager.ended(look(Board(), [], 0.0), 5.0, WALL).due


def test_ten_thousand_ranks_are_a_short_text():
    many = build_status.stuck_verdict(culprit_ranks=tuple(range(0, 20000, 2)), waiting_ranks=tuple(range(1, 20000, 2)))
    incidents = [build_status.stuck_incident(id=str(number), verdict=many, hosts={rank: f"n{rank}" for rank in many.culprit_ranks}) for number in range(40)]
    board = look(Board(), incidents, 0.0)
    assert len(alertmanager.body(board, WALL)) < 4000


def test_a_time_before_its_end_is_its_begin():
    late = dataclasses.replace(incident(), history=(Change(WALL + 9e5, "stuck", "not_entered", (1,)),))
    (alert,) = posted(look(Board(), [late], 0.0))
    assert unix(alert["startsAt"]) < unix(alert["endsAt"])
