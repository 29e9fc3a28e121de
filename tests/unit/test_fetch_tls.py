"""What `status` and `compile` say of an address whose TLS stands in their way: certificates from openssl, a real server on loopback."""

import subprocess

import pytest

from rankwatch.commands import fetch
from rankwatch.serve import tls
from rankwatch.serve.server import Response, Server


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem")]
    alone = ["openssl", "req", "-x509", *key, "-days", "2", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(alone, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def address(files, request):
    client_ca = str(files / "ca.pem") if getattr(request, "param", "") else ""
    material = tls.load(str(files / "ca.pem"), str(files / "key.pem"), client_ca)
    server = Server("127.0.0.1:0", {"/x": lambda request: Response('{"a": 1}', "application/json")}, tls=material)
    yield server.start()
    server.stop()


def failure(url):
    with pytest.raises(OSError) as raised:
        fetch.document(url, "/x", limit_s=10)
    return fetch.why(raised.value)


def test_of_an_authority_of_ones_own_it_is_said_how_it_is_trusted(address, files, monkeypatch):
    assert "SSL_CERT_FILE=CA.pem before the command" in failure(address)
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    assert fetch.document(address, "/x") == {"a": 1}


def test_a_certificate_for_another_name_is_called_that(address, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    assert "for another name" in failure(address.replace("127.0.0.1", "localhost"))


@pytest.mark.parametrize("address", [True], indirect=True)
def test_a_server_that_wants_a_client_certificate_is_called_that(address, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    said = failure(address)
    assert "asks for a client certificate (--tls-client-ca)" in said
    assert "use the run directory on its node" in said
