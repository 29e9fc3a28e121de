"""What a judge asks another launcher, as request targets, and what the launcher reads out of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, quote_plus, urlsplit

from rankwatch.wire.ranks import compress, expand

ROOT = "/peer/v1/"
SCHEMA = 1
Kind = Literal["stacks", "native_stack", "recorder", "ping"]
_FIELDS: dict[str, Kind] = {"stacks": "stacks", "native": "native_stack", "recorder": "recorder", "ping": "ping"}
MAX_RANKS = 64
"""Of one kind in one question; the line of a request is limited."""
MAX_URL = 512
MAX_NUMBER = 1 << 62
ITSELF = 409
"""The status of a launcher's answer that judges the job itself: only it has asked, by a list that does not show which line is its own."""
MAX_WHY = 900
"""Bytes of an order's reason as they go over the wire."""


@dataclass(frozen=True, slots=True)
class Order:
    """The judge's order to end the workers (`--on-stuck exit`). key: proves that it is the judge's. why: one line that names the culprit."""

    key: str
    culprit_ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class News:
    """What the judge tells with its pulls. open_now: last_words.words of its incidents. over: it ends, "0" well, "1" badly; all that it knows is told."""

    open_now: str = ""
    over: str = ""


def report(
    base: int | None,
    events_after: int,
    wants: Mapping[Kind, Iterable[int]],
    judge_url: str,
    order: Order | None = None,
    news: News | None = None,
    line: int | None = None,
) -> str:
    """The target that asks for a report beyond `base`, and for evidence of ranks on the way. With an order no evidence is asked for, no incident told.

    line: the judge's own in the list of --peers.
    """
    fields = [f"events={events_after}"]
    if line is not None:
        fields.append(f"line={line}")
    if base is not None:
        fields.append(f"base={base}")
    for name, kind in _FIELDS.items():
        ranks = sorted(wants.get(kind, ()))[:MAX_RANKS] if order is None else []
        if ranks:
            fields.append(f"{name}={compress(ranks)}")
    if judge_url and len(judge_url) <= MAX_URL:
        fields.append(f"judge={quote(judge_url, safe=':/')}")
    if news is not None and news.open_now and order is None:
        fields.append(f"open={news.open_now}")
    if news is not None and news.over:
        fields.append(f"over={news.over}")
    if order is not None:
        fields += [f"end={order.key}", f"culprits={compress(sorted(order.culprit_ranks)[:MAX_RANKS])}", f"why={_short(order.why)}"]
    return f"{ROOT}report?{'&'.join(fields)}"


def _short(text: str) -> str:
    """Quoted, and cut where that makes it too long."""
    text = text[:MAX_WHY]
    while len(quote_plus(text)) > MAX_WHY:
        text = text[:-16]
    return quote_plus(text)


def order(query: Mapping[str, str]) -> Order | None:
    """The order in a question, None where there is none. ValueError where its ranks cannot be read."""
    key = query.get("end", "")
    if not key:
        return None
    return Order(key, expand(query.get("culprits", ""), MAX_RANKS), "".join(filter(str.isprintable, query.get("why", "")))[:MAX_WHY])


def number(query: Mapping[str, str], name: str) -> int | None:
    """A number of the query, None where it is missing. ValueError where it is none."""
    text = query.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > MAX_NUMBER:
        raise ValueError(f"{name}={text[:40]!r} is no number")
    return int(text)


def wants(query: Mapping[str, str], local: Sequence[int]) -> dict[Kind, set[int]]:
    """The evidence that is asked for, of local ranks. ValueError where the ranks cannot be read."""
    ours = set(local)
    asked = {kind: ours & set(expand(query.get(name, ""), MAX_RANKS)) for name, kind in _FIELDS.items()}
    return {kind: ranks for kind, ranks in asked.items() if ranks}


def seen_there_only(url: str) -> bool:
    """Whether this address of a page means the machine of whoever opens it."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return True
    return host in ("localhost", "::1") or host.startswith("127.")


def page_url(text: str) -> str:
    """The address of a page as given by another launcher, "" where it is none that could be shown."""
    if len(text) > MAX_URL or not text.isascii() or not text.isprintable() or any(letter in "\"'<> " for letter in text):
        return ""
    try:
        parts = urlsplit(text)
        return text if parts.scheme in ("http", "https") and parts.hostname else ""
    except ValueError:
        return ""
