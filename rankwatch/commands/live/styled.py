"""Lines of text with styles, as they are drawn on a screen or written to a pipe."""

from __future__ import annotations

from collections.abc import Iterable

from rankwatch import shown

Part = tuple[str, str]
"""Text and style: words of "bad", "warn", "good", "dim", "bold"; "" for none."""
Line = tuple[Part, ...]


def line(*parts: str | Part) -> Line:
    """A line of parts; a bare text has no style."""
    return tuple((part, "") if isinstance(part, str) else part for part in parts)


def plain(lines: Iterable[Line]) -> str:
    """The text alone, no blanks at the ends of lines; ends with a newline."""
    return "".join("".join(text for text, _style in parts).rstrip() + "\n" for parts in lines)


def text_of(value: object, limit: int = 200) -> str:
    """Any value as one clean line within `limit` characters, "" for none."""
    return "" if value is None else shown.cut(shown.one_line(value), limit)


def fit(text: str, width: int) -> str:
    """The text in exactly so many characters at most."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."[:width]
