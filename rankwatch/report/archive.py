"""Names and links of what `--archive-dir` keeps of a run: DIR/<job>-<run>/index.html and incidents/<id>/{index.html,report.txt,incident.json}. Pure."""

from __future__ import annotations

import os
import re
import time
from urllib.parse import quote

_UNSAFE = re.compile(r"[^0-9A-Za-z._-]+")
MAX_NAME = 120


def run_name(job_id: str, run_dir: str) -> str:
    """`<job>-<run>`, one folder name that is safe in paths and links. A run directory that says its job already stands alone."""
    job, run = _safe(job_id), _safe(os.path.basename(run_dir.rstrip("/")))
    name = run if job and run.endswith(f"-{job}") else "-".join(filter(None, (job, run)))
    return name[:MAX_NAME] or "run"


def run_names(job_id: str, run_dir: str, started_wall_at: float, nonce: str) -> tuple[str, ...]:
    """Names for the run's folder, to be tried in this order: run_name, which a requeue or a run directory of the same name elsewhere shares; with the
    start of the run (unix seconds; UTC in the name); with a nonce too, which is nobody else's."""
    name = run_name(job_id, run_dir)
    started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started_wall_at))
    return name, f"{name}-{started}", f"{name}-{started}-{nonce}"


def run_url(external_url: str, name: str) -> str:
    """The run's address below --external-url, with a "/" at its end; "" without one."""
    return f"{external_url.rstrip('/')}/{quote(name)}/" if external_url else ""


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text).strip("._")
