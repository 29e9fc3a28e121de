"""One kept HTTP connection to another launcher: a deadline over connecting, sending and receiving together, and a limit to what it may answer.

http.client has neither: its timeout begins anew with every byte. What the other side sends is only measured here, never trusted.
"""

from __future__ import annotations

import re
import select
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from rankwatch.monitor.pool import Pool

MAX_ADDRESSES = 8
MAX_HEAD_BYTES = 16 << 10
MAX_ANSWER_BYTES = 8 << 20
MAX_STATUS = 599
_PART_BYTES = 64 << 10
_ADDRESS = re.compile(r"[0-9A-Za-z_.:%-]{1,255}\Z")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
Place = tuple[int, tuple[object, ...]]
"""Family and address of a socket."""
Resolve = Callable[[str, int, float], "tuple[Place, ...]"]


class Unanswered(Exception):
    """Nothing usable has come; the text says what and from where. reached: something took the connection. resend: it was closed before it answered."""

    def __init__(self, text: str, reached: bool = True, resend: bool = False) -> None:
        super().__init__(text)
        self.reached = reached
        self.resend = resend


@dataclass(frozen=True, slots=True)
class Answer:
    """body: unpacked. wire_bytes: sent and received. sent_at, received_at: on the clock of the connection."""

    status: int
    body: bytes
    wire_bytes: int
    sent_at: float
    received_at: float


class Names:
    """Looks host names up beside the caller: a name server that does not answer holds nobody longer than it wants to wait."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = Pool("names", threads, backlog=64)

    def __call__(self, host: str, port: int, wait_s: float) -> tuple[Place, ...]:
        """At most two places. OSError where there is none, or none in time. Numbers are never looked up."""
        try:
            return _places(host, port, socket.AI_NUMERICHOST)
        except OSError:
            pass
        job = self._pool.submit(lambda: _places(host, port, 0))
        if job is None or not job.wait(wait_s):
            raise OSError(f"the name {host} was not found in time")
        if job.value is None:
            raise OSError(f"the name {host} is not known here")
        return job.value

    def close(self) -> None:
        """Let the threads end."""
        self._pool.close()


def _places(host: str, port: int, flags: int) -> tuple[Place, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys((int(family), place) for family, _, _, _, place in found if family in _FAMILIES))[:2]


class Connection:
    """To one launcher at the first of its addresses that answers. One call at a time; `cut` from any thread."""

    def __init__(self, addresses: tuple[str, ...], port: int, token: str, resolve: Resolve, clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses = tuple(filter(_ADDRESS.match, addresses))[:MAX_ADDRESSES] or ("nowhere.invalid",)
        self._port = port
        self._authorization = token
        self._resolve = resolve
        self._clock = clock
        self._at = 0
        self._socket: socket.socket | None = None

    @property
    def address(self) -> str:
        """The one in use, or the next to be tried: "10.0.0.5:41234"."""
        return self._shown(self._addresses[self._at])

    @property
    def host(self) -> str:
        """The same without the port."""
        return self._addresses[self._at]

    def get(self, target: str, deadline: float, max_bytes: int = MAX_ANSWER_BYTES) -> Answer:
        """The answer to GET target. Unanswered for everything that is none; the connection is closed then."""
        kept = self._socket is not None
        try:
            return self._ask(target, deadline, max_bytes)
        except Unanswered as error:
            self.close()
            if not (kept and error.resend):
                raise
        try:
            return self._ask(target, deadline, max_bytes)
        except Unanswered:
            self.close()
            raise

    def turn(self) -> None:
        """Another launcher answers here, or a stranger: go on with the next address."""
        self.close()
        self._at = (self._at + 1) % len(self._addresses)

    def close(self) -> None:
        """Give the descriptor back; a later call connects anew."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def cut(self) -> None:
        """End a call that is under way in another thread."""
        connection = self._socket
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _shown(self, address: str) -> str:
        return f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"

    # -- connecting --------------------------------------------------------------------------------------------------------

    def _connected(self, deadline: float) -> socket.socket:
        """The kept connection, or a new one to the first address that takes it, beginning with the one that did last."""
        if self._socket is not None and not _ended(self._socket):
            return self._socket
        self.close()
        count, problems = len(self._addresses), list[str]()
        for turn in range(count):
            at = (self._at + turn) % count
            left_s = deadline - self._clock()
            if left_s <= 0:
                break
            until = deadline if turn == count - 1 else deadline - left_s + left_s / (count - turn)
            try:
                self._socket = self._open(self._addresses[at], until)
            except (OSError, UnicodeError, ValueError, OverflowError) as error:
                problems.append(f"{self._shown(self._addresses[at])}: {_why(error)}")
                continue
            self._at = at
            return self._socket
        self._at = (self._at + 1) % count  # the next try begins with another one
        raise Unanswered("; ".join(problems) or "no time was left to connect", reached=False)

    def _open(self, address: str, until: float) -> socket.socket:
        places = self._resolve(address, self._port, max(0.0, until - self._clock()))
        if not places:
            raise OSError(f"{address} has no address")
        for number, (family, place) in enumerate(places, 1):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(0.001, (until - self._clock()) / (len(places) - number + 1)))
                connection.connect(place)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                connection.close()
                if number == len(places):
                    raise
                continue
            return connection
        raise OSError("unreachable")

    # -- one question --------------------------------------------------------------------------------------------------------

    def _ask(self, target: str, deadline: float, max_bytes: int) -> Answer:
        connection = self._connected(deadline)
        host = self._shown(self._addresses[self._at].partition("%")[0])
        request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {self._authorization}\r\nAccept-Encoding: gzip\r\n\r\n".encode()
        sent_at = self._clock()
        try:
            connection.settimeout(max(0.001, deadline - sent_at))
            connection.sendall(request)
            head, rest = self._head(connection, deadline)
        except TimeoutError:
            raise Unanswered(f"{self.address} did not answer in time") from None
        except OSError as error:
            raise Unanswered(f"{self.address}: {_why(error)}", resend=True) from None
        status, headers = _parsed(head, self.address)
        try:
            body = self._body(connection, headers, rest, deadline, max_bytes)
        except TimeoutError:
            raise Unanswered(f"{self.address} did not finish its answer in time") from None
        except OSError as error:
            raise Unanswered(f"{self.address}: {_why(error)}") from None
        received_at = self._clock()
        wire_bytes = len(request) + len(head) + 4 + len(body)
        if headers.get(b"content-encoding", b"").lower() == b"gzip":
            body = unpacked(body, max_bytes, self.address)
        if headers.get(b"connection", b"").lower() == b"close":
            self.close()
        return Answer(status, body, wire_bytes, sent_at, received_at)

    def _head(self, connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
        """The head of the answer without the empty line, and what has come behind it."""
        got = b""
        while True:
            connection.settimeout(self._left(deadline))
            part = connection.recv(_PART_BYTES)
            if not part:
                raise ConnectionResetError("it closed the connection") if not got else Unanswered(f"{self.address} closed the connection in its answer")
            got += part
            head, separator, rest = got.partition(b"\r\n\r\n")
            if separator:
                return head, rest
            if len(got) > MAX_HEAD_BYTES:
                raise Unanswered(f"{self.address} answers with a head of more than {MAX_HEAD_BYTES} bytes")

    def _body(self, connection: socket.socket, headers: dict[bytes, bytes], rest: bytes, deadline: float, max_bytes: int) -> bytes:
        told = headers.get(b"content-length", b"")
        if not told.isdigit() or len(told) > 12:
            raise Unanswered(f"{self.address} does not say how long its answer is")
        wanted = int(told)
        if wanted > max_bytes:
            raise Unanswered(f"{self.address} answers with {wanted} bytes, more than the {max_bytes} that are taken")
        if len(rest) > wanted:
            raise Unanswered(f"{self.address} answers with more than it has announced")
        parts, missing = [rest], wanted - len(rest)
        while missing:
            connection.settimeout(self._left(deadline))
            part = connection.recv(min(missing, _PART_BYTES))
            if not part:
                raise Unanswered(f"{self.address} closed the connection {missing} bytes before the end of its answer")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _left(self, deadline: float) -> float:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise TimeoutError
        return left_s


def unpacked(body: bytes, max_bytes: int, whose: str) -> bytes:
    """A gzip body; Unanswered where it is none or becomes too large, before it does."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise Unanswered(f"{whose} answers with a damaged gzip body ({error})") from None
    if len(plain) > max_bytes:
        raise Unanswered(f"{whose} answers with more than {max_bytes} bytes once unpacked")
    if not unpacker.eof:
        raise Unanswered(f"{whose} answers with a gzip body that is cut off")
    return plain


def _parsed(head: bytes, whose: str) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers, names in lower case."""
    first, *lines = head.split(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or not 200 <= int(words[1][:6]) <= MAX_STATUS:
        raise Unanswered(f"what answers at {whose} does not speak HTTP")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


def _ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it while it was idle; a server that owes us nothing has nothing to say."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return str((error.strerror if isinstance(error, OSError) else "") or error or type(error).__name__).lower()[:200]
