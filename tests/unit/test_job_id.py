"""What a job is called, from whatever names it."""

import json

import pytest

from rankwatch.config import Options
from rankwatch.launcher.job_id import JobId, job_id
from rankwatch.launcher.supervision import Start, Supervision
from rankwatch.monitor.policy import Limits

UUID = "b0a1c2d3-1111-4222-8333-0123456789ab"
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def drawn():
    return "feedface"


def forbidden():
    raise AssertionError("nothing is to be drawn")


@pytest.mark.parametrize(
    ("given", "environ", "rendezvous", "host", "expected"),
    [
        ("mine", {"SLURM_JOB_ID": "991"}, "rdzv", "", "mine"),
        ("", {"SLURM_JOB_ID": "991", "TORCHELASTIC_RUN_ID": "run", **POD}, "rdzv", "train-0", "991"),
        ("", {"SLURM_JOB_ID": "995", "SLURM_ARRAY_JOB_ID": "991", "SLURM_ARRAY_TASK_ID": "7"}, "none", "", "991_7"),
        ("", {"SLURM_ARRAY_JOB_ID": "991"}, "rdzv", "", "rdzv"),
        ("", {"TORCHELASTIC_RUN_ID": "run"}, "rdzv", "", "rdzv"),
        ("", {"TORCHELASTIC_RUN_ID": "run"}, "none", "", "run"),
        ("", {"TORCHELASTIC_RUN_ID": "none", "RAY_JOB_ID": "01000000"}, "none", "", "ray-01000000"),
        ("", {}, UUID, "", "b0a1c2d3"),
        ("", {"KUBEFLOW_TRAINING_JOB_ID": "kf"}, UUID, "", "kf"),
        ("", {"JOBSET_NAME": "set", **POD}, "none", "", "set"),
        ("", {"JOB_NAME": "llama", **POD}, "none", "llama-0-x7", "llama"),
        ("", {"JOB_NAME": "nightly build"}, UUID, "", "b0a1c2d3"),
        ("", {"HOSTNAME": "bert-large-worker-12", **POD}, "none", "other", "bert-large"),
        ("", POD, "none", "bert-master-0", "bert"),
        ("", POD, "none", "llama-node-0-3.llama", "llama"),
        ("", {"JOB_COMPLETION_INDEX": "3", **POD}, "none", "train-7b-3", "train-7b"),
        ("", {"JOB_COMPLETION_INDEX": "3"}, UUID, "train-7b-3", "b0a1c2d3"),
        ("", {"RAY_JOB_ID": "02000000", "RAY_CLUSTER_NAME": "a100"}, UUID, "", "a100-02000000"),
        ("", {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "raysubmit_x1"}}), "RAY_JOB_ID": "1"}, "none", "", "raysubmit_x1"),
        ("", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "[1]", "RAY_JOB_ID": "1"}, "none", "", "ray-1"),
        ("", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{", "RAY_JOB_ID": "1"}, "none", "", "ray-1"),
        ("", {}, "../../etc/x y", "", "etc_x_y"),
        ("", {}, "x" * 300, "", "x" * 64),
        ("", {"SLURM_JOB_ID": "///"}, "rdzv", "", "rdzv"),
    ],
)
def test_the_first_name_that_there_is_is_taken(given, environ, rendezvous, host, expected):
    assert job_id(given, environ, rendezvous, host, forbidden) == JobId(expected)


@pytest.mark.parametrize(("environ", "host"), [({}, "node05"), (POD, "debug-shell-x8z2"), ({"JOB_COMPLETION_INDEX": "3", **POD}, "other")])
def test_without_any_a_name_is_drawn_and_said_to_be(environ, host):
    assert job_id("", environ, "none", host, drawn) == JobId("feedface", drawn=True)


def test_two_drawn_names_differ():
    first, second = job_id("", {}, "none"), job_id("", {}, "none")
    assert first.text != second.text
    assert len(first.text) == 8


class FirstLauncher:
    """What the other nodes are told of the first one's run directory."""

    def run_name(self, wait_s):
        return "20261130T031149Z-ab12cd34"


@pytest.mark.parametrize(
    ("given", "rendezvous", "expected"), [("", "none", "ab12cd34"), ("", "rdzv", "rdzv"), ("mine", "none", "mine")], ids=["drawn", "rendezvous", "option"]
)
def test_a_drawn_name_is_the_first_launchers_on_every_node(tmp_path, monkeypatch, given, rendezvous, expected):
    monkeypatch.chdir(tmp_path)
    for name in (
        "SLURM_JOB_ID",
        "TORCHELASTIC_RUN_ID",
        "KUBERNETES_SERVICE_HOST",
        "KUBEFLOW_TRAINING_JOB_ID",
        "JOBSET_NAME",
        "RAY_JOB_ID",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
    ):
        monkeypatch.delenv(name, raising=False)
    watched = Supervision(Options(job_id=given), Limits.from_options(None, {}), (), {}, lambda text: None)
    watched._place_run(Start(1, 4, 2, {0: 2, 1: 3}, rendezvous), FirstLauncher())
    assert watched._job_id == expected
