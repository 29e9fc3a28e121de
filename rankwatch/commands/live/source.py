"""Where a picture of a job comes from: its launcher's socket on this machine, its status address, or the files of a run that is over."""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from rankwatch import shown
from rankwatch.cli import say
from rankwatch.commands import node_runs
from rankwatch.commands.fetch import document, is_url, why
from rankwatch.commands.live import running
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.report import moved, outcome
from rankwatch.report.documents import RUN, load
from rankwatch.serve.control import ControlError, ask
from rankwatch.serve.token import read_token

STATE_ROUTE, COMPILE_ROUTE = "/api/v1/state", "/api/v1/compile"
ANSWER_S = 5.0
COMPILES_EVERY_S = 15.0


class Nothing(Exception):
    """No such job runs, and nothing is left of it: exit code 3."""


class Misused(Exception):
    """The user's mistake: exit code 2."""


class Lost(Exception):
    """It does not answer now. gone: its launcher has ended."""

    def __init__(self, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


@dataclass(frozen=True, slots=True)
class Picture:
    """state: as /api/v1/state. compiles: as /api/v1/compile, {} where nothing is known. over: it does not change any more."""

    state: dict[str, Any]
    compiles: dict[str, Any] = field(default_factory=dict)
    over: bool = False


class Source(Protocol):
    """One job. name: what people call the place."""

    name: str

    def take(self, compiles: bool = True) -> Picture:
        """The newest picture; Lost where there is none now. compiles: with the compile document."""


class Compiles:
    """The compile document of a job that is looked at again and again: it may be a megabyte, so it is fetched while ranks compile, and now and then."""

    def __init__(self, fetch: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = clock
        self._newest: dict[str, Any] = {}
        self._fetched_at = -1e9

    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The one that goes with this state."""
        phases = state.get("phases")
        compiles = isinstance(phases, dict) and "compiling" in phases
        if compiles or self._newest.get("now") or self._clock() - self._fetched_at >= COMPILES_EVERY_S:
            self._newest, self._fetched_at = self._fetch(), self._clock()
        return self._newest


class Here:
    """A launcher of this machine, by its socket; once it has ended, the files of its run."""

    def __init__(self, path: str, run_dir: str) -> None:
        self.name = run_dir or path
        self._path = path
        self._run_dir = run_dir
        self._compiles = Compiles(self._fetch_compiles)

    def take(self, compiles: bool = True) -> Picture:
        try:
            state = ask(self._path, {"do": "state"}, ANSWER_S)
        except ControlError as error:
            if error.gone and self._run_dir:
                try:
                    return Files(self._run_dir).take()
                except Lost:
                    pass
            raise Lost(str(error), error.gone) from None
        return Picture(_checked(state), self._compiles.of(state) if compiles else {}, state.get("state") in ("done", "failed"))

    def _fetch_compiles(self) -> dict[str, Any]:
        try:
            return ask(self._path, {"do": "compile"}, ANSWER_S)
        except ControlError:
            return {}  # nothing is known of compiles


class There:
    """A status address. untold: what to say where it asks for a token that is not sent there."""

    def __init__(self, url: str, token: str = "", untold: str = "") -> None:
        self.name = shown.one_line(url)
        self._url = url.rstrip("/").removesuffix(STATE_ROUTE)
        self._token = token
        self._untold = untold
        self._compiles = Compiles(self._fetch_compiles)

    def take(self, compiles: bool = True) -> Picture:
        try:
            state = _checked(document(self._url, STATE_ROUTE, self._token, ANSWER_S))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise Lost("it answers something that is no JSON; is this the status address of a launcher?") from None
        except ValueError as error:
            if self._untold and isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code == 401:
                raise Lost(f"it asks for a token; {self._untold}") from None
            raise Lost(str(error)) from None
        except OSError as error:
            raise Lost(f"nobody answers: {why(error)}") from None
        return Picture(state, self._compiles.of(state) if compiles else {}, state.get("state") in ("done", "failed"))

    def _fetch_compiles(self) -> dict[str, Any]:
        try:
            found = document(self._url, COMPILE_ROUTE, self._token, ANSWER_S)
        except (OSError, ValueError):
            return {}  # no rank has compiled anything
        return found if isinstance(found, dict) else {}


class Files:
    """A run that nobody answers for: what run.json says."""

    def __init__(self, run_dir: str) -> None:
        self.name = run_dir
        self._run_dir = run_dir

    def take(self, compiles: bool = True) -> Picture:  # noqa: ARG002 - compile.json of a run that is over is `rankwatch compile`'s
        try:
            doc = load(moved.newest(self._run_dir, "run.json"), RUN)
        except (OSError, ValueError) as error:
            raise Lost(f"run.json cannot be read: {error}", gone=True) from None
        return Picture(state_of_run(doc), over=True)


def state_of_run(doc: dict[str, Any]) -> dict[str, Any]:
    """run.json as a state document: of what it does not hold the keys are missing."""
    ended, code = doc.get("ended_at"), doc.get("exit_code")
    incidents = [row for row in doc.get("incidents") or () if isinstance(row, dict)]
    over, ended_by = ended is not None, shown.one_line(doc.get("ended_by") or "")
    said = outcome.sentence(code, ended_by) if over else "No launcher answers and no end is recorded: it was killed, or runs elsewhere."
    keys = ("job_id", "run_dir", "command", "node", "world_size", "nnodes", "attempt", "started_at")
    return {
        "state": doc.get("state") if over else "unknown",
        "headline": said,
        "exit_code": code,
        "ended_by": ended_by,
        "as_of": ended,
        "restarts": doc.get("restarts"),
        "waiting": doc.get("waiting"),
        "run": {key: doc.get(key) for key in keys},
        "incidents": {"open": [], "closed": list(reversed(incidents))},
    }


def find(given: str | None, options: Options) -> Source:
    """The job that `given` means: a run directory or a status address. None: the one that runs here, else the newest run in ./rankwatch-runs.

    Misused where it does not exist or several are meant, Nothing where no job is there.
    """
    if given is not None and is_url(given):
        return There(given, _token(options))
    wanted = given or options.run_dir
    latest = os.path.join(RUNS, LATEST)
    if wanted is None:
        launcher = only(running.launchers(), latest)
        if launcher is not None:
            return Here(launcher.socket, launcher.run_dir)
        if not os.path.isdir(latest):
            raise Nothing(f"no job of yours runs on this machine under rankwatch, and there is no ./{latest}; name a run directory or a status address")
        wanted = latest
    return _in_directory(wanted, options)


def launcher_of(given: str | None, options: Options) -> running.Launcher:
    """The launcher of this machine that `given` means, for what only its socket gives. Misused and Nothing as in `find`."""
    if given is not None and is_url(given):
        raise Misused(f"{given}: this is asked on the node itself, through a private socket; name the run directory there")
    wanted = given or options.run_dir
    if wanted is None:
        launcher = only(running.launchers(), os.path.join(RUNS, LATEST))
        if launcher is None:
            raise Nothing("no job of yours runs on this machine under rankwatch; `rankwatch ls` lists what ran")
        return launcher
    if not os.path.isdir(wanted):
        raise Misused(f"{wanted} is no directory; name the run directory of a job that runs here")
    wanted = _of_this_node(wanted)
    if word := moved.words(wanted):
        say(word)
    launcher = running.at(wanted)
    if launcher is None:
        raise Nothing(_nobody(wanted))
    return launcher


def only(found: Sequence[running.Launcher], latest: str) -> running.Launcher | None:
    """The launcher that is meant where nobody named one: of several the one of ./rankwatch-runs/latest. Misused where that leaves a choice."""
    if len(found) > 1:
        newest = os.path.realpath(latest)
        chosen = [launcher for launcher in found if launcher.run_dir and os.path.realpath(launcher.run_dir) == newest]
        if not chosen:
            names = ", ".join(shown.one_line(launcher.run_dir or launcher.socket) for launcher in found[:8])
            more = f" and {len(found) - 8} more: rankwatch ls" if len(found) > 8 else ""
            raise Misused(f"{len(found)} jobs of yours run on this machine; name one: {names}{more}")
        found = chosen
    return found[0] if found else None


def _in_directory(path: str, options: Options) -> Source:
    if not os.path.isdir(path):
        raise Misused(f"{path} is no directory; name a run directory, or a running job's status address such as http://127.0.0.1:27435")
    path = _of_this_node(path)
    if word := moved.words(path):
        say(word)
    launcher = running.at(path)
    if launcher is not None:
        return Here(launcher.socket, launcher.run_dir or path)
    try:
        file = moved.newest(path, "run.json")
        doc = load(file, RUN)
    except (OSError, ValueError) as error:
        raise Nothing(f"{path} is no run: run.json cannot be read ({getattr(error, 'strerror', None) or error})") from None
    url = str(doc.get("status_url") or "")
    if doc.get("ended_at") is None and doc.get("node") != socket.gethostname() and is_url(url) and not _loopback(url):
        strange = _strange(path, file, doc, url)
        return There(url, "" if strange else _token(options), f"{strange}; {_with_token(url, options)}" if strange else "")
    return Files(path)


def _of_this_node(path: str) -> str:
    """The run that a directory means: itself, or what a node other than the first keeps in it; of several the one whose launcher runs here."""
    try:
        place = node_runs.meant(path)
    except node_runs.Several as error:
        here = [each for each in node_runs.within(path) if running.at(each) is not None]
        if len(here) != 1:
            raise Misused(str(error)) from None
        place = here[0]
    if place != path:
        say(node_runs.words(place))
    return place


def _strange(path: str, file: str, doc: Mapping[str, Any], url: str) -> str:
    """Why the token is not sent to an address that nobody has typed, "" where it is. It is from `doc`, the run.json in `file` of the run directory `path`."""
    for place in (path, os.path.dirname(file), file):
        try:
            status = os.stat(place)
        except OSError as error:
            return f"none is sent there, since {place} cannot be looked at ({error.strerror or error})"
        if status.st_uid not in (os.geteuid(), 0):
            return f"none is sent there, since the address comes from {place}, which is another user's (uid {status.st_uid})"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"none is sent there, since the address comes from {place}, which others may write (mode {stat.S_IMODE(status.st_mode):04o})"
    host, node = _host(url), str(doc.get("node") or "").lower()
    if host not in (node, socket.gethostname().lower()):
        return f"none is sent there, since {path}/run.json names {shown.one_line(host)}, and the run is of {shown.one_line(node) or 'no known node'}"
    return ""


def _with_token(url: str, options: Options) -> str:
    return f"if it is right, ask it by name: rankwatch --token-file {shlex.quote(options.token_file or 'FILE')} status {shlex.quote(shown.one_line(url))}"


def _nobody(path: str) -> str:
    """Why no launcher here answers for a run directory."""
    try:
        doc = load(moved.newest(path, "run.json"), RUN)
    except (OSError, ValueError):
        return f"{path} is no run directory: it has no readable run.json"
    if doc.get("ended_at") is not None:
        return f"{path}: the job has ended with {shown.exit_words(doc.get('exit_code'))}"
    node = shown.one_line(doc.get("node") or "?")
    if node != socket.gethostname():
        return f"{path}: the job was started on {node}; run this there"
    return f"{path}: no launcher answers here and no end is recorded; was it killed, does it run in another container, or as another user?"


def _loopback(url: str) -> bool:
    host = _host(url)
    return host in ("", "localhost", "::1") or host.startswith("127.")


def _host(url: str) -> str:
    """The host that an address names, in small letters; "" where it names none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _token(options: Options) -> str:
    if not options.token_file:
        return ""
    try:
        return read_token(options.token_file)
    except ValueError as error:
        raise Misused(f"--token-file: {error}") from None


def _checked(doc: object) -> dict[str, Any]:
    if not isinstance(doc, dict) or not isinstance(doc.get("run"), dict):
        raise Lost("what answers there is no rankwatch: its state has no run")
    try:
        json.dumps(doc, allow_nan=False)
    except (ValueError, RecursionError):
        raise Lost("what answers there is no rankwatch: its state has numbers that JSON does not have") from None
    return doc
