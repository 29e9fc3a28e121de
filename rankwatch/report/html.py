"""The one place that renders templates: autoescape on, nothing but the files in templates/, every text safe to encode."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwatch import shown
from rankwatch.report import timeline

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates. jinja2 is imported here, at the first page, and not while the launcher starts."""
    from jinja2 import Environment, FileSystemLoader

    env = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    env.filters.update(duration=_known(shown.duration), utc=_known(shown.utc), bytes=_known(size), lost=_known(shown.lost_words))
    env.filters.update(present=present, ranks=ranks, marked=marked, past=lambda text: shown.past(str(text)))
    env.filters["letter"] = lambda kind: timeline.LETTERS.get(str(kind), "")
    return env


def render(template: str, **values: Any) -> str:
    """A page. What is unsafe to encode or to show leaves as an escape."""
    return shown.clean(environment().get_template(template).render(**values)).lstrip()


def size(count: float) -> str:
    """Bytes as people say them: "2.4 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ranks(text: object) -> Markup:
    """A compressed list of ranks that may break after each comma."""
    from markupsafe import Markup, escape

    return Markup(str(escape(text)).replace(",", ",<wbr>"))


def marked(text: object) -> Markup:
    """A line of ours, of which what stands in backticks is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def present(value: object) -> object:
    """What is there, also 0; "" for null and for a key that an older document lacks."""
    from jinja2 import Undefined

    return "" if value is None or isinstance(value, Undefined) else value


def _known(words: Callable[[float], str]) -> Callable[[object], str]:
    """A filter that says nothing about what is no number."""
    return lambda value: words(value) if isinstance(value, (int, float)) else ""
