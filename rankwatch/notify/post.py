"""One HTTP POST with a deadline over all of it, to an address that a user has given. Standard library; http and ssl are loaded by the first post.

Proxies are those of the environment (http_proxy, https_proxy, no_proxy), never for a loopback address. Redirects are not followed: a message may be a
secret, and so may its address. Own certificate authorities: SSL_CERT_FILE, as with everything that uses OpenSSL. No text of an error holds a password
or a path of an address.
"""

from __future__ import annotations

import base64
import os
import socket
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import http.client
    import ssl

DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 4096
MAX_CREDENTIAL_BYTES = 16 << 10
_TRY_AGAIN = (408, 425, 429)


class NotTaken(Exception):
    """The other side has not taken it; the text says why. again: another attempt may help."""

    def __init__(self, text: str, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


@dataclass(frozen=True, slots=True)
class Target:
    """Where to post. authorization: from the address itself. credentials: the file that has it. shown: scheme and host, for people."""

    scheme: str
    host: str
    port: int
    path: str
    authorization: str = ""
    credentials: str = ""

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.scheme == "https" else 80)
        return f"{self.scheme}://{host}{'' if usual else f':{self.port}'}"


def target(url: str, suffix: str = "", credentials: str = "") -> Target:
    """The parts of `url` with `suffix` at the end of its path. ValueError for an address without a host or with an impossible port."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address that starts with http:// or https:// and names a host")
    path = parts.path or "/"
    if suffix and not path.endswith(suffix):
        path = path.rstrip("/") + suffix
    authorization = _basic(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}") if parts.username or parts.password else ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Target(parts.scheme, parts.hostname, port, path + (f"?{parts.query}" if parts.query else ""), authorization, credentials)


def credentials(path: str) -> str:
    """The Authorization header of a file with `user:password` or a bearer token. ValueError says why there is none. Waits for no pipe and no device."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError(f"{path} is no regular file; put user:password or a bearer token into one")
            text = file.read(MAX_CREDENTIAL_BYTES).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); make it, with user:password or a bearer token in it") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no plain text; put user:password or a bearer token into it") from None
    if not text or not text.isprintable():
        raise ValueError(f"{path} holds {'no single line' if text else 'nothing'}; put user:password or a bearer token into it")
    return _basic(text) if ":" in text else f"Bearer {text.removeprefix('Bearer ')}"


def open_to_others(path: str) -> bool:
    """Whether more users than its owner may read the file."""
    try:
        return bool(os.stat(os.path.expanduser(path)).st_mode & 0o077)
    except OSError:
        return False


def post(to: Target, body: bytes, deadline_s: float = DEADLINE_S) -> None:
    """Send it, and return once it was taken (a 2xx answer). NotTaken says why it was not, within deadline_s but for a name server that does not answer."""
    headers = {"Content-Type": "application/json", "User-Agent": "rankwatch", "Connection": "close"}
    try:
        if authorization := credentials(to.credentials) if to.credentials else to.authorization:
            headers["Authorization"] = authorization
    except ValueError as error:
        raise NotTaken(str(error)) from None
    import http.client
    import ssl

    try:
        connection, path, tls = _connection(to, headers, deadline_s)
    except (OSError, ValueError) as error:
        raise NotTaken(_why(error)) from None
    late = threading.Event()
    held: list[socket.socket] = []
    guard = threading.Timer(deadline_s, _cut, (connection, held, late))
    guard.daemon = True
    guard.start()
    try:
        _connect(connection, held, late, tls, to.host)
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        said = answer.read(MAX_ANSWER_BYTES)
    except (OSError, ValueError, AttributeError, http.client.HTTPException, ssl.SSLError) as error:
        raise NotTaken(f"no answer within {deadline_s:g} s" if late.is_set() or isinstance(error, TimeoutError) else _why(error)) from None
    finally:
        guard.cancel()
        connection.close()
    if late.is_set():  # headers that were cut off look like whole ones
        raise NotTaken(f"no answer within {deadline_s:g} s")
    if 300 <= answer.status < 400:
        elsewhere = _host(answer.headers.get("Location", "")) or "elsewhere"
        raise NotTaken(f"HTTP {answer.status}: it redirects to {elsewhere}, which is not followed; give the address that answers", again=False)
    if not 200 <= answer.status < 300:
        reason = " ".join(said.decode("utf-8", "replace").split())[:200]
        again = answer.status >= 500 or answer.status in _TRY_AGAIN
        raise NotTaken(f"HTTP {answer.status}{f': {reason}' if reason else ''}", again)


def _connection(to: Target, headers: dict[str, str], deadline_s: float) -> tuple[http.client.HTTPConnection, str, ssl.SSLContext | None]:
    """A connection that is not open yet, what to ask it for, and how TLS is spoken on it. Through a proxy, plain HTTP asks for the whole address, HTTPS for
    a tunnel.
    """
    import http.client
    import ssl

    proxy = _proxy(to, _proxies(to))
    if to.scheme == "https":
        context = ssl.create_default_context()
        if proxy is None:
            return http.client.HTTPSConnection(to.host, to.port, timeout=deadline_s, context=context), to.path, context
        tunnel = http.client.HTTPSConnection(proxy.host, proxy.port, timeout=deadline_s, context=context)
        tunnel.set_tunnel(to.host, to.port, {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {})
        return tunnel, to.path, context
    if proxy is None:
        return http.client.HTTPConnection(to.host, to.port, timeout=deadline_s), to.path, None
    if proxy.authorization:
        headers["Proxy-Authorization"] = proxy.authorization
    return http.client.HTTPConnection(proxy.host, proxy.port, timeout=deadline_s), f"{to.shown}{to.path}", None


def _connect(connection: http.client.HTTPConnection, held: list[socket.socket], late: threading.Event, tls: ssl.SSLContext | None, host: str) -> None:
    """Open it in steps that `_cut` can end: HTTPSConnection.connect hides its socket during the handshake, and its timeout is for each part alone."""
    import http.client

    http.client.HTTPConnection.connect(connection)
    secure = tls.wrap_socket(connection.sock, server_hostname=host, do_handshake_on_connect=False) if tls is not None else None
    connection.sock = secure or connection.sock
    held.append(connection.sock)
    if late.is_set():
        raise TimeoutError
    if secure is not None:
        secure.do_handshake()


def _host(url: str) -> str:
    """The host that an address names, "" where it names none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _proxies(to: Target) -> Mapping[str, str]:
    from urllib.request import getproxies, proxy_bypass

    return {} if proxy_bypass(to.host) else getproxies()


def _proxy(to: Target, proxies: Mapping[str, str]) -> Target | None:
    given = proxies.get(to.scheme)
    if not given or to.host == "localhost" or to.host.startswith("127.") or to.host == "::1":
        return None
    proxy = target(given if "://" in given else f"http://{given}")
    if proxy.scheme != "http":
        raise ValueError(f"the proxy {proxy.shown} is asked for over TLS, which is not supported; set {to.scheme}_proxy to an http:// address, or no_proxy")
    return proxy


def _cut(connection: http.client.HTTPConnection, held: list[socket.socket], late: threading.Event) -> None:
    """Whatever the other thread waits for fails now. held: the socket, which the connection forgets once the body is read."""
    late.set()
    for each in (connection.sock, *held):
        try:
            if each is not None:
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # not SSLSocket's, which would take the TLS away from under the reader
        except OSError:
            pass


def _why(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", "") or error or type(error).__name__).split())[:200] or type(error).__name__


def _basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode("ascii")
