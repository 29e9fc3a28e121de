"""What a pod says about its own end: the sentence that `kubectl describe pod` shows as the container's termination message. Pure."""

from __future__ import annotations

from rankwatch import shown
from rankwatch.model import PAGING, Incident, Status
from rankwatch.notify.failed import first_cause

MAX_BYTES = 4096
"""Kubernetes keeps that much of a container's message: https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/"""
MAX_ADVICE = 3


def termination_message(status: Status, speaks: bool = True) -> str:
    """At most MAX_BYTES of UTF-8: the verdict that began it, then what to do and where the report lies. "" where there is nothing to say.

    Nothing is said of a job that ended well, nor of one whose end rankwatch cannot explain: Kubernetes may then show the log's end instead
    (`terminationMessagePolicy: FallbackToLogsOnError`). speaks: False where another launcher judges the job; its pod has the verdict.
    """
    if status.exit_code == 0:
        return ""
    if not speaks:
        judge = f" ({_line(status.judge)})" if status.judge else ""
        return _within([f"Exit code {_code(status)}. What held the job up or ended it is told by the pod of group rank 0{judge}."], MAX_BYTES)
    incident = first_cause(status)
    if incident is None:
        return ""
    return _within([*_verdict(incident), f"Job {_line(status.job.job_id)}, exit code {_code(status)}. {_report(incident, status)}"], MAX_BYTES)


def _verdict(incident: Incident) -> list[str]:
    judged = incident.verdict
    gravest = max((change.verdict for change in incident.history if change.verdict in PAGING), key=shown.VERDICT_ORDER.index, default=judged.verdict)
    word = max(gravest, judged.verdict, key=shown.VERDICT_ORDER.index)
    rows = [f"{word.upper()}: {_line(shown.without_countdown(judged.summary)) or judged.cause}"]
    hosts = {incident.hosts[rank]: None for rank in judged.culprit_ranks if rank in incident.hosts}
    where = f" on {_line(', '.join(list(hosts)[:4]))}" if hosts else ""
    rows.append(f"Culprit: {shown.rank_words(judged.culprit_ranks)}{where}; cause {judged.cause}, domain {judged.domain}, {judged.confidence}.")
    if judged.waiting_ranks:
        rows.append(f"Waited: {shown.rank_words(judged.waiting_ranks)} (victims).")
    return [*rows, *(f"To do: {_line(text)}" for text in judged.advice[:MAX_ADVICE])]


def _report(incident: Incident, status: Status) -> str:
    return f"Report: {_line(status.job.run_dir)}/incidents/{incident.id}/report.txt" if status.job.run_dir else f"Incident {incident.id}."


def _code(status: Status) -> str:
    return "unknown" if status.exit_code is None else str(status.exit_code)


def _line(text: str) -> str:
    return shown.public_line(text)


def _within(rows: list[str], limit: int) -> str:
    """The rows as lines; where they are too many bytes, the longest text that fits, never half a character."""
    data = ("\n".join(rows) + "\n").encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= limit else data[: limit - 4].decode("utf-8", "ignore") + "...\n"
