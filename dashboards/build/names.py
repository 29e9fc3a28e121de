"""Selectors. Every series carries `job_id`; `cluster` is a target label that many sites have and some have not.

A launcher exports its own node's ranks, so a job's ranks lie on as many targets (`instance`) as it has nodes; job-level families come from one launcher alone.
"""

from __future__ import annotations

import re

JOB = 'cluster=~"$cluster",job_id="$job_id"'
RANK = f'{JOB},rank="$rank"'
SMALL = 'cluster=~"$cluster",job_id="$small_job"'
"""The job if it has at most SMALL_RANKS ranks, else nothing: an empty selector costs Prometheus nothing, a guard by `and on` would read every series."""
SMALL_RANKS = 64
FLEET = 'cluster=~"$cluster"'
PAGING = 'verdict=~"stuck|timeout_imminent|failed|diverged"'
RATE = "[$__rate_interval]"
RANGE = "[$__range]"

_NAME = re.compile(r"\brankwatch_[a-z0-9_]+\b(?!\{)")


def of(selector: str, expression: str) -> str:
    """Puts a selector behind every bare metric name: of(JOB, "max(rankwatch_x)") is max(rankwatch_x{...}); a name with braces of its own is left alone."""
    return _NAME.sub(lambda found: f"{found[0]}{{{selector}}}", expression)


def job(expression: str) -> str:
    """The expression, of the job that is chosen."""
    return of(JOB, expression)


def rank(expression: str) -> str:
    """The expression, of the rank that is chosen."""
    return of(RANK, expression)


def fleet(expression: str) -> str:
    """The expression, of every job."""
    return of(FLEET, expression)


def rank_by_rank(expression: str) -> str:
    """The expression for each rank of a small job, in the order 0, 1, 2, ..., 10: series are sorted by their labels as text, so one digit gets one more."""
    return f'label_replace(max by (rank) ({of(SMALL, expression)}), "a", "$1", "rank", "([0-9])")'


def with_node(expression: str) -> str:
    """Adds the host's name, which at every metrics level only rankwatch_build_info carries."""
    return f"({expression}) * on (instance, job_id) group_left (node) max by (instance, job_id, node) ({job('rankwatch_build_info')})"
