"""Requests, responses and the rules that every request passes before a route sees it. No socket here."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

OPEN_PATHS = ("/metrics", "/healthz")
"""Served without the token: they show no stack and no path."""
POLLED_PATHS = (*OPEN_PATHS, "/api/v1/state")
"""What programs ask for again and again: it never waits behind pages."""
_POLLED = re.compile(rf"(?:GET|HEAD) (?:{'|'.join(map(re.escape, POLLED_PATHS))})[ ?]".encode())
_UNLIKE_A_HOST = re.compile(r"[\s@/?#\\]")


@dataclass(frozen=True, slots=True)
class Request:
    """One GET or HEAD. `path` is decoded and starts with "/"; header names are lower case; `nonce` is the one that the response's policy allows scripts."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    nonce: str = ""

    @property
    def accept(self) -> str:
        """The Accept header, "" if there is none."""
        return self.headers.get("accept", "")


@dataclass(frozen=True, slots=True)
class Response:
    """What a route answers. Text becomes UTF-8."""

    body: bytes | str = b""
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def payload(self) -> bytes:
        """The body as bytes; what UTF-8 cannot say becomes an escape."""
        return self.body if isinstance(self.body, bytes) else self.body.encode("utf-8", "backslashreplace")


Route = Callable[[Request], Response]


def find(routes: Mapping[str, Route], path: str) -> Route | None:
    """The route of a path: the exact one, else the longest that ends in "/" and that the path begins with."""
    if path in routes:
        return routes[path]
    prefixes = [prefix for prefix in routes if prefix.endswith("/") and prefix != "/" and path.startswith(prefix)]
    return routes[max(prefixes, key=len)] if prefixes else None


def is_polled(first: bytes) -> bool:
    """Whether the first bytes of a connection are a whole request for one of POLLED_PATHS. Only its turn depends on it: other spellings may wait."""
    return b"\r\n\r\n" in first and _POLLED.match(first) is not None


def split_target(target: str) -> tuple[str, dict[str, str]] | None:
    """(path, query) of a request target; None for one that is no path of ours, such as `..` segments, NUL or a full URL of a proxy."""
    if not target.startswith("/") or target.startswith("//"):
        return None
    parts = urlsplit(target)
    path = unquote(parts.path, errors="replace")
    if "\0" in path or "\\" in path or any(segment in ("..", ".") for segment in path.split("/")):
        return None
    return path, dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=50))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def host_allowed(header: str, names: Iterable[str], any_address: bool = False) -> bool:
    """Whether a Host header names this server: localhost, a loopback address, or one of `names` ("*.x" stands for one label more than x).

    A page of another site that points its own name at us sends that name. any_address: every literal address is allowed too, since none is a name
    that anybody could point here. ValueError for brackets that do not match.
    """
    host = urlsplit(f"//{header}").hostname if header else ""
    if not host or _UNLIKE_A_HOST.search(header):
        return False
    if host.endswith(".localhost") or is_loopback(host) or (any_address and _address(host) is not None):
        return True
    known, parent = {name.lower() for name in names}, host.partition(".")[2]
    return host in known or (bool(parent) and f"*.{parent}" in known)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        return None


def token_given(headers: Mapping[str, str], token: str) -> bool:
    """Whether the request brings the token: `Authorization: Bearer TOKEN`, or Basic with it as the password of any user. In constant time.

    ValueError for what is no text. The token is taken from this header and nowhere else: an address ends up in logs and histories.
    """
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    given = rest.strip()
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode("utf-8").partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode("utf-8", "surrogatepass"))


def is_bearer(headers: Mapping[str, str]) -> bool:
    """Whether the credential is one that a program sets: no browser adds it by itself, whatever page it was sent here by."""
    return headers.get("authorization", "").partition(" ")[0].lower() == "bearer"


def security_headers(nonce: str) -> dict[str, str]:
    """Headers of every response: no script but ours, no frame, no sniffing, no referrer, no window of another site, no copy in a cache.

    No Strict-Transport-Security: it holds for every port of a host name, and other programs share ours.
    """
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def wants_gzip(headers: Mapping[str, str]) -> bool:
    """Whether Accept-Encoding asks for gzip."""
    for part in headers.get("accept-encoding", "").lower().split(","):
        name, _, parameters = part.partition(";")
        if name.strip() in ("gzip", "*"):
            quality = parameters.strip().removeprefix("q=")
            return quality.strip("0.") != "" or not parameters.strip()
    return False
