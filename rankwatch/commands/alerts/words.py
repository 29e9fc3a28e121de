"""The text of a page: Go templates that Prometheus fills in while the alert fires. A page needs no click: who, why, since when, how long is left, what to do.

`<<PROMQL>>` stands for the vector of that query at this moment, `{JOB}` in it for the job's own labels: a Slurm job id may exist once a cluster.
`<<PROMQL; .Labels.incident>>` passes one more value, for the `%q` in it. Only functions of Prometheus 2.42 are used.
"""

from __future__ import annotations

import re

HOLD = "HOLD"
"""Stands for the duration for which a verdict outlives the launcher that gave it."""
LAST = "job:rankwatch_incident_info:last"
"""The recording rule that knows the labels of an incident even when its launcher is gone."""

_QUERY = re.compile(r"<<(.+?)(?:; *([^>]+))?>>", re.DOTALL)
_INCIDENTS = '(<<topk(3, job:rankwatch_incident_info:last{JOB,verdict="VERDICT"})>> | sortByLabel "incident")'
_WHO = (
    '{{ if .Labels.rank }}{{ if match "[,-]" .Labels.rank }}ranks{{ else }}rank{{ end }} {{ .Labels.rank }}'
    "{{ if .Labels.node }} on {{ .Labels.node }}{{ end }}{{ else }}no single rank{{ end }}"
)
_HEADLINE = "Job {{ $labels.job_id }} SAYS{{ range $at, $one := INCIDENTS }}{{ if $at }};{{ else }}:{{ end }} WHO, cause {{ .Labels.cause }}{{ end }}."
_OPENED = "<<floor(max_over_time(rankwatch_incident_open_timestamp_seconds{JOB,incident=%q}[HOLD])); .Labels.incident>>"
_STORY = (
    "{{ range INCIDENTS }}Incident {{ .Labels.incident }}, domain {{ .Labels.domain }}"
    "{{ with OPENED }}, open since {{ . | first | value | humanizeTimestamp }}{{ end }}"
    "{{ if .Labels.instance }}: http://{{ .Labels.instance }}/incidents/{{ .Labels.incident }}/{{ end }}\n{{ end }}"
    # who waits, from every node's own clock: true for any number of nodes
    "{{ with <<count(rankwatch_collective_inflight_seconds{JOB} > 1)>> }}Ranks in a collective: {{ . | first | value }}"
    "{{ with <<round(max(rankwatch_collective_inflight_seconds{JOB}))>> }}, the oldest for {{ . | first | value | humanizeDuration }}{{ end }}"
    "{{ with <<round(min("
    "rankwatch_collective_inflight_seconds{JOB} / (rankwatch_collective_timeout_ratio{JOB} > 0) - rankwatch_collective_inflight_seconds{JOB}"
    ")) > 0>> }}; the timeout comes in {{ . | first | value | humanizeDuration }}{{ end }}.\n{{ end }}"
    '{{ with <<last_over_time(rankwatch_job_info{JOB,label_owner!=""}[HOLD])>> }}Owner: {{ . | first | label "label_owner" }}.\n{{ end }}'
    "{{ if not (<<rankwatch_job_state{JOB}>>) }}The launcher reports no more: this is the last that it said.\n{{ end }}"
    "Next: TODO"
)


def filled(text: str) -> str:
    """`text` with its `<<...>>` as calls that Prometheus understands."""
    return _QUERY.sub(_call, text)


def headline(verdict: str, says: str) -> str:
    """ "Job 48213 is stuck: rank 1 on node05, cause stopped." At most three incidents."""
    text = _HEADLINE.replace("INCIDENTS", _INCIDENTS).replace("WHO", _WHO).replace("SAYS", says)
    return filled(text.replace("VERDICT", verdict))


def story(verdict: str, todo: str) -> str:
    """The lines below the headline: each incident with its page, who waits and how long is left, the owner, what to do next."""
    text = _STORY.replace("INCIDENTS", _INCIDENTS).replace("OPENED", _OPENED).replace("TODO", todo)
    return filled(text.replace("VERDICT", verdict))


def _call(found: re.Match[str]) -> str:
    promql, more = found[1], found[2]
    arguments = ["$labels.cluster $labels.job_id"] * promql.count("JOB") + ([more.strip()] if more else [])
    return f"query (printf `{promql.replace('JOB', 'cluster=%q,job_id=%q')}` {' '.join(arguments)})"
