"""The dashboards are what the code makes of them, keep their rules, know only metrics and alerts that exist, and are exported as shipped."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import pytest

from dashboards.build import lint, names, queries
from rankwatch import cli
from rankwatch.commands import dashboards as command
from rankwatch.wire.signals import BY_NAME

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dashboards").glob("rankwatch-*.json"))
BOARDS = {path.stem.removeprefix("rankwatch-"): json.loads(path.read_text(encoding="utf-8")) for path in FILES}


@pytest.fixture
def job():
    """The job dashboard, to be spoilt."""
    return copy.deepcopy(BOARDS["job"])


def first(board, kind="timeseries"):
    return next(panel for panel in board["panels"] if panel["type"] == kind)


def test_there_are_four():
    assert set(BOARDS) == {"job", "rank", "fleet", "compile"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11; the files are made and checked there")
def test_the_files_are_what_the_code_makes():
    """After a change: python -m dashboards.build."""
    from dashboards.build.__main__ import stale

    assert stale() == []


def test_what_is_shipped_is_what_lies_in_dashboards():
    assert command.shipped() == {path.name: path.read_text(encoding="utf-8") for path in FILES}


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_keeps_the_rules(name):
    assert lint.faults(BOARDS[name]) == []


def test_every_metric_is_drawn_somewhere():
    assert set().union(*(lint.metrics(board) for board in BOARDS.values())) == set(BY_NAME)


def test_every_runbook_that_is_named_is_there_and_belongs_to_an_alert():
    alerts = set(re.findall(r"alert: (\w+)", (ROOT / "dashboards" / "alerts.yaml").read_text(encoding="utf-8")))
    files = {path.stem for path in (ROOT / "dashboards" / "runbooks").glob("*.md")}
    named = set().union(*(lint.runbooks(board) for board in BOARDS.values()))
    assert named <= alerts
    assert named <= files


def test_the_lint_sees_a_metric_that_does_not_exist(job):
    first(job)["targets"][0]["expr"] = 'max(rankwatch_rank_mood{job_id="$job_id"})'
    assert "asks for rankwatch_rank_mood, which wire.signals does not have" in " ".join(lint.faults(job))


def test_the_lint_sees_a_query_of_all_jobs(job):
    first(job)["targets"][0]["expr"] = "max(rankwatch_rank_phase)"
    assert "reads all jobs" in " ".join(lint.faults(job))


def test_the_lint_sees_the_rate_of_a_gauge_and_a_rate_over_a_fixed_window(job):
    first(job)["targets"][0]["expr"] = 'rate(rankwatch_rank_phase{job_id="$job_id"}[5m])'
    found = " ".join(lint.faults(job))
    assert "rate of rankwatch_rank_phase" in found
    assert "a rate over 5m" in found


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda panel: panel.update(title=" "), "has no title"),
        (lambda panel: panel.update(description="Shows it."), "does not say what it shows and what to do next"),
        (lambda panel: panel["fieldConfig"]["defaults"].update(unit="furlongs"), "has the unit 'furlongs'"),
        (lambda panel: panel["fieldConfig"]["defaults"].pop("noValue"), "does not say what no data means"),
        (lambda panel: panel["options"].pop("legend"), "has no legend"),
        (lambda panel: panel["targets"][0].pop("legendFormat"), "has no legend"),
        (lambda panel: panel["targets"][0]["datasource"].update(uid="PBFA97CFB590B2093"), "data source 'PBFA97CFB590B2093' is not the variable"),
        (lambda panel: panel["gridPos"].update(x=1, y=1), "overlap"),
        (lambda panel: panel.update(type="graph"), "is of type graph"),
        (lambda panel: panel.update(description="It.\n\nNext: whatever there is to do.", links=[]), "leads nowhere"),
    ],
)
def test_the_lint_sees_a_spoilt_panel(job, spoil, said):
    spoil(first(job))
    assert said in " ".join(lint.faults(job))


def test_the_lint_sees_ranks_that_lead_nowhere(job):
    panel = next(panel for panel in job["panels"] if panel["type"] == "state-timeline")
    panel["fieldConfig"]["defaults"]["links"] = []
    assert "shows ranks and does not lead to them" in " ".join(lint.faults(job))


def test_a_selector_goes_behind_every_bare_name_and_no_other():
    given = 'sum by (rank) (rate(rankwatch_a_total[5m])) > rankwatch_b{x="1"}'
    assert names.of('job_id="1"', given) == 'sum by (rank) (rate(rankwatch_a_total{job_id="1"}[5m])) > rankwatch_b{x="1"}'


def test_variables_are_filled_in_the_longest_name_first():
    given = 'x{a="$rank",b="${job_id}",c="$job"}[$__rate_interval] y[$__range]'
    variables = {"rank": "3", "job": "J", "job_id": "I"}
    assert queries.filled(given, variables, range_s=1800, step_s=6, scrape_s=15) == 'x{a="3",b="I",c="J"}[60s] y[1800s]'


def test_export_writes_what_is_shipped(tmp_path, capsys):
    assert cli.main(["dashboards", "export", str(tmp_path / "new")]) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert written == command.shipped()
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "new" / name) for name in written_order(written)]


def written_order(written):
    return sorted(written)


def test_a_runbook_base_makes_links_in_folded_rows_too():
    board = json.loads(command.with_runbooks(command.shipped()["rankwatch-job.json"], "https://wiki.example/rw"))
    assert all("Runbook: [" in panel["description"] for panel in queries.panels(board) if "Runbook: " in panel["description"])
    links = {link["url"] for panel in queries.panels(board) for link in panel["links"]}
    assert "https://wiki.example/rw/RankwatchStuck.md" in links
    assert "https://wiki.example/rw/RankwatchMonitorErrors.md" in links


@pytest.mark.parametrize(("words", "said"), [(["--runbook-base", "wiki", "out"], "--runbook-base 'wiki' is not"), (["/proc/nobody/writes"], "cannot write")])
def test_a_mistake_ends_with_2(words, said, capsys):
    assert cli.main(["dashboards", "export", *words]) == 2
    assert said in capsys.readouterr().err
