"""A real Prometheus on a free port: scrapes targets each second, or serves blocks that were written before. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from jobs import wait_for


def free_port() -> int:
    """A TCP port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Refused(Exception):
    """Prometheus' own words about a query that it does not take."""


class Prometheus:
    """A running server. Use as a context manager. targets: host:port -> its extra labels; store: a folder, new or with blocks."""

    def __init__(self, folder: Path, targets: dict[str, dict[str, str]] | None = None, store: Path | None = None, arguments: tuple[str, ...] = ()) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._discovered = folder / "targets.json"
        self.follow(targets or {})
        config = folder / "prometheus.yml"
        scrape = [{"job_name": "rankwatch", "scrape_interval": "1s", "file_sd_configs": [{"files": [str(self._discovered)], "refresh_interval": "1s"}]}]
        config.write_text(json.dumps({"scrape_configs": scrape}))
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={store or folder / 'tsdb'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--web.cors.origin=.*",
            *arguments,
        ]
        self._log = (folder / "prometheus.log").open("wb")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Prometheus:
        wait_for(self._ready, 60, "Prometheus is ready")
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self._log.close()

    def follow(self, targets: dict[str, dict[str, str]]) -> None:
        """From the next second on these targets are scraped, and no others."""
        groups = [{"targets": [target], "labels": labels} for target, labels in targets.items()]
        new = self._discovered.with_suffix(".new")
        new.write_text(json.dumps(groups))
        new.rename(self._discovered)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as response:
            return bool(response.status == 200)
        return False

    def now(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Series of an instant query."""
        return self._ask("query", query=expression, time=at or time.time())

    def over(self, expression: str, begin: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Series of a range query."""
        return self._ask("query_range", query=expression, start=begin, end=end, step=step_s)

    def _ask(self, what: str, **arguments: object) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode({key: str(value) for key, value in arguments.items()}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}", data=body, timeout=120) as response:
                return list(json.load(response)["data"]["result"])
        except urllib.error.HTTPError as error:
            raise Refused(f"{json.load(error)['error']}: {arguments['query']}") from None
