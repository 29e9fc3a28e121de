"""`rankwatch compile` on what is no rankwatch and no document: it says so, in bounded time."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager

import pytest

from rankwatch.commands import compile as command
from rankwatch.config import load
from rankwatch.report import compile_text

DOCUMENT = {"run": {"id": "r", "world_size": 2}}


def run(capfd, *argv):
    rc = command.main(argv, load(environ={}, files=()))
    return rc, capfd.readouterr()


@contextmanager
def answering(answer, trickle=False):
    """The port of a server that answers once with these bytes; trickle: blanks behind them, one by one, until the client is done."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            client, _address = server.accept()
            with client:
                client.recv(65536)
                try:
                    client.sendall(answer)
                    while trickle and not over.wait(0.02):
                        client.sendall(b" ")
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nX: "], ids=["in the body", "in the headers"])
def test_a_server_that_trickles_is_left_when_the_time_is_over(head):
    with answering(head, trickle=True) as port, pytest.raises(TimeoutError, match=r"no whole answer within 0\.3 s"):
        command.fetch(f"http://127.0.0.1:{port}", limit_s=0.3)


def test_a_running_job_that_has_compiled_nothing_is_nothing_found(capfd):
    said = b'{"error": "no rank has compiled anything yet"}'
    with answering(b"HTTP/1.0 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(said) + said) as port:
        rc, captured = run(capfd, f"http://127.0.0.1:{port}")
    assert (rc, captured.err) == (3, f"[rankwatch] http://127.0.0.1:{port}: no rank has compiled anything yet\n")


def test_a_404_of_another_server_is_an_error(capfd):
    with answering(b"HTTP/1.0 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found") as port:
        rc, captured = run(capfd, f"http://127.0.0.1:{port}")
    assert rc == 2
    assert "the server answers 404" in captured.err


def test_a_redirect_is_not_followed_since_the_token_would_go_along():
    with answering(b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n") as port, pytest.raises(ValueError, match="the server answers 302"):
        command.fetch(f"http://127.0.0.1:{port}", "secret")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"\x00\xff nonsense\r\n\r\n", "the address or the answer is not HTTP: BadStatusLine"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 200_000, "the answer is nested too deep"),
        (b"HTTP/1.0 200 OK\r\n\r\n[]", "no compile document: it has no run"),
        (b"HTTP/1.0 503 No\r\nContent-Length: 0\r\n\r\n", "the server answers 503"),
    ],
    ids=["no HTTP", "deep", "a list", "503"],
)
def test_an_answer_that_is_no_document_is_an_error_in_words(capfd, answer, words):
    with answering(answer) as port:
        rc, told = run(capfd, f"http://127.0.0.1:{port}")
    assert rc == 2
    assert words in told.err


def test_a_port_that_is_no_number_is_an_error_in_words(capfd):
    rc, told = run(capfd, "http://127.0.0.1:port")
    assert rc == 2
    assert "nonnumeric port" in told.err


def test_an_address_in_capitals_is_an_address(capfd):
    with answering(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(DOCUMENT).encode()) as port:
        rc, told = run(capfd, f"HTTP://127.0.0.1:{port}")
    assert rc == 0
    assert told.out.startswith("run r: 2 ranks, running at step 0")


@pytest.mark.parametrize(
    ("text", "words"),
    [("[" * 200_000, "nested too deep"), ("[]", "no JSON object"), ('{"run": 5}', "it has no run"), ("\x00", "cannot be read")],
    ids=["deep", "a list", "no run", "no JSON"],
)
def test_a_file_that_is_no_document_is_an_error_in_words(capfd, tmp_path, text, words):
    (tmp_path / command.FILE).write_text(text)
    rc, told = run(capfd, str(tmp_path))
    assert rc == 2
    assert words in told.err


def test_a_document_that_cannot_be_shown_is_no_traceback(capfd, tmp_path, monkeypatch):
    (tmp_path / command.FILE).write_text(json.dumps(DOCUMENT))
    monkeypatch.setattr(compile_text, "render", lambda doc: 1 // 0)
    rc, told = run(capfd, str(tmp_path))
    assert rc == 2
    assert "cannot be shown: ZeroDivisionError" in told.err
    assert "rankwatch compile --json shows it as it is" in told.err
