"""Who comes in first: what is polled before pages, pages one after the other. Real sockets on loopback; a page that holds its place until it is let go."""

import contextlib
import socket
import threading

import pytest

from rankwatch.serve import acceptor, server
from rankwatch.serve.http import is_polled
from rankwatch.serve.server import Response, Server

LONG_S = 60


class Site:
    """Routes that answer at once, and /held, which waits for `release`."""

    def __init__(self):
        self.release, self.held = threading.Event(), threading.Semaphore(0)
        self.order, self.clients = [], []
        self.server = Server("127.0.0.1:0", dict.fromkeys(("/", "/metrics", "/healthz", "/api/v1/state"), self.quick) | {"/held": self.hold})
        assert self.server.start()

    def quick(self, request):
        self.order.append(request.path)
        return Response(f"{request.path}\n")

    def hold(self, request):
        self.held.release()
        assert self.release.wait(LONG_S)
        return self.quick(request)

    def ask(self, path):
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
        self.clients.append(client)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return client

    def end(self):
        self.release.set()
        self.server.stop()
        for client in self.clients:
            client.close()


def status(client):
    """That of the whole answer; 0 where the server has closed without one."""
    with contextlib.suppress(ConnectionResetError):
        answer = b"".join(iter(lambda: client.recv(4096), b""))
        return int(answer.split()[1]) if answer else 0
    return 0


@pytest.fixture
def one_place(monkeypatch):
    """A site with one place, which /held has."""
    monkeypatch.setattr(acceptor, "PLACES", 1)
    monkeypatch.setattr(acceptor, "PLACE_S", LONG_S)
    site = Site()
    site.ask("/held")
    assert site.held.acquire(timeout=20)
    yield site
    site.end()


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/api/v1/state"])
def test_a_scrape_does_not_wait_for_pages(one_place, path):
    pages = [one_place.ask("/") for _ in range(20)]
    assert status(one_place.ask(path)) == 200
    assert one_place.order == [path]
    one_place.release.set()
    assert {status(page) for page in pages} == {200}


def test_pages_come_in_one_after_the_other_as_those_before_are_answered(one_place):
    pages = [one_place.ask("/") for _ in range(20)]
    assert status(one_place.ask("/metrics")) == 200  # all of them have come by now
    assert sum(thread.name == "rankwatch-http-connection" for thread in threading.enumerate()) <= 2
    one_place.release.set()
    assert {status(page) for page in pages} == {200}
    assert one_place.order == ["/metrics", "/held", *["/"] * 20]


def test_who_holds_a_place_for_long_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr(acceptor, "PLACES", 1)
    monkeypatch.setattr(acceptor, "PLACE_S", 0)
    site = Site()
    try:
        site.ask("/held")
        assert site.held.acquire(timeout=20)
        assert status(site.ask("/")) == 200
    finally:
        site.end()


def test_the_state_is_answered_while_every_page_slot_is_taken():
    site = Site()
    try:
        for _ in range(server.AT_ONCE):
            site.ask("/held")
        for _ in range(server.AT_ONCE):
            assert site.held.acquire(timeout=20)
        assert status(site.ask("/api/v1/state")) == 200
    finally:
        site.end()


def test_who_waits_and_is_pushed_out_is_closed_at_once(monkeypatch):
    """Without that, connections of a flood would pile up behind the one that has the place."""
    for name, value in (("PLACES", 1), ("PLACE_S", LONG_S), ("MAX_CONNECTIONS", 4)):
        monkeypatch.setattr(acceptor, name, value)
    site = Site()
    try:
        site.ask("/held")
        assert site.held.acquire(timeout=20)
        pages = [site.ask("/") for _ in range(8)]
        assert [status(page) for page in pages[:5]] == [0] * 5
        site.release.set()
        assert [status(page) for page in pages[5:]] == [200] * 3
    finally:
        site.end()


def test_the_end_closes_who_has_said_nothing_and_who_waits(one_place):
    silent = socket.create_connection(("127.0.0.1", one_place.server.port), timeout=20)
    one_place.clients.append(silent)
    waiting = one_place.ask("/")
    assert status(one_place.ask("/metrics")) == 200
    one_place.server.stop()
    assert status(silent) == 0
    assert status(waiting) == 0


@pytest.mark.parametrize("line", [b"GET /metrics HTTP/1.1", b"HEAD /healthz HTTP/1.0", b"GET /metrics?a=1 HTTP/1.1", b"GET /api/v1/state HTTP/1.1"])
def test_what_is_polled_is_told_by_its_first_bytes(line):
    assert is_polled(line + b"\r\nHost: x\r\n\r\n")
    assert not is_polled(line + b"\r\nHost: x\r\nX-A: ")  # who trickles may wait


@pytest.mark.parametrize("line", [b"GET /metrics", b"GET /metricsx HTTP/1.1", b"GET / HTTP/1.1", b"POST /metrics HTTP/1.1", b"\x16\x03\x01\x02\x00"])
def test_what_is_not_told_so_is_of_the_crowd(line):
    assert not is_polled(line + b"\r\n\r\n")
