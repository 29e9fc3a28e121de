"""The manifests: valid by Kubernetes' own schemas where these know them, else by the fields that the custom resource requires; and what they start runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jobs import JOBS
from prometheus_server import free_port

from rankwatch.config import OPTIONS
from rankwatch.monitor import termination_log

KUBERNETES = Path(__file__).parents[2] / "launch" / "kubernetes"
RELEASE = "1.34"
TRAINING = ("job.yaml", "pytorchjob.yaml", "trainjob.yaml")

pytestmark = pytest.mark.stack


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


def pod_templates(name: str) -> Iterator[dict[str, Any]]:
    """Every pod template of a manifest, in the places where each kind of job has it."""
    for document in documents(name):
        spec = document["spec"]
        if document["kind"] == "Job":
            yield spec["template"]
        elif document["kind"] == "PyTorchJob":
            yield from (replica["template"] for replica in spec["pytorchReplicaSpecs"].values())
        elif document["kind"] == "TrainingRuntime":
            yield from (job["template"]["spec"]["template"] for job in spec["template"]["spec"]["replicatedJobs"])


def env(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


@pytest.mark.parametrize("document", documents("job.yaml"), ids=lambda document: str(document["kind"]))
def test_what_kubernetes_knows_itself_is_valid_by_its_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, RELEASE, strict=True)


@pytest.mark.parametrize("name", TRAINING)
def test_every_pod_is_valid_and_has_what_rankwatch_needs(name: str) -> None:
    templates = list(pod_templates(name))
    assert templates
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, RELEASE, strict=True)
        (container,) = template["spec"]["containers"]
        assert container["terminationMessagePath"] == termination_log.DEFAULT
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True, "launcher and ranks are one user, who may trace himself"
        assert "livenessProbe" not in container, "a job that hangs is not to be killed before its evidence is on disk"
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in template["spec"]["volumes"]}
        assert {"/dev/shm", os.path.dirname(env(container)["RANKWATCH_TOKEN_FILE"]), "/runs"} <= mounted
        assert env(container)["RANKWATCH_RUN_DIR"].startswith("/runs/")


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_set_for_rankwatch_are_options_of_it(name: str) -> None:
    for template in pod_templates(name):
        given = [variable for variable in env(template["spec"]["containers"][0]) if variable.startswith("RANKWATCH_")]
        assert set(given) <= {option.variable for option in OPTIONS}


@pytest.mark.parametrize("name", TRAINING)
def test_the_monitor_finds_the_port_that_the_pods_listen_on(name: str) -> None:
    spec = of_kind("podmonitor.yaml", "PodMonitor")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    for template in pod_templates(name):
        assert template["metadata"]["labels"].items() >= spec["selector"]["matchLabels"].items()
        (container,) = template["spec"]["containers"]
        (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == endpoint["port"]]
        assert env(container)["RANKWATCH_LISTEN"] == f"0.0.0.0:{port}"


def test_the_pod_monitor_has_the_fields_that_the_operator_requires() -> None:
    monitor = of_kind("podmonitor.yaml", "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"namespaceSelector", "selector", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout", "honorLabels", "relabelings"}
    assert endpoint["honorLabels"] is True
    assert int(endpoint["scrapeTimeout"].rstrip("s")) <= int(endpoint["interval"].rstrip("s"))


def test_the_rules_are_those_that_rankwatch_exports() -> None:
    path = KUBERNETES / "prometheusrule.yaml"
    lines = path.read_text().splitlines(keepends=True)
    written = "".join(line for line in lines if not line.startswith("#"))
    exported = subprocess.run([sys.executable, "-m", "rankwatch", "rules", "export", "--format", "k8s"], capture_output=True, text=True, check=True).stdout
    head = "".join(line for line in lines if line.startswith("#"))
    assert written == exported, f"stale: keep its {head.count(chr(10))} comment lines, put below them: rankwatch rules export --format k8s"


def test_the_pods_of_the_plain_job_know_each_other_by_name() -> None:
    service, job = of_kind("job.yaml", "Service"), of_kind("job.yaml", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    given = env(spec["template"]["spec"]["containers"][0])
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert given["PET_MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert int(given["PET_MASTER_PORT"]) == service["spec"]["ports"][0]["port"]
    assert int(given["PET_NNODES"]) == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"


def test_the_custom_jobs_have_the_fields_that_their_operators_look_for() -> None:
    job = of_kind("pytorchjob.yaml", "PyTorchJob")
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    assert isinstance(job["spec"]["nprocPerNode"], str)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert "pytorchjob-port" in [port["name"] for port in container["ports"]]
    runtime, train = of_kind("trainjob.yaml", "TrainingRuntime"), of_kind("trainjob.yaml", "TrainJob")
    assert train["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert train["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert set(train["spec"]["trainer"]) == {"image", "command", "numNodes", "numProcPerNode", "resourcesPerNode"}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [container["name"] for container in replicated["template"]["spec"]["template"]["spec"]["containers"]] == ["node"]


@pytest.mark.ranks
@pytest.mark.slow_ranks
@pytest.mark.parametrize("name", TRAINING)
def test_what_the_container_starts_says_the_verdict_in_its_termination_message(tmp_path: Path, name: str) -> None:
    """The manifest's own command and environment; places of the pod are replaced by places here, and what operators set is set."""
    container = next(pod_templates(name))["spec"]["containers"][0]
    command = container.get("command") or of_kind(name, "TrainJob")["spec"]["trainer"]["command"]
    said, token = tmp_path / "termination-log", tmp_path / "token"
    token.write_text("secret")
    port = str(free_port())
    given = {
        **env(container), "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANKWATCH_TOKEN_FILE": str(token), "RANKWATCH_RUN_DIR": str(tmp_path / "run"),
        "RANKWATCH_LISTEN": "127.0.0.1:0", "RANKWATCH_TERMINATION_LOG": str(said), "KUBERNETES_SERVICE_HOST": "10.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    expanded = [given.get(word[2:-1], word) if word.startswith("$(") else word for word in command]
    words = [sys.executable, "-m", *expanded[:-1], str(JOBS / "many_nodes.py"), "killed"]
    done = subprocess.run(words, env={**os.environ, **given}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert said.read_text().startswith("FAILED: rank 1"), said.read_text()
    assert "cause killed" in said.read_text()
