"""Requests of people who mean harm, and rubbish: each gets a proper refusal or nothing, echoes nothing, leaves no error, and the next scrape works."""

from __future__ import annotations

import os
import socket
import urllib.parse
from types import SimpleNamespace

import build_status
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rankwatch.config import Options
from rankwatch.model import Status
from rankwatch.monitor.web import Web
from rankwatch.serve.server import Server

SECRET = b"the-contents-of-a-file-that-nobody-serves"
MARK = b"Zx9Marker"
HEADERS = (b"content-security-policy: default-src 'none'", b"x-content-type-options: nosniff", b"x-frame-options: deny", b"referrer-policy: no-referrer")
INCIDENT = "20261130T031149Z-1"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The real routes over a run directory with a secret beside, above and below what is served."""
    home = tmp_path_factory.mktemp("run")
    folder = home / "incidents" / INCIDENT
    (folder / "stacks").mkdir(parents=True)
    (folder / "stacks" / "rank_1.txt").write_text("served\n")
    for place in (home.parent, home, home / "incidents", folder, folder / "stacks"):
        (place / "secret.txt").write_bytes(SECRET)
    (folder / "stacks" / "rank_2.txt").symlink_to(home / "secret.txt")
    files = SimpleNamespace(known=lambda one: one == INCIDENT, path_of=lambda one, name="": str(home / "incidents" / one / name), home=str(home))
    status = Status(build_status.job(run_dir=str(home)), None, state="starting")
    web = Web(Options(listen="off"), files, lambda: status, lambda text: None)
    server = Server("127.0.0.1:0", web.routes())
    assert server.start()
    yield SimpleNamespace(port=server.port, server=server)
    server.stop()


def ask(site, data):
    """All that comes back, after the client has said all that it will say."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=20) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(65536), b""))
        except OSError:  # answered and closed while we were still talking
            return b""


def check(site, answer):
    for response in answer.split(b"HTTP/1.")[1:]:
        head = response.partition(b"\r\n\r\n")[0].lower()
        assert head[2:5] in (b"200", b"304", b"400", b"404", b"405", b"414", b"421", b"431", b"501", b"503", b"505"), head
        for header in HEADERS:
            assert header in head, head
    assert answer == b"" or answer.startswith(b"HTTP/1.")
    assert SECRET not in answer
    assert MARK not in answer
    assert site.server.errors == 0


def alive(site):
    return ask(site, b"GET /healthz HTTP/1.0\r\n\r\n")[:12] == b"HTTP/1.1 200"


def words(text: str, *more: bytes):
    """One of the words of `text`, or of `more`: those that a word list cannot hold."""
    return st.sampled_from([*(word.encode() for word in text.split()), *more])


METHODS = words("GET HEAD POST get CONNECT PRI", b"", b"GET\t", b"\x00", b"G\xcfT", MARK)
PARTS = words(
    "/ .. %2e%2e %252e \\ %5c %00 incidents stacks rank_1.txt secret.txt ? &a=b # % %zz %ff ; // http://evil/ [ @ : ' <script> api/v1/state metrics",
    *(INCIDENT.encode(), MARK, b"\x00", b"\xff", b" ", b"a" * 3000),
)
TARGETS = st.lists(PARTS, max_size=6).map(lambda parts: b"/" + b"".join(parts)) | PARTS | st.binary(max_size=40)
VERSIONS = words("HTTP/1.1 HTTP/1.0 HTTP/0.9 HTTP/2.0 HTTP/1.1.1 HTTP/-1.1 HTTP/1.99999999999 X", b"", b"HTTP/\xb2.1")
NAMES = words(
    "Host host Authorization Content-Length Transfer-Encoding Accept Accept-Encoding If-None-Match Connection Expect",
    *(MARK, b"", b" ", b"\x00", b"\xff", b"A b"),
)
VALUES = words(
    "localhost evil.example [::1 ] -1 5 99999999999999999999 chunked Bearer gzip;q=x gzip;q=1e999 * keep-alive 100-continue %s%n{}",
    *(MARK, b"Basic \xff", b"Basic ====", b"a\x00b", b"\xc3\xa9", b"x" * 5000, b"application/openmetrics-text;version=\xb2"),
)
ENDS = st.sampled_from([b"\r\n", b"\n", b"\r", b"\r\n ", b"\r\n\t"])
LINES = st.lists(st.builds(lambda name, value, end: name + b": " + value + end, NAMES, VALUES, ENDS), max_size=6).map(b"".join)
FIRST = st.builds(lambda method, target, version, end: method + b" " + target + b" " + version + end, METHODS, TARGETS, VERSIONS, ENDS)
REQUESTS = st.builds(lambda first, lines, rest: first + lines + b"\r\n" + rest, FIRST, LINES, st.binary(max_size=30))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=REQUESTS | st.binary(max_size=200))
@example(b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n")
@example(b"GET /healthz HTTP/1.1\r\n Host: localhost\r\n\r\n")
@example(b"\r\n\r\n\r\n")
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
def test_any_bytes_get_a_proper_answer_or_none(site, data):
    check(site, ask(site, data))


def test_the_scrape_after_all_that_works(site):
    assert alive(site)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"414"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 101 + b"\r\n", b"431"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: %s\r\n" % (n, b"y" * 1000) for n in range(40)) + b"\r\n", b"431"),
        (b"GET /healthz?" + b"&".join(b"a=1" for _ in range(60)) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
    ],
)
def test_huge_heads_are_refused_before_they_are_held(site, head, status):
    with socket.create_connection(("127.0.0.1", site.port), timeout=20) as client:
        try:
            client.sendall(head)
        except OSError:
            pass
        assert client.recv(12) == b"HTTP/1.1 " + status
    assert alive(site)


def test_a_body_of_any_size_is_not_read(site):
    answer = ask(site, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Connection: close" in answer


@pytest.mark.parametrize("name", ["Host: localhost", "Authorization: Bearer x", "Content-Length: 0", "Transfer-Encoding: identity"])
def test_a_header_that_comes_twice_is_refused(site, name):
    host = "" if name.startswith("Host") else "Host: localhost\r\n"
    answer = ask(site, f"GET /healthz HTTP/1.1\r\n{host}{name}\r\n{name.lower()}\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_only_get_and_head_are_answered_on_every_path(site, method):
    for path in ("/", "/metrics", "/healthz", "/api/v1/state", f"/incidents/{INCIDENT}/stacks/rank_1.txt", "/nothing"):
        answer = ask(site, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 405 ")
        check(site, answer)


def spellings(path):
    """Ways to write `path` that some server somewhere has taken for it."""
    yield path
    yield path.replace("..", "%2e%2e")
    yield path.replace("..", "%2E.")
    yield path.replace("/", "%2f").replace("%2f", "/", 1)
    yield path.replace("..", "%252e%252e")
    yield path.replace("/", "\\").replace("\\", "/", 1)
    yield path.replace("/", "%5c").replace("%5c", "/", 1)
    yield path.replace("..", "..;")
    yield path.replace("..", "%c0%ae%c0%ae")
    yield path.replace("..", "....//")
    yield path.replace("..", "\uff0e\uff0e")
    yield path + "%00.txt"
    yield path + "?/stacks/rank_1.txt"
    yield path + "#/stacks/rank_1.txt"
    yield "/" + path


@pytest.mark.parametrize("base", ["", f"/incidents/{INCIDENT}", f"/incidents/{INCIDENT}/stacks", "/incidents", "/api/v1", "/metrics"])
def test_no_spelling_of_a_path_leaves_what_is_served(site, base):
    for file in ("secret.txt", "etc/passwd"):
        for up in range(7):
            for target in spellings(base + "/.." * up + "/" + file):
                raw = target.encode("utf-8")
                answer = ask(site, b"GET " + raw + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                check(site, answer)
                assert b"root:" not in answer
                assert answer[:12] in (b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 200" if base == "/metrics" and up else b""), raw


def test_what_is_meant_to_be_served_is(site):
    answer = ask(site, f"GET /incidents/{INCIDENT}/stacks/rank_1.txt HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.endswith(b"\r\n\r\nserved\n")


def test_a_link_that_somebody_laid_into_the_run_is_not_followed(site):
    check(site, ask(site, f"GET /incidents/{INCIDENT}/stacks/rank_2.txt HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))


@pytest.mark.parametrize("target", ["/no/" + MARK.decode(), "/?q=" + MARK.decode(), "/" + urllib.parse.quote("<script>" + MARK.decode() + "</script>")])
def test_a_refusal_repeats_nothing_of_the_request(site, target):
    answer = ask(site, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nX-{MARK.decode()}: {MARK.decode()}\r\n\r\n".encode())
    check(site, answer)


def test_nothing_is_written_anywhere_about_a_request(site, capfd):
    ask(site, b"GET /nothing?token=hunter2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    ask(site, os.urandom(100))
    assert capfd.readouterr() == ("", "")
