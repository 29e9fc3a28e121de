"""The table of alerts keeps its promises: only metrics that exist, one vocabulary, a runbook each; and `rankwatch rules` says what is wrong with its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankwatch import cli
from rankwatch.commands.alerts import document, yaml_text
from rankwatch.commands.alerts.table import ALERTS, RECORDINGS, SEVERITIES
from rankwatch.commands.alerts.words import LAST
from rankwatch.model import PAGING
from rankwatch.wire.signals import BY_NAME, COMPILE_DIVERGENCES, COMPILE_REGIMES, VERDICTS, exported

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RUNBOOKS = DASHBOARDS / "runbooks"
TEXTS = [*(alert.expr + alert.summary + alert.description for alert in ALERTS), *(rule.expr for rule in RECORDINGS)]
METRIC = re.compile(r"(?<![\w:])rankwatch_\w+")
OUTSIDE = {"job_id", "cluster", "instance"}


def export(capsys, *words):
    assert cli.main(["rules", "export", *words]) == 0
    return capsys.readouterr().out


def error_of(capsys, *words):
    assert cli.main(["rules", "export", *words]) == 2
    return capsys.readouterr().err


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_metric_is_one_that_rankwatch_exports():
    names = {name for text in TEXTS for name in METRIC.findall(text)}
    assert len(names) > 15
    assert names <= set(BY_NAME)


def test_every_label_is_one_that_the_metric_has():
    for text in TEXTS:
        for name, inside in re.findall(r"(rankwatch_\w+)(?::last)?\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)(?:=|!=|=~|!~)[\"%]", inside)) - OUTSIDE
            assert labels <= set(BY_NAME[name].labels) or name == "rankwatch_job_info", (name, labels)


def test_every_value_that_a_rule_asks_for_exists():
    asked = {(label, value) for text in TEXTS for label, values in re.findall(r'(verdict|regime|kind)=~?"([\w|]+)"', text) for value in values.split("|")}
    known = {("verdict", name) for name in VERDICTS} | {("regime", name) for name in COMPILE_REGIMES} | {("kind", name) for name in COMPILE_DIVERGENCES}
    assert asked <= known


def test_what_wakes_somebody_reads_metrics_that_exist_at_any_size():
    for alert in ALERTS:
        if alert.severity == "critical":
            assert set(METRIC.findall(alert.expr + alert.summary + alert.description)) <= exported("low"), alert.name
    assert set(METRIC.findall(next(rule.expr for rule in RECORDINGS if rule.name == LAST))) <= exported("low")


def test_exactly_the_paging_verdicts_wake_somebody():
    assert {alert.verdict for alert in ALERTS if alert.severity == "critical"} == set(PAGING)
    assert {alert.severity for alert in ALERTS} == set(SEVERITIES)


def test_an_alert_of_a_verdict_has_its_name():
    for alert in ALERTS:
        if alert.verdict:
            assert alert.name == "Rankwatch" + alert.verdict.title().replace("_", "")


def test_an_alert_and_its_severity_occur_once():
    keys = [(alert.name, alert.severity) for alert in ALERTS]
    assert len(set(keys)) == len(keys)


def test_every_rule_of_a_job_is_aggregated_to_the_job():
    for alert in ALERTS:
        assert re.search(r"(max|sum|count) by \(cluster, job_id\)", alert.expr), alert.name
        for by in re.findall(r"\bby \(([^)]*)\)", alert.expr):
            assert by.startswith("cluster, job_id"), alert.name


def test_every_text_ends_with_what_to_do():
    for alert in ALERTS:
        assert alert.description.splitlines()[-1].rpartition("{{ end }}")[2].startswith("Next: "), alert.name
        assert alert.summary.endswith("."), alert.name


# -- the files beside it -----------------------------------------------------------------------------------------------


def test_the_file_in_dashboards_is_the_export(capsys):
    assert (DASHBOARDS / "alerts.yaml").read_text() == export(capsys), "run: rankwatch rules export > dashboards/alerts.yaml"


def test_every_alert_has_a_runbook_and_no_runbook_is_left_over():
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md")) == sorted({alert.name for alert in ALERTS})


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_a_runbook_says_what_it_means_what_it_costs_where_to_look_and_what_to_do(path):
    text = path.read_text()
    assert text.startswith(f"# {path.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    for command in re.findall(r"`(?:srun[^`]*)?rankwatch (?:--\S+ \S+ )*(\w+)[^`]*`", text):
        assert command in cli.available(), command
    for metric in METRIC.findall(text):
        assert metric in BY_NAME, metric
    for alert in re.findall(r"Rankwatch\w+", text):
        assert alert in {each.name for each in ALERTS}, alert


def test_the_routing_names_only_alerts_that_exist():
    named = re.findall(r"Rankwatch[A-Z]\w+", (DASHBOARDS / "alertmanager.yml").read_text())
    assert named
    assert set(named) <= {alert.name for alert in ALERTS}


# -- the command -------------------------------------------------------------------------------------------------------


def test_severities_get_the_names_of_the_site(capsys):
    text = export(capsys, "--severity-map", "critical=page,ticket=P4")
    assert set(re.findall(r"severity: (\S+)", text)) == {"page", "warning", "P4"}


def test_a_label_stands_on_every_alert_and_on_no_recording_rule(capsys):
    text = export(capsys, "--label", "team=speech", "--label=cluster=a")
    assert text.count("          team: speech\n          cluster: a\n") == len(ALERTS) == text.count("team:")


def test_links_are_there_only_where_they_lead_somewhere(capsys):
    assert "_url:" not in export(capsys)
    text = export(capsys, "--runbook-base", "https://wiki.example/r/")
    assert 'runbook_url: "https://wiki.example/r/RankwatchStuck.md"' in text or "runbook_url: https://wiki.example/r/RankwatchStuck.md" in text
    assert "dashboard_url" not in text


def test_the_hold_replaces_every_duration_that_outlives_a_launcher(capsys):
    text = export(capsys, "--hold", "90s")
    assert "HOLD" not in text
    assert 'last_over_time(rankwatch_verdict{verdict="stuck"}[90s])' in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--severity-map", "fatal=page"), "'fatal' is no severity; there are critical, warning, ticket"),
        (("--severity-map", "critical"), "--severity-map 'critical' is not K=V"),
        (("--label", "a-b=c"), "'a-b' is no label name of Prometheus"),
        (("--label", "severity=c"), "severity is set by the rules or by the job"),
        (("--label", "team=a\nb"), "its value has characters that cannot be printed"),
        (("--runbook-base", "wiki"), "--runbook-base 'wiki' is not an address that starts with http:// or https://"),
        (("--hold", "soon"), "--hold 'soon' is no duration of Prometheus such as 90s, 10m or 1h"),
        (("--metadata-label", "a=b"), "--metadata-label belongs to --format k8s"),
        (("--format", "k8s", "--metadata-label", "a=b c"), "no label of Kubernetes"),
    ],
)
def test_a_mistake_is_said_and_nothing_is_written(capsys, words, told):
    assert told in error_of(capsys, *words)


def test_the_command_without_its_verb_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["rules"])
    assert end.value.code == 2


# -- YAML --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "yaml"),
    [
        ("critical", "critical"),
        ("job:rankwatch_rank_phase:count", "job:rankwatch_rank_phase:count"),
        ("yes", '"yes"'),
        ("Null", '"Null"'),
        ("10m", '"10m"'),
        ("a: b", '"a: b"'),
        ("a #b", '"a #b"'),
        ("a:", '"a:"'),
        ("", '""'),
        ("say \"a\" or \\ or 'b'", "'say \"a\" or \\ or ''b'''"),
        ("é 🏖\x7f", '"\\U000000e9 \\U0001f3d6\\U0000007f"'),
        ('tab\t"x"', '"tab\\t\\"x\\""'),
    ],
)
def test_a_text_stays_a_text(text, yaml):
    assert yaml_text.scalar(text) == yaml


def test_several_lines_are_a_block_and_lists_are_indented():
    value = {"groups": [{"name": "a", "rules": [{"expr": "one\n  two\n\nthree"}, {"expr": "x y\n"}, {"expr": " a\nb"}]}]}
    assert yaml_text.dump(value) == (
        "groups:\n  - name: a\n    rules:\n      - expr: |-\n          one\n            two\n\n          three\n"
        '      - expr: "x y\\n"\n      - expr: " a\\nb"\n'
    )  # fmt: skip


def test_what_a_rule_file_never_holds_is_refused():
    with pytest.raises(TypeError, match="float has no place in a rule file"):
        yaml_text.dump({"a": 1.5})


def test_settings_without_a_site_add_nothing():
    assert document.rule_file(document.Settings()) == document.rule_file(document.Settings(labels={}, severities={}))
