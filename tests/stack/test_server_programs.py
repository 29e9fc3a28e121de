"""The status server in the programs that people use: curl and Prometheus come with client certificates, Chromium meets hostile texts and a foreign name."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import urllib.request
from pathlib import Path

import build_status
import pytest
from jobs import wait_for
from prometheus_server import free_port

from rankwatch.report import incident, page, status
from rankwatch.serve import tls
from rankwatch.serve.server import Response, Server

pytestmark = pytest.mark.stack

TOKEN = "correct-horse"
EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>\"onmouseover=alert(1) x=\""


def certificate(folder: Path, name: str, ca: str, *extensions: str) -> None:
    """name.pem and name.key, signed by `ca`, or by itself where it is the CA."""
    signer = ["-CA", f"{folder}/{ca}.pem", "-CAkey", f"{folder}/{ca}.key"] if ca != name else []
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{folder}/{name}.key"]
    extra = [word for extension in extensions for word in ("-addext", extension)]
    command = ["openssl", "req", "-x509", *key, *signer, "-days", "2", "-subj", f"/CN={name}", *extra, "-out", f"{folder}/{name}.pem"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    certificate(folder, "ca", "ca", "basicConstraints=critical,CA:TRUE")
    certificate(folder, "server", "ca", "basicConstraints=CA:FALSE", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    certificate(folder, "client", "ca", "basicConstraints=CA:FALSE")
    return folder


@pytest.fixture
def secured(certificates: Path):
    material = tls.load(str(certificates / "server.pem"), str(certificates / "server.key"), str(certificates / "ca.pem"))
    routes = {"/": lambda request: Response("page\n"), "/metrics": lambda request: Response("rankwatch_up 1\n", "text/plain; version=0.0.4")}
    server = Server("127.0.0.1:0", routes, TOKEN, tls=material)
    assert server.start()
    yield server
    server.stop()


def curl(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(["curl", "--silent", "--show-error", "--max-time", "20", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_curl_reads_pages_with_certificate_and_token_and_nothing_without(secured: Server, certificates: Path) -> None:
    url, trust = f"https://localhost:{secured.port}/", ["--cacert", f"{certificates}/ca.pem"]
    mine = [*trust, "--cert", f"{certificates}/client.pem", "--key", f"{certificates}/client.key"]
    assert curl(*mine, "-u", f"me:{TOKEN}", url) == (0, "page\n")
    assert curl(*mine, "-w", "%{http_code}", "-o", "/dev/null", url) == (0, "401")
    assert curl(*trust, "-u", f"me:{TOKEN}", url)[0] != 0
    assert curl(*mine, "--tls-max", "1.1", url)[0] != 0
    code, said = curl(url.replace("https", "http"))
    assert (code, said) == (0, "this port speaks TLS: open it by https\n")


def test_prometheus_scrapes_with_its_certificate_while_200_clients_hang_in_the_handshake(secured: Server, certificates: Path, tmp_path: Path) -> None:
    files = {"ca_file": f"{certificates}/ca.pem", "cert_file": f"{certificates}/client.pem", "key_file": f"{certificates}/client.key"}
    scrape = {"job_name": "rankwatch", "scrape_interval": "1s", "scheme": "https", "tls_config": {**files, "server_name": "localhost"}}
    config = {"scrape_configs": [{**scrape, "static_configs": [{"targets": [f"127.0.0.1:{secured.port}"]}]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    api = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address={api}"]
    silent = [socket.create_connection(("127.0.0.1", secured.port), timeout=20) for _ in range(200)]
    prometheus = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def up() -> bool:
            try:
                with urllib.request.urlopen(f"http://{api}/api/v1/query?query=rankwatch_up", timeout=5) as answer:
                    return bool(json.load(answer)["data"]["result"])
            except OSError:
                return False

        wait_for(up, 60, "Prometheus has scraped rankwatch_up")
    finally:
        prometheus.kill()
        prometheus.wait(20)
        for connection in silent:
            connection.close()


def seen_by_chromium(url: str, profile: Path, *arguments: str) -> str:
    """The page's document after its scripts have run for two seconds."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=2000"]
    return subprocess.run([*command, *arguments, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True).stdout


def hostile() -> object:
    """A picture whose rank has markup in its operation, stack, group, frame, guard and exception."""
    evil = build_status.compiling_activity(frame=f"forward{EVIL}@model.py:31", recompile_reason=EVIL, detail=EVIL)
    frames = tuple(dataclasses.replace(frame, name=frame.name + EVIL, file=f"/home/{EVIL}/train.py") for frame in build_status.LOAD)
    stack = dataclasses.replace(build_status.stack(21109, frames), text=EVIL)
    base = build_status.compiling_incident()
    verdict = dataclasses.replace(base.verdict, summary=base.verdict.summary + EVIL, at=EVIL, advice=(EVIL,), evidence=(EVIL,))
    one = dataclasses.replace(base, verdict=verdict, compiling={3: evil}, stacks={3: stack}, hosts={3: EVIL})
    picture = build_status.compiling_status(open_incidents=(one,), job=build_status.job(job_id=EVIL, node=EVIL))
    ranks = tuple(dataclasses.replace(rank, node=EVIL, compiling=(evil,) if rank.rank == 3 else ()) for rank in picture.snapshot.ranks().values())
    return dataclasses.replace(picture, snapshot=build_status.snapshot(ranks))


def test_chromium_runs_nothing_that_a_rank_has_written_even_where_escaping_failed(tmp_path: Path) -> None:
    """Third page: the same markup unescaped, to see that the policy alone stops it too; fourth: without our headers it would run."""
    picture = hostile()
    first = picture.open_incidents[0]  # type: ignore[attr-defined]
    raw = f"<!doctype html><title>fine</title><p>{EVIL}</p>"
    routes = {
        "/": lambda request: Response(status.render(picture, request.nonce), "text/html; charset=utf-8"),
        "/incident": lambda request: Response(page.render(incident.to_json(first, picture), request.nonce), "text/html; charset=utf-8"),
        "/raw": lambda request: Response(raw, "text/html; charset=utf-8"),
    }
    server = Server("127.0.0.1:0", routes)
    assert server.start()
    try:
        for path in ("/", "/incident"):
            document = seen_by_chromium(f"http://127.0.0.1:{server.port}{path}", tmp_path / "profile")
            assert "onerror=" in document, "the hostile text is not on the page: this test shows nothing"
            assert not re.search(r"<img|<title>owned|onmouseover=\"alert", document)
        assert "<title>fine</title>" in seen_by_chromium(f"http://127.0.0.1:{server.port}/raw", tmp_path / "profile")
    finally:
        server.stop()
    (tmp_path / "raw.html").write_text(raw)
    assert "<title>owned</title>" in seen_by_chromium(f"file://{tmp_path}/raw.html", tmp_path / "profile")


def test_a_site_that_points_its_name_at_us_shows_chromium_no_page(tmp_path: Path) -> None:
    server = Server("127.0.0.1:0", {"/": lambda request: Response("<p>stacks</p>", "text/html")})
    assert server.start()
    try:
        rebound = ["--host-resolver-rules=MAP evil.example 127.0.0.1"]
        document = seen_by_chromium(f"http://evil.example:{server.port}/", tmp_path / "profile", *rebound)
        assert "stacks" not in document
        assert "this server answers as localhost only" in document
        assert "stacks" in seen_by_chromium(f"http://localhost:{server.port}/", tmp_path / "profile")
    finally:
        server.stop()
