"""The status server as its options ask for it: TLS, client certificates, and the token that a run draws for itself beyond loopback."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import build_status
import pytest

from rankwatch.config import COMMAND_LINE, ConfigError, Options, load
from rankwatch.launcher import usable
from rankwatch.model import Status
from rankwatch.monitor.slots import SlotReader
from rankwatch.monitor.web import Web
from rankwatch.monitor.worker_server import ServerError, WorkerServer
from rankwatch.wire import layout


@pytest.fixture
def start(tmp_path):
    running = []

    def begin(**options):
        said = []
        status = Status(build_status.job(run_dir=str(tmp_path)), None, state="starting")
        files = SimpleNamespace(known=lambda one: False, path_of=None, home=str(tmp_path))
        web = Web(Options(**options), files, lambda: status, said.append)
        running.append(web)
        web.start()
        return web, said

    yield begin
    for web in running:
        web.stop()


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", f"{folder}/key", "-out", f"{folder}/cert"], check=True, capture_output=True, timeout=60)
    return folder


def get(url, token="", cafile=None):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    context = ssl.create_default_context(cafile=cafile) if cafile else None
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_default_is_loopback_without_a_token(start, tmp_path):
    assert load(environ={}, files=()).listen == "127.0.0.1:27435"
    web, said = start(listen="127.0.0.1:0")
    assert (get(f"{web.url}/healthz")[0], said) == (200, [])
    assert web.token_at == ""
    assert not (tmp_path / "token").exists()


def test_beyond_loopback_a_run_draws_a_token_and_tells_who_comes_without_it_where_it_lies(start, tmp_path):
    web, said = start(listen="0.0.0.0:0")
    url = f"http://127.0.0.1:{web.url.rpartition(':')[2]}"
    path = tmp_path / "token"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert said == [f"the status page asks for the token in {path} (as Bearer, or as the password of any user)"]
    assert web.token_at == str(path)
    token = path.read_text().strip()
    code, answer = get(f"{url}/api/v1/state")
    assert code == 401
    assert f"it lies in {path} on {socket.gethostname()}" in answer
    assert token not in answer
    assert get(f"{url}/api/v1/state", token)[0] == 200
    assert get(f"{url}/healthz")[0] == 200
    assert not any(token in text for text in said)


def test_where_no_token_can_be_kept_safely_the_server_stays_on_loopback(start, tmp_path):
    os.symlink(tmp_path / "elsewhere", tmp_path / "token")
    web, said = start(listen="0.0.0.0:0")
    assert web.url.startswith("http://127.0.0.1:")
    assert said[0].startswith("no token for the status page: ")
    assert "listening on 127.0.0.1 only" in said[1]
    assert not (tmp_path / "elsewhere").exists()


def test_a_given_token_is_used_and_none_is_drawn(start, tmp_path):
    (tmp_path / "mine").write_text("t0ken")
    web, said = start(listen="0.0.0.0:0", token_file=str(tmp_path / "mine"))
    assert said == []
    assert not (tmp_path / "token").exists()
    assert web.url
    assert web.token_at == str(tmp_path / "mine")


def test_pages_are_served_by_https_with_a_certificate(start, pem):
    web, said = start(listen="127.0.0.1:0", tls_cert=f"{pem}/cert", tls_key=f"{pem}/key")
    assert said == []
    assert web.url.startswith("https://127.0.0.1:")
    assert get(web.url.replace("127.0.0.1", "localhost") + "/healthz", cafile=f"{pem}/cert")[0] == 200


def test_with_a_client_ca_no_token_is_drawn(start, pem, tmp_path):
    web, said = start(listen="0.0.0.0:0", tls_cert=f"{pem}/cert", tls_key=f"{pem}/key", tls_client_ca=f"{pem}/cert")
    assert said == []
    assert web.url.startswith("https://")
    assert not (tmp_path / "token").exists()


def test_a_certificate_that_went_away_since_the_start_is_a_reason_not_to_listen(start, pem):
    web, said = start(listen="127.0.0.1:0", tls_cert=f"{pem}/none")
    assert web.url == ""
    assert said[0].startswith(f"no status page: --tls-cert: certificate {pem}/none cannot be read")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_cert": "PEM/none", "tls_key": "PEM/key"}, "--tls-cert: certificate PEM/none cannot be read"),
        ({"tls_cert": "PEM/cert"}, "--tls-cert: certificate PEM/cert comes without its key; give --tls-key FILE"),
        ({"tls_key": "PEM/key"}, "--tls-key: it needs --tls-cert FILE"),
        ({"tls_client_ca": "PEM/cert"}, "--tls-client-ca: it needs --tls-cert FILE"),
    ],
)
def test_a_mistake_ends_the_command_before_any_rank_runs_and_from_a_file_nothing_is_served_in_plain_text(pem, options, words):
    given = {name: value.replace("PEM", str(pem)) for name, value in options.items()}
    with pytest.raises(ConfigError) as caught:
        usable.settled(Options(**given, origins=dict.fromkeys(given, COMMAND_LINE)))
    assert str(caught.value).startswith(words.replace("PEM", str(pem)))
    settled = usable.settled(Options(**given, origins=dict.fromkeys(given, "/etc/rankwatch/config.toml")))
    assert settled.listen == "off"
    assert "nothing is served in plain text instead" in settled.warnings[0]


def test_a_slot_of_another_user_is_not_read(tmp_path, monkeypatch):
    slot = tmp_path / "rank_0.slot"
    slot.write_bytes(bytes(layout.SLOT_BYTES))
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    reader = SlotReader(str(slot))
    assert reader.read().problem == f"slot belongs to another user (uid {owner})"
    assert reader.read().present is False


def test_a_socket_of_another_user_is_not_asked(tmp_path, monkeypatch):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        heard = []

        def accept():
            connection, _ = listening.accept()
            with connection:
                heard.append(connection.recv(100))

        thread = threading.Thread(target=accept)
        thread.start()
        monkeypatch.setattr(socket.socket, "getsockopt", lambda *arguments: struct.pack("iII", 1, os.geteuid() + 1, 0))
        with pytest.raises(ServerError, match=rf"the socket is another user's \(uid {os.geteuid() + 1}\)"):
            WorkerServer(path).ping()
        thread.join(20)
    assert heard == [b""]
