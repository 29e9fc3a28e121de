"""The launcher's private socket: who is answered, and what a client that misbehaves costs."""

import os
import shutil
import socket
import stat
import tempfile
import threading

import pytest

from rankwatch.serve import control
from rankwatch.serve.control import Control, ControlError, ask

ASK_S = 10.0


@pytest.fixture
def folder():
    """A short path: a socket's may have 107 bytes."""
    made = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    yield made
    shutil.rmtree(made)


@pytest.fixture
def listening(folder):
    started = []

    def listen(answer=lambda request: {"said": dict(request)}):
        started.append(Control(os.path.join(folder, control.NAME), answer))
        started[-1].start()
        return started[-1]

    yield listen
    for one in started:
        one.stop()


def raw(path, data):
    """What a client that sends these bytes is told."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ASK_S)
        client.connect(path)
        client.sendall(data)
        return client.makefile("rb").read()


def test_a_request_is_answered_and_only_its_user_may_open_the_socket(listening):
    made = listening()
    assert ask(made.path, {"do": "info", "text": "\u2603\x1b"}, ASK_S) == {"schema": 1, "said": {"do": "info", "text": "\u2603\x1b"}}
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o600


def test_another_users_process_gets_no_answer(listening, monkeypatch):
    asked = []
    made = listening(lambda request: asked.append(request) or {})
    monkeypatch.setattr(control, "peer_uid", lambda connection: os.geteuid() + 1)
    with pytest.raises(ControlError, match="another user's"):
        ask(made.path, {"do": "info"}, ASK_S)
    try:
        told = raw(made.path, b'{"do":"info"}\n')
    except OSError:
        told = b""  # closed before we had sent it
    assert (told, asked) == (b"", [])


def test_a_path_that_is_too_long_for_a_socket_is_an_error_in_words(tmp_path):
    made = Control(str(tmp_path / ("x" * 100) / control.NAME), lambda request: {})
    with pytest.raises(OSError) as caught:
        made.start()
    assert "too long for a socket (107 bytes)" in caught.value.strerror


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"nonsense\n", b"that is no JSON"), (b"[1]\n", b"no JSON object"), (b"[" * 4000 + b"\n", b"no JSON"), (b"x" * 5000, b"more than 4096 bytes")],
    ids=["no JSON", "a list", "deep", "long"],
)
def test_what_is_no_request_is_an_error_in_words(listening, data, words):
    assert words in raw(listening().path, data)


def test_a_client_that_sends_nothing_is_cut(listening, monkeypatch):
    monkeypatch.setattr(control, "REQUEST_S", 0.05)
    assert b"TimeoutError" in raw(listening().path, b"")


def test_an_answer_that_raises_is_told_and_the_next_one_comes(listening):
    made = listening(lambda request: {"half": 1 / request["by"]})
    with pytest.raises(ControlError, match="ZeroDivisionError"):
        ask(made.path, {"by": 0}, ASK_S)
    assert ask(made.path, {"by": 2}, ASK_S)["half"] == 0.5


def test_more_clients_than_are_answered_at_once_are_told_so(listening):
    go_on = threading.Event()
    entered = threading.Semaphore(0)

    def slow(request):
        entered.release()
        assert go_on.wait(ASK_S)
        return {}

    made = listening(slow)
    answers = []
    clients = [threading.Thread(target=lambda: answers.append(ask(made.path, {}, ASK_S))) for _ in range(control.AT_ONCE)]
    for client in clients:
        client.start()
    for _ in clients:
        assert entered.acquire(timeout=ASK_S)
    with pytest.raises(ControlError):
        ask(made.path, {}, ASK_S)
    go_on.set()
    for client in clients:
        client.join(ASK_S)
    assert len(answers) == control.AT_ONCE


def test_a_launcher_that_does_not_answer_is_left_when_the_time_is_over(folder):
    path = os.path.join(folder, control.NAME)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen(1)
        with pytest.raises(ControlError, match=r"has not answered within 0\.1 s"):
            ask(path, {"do": "info"}, 0.1)


def test_after_the_end_nothing_is_left_and_who_asks_is_told_that_it_is_gone(listening):
    made = listening()
    made.stop()
    made.stop()
    assert not os.path.exists(made.path)
    with pytest.raises(ControlError) as caught:
        ask(made.path, {"do": "info"}, ASK_S)
    assert caught.value.gone


def test_a_socket_file_that_a_killed_launcher_has_left_is_gone_too(folder):
    path = os.path.join(folder, control.NAME)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    with pytest.raises(ControlError) as caught:
        ask(path, {"do": "info"}, ASK_S)
    assert caught.value.gone
