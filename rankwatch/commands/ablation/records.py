"""What the ranks of one run recorded (agent/ablate_steps.py, agent/ablate.py), read from their files of JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RANK_FILE = re.compile(r"rank_(\d+)\.jsonl$")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. seconds: since the one before, without recording. compiled: a graph was compiled meanwhile."""

    number: int
    loss: float | None
    grad_norm: float | None
    param_norm: float | None
    grads: tuple[float | None, ...]
    seconds: float
    compiled: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph handed to a backend. key: `frame#2`, the third graph of that frame."""

    frame: str
    key: str
    ops: int
    ok: bool
    backend: str
    error: str = ""


@dataclass(slots=True)
class RankRun:
    """One rank of one run."""

    rank: int
    torch: str = ""
    steps: list[Step] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)  # of the user's, that Dynamo was to leave alone
    given: dict[str, int] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    exception: dict[str, Any] | None = None
    reached_last: bool = False
    ended: bool = False
    caught: str | None = None  # it went on after the SystemExit of its last step; caught where: "train.py:31", "" where nobody knows

    def name_of(self, parameter: int) -> str:
        """`blocks.3.weight`, or `parameter 12`."""
        name = self.names[parameter] if parameter < len(self.names) else None
        return name or f"parameter {parameter}"


def read(folder: Path) -> dict[int, RankRun]:
    """rank -> what it recorded; a rank without a file is absent."""
    found = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        match = _RANK_FILE.search(path.name)
        if match:
            try:
                found[int(match[1])] = parse(int(match[1]), path.read_text(encoding="utf-8", errors="replace").splitlines())
            except OSError:
                continue
    return dict(sorted(found.items()))


def parse(rank: int, lines: Iterable[str]) -> RankRun:
    """One file. A line that was cut by a crash is left out."""
    run = RankRun(rank)
    for line in lines:
        try:
            entry = json.loads(line)
            kind = entry["kind"]
        except (ValueError, KeyError, TypeError):
            continue
        if kind == "step":
            run.steps.append(
                Step(entry["n"], entry["loss"], entry["grad_norm"], entry["param_norm"], tuple(entry["grads"]), entry["seconds"], entry["compiled"])
            )
            run.dtypes.update(entry["dtypes"])
        elif kind == "graph":
            run.graphs.append(
                Graph(entry["frame"], entry["key"], entry.get("ops", 0), entry["ok"], entry["backend"], f"{entry['error']}: {entry['text']}")
                if not entry["ok"]
                else Graph(entry["frame"], entry["key"], entry.get("ops", 0), True, entry["backend"])
            )
            run.dtypes.update(entry.get("dtypes", ()))
        elif kind == "start":
            run.torch = entry["torch"]
        elif kind == "names":
            run.names = entry["names"]
        elif kind == "given":
            run.given[entry["backend"]] = entry["level"]
        elif kind == "frame":
            run.frames.append(entry["frame"])
        elif kind == "problem":
            run.problems.append(f"{entry['at']}: {entry['text']}")
        elif kind == "last":
            run.reached_last = True
        elif kind == "caught":
            run.caught = str(entry["where"])
        elif kind == "end":
            run.ended, run.exception = True, entry["exception"]
    return run
