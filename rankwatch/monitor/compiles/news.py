"""Which facts of a compile document deserve a line on stderr. Pure. A job that compiles and then runs steadily makes no news."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rankwatch.monitor.compiles.regime import frames, number, outlived

TELLING_REGIMES = ("compiled_nothing", "compiles_for_ever", "fell_back")
ALARMS = ("different_split", "split_mode")
MAX_NEWS = 8  # lines of one run: the document has the rest


class News(NamedTuple):
    """One line, said once. `key` tells it from others; `kind` is its word, such as `recompile_limit`; `ranks` as "0-3,7"."""

    key: str
    kind: str
    frame: str
    ranks: str
    words: str


def news(doc: Mapping[str, Any]) -> Iterator[News]:
    """What the document proves by now, gravest first; the caller says each key once."""
    for found in doc.get("divergence") or ():
        if found.get("kind") in ALARMS:
            ranks = ",".join(str(group.get("ranks")) for group in found.get("groups") or ())
            yield News(f"{found['kind']}", str(found["kind"]), str(found.get("frame") or ""), ranks, str(found.get("words") or ""))
    for frame in frames(doc):
        if frame.get("limited"):
            name = str(frame.get("frame"))
            words = f"compiled {int(number(frame, 'compiles'))} times, now it runs eagerly for ever; the last guard: {frame.get('last_reason') or 'not known'}"
            yield News(f"limit {name}", "recompile_limit", name, str(frame["limited"]), words)
    yield from _failing(doc)
    regime = doc.get("regime") or {}
    name = str(regime.get("name"))
    if name in TELLING_REGIMES and not any(frame.get("limited") for frame in frames(doc)):
        yield News(f"regime {name}", name, "", "", str(regime.get("words") or ""))


def _failing(doc: Mapping[str, Any]) -> Iterator[News]:
    """One line of all frames whose compile fails while the job goes on: nothing else of it is loud. A failure that ends the job is told as its end."""
    found = [(frame, failure, words) for frame in frames(doc) for failure in (frame.get("failures") or ())[:1] if (words := outlived(doc, frame))]
    if found:
        frame, failure, words = found[0]
        more = f"; {len(found) - 1} more fail" if len(found) > 1 else ""
        what = f"{failure.get('type')}: {failure.get('reason')}; {words}{more}"
        yield News("failing", "failing", str(frame.get("frame")), str(failure.get("ranks") or ""), what)
