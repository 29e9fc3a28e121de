"""Options whose values are secrets, as they are shown: an address by scheme and host only. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankwatch.config.options import OPTIONS
from rankwatch.redact import HIDDEN

_ADDRESS = re.compile(r"(https?://)(?:[^/?#\s]*@)?([^/?#\s@]*)\S*")
_USERINFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def value(text: str) -> str:
    """What is shown of a secret value: `https://hooks.slack.com/***`; `***` of what is no address."""
    found = _ADDRESS.fullmatch(text)
    return f"{found[1]}{found[2]}/{HIDDEN}" if found else HIDDEN


def words(command_line: Iterable[str]) -> tuple[str, ...]:
    """A command line of rankwatch without the values of its secret options, and without passwords in any address."""
    secret = {option.flag for option in OPTIONS if option.secret}
    shown: list[str] = []
    hide_next = False
    for word in command_line:
        name, equals, given = word.partition("=")
        if hide_next:
            shown.append(listed(word))
        elif equals and name in secret:
            shown.append(f"{name}={listed(given)}")
        else:
            shown.append(without_password(word))
        hide_next = not hide_next and not equals and name in secret
    return tuple(shown)


def listed(text: str) -> str:
    """The same of several with commas between them."""
    return ",".join(map(value, text.split(",")))


def without_password(text: str) -> str:
    """`http://***@host/`."""
    return _USERINFO.sub(HIDDEN, text)
