"""TLS of the status server: certificates from openssl, real handshakes on loopback, and every mistake said at the start."""

import os
import socket
import ssl
import subprocess
import threading
import time
from urllib.request import Request, urlopen

import pytest

from rankwatch.serve import acceptor, handler, tls
from rankwatch.serve.server import Response, Server

TOKEN = "correct-horse"
ROUTES = {"/": lambda request: Response("page\n"), "/metrics": lambda request: Response("up 1\n"), "/big": lambda request: Response(b"x" * 8_000_000)}


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def certificate(folder, name, *, ca=None, days=2, extensions=("subjectAltName=DNS:localhost,DNS:node05.example,DNS:*.jobs.example,IP:127.0.0.1",)):
    """name.pem and name.key, signed by `ca` or by itself."""
    paths = [str(folder / f"{name}.pem"), str(folder / f"{name}.key")]
    extra = [word for extension in extensions for word in ("-addext", extension)]
    signer = ["-CA", str(folder / f"{ca}.pem"), "-CAkey", str(folder / f"{ca}.key")] if ca else []
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, *signer, "-days", str(days), "-subj", f"/CN={name}", *extra, "-keyout", paths[1], "-out", paths[0])
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    certificate(folder, "ca", extensions=("basicConstraints=critical,CA:TRUE",))
    certificate(folder, "stranger-ca", extensions=("basicConstraints=critical,CA:TRUE",))
    leaf = ("basicConstraints=CA:FALSE",)
    certificate(folder, "server", ca="ca", extensions=(*leaf, "subjectAltName=DNS:localhost,DNS:node05.example,DNS:*.jobs.example,IP:127.0.0.1"))
    certificate(folder, "client", ca="ca", extensions=leaf)
    certificate(folder, "stranger", ca="stranger-ca", extensions=leaf)
    certificate(folder, "other")
    openssl("pkey", "-in", str(folder / "server.key"), "-aes128", "-passout", "pass:x", "-out", str(folder / "locked.key"))
    openssl("x509", "-in", str(folder / "server.pem"), "-outform", "der", "-out", str(folder / "server.der"))
    (folder / "both.pem").write_bytes((folder / "server.pem").read_bytes() + (folder / "server.key").read_bytes())
    (folder / "empty").touch()
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture
def start(files):
    running = []

    def begin(client_ca="", **options):
        material = tls.load(str(files / "server.pem"), str(files / "server.key"), client_ca and str(files / client_ca))
        running.append(Server(options.pop("listen", "127.0.0.1:0"), ROUTES, tls=material, **options))
        assert running[-1].start()
        return running[-1]

    yield begin
    for one in running:
        one.stop()


def trusting(files, client=None):
    context = ssl.create_default_context(cafile=str(files / "ca.pem"))
    if client:
        context.load_cert_chain(str(files / f"{client}.pem"), str(files / f"{client}.key"))
    return context


def get(running, files, target="/", client=None, **headers):
    request = Request(f"https://localhost:{running.port}{target}", headers=headers)
    with urlopen(request, timeout=10, context=trusting(files, client)) as answer:
        return answer.status, answer.read()


class TestPages:
    def test_a_page_is_served_to_who_trusts_the_ca(self, start, files):
        running = start()
        assert running.url == f"https://127.0.0.1:{running.port}"
        assert get(running, files) == (200, b"page\n")

    def test_a_large_answer_arrives_whole_and_the_stream_ends_properly(self, start, files):
        running = start()
        plain = socket.create_connection(("127.0.0.1", running.port), timeout=10)
        with trusting(files).wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as connection:
            connection.sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))  # a cut stream would raise
        assert len(answer.partition(b"\r\n\r\n")[2]) == 8_000_000

    def test_the_certificates_names_are_hosts_of_this_server(self, start, files):
        running = start()
        for host in ("node05.example", "a.jobs.example"):
            assert get(running, files, Host=host)[0] == 200
        for host in ("evil.example", "a.b.jobs.example", "jobs.example"):
            with pytest.raises(OSError, match="421"):
                get(running, files, Host=host)

    def test_versions_before_1_2_are_refused(self, start):
        running = start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="deprecated"):
            context.minimum_version = ssl.TLSVersion.TLSv1_1
        with pytest.warns(DeprecationWarning, match="deprecated"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as plain, pytest.raises(OSError):
            context.wrap_socket(plain, server_hostname="localhost")

    def test_plain_http_is_told_to_use_tls(self, start):
        running = start()
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as plain:
            plain.sendall(b"GET /x<script> HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b"".join(iter(lambda: plain.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert f"Content-Length: {len(body)}".encode() in head
        assert body == b"this port speaks TLS: open it by https\n"

    def test_a_client_that_trusts_nothing_of_it_leaves_no_error_behind(self, start):
        running = start()
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as plain, pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
        assert running.errors == 0


class TestClientCertificates:
    def test_nobody_without_one_gets_an_answer(self, start, files):
        running = start("ca.pem")
        for target in ("/", "/metrics"):
            assert get(running, files, target, client="client")[0] == 200
            for client in (None, "stranger"):
                with pytest.raises(OSError):
                    get(running, files, target, client=client)

    def test_it_opens_a_server_beyond_loopback_without_a_token(self, start, files):
        running = start("ca.pem", listen="0.0.0.0:0")
        assert running.notice == ""
        assert get(running, files, client="client") == (200, b"page\n")

    def test_tls_alone_opens_nothing_beyond_loopback(self, start):
        running = start(listen="0.0.0.0:0")
        assert running.url.startswith("https://127.0.0.1:")
        assert "need a token" in running.notice

    def test_with_a_token_as_well_pages_need_both_and_metrics_the_certificate(self, start, files):
        running = start("ca.pem", token=TOKEN)
        assert get(running, files, "/metrics", client="client")[0] == 200
        assert get(running, files, client="client", Authorization=f"Bearer {TOKEN}")[0] == 200
        with pytest.raises(OSError, match="401"):
            get(running, files, client="client")
        with pytest.raises(OSError):
            get(running, files, Authorization=f"Bearer {TOKEN}")


class TestSilentClients:
    def test_handshakes_that_never_come_hold_up_nobody(self, start, files):
        running = start()
        silent = [socket.create_connection(("127.0.0.1", running.port), timeout=10) for _ in range(100)]
        try:
            for connection in silent[::2]:
                connection.sendall(b"\x16\x03\x01\x02")  # the beginning of a hello
            assert get(running, files, "/metrics") == (200, b"up 1\n")  # before the first of them has timed out: the accepting thread waits for none
        finally:
            for connection in silent:
                connection.close()

    def test_a_handshake_that_waits_for_its_client_holds_no_place(self, start, files, monkeypatch):
        monkeypatch.setattr(acceptor, "PLACES", 1)
        monkeypatch.setattr(acceptor, "PLACE_S", 60)
        running = start()
        halves = [socket.create_connection(("127.0.0.1", running.port), timeout=10) for _ in range(5)]
        for connection in halves:
            connection.sendall(b"\x16\x03\x01\x02")
        assert get(running, files, "/metrics") == (200, b"up 1\n")
        for connection in halves:
            connection.close()

    def test_a_handshake_that_does_not_come_is_cut(self, start, monkeypatch):
        monkeypatch.setattr(handler, "REQUEST_S", 0.2)
        running = start()
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
            began = time.monotonic()
            assert connection.recv(10) == b""
            assert time.monotonic() - began < handler.RECEIVE_S

    def test_a_connection_that_is_cut_never_goes_on_in_plain_text(self, files):
        """SSLSocket.shutdown drops the encryption at once: a thread that is in the middle of an answer would then write it as it is."""
        material = tls.load(str(files / "server.pem"), str(files / "server.key"))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            served = {}

            def serve():
                served["socket"] = material.context.wrap_socket(ours, server_side=True)

            thread = threading.Thread(target=serve)
            thread.start()
            with trusting(files).wrap_socket(theirs, server_hostname="localhost"):
                thread.join(20)
                connection = served["socket"]
                handler.cut(connection)
                assert connection.version() is not None
                with pytest.raises(OSError):
                    connection.sendall(b"secret")
                connection.close()


class TestMistakes:
    @pytest.mark.parametrize(
        ("cert", "key", "client_ca", "words"),
        [
            ("none.pem", "server.key", "", "certificate DIR/none.pem cannot be read (No such file or directory); give PEM files, such as: openssl req"),
            ("pipe", "server.key", "", "certificate DIR/pipe cannot be read (it is no regular file)"),
            ("empty", "server.key", "", "certificate DIR/empty holds no PEM certificate; convert it: openssl x509 -inform der"),
            ("server.der", "server.key", "", "certificate DIR/server.der holds no PEM certificate"),
            ("server.pem", "", "", "certificate DIR/server.pem comes without its key; give --tls-key FILE"),
            ("server.pem", "none.key", "", "key DIR/none.key cannot be read (No such file or directory)"),
            ("server.pem", "pipe", "", "key DIR/pipe cannot be read (it is no regular file)"),
            ("server.pem", "other.key", "", "key DIR/other.key cannot be used (key values mismatch)"),
            ("server.pem", "empty", "", "key DIR/empty cannot be used ("),
            ("server.pem", "locked.key", "", "key DIR/locked.key is locked by a passphrase; take it off"),
            ("server.pem", "server.key", "none.pem", "client CA DIR/none.pem cannot be read"),
            ("server.pem", "server.key", "server.key", "client CA DIR/server.key holds no PEM certificate ("),
            ("server.pem", "server.key", "pipe", "client CA DIR/pipe cannot be read (it is no regular file)"),
        ],
    )
    def test_each_names_the_file_and_what_to_do(self, files, cert, key, client_ca, words):
        with pytest.raises(ValueError) as caught:
            tls.load(*(str(files / name) if name else "" for name in (cert, key, client_ca)))
        assert words.replace("DIR", str(files)) in str(caught.value)

    def test_an_expired_certificate_is_refused_at_the_start(self, tmp_path):
        request, key, cert = (str(tmp_path / name) for name in ("request", "key", "cert"))
        openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x", "-keyout", key, "-out", request)
        openssl("x509", "-req", "-in", request, "-signkey", key, "-days", "-1", "-out", cert)
        with pytest.raises(ValueError, match="is refused by clients: certificate has expired; renew it"):
            tls.load(cert, key)

    def test_one_file_may_hold_certificate_and_key(self, files):
        material = tls.load(str(files / "both.pem"))
        assert material.names == ("localhost", "node05.example", "*.jobs.example")
        assert material.clients_certified is False
