"""What a job is called: the label `job_id` of every metric, in every file and line of the run. The same on all nodes, wherever something names the job.

What each launcher sets: Slurm SLURM_JOB_ID, in an array SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID (sbatch(1)); torchrun the rendezvous id, "none" by default
and a uuid with --standalone; Kubernetes KUBERNETES_SERVICE_HOST in every pod, JOB_COMPLETION_INDEX in an indexed Job, whose pods' host names end in it;
Kubeflow pods are <job>-master-0, <job>-worker-<n> (PyTorchJob) or <job>-node-0-<n> (TrainJob); Ray RAY_JOB_ID in its workers, RAY_JOB_CONFIG_JSON_ENV_VAR in
what `ray job submit` starts, and KubeRay RAY_CLUSTER_NAME: Ray counts jobs from 1 in each cluster.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_CHARS = 64
_UUID = re.compile(r"([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_KUBEFLOW_POD = re.compile(r"(.+?)-(?:(?:master|worker|launcher)-\d+|node-\d+-\d+)\Z")


@dataclass(frozen=True, slots=True)
class JobId:
    """drawn: at random, since nothing names the job: every launcher draws another one."""

    text: str
    drawn: bool = False


def job_id(given: str, environ: Mapping[str, str], rendezvous_id: str, host: str = "", draw: Callable[[], str] = lambda: secrets.token_hex(4)) -> JobId:
    """The first that there is: --job-id, Slurm's, the rendezvous id (not "none", not a uuid), Kubernetes', Ray's, the first part of a uuid, a drawn one.

    host: of this machine, which in a pod tells the job. Only letters, digits, ".", "_" and "-" stay, at most MAX_CHARS.
    """
    rendezvous = "" if rendezvous_id == "none" else rendezvous_id
    inherited = environ.get("TORCHELASTIC_RUN_ID", "")  # a launcher inside a rank, or a wrapper's
    named = rendezvous or ("" if inherited == "none" else inherited)
    made_up = _UUID.fullmatch(named)
    for text in (given, _slurm(environ), "" if made_up else named, _kubernetes(environ, host), _ray(environ), made_up[1] if made_up else ""):
        if clean := _clean(text):
            return JobId(clean)
    return JobId(draw(), drawn=True)


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:MAX_CHARS].strip("._")


def _slurm(environ: Mapping[str, str]) -> str:
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task and environ.get("SLURM_JOB_ID") else environ.get("SLURM_JOB_ID", "")


def _kubernetes(environ: Mapping[str, str], host: str) -> str:
    for name in ("KUBEFLOW_TRAINING_JOB_ID", "JOBSET_NAME"):
        if environ.get(name):
            return environ[name]
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return ""  # elsewhere JOB_NAME is a build server's
    if environ.get("JOB_NAME"):
        return environ["JOB_NAME"]
    host = (environ.get("HOSTNAME") or host).partition(".")[0]
    if match := _KUBEFLOW_POD.match(host):
        return match[1]
    index = environ.get("JOB_COMPLETION_INDEX", "")
    return host.removesuffix(f"-{index}") if index and host.endswith(f"-{index}") else ""


def _ray(environ: Mapping[str, str]) -> str:
    try:
        config = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
        submitted = config.get("metadata", {}).get("job_submission_id")
    except (ValueError, AttributeError):
        submitted = None
    if isinstance(submitted, str) and submitted:
        return submitted
    number = environ.get("RAY_JOB_ID", "")
    return f"{environ.get('RAY_CLUSTER_NAME') or 'ray'}-{number}" if number else ""
