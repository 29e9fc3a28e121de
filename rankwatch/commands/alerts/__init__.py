"""What `rankwatch rules export` writes: alert rules for Prometheus, from one table.

table: every alert and recording rule, with its reason. words: the text of a page, as templates that Prometheus fills in. document: the table with the
user's settings, as a rule file or a Kubernetes PrometheusRule. yaml_text: that as YAML.

An alert repeats what rankwatch has judged (`rankwatch_verdict`, `rankwatch_compile_regime`, ...); it never judges again by a number of its own.
dashboards/alerts.yaml is the export with default settings, kept equal by a test; dashboards/runbooks/ has a page an alert, dashboards/tests/ what
promtool proves of each.
"""
