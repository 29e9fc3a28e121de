"""What each option accepts: a reader of one raw value (a string, or what TOML gives), which raises ValueError with what is accepted."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

PROBES = ("compile", "ddp", "cudagraph", "steps", "collectives", "memory", "gpu")
MORE_PROBES = ("numerics",)

_LONGEST_S = 1e12  # 30,000 years; what is longer is a slip, or no float any more
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class ConfigError(ValueError):
    """A value that no option accepts. The text names the file, variable or flag, the key, the value and what is accepted."""


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a path")
    return value


def run_dir(value: Any) -> str:
    given = path(value)
    if given.startswith("~") and os.path.expanduser(given) == given:
        user = given[1:].partition("/")[0]
        why = f"there is no user {user!r} here" if user else "this user has no home directory"
        raise ValueError(f"a path, and {why}; a folder of that very name is ./{given}")
    return given


def folder_or_off(value: Any) -> str:
    """ "" for off, so that one command may do without what a site's file has set."""
    return "" if value == "off" else run_dir(value)


def job_id(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        raise ValueError("at most 64 letters, digits, '.', '_' and '-', the first a letter or a digit")
    return value


def mode(value: Any) -> int:
    accepted = "octal permissions that keep the owner's rwx, such as 0700 or 0750"
    if isinstance(value, str) and re.fullmatch(r"(0o|0)?[0-7]{3}", value):
        value = int(value.removeprefix("0o"), 8)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0o777 or value & 0o700 != 0o700:
        raise ValueError(accepted)
    return value


def listen(value: Any) -> str:
    accepted = "HOST:PORT such as 127.0.0.1:27435 or [::1]:27435, or off"
    if not isinstance(value, str):
        raise ValueError(accepted)
    if value == "off":
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(accepted)
    bracketed = host.startswith("[") and host.endswith("]")
    if any(c.isspace() or c in "/@" for c in host) or (":" in host and not bracketed):
        raise ValueError(accepted)
    return value


def host_port(text: str) -> tuple[str, int | None]:
    """(host, port or None) of "node05", "node05:27480", "10.0.0.5", "fd00::5", "[fd00::5]:27480". ValueError says what is accepted."""
    accepted = "HOST or HOST:PORT with a port from 1 to 65535, such as 10.0.0.5:27480 or [fd00::5]:27480"
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(accepted)
        port = rest[1:] if rest else ""
        if rest and not port:
            raise ValueError(accepted)
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
        if not port:
            raise ValueError(accepted)
    if not host or not all(c.isascii() and (c.isalnum() or c in "._:%-") for c in host) or (":" in host and not _is_ip(host)):
        raise ValueError(accepted)
    if port and not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        raise ValueError(accepted)
    return host, int(port) if port else None


def peer_address(value: Any) -> str:
    host_port(text(value))
    return str(value)


def url(value: Any) -> str:
    if not isinstance(value, str) or (value and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value)):
        raise ValueError("an address that starts with http:// or https://")
    return value


def address(value: Any) -> str:
    """An address to post to."""
    given = url(value)
    try:
        if not given or not urlsplit(given).hostname or urlsplit(given).port == 0:
            raise ValueError
    except ValueError:
        raise ValueError("an address that starts with http:// or https://, with a host and, if need be, a port from 1 to 65535") from None
    return given


def seconds(value: Any) -> float:
    """A duration: a number of seconds, or a text such as 90, 90s, 1.5m, 2h. ValueError says what is accepted."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)", value.strip())
        if match and (found := float(match[1]) * _UNIT_S[match[2]]) <= _LONGEST_S:
            return found
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LONGEST_S:
        return float(value)
    raise ValueError("seconds, or a number with s, m or h, such as 90, 90s, 1.5m")


def duration(value: Any) -> float:
    result = seconds(value)
    if result <= 0:
        raise ValueError("a duration above 0, such as 90, 90s, 1.5m")
    return result


def limit(value: Any) -> float:
    """A number or a duration; what is negative is read too, for the table's own words on it."""
    if isinstance(value, str) and value.strip().startswith("-"):
        return -seconds(value.strip()[1:])
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return -seconds(-value)
    return value if isinstance(value, float) else seconds(value)


def choice(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(allowed) if len(allowed) == 2 else ", ".join(allowed[:-1]) + f" or {allowed[-1]}")
        return str(value)

    return read


def probe(value: Any) -> str:
    return choice(*PROBES)(value)


def more_probe(value: Any) -> str:
    name, equals, number = str(value).partition("=")
    if name not in MORE_PROBES or (equals and not (number.isascii() and number.isdigit() and 0 < int(number) <= 1_000_000)):
        raise ValueError(f"{' or '.join(MORE_PROBES)}, also as NAME=STEPS: look at every STEPS-th step")
    return str(value)


def switch(value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in known:
        raise ValueError("true or false")
    return known[value.lower()]


def label_name(name: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
        raise ValueError("K=V with K of letters, digits and _ that does not begin with a digit or __")
    return name


def limit_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError("NAME=VALUE with a name of the policy table, such as notice_s=10")
    return name


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
