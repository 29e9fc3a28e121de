"""The server: what it refuses, and that no client can hold up a scrape. Real sockets on loopback, no process."""

import base64
import contextlib
import gzip
import http.client
import json
import os
import socket
import threading
import time

import pytest

from rankwatch.serve import acceptor, address, handler, server
from rankwatch.serve.server import Response, Server

TOKEN = "correct-horse"
BIG = b"x" * 8_000_000  # more than the socket buffers of both sides take


class Site:
    """A running server with routes that tests need; `get` is one request on a connection of its own."""

    def __init__(self, token=None, listen="127.0.0.1:0", routes=None, **options):
        self.release = threading.Event()
        self.seen = []
        self.connections = []
        self.server = Server(listen, {**self.routes(), **(routes or {})}, token, **options)
        self.url = self.server.start()
        self.host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def routes(self):
        def slow(request):
            self.release.wait(20)
            return Response("slow\n")

        def seen(request):
            self.seen.append(request)
            return Response("<p>page</p>", "text/html; charset=utf-8")

        return {
            "/": seen,
            "/metrics": lambda request: Response(b"up 1\n" * 1000),
            "/healthz": lambda request: Response("ok\n"),
            "/slow": slow,
            "/broken": lambda request: 1 // 0,
            "/incidents/": seen,
            "/big": lambda request: Response(BIG),
        }

    def get(self, target="/", method="GET", headers=None, timeout=10):
        connection = http.client.HTTPConnection(self.host.strip("[]"), self.port, timeout=timeout)
        try:
            connection.request(method, target, headers=headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def raw(self, data=b"", timeout=10):
        connection = socket.create_connection((self.host.strip("[]"), self.port), timeout=timeout)
        self.connections.append(connection)
        connection.sendall(data)
        return connection

    def answer(self, data):
        with self.raw(data) as connection:
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def site(request):
    sites = []

    def start(**options):
        sites.append(Site(**options))
        return sites[-1]

    yield start
    for running in sites:
        running.release.set()
        running.server.stop()
        for connection in running.connections:
            connection.close()


def wait_until(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        threading.Event().wait(0.02)


class TestRequests:
    def test_a_page_comes_with_its_length_and_the_security_headers(self, site):
        status, headers, body = site().get("/?a=1")
        assert (status, body) == (200, b"<p>page</p>")
        assert headers["Content-Length"] == "11"
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Server"].strip() == "rankwatch"

    def test_the_policy_allows_the_nonce_that_the_route_was_given(self, site):
        running = site()
        _, headers, _ = running.get("/?a=1&b=")
        request = running.seen[0]
        assert f"script-src 'nonce-{request.nonce}'" in headers["Content-Security-Policy"]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert (request.path, request.query, request.method) == ("/", {"a": "1", "b": ""}, "GET")
        assert len(request.nonce) >= 16
        _, again, _ = running.get("/")
        assert again["Content-Security-Policy"] != headers["Content-Security-Policy"]

    def test_head_gives_the_headers_only(self, site):
        status, headers, body = site().get("/metrics", "HEAD")
        assert (status, headers["Content-Length"], body) == (200, "5000", b"")

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
    def test_other_methods_are_refused(self, site, method):
        status, headers, _ = site().get("/", method)
        assert (status, headers["Allow"], headers["Connection"]) == (405, "GET, HEAD", "close")

    def test_a_connection_serves_several_requests(self, site):
        running = site()
        connection = http.client.HTTPConnection(running.host, running.port, timeout=10)
        for _ in range(3):
            connection.request("GET", "/metrics")
            assert connection.getresponse().read() == b"up 1\n" * 1000
        connection.close()

    def test_a_body_is_never_taken_for_the_next_request(self, site):
        answer = site().answer(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\nGET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 200")

    def test_gzip_only_if_asked_for(self, site):
        running = site()
        assert "Content-Encoding" not in running.get("/metrics")[1]
        _, headers, body = running.get("/metrics", headers={"Accept-Encoding": "deflate, gzip;q=0.8"})
        assert (headers["Content-Encoding"], gzip.decompress(body)) == ("gzip", b"up 1\n" * 1000)
        assert "Content-Encoding" not in running.get("/metrics", headers={"Accept-Encoding": "gzip;q=0"})[1]
        assert "Content-Encoding" not in running.get("/healthz", headers={"Accept-Encoding": "gzip"})[1]

    def test_an_unchanged_page_is_not_sent_again(self, site):
        running = site()
        tag = running.get("/metrics")[1]["ETag"]
        status, _, body = running.get("/metrics", headers={"If-None-Match": tag})
        assert (status, body) == (304, b"")

    def test_a_prefix_route_takes_what_lies_below_it(self, site):
        running = site()
        assert running.get("/incidents/20261130T031149Z-1/index.html")[0] == 200
        assert running.seen[0].path == "/incidents/20261130T031149Z-1/index.html"
        assert running.get("/nothing")[0] == 404
        assert running.get("/incidents")[0] == 404

    @pytest.mark.parametrize("target", ["/incidents/../secret", "/incidents/%2e%2e/x", "//host/x", "http://evil/", "/incidents/a%00b", "/incidents/..%5cx"])
    def test_targets_that_leave_their_place_are_refused(self, site, target):
        answer = site().answer(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404")

    @pytest.mark.parametrize(
        "request_lines",
        [
            b"GET /metrics?" + b"&".join(b"a=1" for _ in range(60)) + b" HTTP/1.1\r\nHost: localhost",
            b"GET /metrics HTTP/1.1\r\nHost: [",
            b"GET /metrics HTTP/1.1\r\nHost: [::1",
        ],
    )
    def test_what_cannot_be_parsed_is_answered_400(self, site, request_lines):
        assert site().answer(request_lines + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")

    def test_a_password_that_is_no_ascii_is_answered_400(self, site):
        answer = site(token=TOKEN).answer(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic \xe9\xe9\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")

    def test_a_page_that_fails_says_so_and_the_next_one_works(self, site):
        running = site()
        assert running.get("/broken")[0] == 500
        assert running.server.errors == 1
        assert running.get("/healthz")[0] == 200

    def test_a_long_request_line_is_refused(self, site):
        assert site().answer(b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n").startswith(b"HTTP/1.1 414")

    @pytest.mark.parametrize(
        "data", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"<script>alert(1)</script>\r\n\r\n"]
    )
    def test_what_is_no_http_is_answered_without_an_echo(self, site, data):
        answer = site().answer(data)
        assert b"script>" not in answer
        assert answer == b"" or b" 400 " in answer[:20] or b" 505 " in answer[:20]

    def test_nothing_is_written_to_stderr(self, site, capfd):
        running = site()
        running.get("/broken")
        running.get("/nothing")
        running.answer(b"\x00\x01\r\n\r\n")
        assert capfd.readouterr() == ("", "")


class TestWhoMayRead:
    @pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:27435", "[::1]:27435", "job.localhost", "127.1.2.3"])
    def test_loopback_names_are_served(self, site, host):
        assert site().get("/", headers={"Host": host})[0] == 200

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "@", "a b"])
    def test_a_site_that_points_its_name_at_us_is_refused(self, site, host):
        status, _, body = site().get("/", headers={"Host": host})
        assert (status, b"--external-url" in body) == (421, True)
        assert site().get("/metrics", headers={"Host": host})[0] == 421

    def test_a_name_that_was_given_is_served(self, site):
        assert site(hosts=("jobs.example",)).get("/", headers={"Host": "jobs.example:443"})[0] == 200

    def test_http_1_1_without_a_host_is_refused(self, site):
        assert site().answer(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert site().answer(b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")

    def test_the_token_opens_pages_as_bearer_and_as_password(self, site):
        running = site(token=TOKEN)
        basic = base64.b64encode(f"any:{TOKEN}".encode()).decode()
        assert running.get("/", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        assert running.get("/", headers={"Authorization": f"Basic {basic}"})[0] == 200

    @pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer ", "Basic !!!", "Basic eDp5", f"Digest {TOKEN}", TOKEN, "Bearer \xff"])
    def test_without_the_token_only_metrics_and_health_are_served(self, site, authorization):
        running = site(token=TOKEN)
        headers = {"Authorization": authorization} if authorization is not None else {}
        status, answer, body = running.get("/", headers=headers)
        assert (status, answer["WWW-Authenticate"]) == (401, 'Basic realm="rankwatch"')
        assert TOKEN.encode() not in body
        assert running.get("/incidents/x", headers=headers)[0] == 401
        assert running.get("/nothing", headers=headers)[0] == 401
        assert running.get("/metrics", headers=headers)[0] == 200
        assert running.get("/healthz", headers=headers)[0] == 200

    @pytest.mark.parametrize("listen", ["0.0.0.0:0", ":0", "[::]:0", "10.1.2.3:0", "somewhere.example:0"])
    def test_without_a_token_only_loopback_is_listened_on_and_said(self, site, listen):
        running = site(listen=listen)
        assert running.host == "127.0.0.1"
        assert "need a token; listening on 127.0.0.1 only; give a token with --token-file FILE" in running.server.notice
        assert running.get("/healthz")[0] == 200

    def test_beyond_loopback_any_host_name_with_the_token_is_served(self, site):
        running = site(token=TOKEN, listen="0.0.0.0:0")
        running.host = "127.0.0.1"
        assert running.get("/", headers={"Host": "node05.example", "Authorization": f"Bearer {TOKEN}"})[0] == 200
        assert running.get("/metrics", headers={"Host": "node05.example"})[0] == 200
        assert running.url == f"http://{socket.gethostname()}:{running.port}"


class TestListening:
    @pytest.mark.parametrize(
        ("listen", "parsed"),
        [
            ("127.0.0.1:27435", ("127.0.0.1", 27435)),
            ("27435", ("127.0.0.1", 27435)),
            (":80", ("0.0.0.0", 80)),
            ("[::1]:0", ("::1", 0)),
            (" localhost:1 ", ("localhost", 1)),
        ],
    )
    def test_addresses(self, listen, parsed):
        assert address.parse(listen) == parsed

    @pytest.mark.parametrize("listen", ["::1:80", "host:", "host:x", "host:70000", "host:-1", ""])
    def test_a_wrong_address_is_named(self, listen):
        with pytest.raises(ValueError, match="--listen"):
            address.parse(listen)

    def test_off_serves_nothing(self):
        running = Server("off", {})
        assert (running.start(), running.notice) == ("", "")
        running.stop()

    def test_ipv6(self, site):
        if not socket.has_ipv6:
            pytest.skip("no IPv6 here")
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 loopback: {error}")
        running = site(listen="[::1]:0")
        assert running.url.startswith("http://[::1]:")
        assert running.get("/healthz")[0] == 200

    def test_a_taken_port_gives_way_to_the_next_and_its_holder_is_named(self, site):
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            running = site(listen=f"127.0.0.1:{port}")
            assert running.port != port
            assert running.server.notice.startswith(f"port {port} is taken by pid {os.getpid()} (")
            assert running.server.notice.endswith(f"; listening on {running.port} instead")
            assert running.get("/healthz")[0] == 200

    def test_an_address_that_is_not_ours_is_a_notice_and_no_exception(self):
        running = Server("192.0.2.1:0", {}, TOKEN)
        assert running.start() == ""
        assert "cannot listen on 192.0.2.1:0" in running.notice
        running.stop()

    def test_stop_frees_the_port_at_once_and_cuts_who_is_connected(self, site):
        running = site()
        connection = running.raw(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        running.server.stop()
        assert time.monotonic() - began < 0.5 < acceptor.POLL_S
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", running.port))


class TestBadClients:
    def test_200_half_open_connections_do_not_hold_up_a_scrape(self, site):
        running = site()
        for _ in range(200):
            running.raw(b"GET /met")
        assert running.get("/metrics", timeout=4)[0] == 200  # before the first of them has timed out

    def test_more_connections_than_allowed_push_out_the_oldest_silent_one(self, site, monkeypatch):
        monkeypatch.setattr(acceptor, "MAX_CONNECTIONS", 8)
        running = site()
        for _ in range(20):
            running.raw(b"G")
        assert running.get("/metrics", timeout=3)[0] == 200
        assert running.connections[0].recv(10) == b""

    def test_a_request_whose_bytes_trickle_is_cut_though_each_comes_in_time(self, site, monkeypatch):
        monkeypatch.setattr(handler, "REQUEST_S", 0.3)
        running = site()
        connection = running.raw(b"GET /")
        began = time.monotonic()
        while time.monotonic() - began < 5:
            try:
                connection.sendall(b"a")
            except OSError:
                break
            threading.Event().wait(0.05)
        assert time.monotonic() - began < 3
        connection.close()

    def test_idle_connections_lose_their_threads(self, site, monkeypatch):
        monkeypatch.setattr(handler, "REQUEST_S", 0.2)
        running = site()
        before = threading.active_count()
        for _ in range(20):
            running.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: threading.active_count() >= before + 15)
        wait_until(lambda: threading.active_count() <= before + 1)

    def test_a_connection_that_has_said_nothing_has_no_thread(self, site):
        running = site()
        for _ in range(20):
            running.raw()
        assert running.get("/metrics")[0] == 200  # it came after them
        assert sum(thread.name == "rankwatch-http-connection" for thread in threading.enumerate()) <= 1

    def test_readers_that_do_not_read_neither_block_scrapes_nor_other_pages(self, site):
        running = site()
        for _ in range(server.AT_ONCE + 8):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((running.host, running.port))
            running.connections.append(connection)
            connection.sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert running.get("/metrics")[0] == 200
        assert running.get("/")[0] == 200

    def test_too_many_pages_at_once_are_told_to_come_back_and_scrapes_still_work(self, site):
        running = site()
        for _ in range(server.AT_ONCE):
            running.raw(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: running.get("/", timeout=5)[0] == 503)
        assert running.get("/")[1]["Retry-After"] == "1"
        assert running.get("/metrics")[0] == 200
        running.release.set()
        wait_until(lambda: running.get("/", timeout=5)[0] == 200)


def test_a_page_of_lone_surrogates_still_goes_out(site):
    running = site(routes={"/odd": lambda request: Response(json.dumps("x") + "\udcff")})
    assert running.get("/odd")[2] == b'"x"\\udcff'


def test_the_holder_of_a_port_nobody_has_is_not_made_up():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert address.holder(port) == "a process that /proc does not show"
