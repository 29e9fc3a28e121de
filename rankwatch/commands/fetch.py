"""A document of a running job from its status address, in bounded time: whoever answers there may be anything."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import urllib.error
import urllib.request

from rankwatch import shown
from rankwatch.report.documents import MAX_BYTES

FETCH_S = 10.0  # for the whole answer
_READ_BYTES = 1 << 16
_SAID_BYTES, _SAID_SHOWN = 4096, 300
_ASKS = ("CERTIFICATE_REQUIRED", "certificate required", "PEER_DID_NOT_RETURN", "HANDSHAKE_FAILURE")


def is_url(source: str) -> bool:
    """Whether a command's argument is a status address rather than a path."""
    return source.lower().startswith(("http://", "https://"))


class Absent(ValueError):
    """The server is a rankwatch that has nothing of the kind yet; the text is its own."""


def document(url: str, route: str, token: str = "", limit_s: float = FETCH_S) -> object:
    """The JSON at `route` of a status address, which may end in that route. OSError when nobody answers in time, ValueError when it is no JSON over HTTP,
    Absent where the server says that there is nothing."""
    request = urllib.request.Request(url.rstrip("/").removesuffix(route) + route, headers={"Authorization": f"Bearer {token}"} if token else {})
    got: list[bytes | Exception] = []
    over = threading.Event()

    def ask() -> None:
        try:
            got.append(_answer(request, limit_s, over))
        except Exception as error:
            got.append(error)

    # A timeout of a socket bounds each read alone: only a thread that is left behind bounds names, redirects, headers and body together.
    asking = threading.Thread(target=ask, name="rankwatch-fetch", daemon=True)
    asking.start()
    asking.join(limit_s)
    over.set()
    if not got:
        raise TimeoutError(f"no whole answer within {limit_s:g} s")
    if isinstance(got[0], http.client.HTTPException):
        raise ValueError(f"the address or the answer is not HTTP: {type(got[0]).__name__}: {got[0]}") from got[0]
    if isinstance(got[0], Exception):
        raise got[0]
    try:
        found: object = json.loads(got[0])
    except RecursionError:
        raise ValueError("the answer is nested too deep") from None
    return found


def why(error: OSError) -> str:
    """Why nobody answers, in words that say what to do where TLS is the reason."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, OSError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        if "mismatch" in cause.verify_message:
            return f"its certificate is for another name ({shown.one_line(cause.verify_message)}): use a name that stands in it"
        authority = "its authority is your own: put SSL_CERT_FILE=CA.pem before the command"
        return f"its certificate is not trusted here ({shown.one_line(cause.verify_message)}); where {authority}"
    if isinstance(cause, ssl.SSLError) and any(word in str(cause) for word in _ASKS):
        return "it asks for a client certificate (--tls-client-ca), which this command does not send: use the run directory on its node"
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "it ends the TLS connection; most likely it asks for a client certificate (--tls-client-ca): use the run directory on its node"
    return shown.one_line(reason or error.strerror or error)


def _said(error: urllib.error.HTTPError) -> str:
    """The reason in a rankwatch server's 404; "" where it is another's."""
    try:
        doc = json.loads(error.read(_SAID_BYTES))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return ""
    said = doc.get("error") if isinstance(doc, dict) else None
    return shown.one_line(said)[:_SAID_SHOWN] if isinstance(said, str) else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A status address does not redirect, and urllib would take the token along to another host."""

    def redirect_request(self, *_args: object) -> None:
        return None


def _answer(request: urllib.request.Request, limit_s: float, over: threading.Event) -> bytes:
    """The body. over: nobody waits for it any more."""
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=limit_s) as answer:
            data = bytearray()
            while not over.is_set() and (more := answer.read1(_READ_BYTES)):
                data += more
                if len(data) > MAX_BYTES:
                    raise ValueError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
            return bytes(data)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404 and (said := _said(error)):
                raise Absent(said) from error
            asks = "; it asks for a token: give --token-file" if error.code == 401 else ""
            raise ValueError(f"the server answers {error.code}{asks}") from error
