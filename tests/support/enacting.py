"""Runs one case of a folder under a monitor and reads the incident files that it leaves. Standard library, Linux."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from case_table import CLOCK_SLACK_S, PAGES, How, Seen, accepted, culprit_sets, fits, judge_control, judge_fault

POLL_S = 0.25
FIELDS = ("verdict", "cause", "culprit_ranks", "waiting_ranks", "opened_at", "summary", "stacks")


@dataclass(slots=True)
class Result:
    """named_s and paged_s: from the onset of a fault (of a control's wait, for a notice) to the first incident with the right rank / page."""

    name: str
    turn: int
    right: bool
    states: list[Seen]
    named_s: float | None
    paged_s: float | None
    exit_code: int | None
    wall_s: float
    problems: list[str]
    notes: list[str]
    unable: bool = False  # a drill that this machine cannot enact

    def verdicts(self) -> list[str]:
        return list(dict.fromkeys(str(state) for state in self.states if state.verdict != "recovered"))


@dataclass(slots=True)
class Incidents:
    """Every state of every incident file of some run directories, in the order seen."""

    run_dirs: list[Path]
    states: list[Seen] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)  # cleared when a later read succeeds
    last: dict[Path, tuple[Any, ...]] = field(default_factory=dict)

    def poll(self) -> None:
        for path in sorted(path for run_dir in self.run_dirs for path in run_dir.glob("incidents/*/incident.json")):
            name = path.parent.name
            try:
                doc = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self.broken[name] = f"unreadable: {error}"
                continue
            if missing := [key for key in FIELDS if key not in doc]:
                self.broken[name] = f"without {', '.join(missing)}"
                continue
            self.broken.pop(name, None)
            key = (doc["verdict"], doc["cause"], tuple(sorted(doc["culprit_ranks"])))
            if self.last.get(path) != key:
                since = doc.get("since", doc["opened_at"])
                self.states.append(Seen(name, time.time(), path not in self.last, *key, doc["opened_at"], since, doc["summary"]))
                self.last[path] = key


class Processes:
    """Everything that descends from one case: it carries a mark in its environment."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.launchers: list[subprocess.Popen[bytes]] = []

    def marked(self) -> list[int]:
        found, needle = [], f"ENACT_MARK={self.mark}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    marked = needle in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                    state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                except (OSError, IndexError):
                    continue
                if marked and state not in "ZX":
                    found.append(int(entry))
        return sorted(found)

    def ranks(self) -> list[int]:
        launchers = {launcher.pid for launcher in self.launchers}
        return [pid for pid in self.marked() if _parent(pid) in launchers]

    def send(self, number: signal.Signals, to: str) -> None:
        whole = self.ranks if to == "ranks" else self.marked
        pids = [self.launchers[int(to.partition(" ")[2] or 0)].pid] if to.startswith("launcher") else whole()
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def end(self) -> None:
        """As an operator would, then whatever is still there."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.terminate()
        for launcher in self.launchers:
            try:
                launcher.wait(10)
            except subprocess.TimeoutExpired:
                continue
        for _ in range(50):
            if not (pids := self.marked()):
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
            time.sleep(0.1)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def truths(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("truth_rank*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # being written
    return found


def onset_of(folder: Path, spec: dict[str, Any]) -> float | None:
    where = {"event": spec["event"], **({"rank": spec["rank"]} if "rank" in spec else {}), **spec.get("where", {})}
    times = [line["t"] for line in truths(folder) if all(line.get(key) == value for key, value in where.items())]
    return min(times, default=None)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def enact(name: str, case: dict[str, Any], folder: Path, work: Path, turn: int, how: How) -> Result:
    """Run one case in the fresh folder `work` and judge it. Nothing of it lives on afterwards."""
    truth_dir = work / "truth"
    truth_dir.mkdir(parents=True)
    run_dirs = [work / f"run{number}" for number in range(case.get("launchers", 1))]
    incidents, processes = Incidents(run_dirs), Processes()
    actions = list(case.get("actions", []))
    limit_s = case["limit_s"] * how.limit_factor * max(1.0, float(os.environ.get("CONTROL_SCALE", "1")) if case["kind"] == "control" else 1.0)
    port, began, ready_at, done_at, cut = free_port(), time.time(), time.time(), None, False
    with (work / "output.log").open("wb") as log:
        try:
            for number, run_dir in enumerate(run_dirs):
                if number:
                    time.sleep(4.0)  # the first one hosts the rendezvous
                command, env = _command(case, folder, run_dir, port, truth_dir, processes.mark, how)
                processes.launchers.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
            launcher = processes.launchers[0]
            while launcher.poll() is None:
                time.sleep(POLL_S)
                incidents.poll()
                now = time.time()
                if now - began > limit_s:
                    cut = True
                    break
                if actions and (after := _due(actions[0], truth_dir, ready_at, case)) is not None and now >= after:
                    action = actions.pop(0)
                    processes.send(signal.Signals[action["send"]], action["to"])
                    ready_at = now
                if case["kind"] == "fault" and not how.full:
                    onset = onset_of(truth_dir, case["onset"])
                    if done_at is None and any(accepted(state, case, onset) for state in incidents.states):
                        done_at = now
                    if done_at is not None and now - done_at > how.linger_s and not case.get("forbid_verdicts"):
                        break
                    if onset is not None and done_at is None and now - onset > case["max_s"] * (1.0 if how.judge_lateness else 3.0) + how.linger_s:
                        break
            code, wall_s = launcher.poll(), time.time() - began
            if code is not None:
                settled = time.time() + 2.0
                while time.time() < settled:
                    incidents.poll()
                    time.sleep(POLL_S)
        finally:
            processes.end()
    return _result(name, case, turn, how, incidents, truth_dir, code, wall_s, limit_s if cut else None)


def _due(action: dict[str, Any], truth_dir: Path, ready_at: float, case: dict[str, Any]) -> float | None:
    """When the action is to be done; None while its event has not come from all ranks."""
    if "event" in action:
        times = [line["t"] for line in truths(truth_dir) if line["event"] == action["event"]]
        if len(times) < case["nproc"] * case.get("launchers", 1):
            return None
        ready_at = max(ready_at, *times)
    return ready_at + float(action.get("after_s", 0.0))


def _command(case: dict[str, Any], folder: Path, run_dir: Path, port: int, truth_dir: Path, mark: str, how: How) -> tuple[list[str], dict[str, str]]:
    fill = {"{run_dir}": str(run_dir), "{port}": str(port), "{python}": sys.executable, "{dir}": str(folder)}

    def filled(word: str) -> str:
        for key, value in fill.items():
            word = word.replace(key, value)
        return word

    if case["kind"] == "drill":
        words = case["launch"]
    else:
        words = [*shlex.split(how.command), *case.get("torchrun", ["--master-port", "{port}"]), "--nproc-per-node", str(case["nproc"])]
        words += [*case["launch"], *case.get("args", [])]
    env = {**os.environ, "ENACT_MARK": mark, "REENACT_TRUTH_DIR": str(truth_dir), "CONTROL_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    for key, value in case.get("env", {}).items():
        joined = key == "PYTHONPATH" and env.get(key)
        env[key] = filled(value) + (os.pathsep + env[key] if joined else "")
    return [filled(word) for word in words], env


def _result(
    name: str, case: dict[str, Any], turn: int, how: How, incidents: Incidents, truth_dir: Path, code: int | None, wall_s: float, cut_s: float | None
) -> Result:
    states = incidents.states
    problems = [f"incident {each}: {why}" for each, why in sorted(incidents.broken.items())]
    notes: list[str] = []
    named: list[float] = []
    paged: list[float] = []
    if case["kind"] == "control":
        exits = case.get("exit", 0)
        if cut_s is not None:
            problems.append(f"time limit {cut_s:.0f} s")
        elif code not in (exits if isinstance(exits, list) else [exits]):
            problems.append(f"exit code {code}, expected {exits}")
        more, notes = judge_control(case, states, how)
        problems += more
        named = [state.opened_at - state.since for state in states if state.fresh]
    else:
        drill = case["kind"] == "drill"
        onset = onset_of(truth_dir, case["onset"]) if not drill else _planted(incidents.run_dirs[0])
        if drill:
            problems += [] if code == 0 else [f"exit code {code}"] if cut_s is None else [f"time limit {cut_s:.0f} s"]
            problems += [f"WRONG NAME {state}" for state in states if state.verdict in PAGES and list(state.culprits) not in culprit_sets(case)]
        else:
            more, notes = judge_fault(case, states, onset, how)
            problems += more
        right = [state for state in states if fits(state, case) and onset is not None and state.when >= onset - CLOCK_SLACK_S]
        named = [state.at - onset for state in right if onset is not None]
        paged = [state.at - onset for state in right if onset is not None and state.verdict in PAGES]
    unable = case["kind"] == "drill" and code == 4
    return Result(name, turn, not problems or unable, states, min(named, default=None), min(paged, default=None), code, wall_s, problems, notes, unable)


def _planted(run_dir: Path) -> float | None:
    """When a drill's job entered its fault: the demo's own note of it."""
    try:
        return float((run_dir / "planted").read_text())
    except (OSError, ValueError):
        return None
