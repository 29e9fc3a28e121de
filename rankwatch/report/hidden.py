"""`rankwatch report --redact`: an incident for strangers. Paths lose their folders, hosts become host1, host2, ..., arguments their values. Pure.

What cannot be seen: a name that is neither a path, a host of the run, nor an argument, such as one in the text of an exception.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rankwatch import redact

_PATH = re.compile(r"(?<![\w.~:/])~?(?:/[^\s/:;,'\"()\[\]<>|=&]+)+/([^\s/:;,'\"()\[\]<>|=&]*)")
_KEPT = re.compile(r"/((?:site|dist)-packages/.*|lib(?:64)?/python\d.*)$")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"<>)\]]+")
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\[[0-9a-fA-F:]*:[0-9a-fA-F:]+\]")
_PROCESS = re.compile(r"^((?:Process|-- child process) \d+:? ).*$", re.MULTILINE)
_LEAST_VALUE = 6  # letters: shorter values of arguments are found in everything
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def hide(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The document for strangers: of the same form, so that every report can be made of it."""
    run = doc.get("run") if isinstance(doc.get("run"), Mapping) else {}
    assert isinstance(run, Mapping)
    arguments = [str(word) for word in run.get("command") or ()] if isinstance(run.get("command"), (list, tuple)) else []
    hosts = {host: f"host{number}" for number, host in enumerate(sorted(_hosts(doc, run)), 1)}
    values = {value for word in arguments for value in (word, word.partition("=")[2]) if _telling(value)}
    words = _words(hosts, values)
    hidden = _walk(doc, words)
    assert isinstance(hidden, dict)
    if isinstance(hidden.get("run"), dict):
        hidden["run"] |= {"command": command(arguments), "labels": dict.fromkeys(run.get("labels") or (), redact.HIDDEN), "status_url": ""}
    return hidden


def command(arguments: list[str]) -> list[str]:
    """What was run without what it was told: names of options and of the script stay, values are `***`."""
    shown, script = [], False
    for index, word in enumerate(arguments):
        name, equals, _ = word.partition("=")
        if redact.is_flag(name):
            shown.append(f"{name}={redact.HIDDEN}" if equals else name)
        elif word.endswith(".py") and not script:
            shown.append(word.rsplit("/", 1)[-1])
            script = True
        elif index == 0 or word in ("torchrun", "run", "demo", "--", "-m"):
            shown.append(word.rsplit("/", 1)[-1])
        else:
            shown.append(redact.HIDDEN)
    return shown


def _telling(value: str) -> bool:
    return len(value) >= _LEAST_VALUE and not value.startswith("-") and value not in ("torchrun", "rankwatch") and not value.endswith(".py")


def _hosts(doc: Mapping[str, Any], run: Mapping[str, Any]) -> set[str]:
    found = {str(run.get("node") or "")}
    for key in ("hosts", "ranks"):
        table = doc.get(key)
        for value in table.values() if isinstance(table, Mapping) else ():
            found.add(str(value.get("node") or "") if isinstance(value, Mapping) else str(value))
    rows = doc.get("nodes")
    found.update(str(row.get("node") or "") for row in (rows if isinstance(rows, list) else ()) if isinstance(row, Mapping))
    return {host for host in found if host}


def _words(hosts: Mapping[str, str], values: set[str]) -> Callable[[str], str]:
    names = sorted(hosts, key=len, reverse=True)
    host = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-])") if names else None
    value = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, sorted(values, key=len, reverse=True)))})(?![\w/-])") if values else None

    def words(text: str) -> str:
        text = _PROCESS.sub(rf"\1{redact.HIDDEN}", text)
        text = _URL.sub(rf"\1://{redact.HIDDEN}", text)
        text = _PATH.sub(_short, text)
        if value is not None:
            text = value.sub(redact.HIDDEN, text)
        if host is not None:
            text = host.sub(lambda found: hosts[found[0]], text)
        return _ADDRESS.sub(lambda found: found[0] if found[0] in _LOOPBACK else redact.HIDDEN, text)

    return words


def _short(found: re.Match[str]) -> str:
    """`.../train.py`; of a library what lies below the folder of packages."""
    kept = _KEPT.search(found[0])
    return f".../{kept[1] if kept else found[1]}"


def _walk(value: Any, words: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {words(str(key)): _walk(item, words) for key, item in value.items()}
    return [_walk(item, words) for item in value] if isinstance(value, (list, tuple)) else value
