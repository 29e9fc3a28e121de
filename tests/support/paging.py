"""Debian's Prometheus and Alertmanager with our rules and our routing, and a webhook that keeps what a person would be sent."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jobs import wait_for
from prometheus_server import free_port

DASHBOARDS = Path(__file__).parents[2] / "dashboards"


class Webhook:
    """Keeps every notification as (receiver's path, Alertmanager's document), oldest first."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.at: list[float] = []  # when, in unix seconds
        sent, at = self.sent, self.at

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                at.append(time.time())
                sent.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Webhook:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def alerts(self, path: str, status: str) -> list[dict[str, Any]]:
        """Alerts of this status that were sent to this receiver."""
        return [alert for to, doc in self.sent if to == path for alert in doc["alerts"] if alert["status"] == status]

    def pages(self, path: str, job_id: str) -> list[dict[str, Any]]:
        """Alertmanager's notifications about this job that were sent to this receiver."""
        return [doc for to, doc in self.sent if to == path and doc["groupLabels"].get("job_id") == job_id]


@contextmanager
def alertmanager(folder: Path, webhook: str, wait: str = "1s") -> Iterator[str]:
    """Alertmanager with our file, its waits replaced. Yields its address, once it answers."""
    routing = (DASHBOARDS / "alertmanager.yml").read_text().replace("127.0.0.1:9099", webhook)
    (folder / "alertmanager.yml").write_text(re.sub(r"(group_wait|group_interval): \w+", rf"\1: {wait}", routing))
    address = f"127.0.0.1:{free_port()}"
    command = ("prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/am", "--cluster.listen-address=",
               f"--web.listen-address={address}")  # fmt: skip
    with _running(folder, command):
        wait_for(lambda: get(f"http://{address}/-/ready") is not None, 30, "Alertmanager answers")
        yield f"http://{address}"


@contextmanager
def prometheus(folder: Path, target: str, rules: str, manager: str, every_s: int = 1) -> Iterator[str]:
    """Prometheus that scrapes `target` and evaluates `rules` each every_s, and tells `manager`. Yields its address, once it answers."""
    (folder / "rules.yaml").write_text(rules)
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {every_s}s, evaluation_interval: {every_s}s}}\n"
        "rule_files: [rules.yaml]\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{manager.removeprefix('http://')}']}}]}}]}}\n"
        f"scrape_configs: [{{job_name: rankwatch, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    address = f"127.0.0.1:{free_port()}"
    command = ("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address={address}")
    with _running(folder, command):
        wait_for(lambda: query(f"http://{address}", "vector(1)"), 30, "Prometheus answers")
        yield f"http://{address}"


@contextmanager
def stack(folder: Path, target: str, rules: str, webhook: str) -> Iterator[str]:
    """Both, with waits of a second. Yields the address of Prometheus."""
    with alertmanager(folder, webhook) as manager, prometheus(folder, target, rules, manager) as address:
        yield address


@contextmanager
def _running(folder: Path, command: tuple[str, ...]) -> Iterator[None]:
    with (folder / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def get(address: str) -> bytes | None:
    """What is there; None while nothing answers."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.read()  # type: ignore[no-any-return]
    except OSError:
        return None


def alerts_in(manager: str) -> list[dict[str, Any]]:
    """The alerts that an Alertmanager holds, those that have ended left out."""
    return json.loads(get(f"{manager}/api/v2/alerts") or b"[]")  # type: ignore[no-any-return]


def flushed(manager: str, webhook: Webhook, name: str) -> None:
    """Returns once Alertmanager, which waits a second, has sent all that was due: alerts of two other groups, one after the other, have come through."""
    for number in (1, 2):
        labels = {"alertname": "RankwatchStuck", "severity": "critical", "job_id": f"{name}-{number}"}
        send(manager, labels)
        wait_for(lambda labels=labels: any(alert["labels"] == labels for alert in webhook.alerts("/pager", "firing")), 30, "a later alert comes through")  # type: ignore[misc]


def send(manager: str, labels: dict[str, str]) -> None:
    """Post one alert, as Prometheus would."""
    body = json.dumps([{"labels": labels, "annotations": {"summary": "one more"}}]).encode()
    request = urllib.request.Request(f"{manager}/api/v2/alerts", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def query(address: str, promql: str) -> list[dict[str, Any]]:
    """The vector of a query; [] while Prometheus does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={urllib.parse.quote(promql)}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]  # type: ignore[no-any-return]
    except OSError:
        return []
