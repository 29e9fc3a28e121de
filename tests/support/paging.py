"""Debian's Prometheus and Alertmanager with our rules and our routing, and a webhook that keeps what a person would be sent."""

from __future__ import annotations

import json
import re
import subprocess
import threading
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
        sent = self.sent

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
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


@contextmanager
def stack(tmp_path: Path, target: str, rules: str, webhook: str) -> Iterator[str]:
    """Prometheus scrapes and evaluates every second; Alertmanager has our file with shorter waits. Yields the address of Prometheus."""
    (tmp_path / "rules.yaml").write_text(rules)
    routing = (DASHBOARDS / "alertmanager.yml").read_text().replace("127.0.0.1:9099", webhook)
    (tmp_path / "alertmanager.yml").write_text(re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", routing))
    alertmanager, prometheus = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [rules.yaml]\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alertmanager}']}}]}}]}}\n"
        f"scrape_configs: [{{job_name: rankwatch, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    commands = (
        ("prometheus-alertmanager", f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}/am", "--cluster.listen-address=",
         f"--web.listen-address=127.0.0.1:{alertmanager}"),
        ("prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{prometheus}"),
    )  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (tmp_path / f"{command[0]}.log").open("wb") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
        address = f"http://127.0.0.1:{prometheus}"
        wait_for(lambda: query(address, "vector(1)"), 30, "Prometheus answers")
        yield address
    finally:
        for process in running:
            process.kill()
            process.wait(10)


def query(address: str, promql: str) -> list[dict[str, Any]]:
    """The vector of a query; [] while Prometheus does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={urllib.parse.quote(promql)}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]  # type: ignore[no-any-return]
    except OSError:
        return []
