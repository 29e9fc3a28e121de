"""`rankwatch report --redact`: an incident for strangers. Paths lose their folders, hosts become host1, host2, ..., arguments their values. Pure.

What cannot be seen: a name that is neither a path, a host of the run, the job's id, nor an argument, such as one in the text of an exception; numbers and
words of one or two letters among the arguments; a folder with a space in free text, unless it stands in quotes or the document knows the path.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, get_args

from rankwatch import redact
from rankwatch.model import Cause, Confidence, Domain, VerdictName

_ENDS = r"\s/:;,'\"()\[\]<>|=&"
_PATH = re.compile(rf"(?<![\w./~])(?:~[\w.-]*|\.{{1,2}})?/(?=[^\s/])[^\s'\"<>]*/([^{_ENDS}]*)")
"""A path in free text: its folders go on up to the last slash before a space or a quote, whatever stands between."""
_QUOTED = re.compile(r"(?P<quote>['\"])(?P<path>(?:~[\w.-]*|\.{1,2})?/(?=[^/\n'\"])[^\n'\"]*/[^/\n'\"]*)(?P=quote)")
_WHOLE = re.compile(r"(?![^\n]*\s(?:~[\w.-]*|\.{1,2})?/)(?:~[\w.-]*|\.{1,2})?/(?=[^/\s])[^\n]*/[^\s/]*")
_FILE = re.compile(r"\bFile \"(?P<line>[^\"\n]+)\", line \d|\s\((?P<frame>[~/][^\n]{1,1024}):\d+\)$", re.MULTILINE)
"""The file of a frame: in a traceback, and in stacks as py-spy and incident.json have them."""
_KEPT = re.compile(r"/((?:(?:site|dist)-packages/|lib(?:64)?/python\d)[\w./+-]*(?::[\w.<>]+)*)$")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"<>)\]]+")
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\[[0-9a-fA-F:]*:[0-9a-fA-F:]+\]")
_BARE_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])(?:%\w+)?")
_PROCESS = re.compile(r"^((?:Process|-- child process) \d+:? ).*$", re.MULTILINE)
_LEAST_VALUE, _LONG_VALUE = 3, 6
"""Shorter values of arguments are found in everything; and so are numbers that are no long ones."""
_LEAST_JOB_DIGITS = 4
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_TERMS = frozenset(("verdict", "cause", "domain", "confidence", "closed_by", "state", "role", "phase"))
"""Keys whose values are words of ours."""
_OURS = frozenset(word for kind in (VerdictName, Cause, Domain, Confidence) for word in get_args(kind))
_SENTENCES = frozenset(("for", "has", "not", "the", "job", "pid", "seq", "node", "host", "rank", "ranks", "step", "steps", "wait", "waits", "waiting"))
_PROGRAMS = frozenset(("rankwatch", "torchrun", "torch", "python", "python3", "run", "demo", "gloo", "nccl", "cpu", "cuda", "gpu", "all_reduce"))
_SWITCHES = frozenset(("true", "false", "none", "null", "auto", "off"))
_PLAIN = _OURS | _SENTENCES | _PROGRAMS | _SWITCHES
"""Values of arguments that say nothing of anybody, and without which no sentence of a report can be read."""


def hide(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The document for strangers: of the same form, so that every report can be made of it."""
    run = doc.get("run") if isinstance(doc.get("run"), Mapping) else {}
    assert isinstance(run, Mapping)
    arguments = [str(word) for word in run.get("command") or ()] if isinstance(run.get("command"), (list, tuple)) else []
    hosts = {host: f"host{number}" for number, host in enumerate(sorted(_hosts(doc, run)), 1)}
    values = set(_values(arguments))
    paths = {value: redact.HIDDEN for value in values if "/" in value and not _URL.match(value)}
    paths |= {path: _short(path) for text in _texts(doc) for path in _files(text) if not _PATH.fullmatch(path)}
    paths |= {path: _short(path) for path in (str(run.get("run_dir") or ""),) if "/" in path}
    paths |= {path: _short(path) for word in arguments for path in (word, word.partition("=")[2]) if "/" in path and path.endswith(".py")}
    job_id = str(run.get("job_id") or "")
    hidden = _walk(doc, _words(hosts, paths, values, job_id), _words(hosts, paths, (), ""))
    assert isinstance(hidden, dict)
    if isinstance(hidden.get("run"), dict):
        hidden["run"] |= {"command": command(arguments), "labels": dict.fromkeys(run.get("labels") or (), redact.HIDDEN), "status_url": ""}
        hidden["run"] |= {"job_id": redact.HIDDEN} if job_id else {}
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


def _values(arguments: list[str]) -> Iterator[str]:
    """What the arguments say that could be found again in a text: `acme` and `falcon` of `--tags=team=acme,project=falcon`."""
    for word in arguments:
        for value in (word, word.partition("=")[2], *(piece.rsplit("=", 1)[-1] for piece in word.split(","))):
            if not value.startswith("-") and not value.endswith(".py") and value.lower() not in _PLAIN and _telling(value):
                yield value


def _telling(value: str) -> bool:
    return len(value) >= _LONG_VALUE or (len(value) >= _LEAST_VALUE and any(map(str.isalpha, value)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _files(text: str) -> Iterator[str]:
    """The files of the frames that a text holds, as far as they have a folder."""
    for found in _FILE.finditer(text):
        path = found["line"] or found["frame"]
        if "/" in path.strip("/"):
            yield path


def _hosts(doc: Mapping[str, Any], run: Mapping[str, Any]) -> set[str]:
    found = {str(run.get("node") or "")}
    for key in ("hosts", "ranks"):
        table = doc.get(key)
        for value in table.values() if isinstance(table, Mapping) else ():
            found.add(str(value.get("node") or "") if isinstance(value, Mapping) else str(value))
    rows = doc.get("nodes")
    found.update(str(row.get("node") or "") for row in (rows if isinstance(rows, list) else ()) if isinstance(row, Mapping))
    return {host for host in found if host}


def _words(hosts: Mapping[str, str], paths: Mapping[str, str], values: Collection[str], job_id: str) -> Callable[[str], str]:
    """What a text becomes. paths: that the document knows, with what stands for them."""
    host = re.compile(rf"(?<![\w.-])(?:{_any(hosts)})(?![\w-])") if hosts else None
    known = re.compile(rf"(?<![\w./~])(?:{_any(paths)})(?:/[^{_ENDS}]*)*(?![\w-]|\.\w)") if paths else None
    value = re.compile(rf"(?<![\w./-])(?:{_any(values)})(?![\w/-]|\.py\b)") if values else None
    telling = job_id.lower() not in _PLAIN and (_telling(job_id) or len(job_id) >= _LEAST_JOB_DIGITS)
    job = re.compile(rf"(?<![A-Za-z0-9]){re.escape(job_id)}(?![A-Za-z0-9])") if telling else None

    def path(text: str) -> str:
        return paths.get(text) or _short(text)

    def words(text: str) -> str:
        text = _PROCESS.sub(rf"\1{redact.HIDDEN}", text)
        text = _URL.sub(rf"\1://{redact.HIDDEN}", text)
        text = path(text) if _WHOLE.fullmatch(text) else _QUOTED.sub(lambda found: f"{found['quote']}{path(found['path'])}{found['quote']}", text)
        if known is not None:
            text = known.sub(lambda found: path(found[0]), text)
        text = _PATH.sub(lambda found: path(found[0]), text)
        if value is not None:
            text = value.sub(redact.HIDDEN, text)
        if host is not None:
            text = host.sub(lambda found: hosts[found[0]], text)
        if job is not None:
            text = job.sub(redact.HIDDEN, text)
        text = _ADDRESS.sub(lambda found: found[0] if found[0] in _LOOPBACK else redact.HIDDEN, text)
        return _BARE_IPV6.sub(_address, text)

    return words


def _any(texts: Collection[str]) -> str:
    """The longest first: a part of another must not be taken for it."""
    return "|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text))))


def _address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.IPv6Address(found[0])
    except ValueError:  # a time
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else redact.HIDDEN


def _short(path: str) -> str:
    """`.../train.py`; of a library what lies below the folder of packages."""
    kept = _KEPT.search(path)
    return f".../{kept[1] if kept else path.rsplit('/', 1)[-1]}"


def _walk(value: Any, words: Callable[[str], str], key_words: Callable[[str], str]) -> Any:
    """key_words: for keys, and for what is a word of ours, of which arguments have nothing to take away."""
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {
            key_words(str(key)): key_words(item) if key in _TERMS and isinstance(item, str) else _walk(item, words, key_words) for key, item in value.items()
        }
    return [_walk(item, words, key_words) for item in value] if isinstance(value, (list, tuple)) else value
