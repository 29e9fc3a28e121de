"""`rankwatch metrics --describe`, and that the catalogue, the dashboards, the rules and the exporter know the same metrics."""

import json
import re
from pathlib import Path

import build_status
import pytest

from rankwatch import cli
from rankwatch.commands import metrics
from rankwatch.export.samples import Ledger, samples
from rankwatch.wire.signals import BY_NAME, JOB_STATE_CODES, PHASE_CODES, SIGNALS, exported

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w:])rankwatch_[a-z0-9_]+")


def printed(capsys, *words):
    assert cli.main(["metrics", *words]) == 0
    return capsys.readouterr().out


def expressions():
    """Everything that asks Prometheus for something: queries of the dashboards, expressions and texts of the rules."""
    for path in sorted((ROOT / "dashboards").glob("rankwatch-*.json")):
        yield from re.findall(r'"(?:expr|query|definition)": "((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"))
    yield (ROOT / "dashboards" / "alerts.yaml").read_text(encoding="utf-8")


def test_every_metric_is_used_in_a_dashboard_or_a_rule_and_every_one_used_exists():
    used = {name for text in expressions() for name in NAME.findall(text)}
    assert sorted(used - set(BY_NAME)) == []
    assert sorted(set(BY_NAME) - used) == []


def test_the_exporter_gives_no_metric_and_no_label_that_the_catalogue_does_not_have():
    for build in (build_status.stuck_status, build_status.compiling_status, build_status.crashed_status, build_status.healthy_status):
        for name, labels, _ in samples(build(), Ledger(), 0.0):
            assert len(labels) == len(BY_NAME[name].labels), name


def test_json_is_the_table(capsys):
    document = json.loads(printed(capsys, "--describe", "--format", "json"))
    assert document["schema"] == 1
    assert document["labels"] == ["job_id"]
    assert document["phases"] == PHASE_CODES
    assert document["job_states"] == JOB_STATE_CODES
    assert [row["name"] for row in document["metrics"]] == [signal.name for signal in SIGNALS]
    row = next(row for row in document["metrics"] if row["name"] == "rankwatch_compile_seconds_total")
    assert row == {
        "name": "rankwatch_compile_seconds_total", "type": "counter", "unit": "seconds", "labels": ["rank", "stage"], "level": "default", "scope": "rank",
        "help": "Time spent compiling.", "source": "RankState.compile_totals.seconds", "stability": "stable",
    }  # fmt: skip


@pytest.mark.parametrize("level", ["low", "default", "full"])
def test_a_level_shows_what_it_exports(capsys, level):
    rows = json.loads(printed(capsys, "--format", "json", "--level", level))["metrics"]
    assert {row["name"] for row in rows} == exported(level)


def test_stable_ones_are_shown_alone_on_demand(capsys):
    assert {row["stability"] for row in json.loads(printed(capsys, "--format", "json", "--stability", "stable"))["metrics"]} == {"stable"}


def test_text_says_everything_of_a_metric(capsys):
    lines = printed(capsys, "--describe").splitlines()
    at = lines.index("rankwatch_probe_up{rank,probe}  gauge, per rank, default, stable, from RankState.probes")
    assert lines[at + 1] == "    1 while the probe works, 0 once it failed or found no hook; absent if switched off."
    assert sum(not line.startswith(" ") for line in lines) == len(SIGNALS)


def test_a_markdown_table_has_four_columns_in_every_row(capsys):
    rows = printed(capsys, "--describe", "--format", "markdown").splitlines()
    assert len(rows) == len(SIGNALS) + 2
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
    assert metrics.markdown([SIGNALS[0]._replace(help="a|b.", stability="experimental")]).splitlines()[-1].endswith("| a\\|b. (experimental) |")


@pytest.mark.parametrize("words", [["--level", "all"], ["--format", "yaml"], ["extra"]])
def test_a_mistake_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["metrics", *words])
    assert end.value.code == 2
