"""One POST: its deadline holds whatever the other side does, it follows nobody, and what it says of a failure holds no secret."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rankwatch.notify import post
from rankwatch.notify.post import NotTaken, target


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@contextmanager
def server(status=200, headers=(), body=b""):
    """(address, requests): answers every POST alike and keeps (path, headers, body) of each."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", seen
        finally:
            http.shutdown()
            thread.join()


@contextmanager
def raw(answer):
    """The address of one that takes a connection and then does `answer(socket, over)` in a thread."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                answer(connection, over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


def refused(url, **options):
    with pytest.raises(NotTaken) as caught:
        post.post(target(url, **options), b"{}", 5.0)
    return caught.value


def test_it_is_json_to_the_path_of_the_address():
    with server() as (url, seen):
        post.post(target(f"{url}/hook?room=1"), b'{"a": 1}')
    ((path, headers, body),) = seen
    assert (path, headers["Content-Type"], body) == ("/hook?room=1", "application/json", b'{"a": 1}')
    assert "Authorization" not in headers


@pytest.mark.parametrize("given", ["", "/", "/api/v2/alerts"])
def test_the_path_of_the_api_is_added_once(given):
    assert target(f"http://am:9093{given}", "/api/v2/alerts").path == "/api/v2/alerts"


def test_a_prefix_stays_before_the_path_of_the_api():
    assert target("http://am/alertmanager/", "/api/v2/alerts").path == "/alertmanager/api/v2/alerts"


def test_an_address_is_shown_without_path_and_password():
    assert target("https://alice:secret@hooks.example/T1/B2").shown == "https://hooks.example"
    assert target("http://[fd00::5]:9093/x").shown == "http://[fd00::5]:9093"


def test_the_user_of_an_address_is_sent_as_basic_authorization():
    with server() as (url, seen):
        post.post(target(url.replace("//", "//alice:p%40ss@")), b"{}")
    assert seen[0][1]["Authorization"] == "Basic YWxpY2U6cEBzcw=="


@pytest.mark.parametrize(("text", "header"), [("alice:pw\n", "Basic YWxpY2U6cHc="), ("abc.def\n", "Bearer abc.def"), ("Bearer abc", "Bearer abc")])
def test_the_file_of_credentials_is_read_at_each_post(tmp_path, text, header):
    file = tmp_path / "credentials"
    with server() as (url, seen):
        to = target(url, credentials=str(file))
        with pytest.raises(NotTaken, match=r"credentials cannot be read \(No such file or directory\); make it"):
            post.post(to, b"{}")
        file.write_text(text)
        post.post(to, b"{}")
    assert [headers["Authorization"] for _path, headers, _body in seen] == [header]


@pytest.mark.parametrize(("content", "why"), [(b"", "holds nothing"), (b"a\nb", "holds no single line"), (b"\xff\xfe", "is no plain text")])
def test_a_file_that_holds_no_credentials_says_so(tmp_path, content, why):
    file = tmp_path / "credentials"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        post.credentials(str(file))


def test_a_pipe_is_no_file_of_credentials(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is no regular file"):
        post.credentials(str(tmp_path / "pipe"))


def test_who_may_read_the_file_is_known(tmp_path):
    file = tmp_path / "credentials"
    file.write_text("x")
    file.chmod(0o600)
    assert not post.open_to_others(str(file))
    file.chmod(0o640)
    assert post.open_to_others(str(file))


@pytest.mark.parametrize(("status", "again"), [(400, False), (401, False), (404, False), (408, True), (429, True), (500, True), (503, True)])
def test_an_answer_tells_whether_another_attempt_may_help(status, again):
    with server(status, body=b"bad\n  labels") as (url, _seen):
        problem = refused(url)
    assert str(problem) == f"HTTP {status}: bad labels"
    assert problem.again == again


def test_a_redirect_is_not_followed():
    with server(307, headers=[("Location", "http://evil.example/take?secret=1")]) as (url, seen):
        problem = refused(url)
    assert str(problem) == "HTTP 307: it redirects to evil.example, which is not followed; give the address that answers"
    assert not problem.again
    assert len(seen) == 1


@pytest.mark.parametrize("location", ["http://[::1", "//[x]/y", ""])
def test_a_redirect_to_no_address_is_a_redirect(location):
    with server(302, headers=[("Location", location)]) as (url, _seen):
        assert str(refused(url)) == "HTTP 302: it redirects to elsewhere, which is not followed; give the address that answers"


def test_nobody_there_is_said_in_words():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    problem = refused(f"http://127.0.0.1:{port}/T1/secret")
    assert str(problem) == "Connection refused"
    assert problem.again


def test_one_that_never_answers_is_left_at_the_deadline():
    with raw(lambda _connection, over: over.wait(20)) as url, pytest.raises(NotTaken, match=r"no answer within 0\.3 s"):
        post.post(target(url), b"{}", 0.3)


def test_one_that_answers_a_byte_at_a_time_is_left_at_the_deadline():
    def drip(connection, over):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not over.wait(0.05):
            try:
                connection.sendall(b"x")
            except OSError:
                return

    with raw(drip) as url, pytest.raises(NotTaken, match=r"no answer within 0\.5 s"):
        post.post(target(url), b"{}", 0.5)


def test_a_body_that_comes_a_byte_at_a_time_is_left_at_the_deadline():
    sent = []

    def drip(connection, over):
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4000\r\n\r\n")
        while not over.wait(0.02):
            try:
                connection.sendall(b"x")
            except OSError:
                return
            sent.append(1)

    with raw(drip) as url, pytest.raises(NotTaken, match=r"no answer within 0\.5 s"):
        post.post(target(url), b"{}", 0.5)
    assert len(sent) < 4000, "the body was waited for"


class Guard:
    """The timer of a post: its time comes when the test says so."""

    made: Guard

    def __init__(self, _after_s, function, arguments):
        self.fire = lambda: function(*arguments)
        Guard.made = self

    def start(self):
        pass

    def cancel(self):
        pass


def test_a_tls_handshake_that_does_not_end_is_cut_at_the_deadline(monkeypatch):
    monkeypatch.setattr(post.threading, "Timer", Guard)
    rest = []

    def shake(connection, _over):
        connection.settimeout(10)
        connection.recv(4096)  # the ClientHello
        connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KiB that never comes
        Guard.made.fire()
        try:
            rest.append(connection.recv(1))
        except TimeoutError:
            rest.append("open")

    with raw(shake) as url, pytest.raises(NotTaken, match="no answer within 20 s"):
        post.post(target(url.replace("http:", "https:")), b"{}", 20.0)
    assert rest == [b""]


def test_a_deadline_that_passes_before_the_handshake_is_kept(monkeypatch):
    """Nothing is there to be cut while a plain socket becomes one of TLS."""
    monkeypatch.setattr(post.threading, "Timer", Guard)
    monkeypatch.setattr(post.socket.socket, "shutdown", lambda _socket, _how: None)
    real = post.socket.create_connection

    def connect(*arguments, **more):
        Guard.made.fire()
        return real(*arguments, **more)

    monkeypatch.setattr(post.socket, "create_connection", connect)
    sent = []
    with raw(lambda connection, _over: sent.append(connection.recv(1))) as url, pytest.raises(NotTaken, match="no answer within 20 s"):
        post.post(target(url.replace("http:", "https:")), b"{}", 20.0)
    assert sent == [b""]


def test_rubbish_is_no_answer():
    def rubbish(connection, _over):
        connection.recv(1000)
        connection.sendall(b"\0\1\2 SSH-2.0\r\n\r\n")

    with raw(rubbish) as url:
        assert refused(url).again


def test_the_proxy_of_the_environment_is_asked_for_the_whole_address(monkeypatch):
    with server() as (url, seen):
        monkeypatch.setenv("http_proxy", url.replace("//", "//me:pw@"))
        post.post(target("http://chat.invalid/hook"), b"{}")
    path, headers, _body = seen[0]
    assert path == "http://chat.invalid/hook"
    assert headers["Host"] == "chat.invalid"
    assert headers["Proxy-Authorization"].startswith("Basic ")


def test_no_proxy_is_asked_for_this_machine_or_what_no_proxy_names(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", "am.example")
    with server() as (url, seen):
        post.post(target(url), b"{}")
    assert seen[0][0] == "/"
    assert post._proxies(target("http://am.example")) == {}


def test_a_proxy_over_tls_is_refused_in_words(monkeypatch):
    monkeypatch.setenv("http_proxy", "https://proxy.example:8443")
    assert "proxy https://proxy.example:8443 is asked for over TLS, which is not supported" in str(refused("http://chat.invalid"))
