"""The direct path as a whole: every Alertmanager and every webhook of the options, counted by channel, silent about secrets."""

from __future__ import annotations

import json

import build_status
import pytest

from rankwatch.config import COMMAND_LINE, Options, hidden, load
from rankwatch.notify.alertmanager import FIRES_FOR_S
from rankwatch.notify.direct import Direct
from rankwatch.notify.post import NotTaken

STUCK = build_status.stuck_status()
WALL = build_status.WALL


class Sent:
    """Keeps what was posted, as (host, path, document); nothing is taken by the hosts in `down`."""

    def __init__(self, *down):
        self.all = []
        self.down = down

    def __call__(self, to, body):
        if to.host in self.down:
            raise NotTaken("HTTP 401", again=False)
        self.all.append((to.host, to.path, json.loads(body)))


def direct(sent, said=None, **options):
    return Direct(Options(**options), (said if said is not None else []).append, sent, lambda: 0.0, lambda: WALL)


def test_without_a_target_nothing_is_done():
    def never(_to, _body):
        raise AssertionError

    quiet = direct(never)
    quiet.look(STUCK)
    quiet.changed("opened", build_status.stuck_incident(), STUCK)
    quiet.finish()
    assert quiet.flush(0.0)
    assert not quiet.tells
    assert quiet.counts == {}


def test_every_alertmanager_gets_the_alert_and_one_that_is_down_keeps_it_from_no_other():
    sent, said = Sent("b"), []
    path = direct(sent, said, alertmanager=("http://a:9093", "http://b:9093", "https://c/am"))
    path.look(STUCK)
    assert path.flush(10)
    assert sorted((host, where, len(alerts)) for host, where, alerts in sent.all) == [("a", "/api/v2/alerts", 1), ("c", "/am/api/v2/alerts", 1)]
    assert said[0] == "alertmanager http://b:9093 has not taken a message: HTTP 401; it is given up"
    assert path.counts == {("alertmanager", "ok"): 2, ("alertmanager", "failed"): 1, ("alertmanager", "dropped"): 1}


def test_a_webhook_is_told_of_what_pages_and_of_its_end():
    sent = Sent()
    path = direct(sent, webhook=("https://chat.example/secret",))
    incident = build_status.stuck_incident()
    path.changed("opened", build_status.compiling_incident(), STUCK)
    path.changed("escalated", incident, STUCK)
    path.changed("closed", incident, STUCK, "job_ended")
    assert path.flush(10)
    assert [(where, doc["change"], doc["reason"]) for _host, where, doc in sent.all] == [("/secret", "escalated", ""), ("/secret", "closed", "job_ended")]
    assert path.counts == {("webhook", "ok"): 2, ("webhook", "failed"): 0, ("webhook", "dropped"): 0}


def test_the_last_post_holds_the_page_after_the_job():
    sent = Sent()
    path = direct(sent, alertmanager=("http://a",))
    path.look(STUCK)
    assert path.flush(10)
    path.finish()
    assert path.flush(10)
    assert len(sent.all) == 2
    assert FIRES_FOR_S > 600


def test_who_judges_no_more_posts_no_more():
    sent = Sent()
    path = direct(sent, alertmanager=("http://a",))
    path.look(STUCK)
    assert path.flush(10)
    path.rest()
    path.finish()
    assert path.flush(10)
    assert len(sent.all) == 1


def test_secrets_that_others_may_read_are_told(tmp_path):
    file = tmp_path / "credentials"
    file.write_text("a:b")
    file.chmod(0o644)
    said = []
    given = {"alertmanager": ("http://u:p@a",), "alertmanager_credentials": str(file), "webhook": ("https://hooks.slack.com/services/T1/B2/xyz",)}
    direct(Sent(), said, **given, origins={"alertmanager": COMMAND_LINE, "webhook": COMMAND_LINE})
    assert said[0] == f"others may read {file}: chmod 600 {file}"
    assert "RANKWATCH_WEBHOOK" in said[1]
    assert "--alertmanager-credentials FILE" in said[2]
    assert not any("xyz" in text or "u:p" in text for text in said)
    said.clear()
    file.chmod(0o600)
    direct(Sent(), said, **given, origins={"webhook": "RANKWATCH_WEBHOOK"})
    assert said == []


# -- the options ---------------------------------------------------------------------------------------------------------


def test_targets_may_be_repeated_or_listed():
    given = [("alertmanager", "http://a:9093,http://b:9093"), ("alertmanager", "http://c"), ("webhook", "https://chat/x")]
    options = load(given, {}, [])
    assert options.alertmanager == ("http://a:9093", "http://b:9093", "http://c")
    assert options.webhook == ("https://chat/x",)
    assert load([], {"RANKWATCH_WEBHOOK": "https://chat/x"}, []).webhook == ("https://chat/x",)


@pytest.mark.parametrize("address", ["am:9093", "ftp://am", "http://", "http://am:99999", "http://:9093"])
def test_what_is_no_address_is_refused_without_being_said(address):
    with pytest.raises(ValueError, match=r"--webhook: \*\*\* is not accepted; it takes an address that starts with http://"):
        load([("webhook", address)], {}, [])


def test_a_command_line_is_shown_without_secret_addresses():
    words = ("--webhook", "https://chat/secret", "--webhook=https://u:p@b/secret,http://c:1/secret", "--alertmanager", "http://u:p@am:9093/x", "torchrun")
    shown = ("--webhook", "https://chat/***", "--webhook=https://b/***,http://c:1/***", "--alertmanager", "http://***@am:9093/x", "torchrun")
    assert hidden.words(words) == shown
    assert hidden.words(["--webhook", "not an address", "--webhook"]) == ("--webhook", "***", "--webhook")
