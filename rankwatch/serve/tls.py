"""The server's side of TLS: the context, tried once in memory before anybody connects, so that a mistake is said at the start and by its file.

The context is for connections, never for the listening socket: a handshake there lets one silent client keep everybody out.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from rankwatch.serve import regular_file

MAX_BYTES = 1 << 20
_MAKE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 90 -subj /CN=$(hostname) -addext subjectAltName=DNS:$(hostname)"


@dataclass(frozen=True, slots=True)
class Tls:
    """What a server needs for TLS. names: DNS names of the certificate. clients_certified: nobody without a certificate of the given CA connects."""

    context: ssl.SSLContext
    names: tuple[str, ...] = ()
    clients_certified: bool = False


def load(cert: str, key: str = "", client_ca: str = "") -> Tls:
    """TLS 1.2 and later with a PEM certificate (and chain), its key (in the same file where key is ""), and the CA that clients need one of.

    ValueError says which file is wrong, in what, and what to do. A key with a passphrase is refused: nobody is there to type it.
    """
    cert, key, client_ca = (os.path.expanduser(path) for path in (cert, key, client_ca))
    certificate = _read("certificate", cert, f"give PEM files, such as: {_MAKE} -keyout key.pem -out cert.pem")
    if b"-----BEGIN CERTIFICATE-----" not in certificate:
        raise ValueError(f"certificate {cert} holds no PEM certificate; convert it: openssl x509 -inform der -in {cert} -out cert.pem")
    if key:
        _read("key", key, "give the certificate's private key, in PEM")
    elif b"PRIVATE KEY-----" not in certificate:
        raise ValueError(f"certificate {cert} comes without its key; give --tls-key FILE")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(cert, key or None, password=_no_passphrase)
    except _PassphraseWanted:
        raise ValueError(f"key {key or cert} is locked by a passphrase; take it off into a file 0600: openssl pkey -in {key or cert} -out key.pem") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"certificate {cert} and key {key or cert} cannot be used ({_why(error)})") from None
    names = _tried(context, certificate, cert)
    if client_ca:
        authority = _read("client CA", client_ca, "give the CA's certificate, in PEM")
        try:
            context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
        except (OSError, ValueError) as error:
            raise ValueError(f"client CA {client_ca} holds no PEM certificate ({_why(error)})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return Tls(context, names, bool(client_ca))


class _PassphraseWanted(Exception):
    pass


def _no_passphrase() -> str:
    raise _PassphraseWanted


def _read(what: str, path: str, todo: str) -> bytes:
    try:
        return regular_file.read(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read ({error.strerror or error}); {todo}") from None


def _tried(context: ssl.SSLContext, certificate: bytes, path: str) -> tuple[str, ...]:
    """DNS names of the certificate, from a handshake in memory with a client that trusts just it. ValueError where that fails: expired, for no server."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is the anchor
    try:
        trusting.load_verify_locations(cadata=certificate.decode("ascii", "replace"))
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(to_client, to_server)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    pass
        shown = client.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"certificate {path} is refused by clients: {error.verify_message}; renew it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"certificate {path} cannot be used ({_why(error)})") from None
    alternatives = shown.get("subjectAltName", ())
    return tuple(str(pair[1]) for pair in alternatives if isinstance(pair, tuple) and pair[0] == "DNS")


def _why(error: Exception) -> str:
    """OpenSSL's own words, without its file and line."""
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else getattr(error, "strerror", None) or str(error)
