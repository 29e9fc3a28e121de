"""The alert rules in Debian's promtool, the routing in amtool. A program that is missing is an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paging import DASHBOARDS

from rankwatch.commands.alerts.table import ALERTS

pytestmark = pytest.mark.stack
TESTS = sorted((DASHBOARDS / "tests").glob("*.yaml"))


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def export(*words: str) -> str:
    return run(sys.executable, "-m", "rankwatch", "rules", "export", *words)


def prove(tmp_path: Path, rules: str, test: dict[str, Any]) -> None:
    """One test of promtool, written as JSON, which is YAML."""
    (tmp_path / "rules.yaml").write_text(rules)
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [{"interval": "15s", **test}]}
    (tmp_path / "test.yaml").write_text(json.dumps(document, ensure_ascii=False))
    run("promtool", "test", "rules", tmp_path / "test.yaml")


def test_promtool_takes_the_rules_without_a_remark() -> None:
    assert "SUCCESS" in run("promtool", "check", "rules", "--lint=all", "--lint-fatal", DASHBOARDS / "alerts.yaml")


def test_promtool_proves_that_each_rule_fires_when_it_should_and_not_otherwise() -> None:
    run("promtool", "test", "rules", *TESTS)


@pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
def test_each_alert_is_tested_firing_and_silent(name: str) -> None:
    text = "\n".join(path.read_text() for path in TESTS)
    assert re.search(rf"alertname: {name}\n +exp_alerts:", text)
    assert re.search(rf"alertname: {name}}}", text)


def test_a_hang_of_a_thousand_ranks_is_one_alert(tmp_path: Path) -> None:
    ranks = [{"series": f'rankwatch_rank_waiting{{job_id="7",instance="n{rank // 8}",rank="{rank}"}}', "values": "1x8"} for rank in range(1000)]
    inflight = [
        {"series": f'rankwatch_collective_inflight_seconds{{job_id="7",instance="n{rank // 8}",rank="{rank}"}}', "values": "60x8" if rank != 5 else "0x8"}
        for rank in range(1000)
    ]
    job = {"rankwatch_job_state": "2x8", 'rankwatch_verdict,verdict="stuck"': "1x8"}
    one = [{"series": f'{name.partition(",")[0]}{{job_id="7",instance="n0",{name.partition(",")[2]}}}', "values": values} for name, values in job.items()]
    labels = {"job_id": "7", "severity": "critical", "verdict": "stuck"}
    todo = next(alert.description for alert in ALERTS if alert.name == "RankwatchStuck").rpartition("Next: ")[2]
    annotations = {"summary": "Job 7 is stuck.", "description": f"Ranks in a collective: 999, the oldest for 1m 0s.\nNext: {todo}"}
    expected = {"eval_time": "1m", "alertname": "RankwatchStuck", "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]}
    nothing_else = {"expr": "count(ALERTS)", "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": 1}]}
    prove(tmp_path, export(), {"input_series": [*one, *ranks, *inflight], "alert_rule_test": [expected], "promql_expr_test": [nothing_else]})


def test_labels_severities_and_links_of_a_site_arrive_as_they_were_given(tmp_path: Path) -> None:
    note = "a: \"b\" #c 'd' \\e é 🏖 {f} %g"
    given = ("--label", f"note={note}", "--label", "team=yes", "--severity-map", "critical=page,ticket=low")
    rules = export(*given, "--runbook-base", "https://wiki.example/r/", "--grafana-url", "https://grafana.example")
    labels = {"job_id": "7", "severity": "low", "note": note, "team": "yes"}
    regime = next(alert for alert in ALERTS if alert.name == "RankwatchCompiledNothing")
    annotations = {
        "summary": regime.summary.replace("{{ $labels.job_id }}", "7"),
        "description": regime.description,
        "runbook_url": "https://wiki.example/r/RankwatchCompiledNothing.md",
        "dashboard_url": "https://grafana.example/d/rankwatch-job?var-job_id=7&var-cluster=b+c&from=-1500000&to=1200000",
    }
    series = [{"series": 'rankwatch_compile_regime{job_id="7",cluster="b c",regime="compiled_nothing"}', "values": "1x40"}]
    alerts = [{"exp_labels": {**labels, "cluster": "b c"}, "exp_annotations": annotations}]
    prove(tmp_path, rules, {"input_series": series, "alert_rule_test": [{"eval_time": "5m", "alertname": regime.name, "exp_alerts": alerts}]})


def test_the_spec_of_the_kubernetes_manifest_is_a_rule_file(tmp_path: Path) -> None:
    manifest = export("--format", "k8s", "--metadata-label", "release=prometheus")
    head, spec = manifest.split("\nspec:\n")
    assert head.splitlines() == [
        "apiVersion: monitoring.coreos.com/v1",
        "kind: PrometheusRule",
        "metadata:",
        "  name: rankwatch",
        "  labels:",
        "    release: prometheus",
    ]
    rules = tmp_path / "rules.yaml"
    rules.write_text("\n".join(line.removeprefix("  ") for line in spec.splitlines()))
    assert rules.read_text().rstrip() == export().rstrip()
    run("promtool", "check", "rules", "--lint=all", rules)


def test_amtool_takes_the_routing_and_sends_each_severity_to_its_receiver() -> None:
    config = DASHBOARDS / "alertmanager.yml"
    run("amtool", "check-config", config)
    for severity, receiver in (("critical", "rankwatch-pager"), ("warning", "rankwatch-owner"), ("ticket", "rankwatch-tickets")):
        routed = run("amtool", "config", "routes", "test", f"--config.file={config}", "alertname=RankwatchFailed", f"severity={severity}", "job_id=7")
        assert routed.strip() == receiver
