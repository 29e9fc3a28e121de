"""The worker server's start and end, with a stand-in for torch's class: any listening socket will do."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from rankwatch.agent import worker_server


class Listener:
    """Listens at the path, sets SIGPIPE to be ignored as torch's does, and counts."""

    made = 0

    def __init__(self, path: str, port: int) -> None:
        assert port == -1
        Listener.made += 1
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(path)
        self.socket.listen(8)

    def shutdown(self) -> None:
        raise AssertionError("it may never come back")


@pytest.fixture
def full_pipe() -> object:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 512)
    except BlockingIOError:
        pass
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_pipe_that_nobody_reads_takes_no_line(full_pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, writer = full_pipe
    assert not worker_server.takes_output(writer)
    os.read(reader, 65536)
    assert worker_server.takes_output(writer)
    with open(tmp_path / "log", "w") as log:
        assert worker_server.takes_output(log.fileno())
    gone, broken = os.pipe()
    os.close(gone)
    assert worker_server.takes_output(broken)  # the write fails at once
    os.close(broken)
    assert worker_server.takes_output(broken)  # as above: no such descriptor


def test_nothing_is_started_where_its_line_would_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_server, "takes_output", lambda fd: fd != 2)
    before = Listener.made
    server, reason = worker_server.start(Listener, str(tmp_path / "s"))
    assert (server, Listener.made) == (None, before)
    assert reason == "it writes a line to stderr when it starts, and nobody reads this stderr: it would block there"


def test_the_end_hangs_up_on_clients_and_leaves_the_listener_alone(tmp_path: Path) -> None:
    """An idle client, and one whose answer is never read: both connections end within the bound, and no other socket is touched."""
    path = str(tmp_path / "s")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    server, reason = worker_server.start(Listener, path)
    assert server is not None, reason
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN  # Python's own table; the kernel's is restored
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    listener: socket.socket = server._server.socket
    clients = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    accepted = []
    for client in clients:
        client.connect(path)
        accepted.append(listener.accept()[0])
    bystander, its_peer = socket.socketpair()

    def serve(connection: socket.socket, answer: bytes) -> None:
        with connection:
            try:
                connection.sendall(answer)
                connection.recv(1)
            except OSError:
                pass

    threads = [threading.Thread(target=serve, args=pair) for pair in zip(accepted, (b"", b"x" * (16 << 20)), strict=True)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    server.stop()
    took = time.monotonic() - began
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert took < 5
    assert not os.path.exists(path)
    its_peer.send(b"still here")
    assert bystander.recv(100) == b"still here"
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    server.stop()  # once more does nothing
    for each in (*clients, bystander, its_peer, listener):
        each.close()
