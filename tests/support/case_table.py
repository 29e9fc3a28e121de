"""What the runner of cases knows of them: the table beside the scripts, and when what a monitor said of one is right. Nothing here runs anything.

expect.json: name -> {"kind": "control" | "fault", "nproc", "launch": [script and arguments], "args", "env", "limit_s", ...}. A control has "allowed" and
"wanted" notices ({"verdict", "causes", "culprit_sets"}), "forbid_verdicts", "exit" (a code or several) and "actions": signals that are sent from outside, one
after the other, each `after_s` seconds after the one before it or after all ranks wrote the truth `event`; "to" is launcher, launcher N, ranks (the
launcher's children) or all. "launchers": 2 starts the command twice. A fault has "culprit_ranks", "also_ok_culprits", "causes", "verdicts", "max_s" and
"onset" (the truth line that says when it began). A case of kind "drill" is a whole `rankwatch demo --fault`, which judges itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = "{python} -m rankwatch --run-dir {run_dir} --listen off torchrun"
PAGES = ("stuck", "failed", "timeout_imminent", "diverged")
CLOCK_SLACK_S = 1.0  # an incident may be dated this much before the onset


@dataclass(frozen=True, slots=True)
class How:
    """What is the same for all cases of a run."""

    command: str = COMMAND  # launcher template: {python} {run_dir} {port}
    strict: bool = False
    full: bool = False  # faults run on after they were named
    linger_s: float = 5.0  # how long a fault is watched on, for a wrong page that comes later
    limit_factor: float = 1.0
    judge_lateness: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """One state in which one incident file was seen."""

    id: str
    at: float
    fresh: bool  # the first state of its file
    verdict: str
    cause: str
    culprits: tuple[int, ...]
    opened_at: float
    since: float
    summary: str

    def __str__(self) -> str:
        return f"{self.verdict}/{self.cause}{list(self.culprits)}"

    @property
    def when(self) -> float:
        """A file's first state is dated by what it says, a later one by the moment it was seen."""
        return self.opened_at if self.fresh else self.at


def read_table(folder: Path) -> dict[str, dict[str, Any]]:
    """expect.json with held_expect.json beside it. SystemExit for a folder without one or an entry that lacks something."""
    table: dict[str, dict[str, Any]] = {}
    for name in ("expect.json", "held_expect.json"):
        if (folder / name).exists():
            table |= json.loads((folder / name).read_text())
    if not table:
        raise SystemExit(f"no expect.json in {folder}")
    for name, case in table.items():
        needed = ("nproc", "limit_s", *(("culprit_ranks", "causes", "max_s", "onset") if case["kind"] == "fault" else ()))
        if lacks := [key for key in needed if key not in case]:
            raise SystemExit(f"{folder}: {name} lacks {', '.join(lacks)}")
        case.setdefault("launch", [name])
    return table


def drills() -> dict[str, dict[str, Any]]:
    """Every `rankwatch demo --fault` as a case."""
    from rankwatch.commands.faults.table import FAULTS

    table = {}
    for fault in FAULTS:
        table[fault.name] = {
            "kind": "drill", "nproc": fault.nproc, "limit_s": 240, "culprit_ranks": list(fault.culprits), "causes": list(fault.causes),
            "also_ok_culprits": [list(each) for each in fault.also_culprits],
            "launch": ["{python}", "-m", "rankwatch", "--run-dir", "{run_dir}", "--listen", "off", "demo", "--fault", fault.name],
        }  # fmt: skip
    return table


# -- judging -----------------------------------------------------------------------------------------------------------


def fits(state: Seen, case: dict[str, Any]) -> bool:
    """Whether it names the planted rank and cause."""
    return list(state.culprits) in culprit_sets(case) and state.cause in case["causes"]


def culprit_sets(case: dict[str, Any]) -> list[list[int]]:
    return [sorted(each) for each in (case["culprit_ranks"], *case.get("also_ok_culprits", []))]


def accepted(state: Seen, case: dict[str, Any], onset: float | None) -> bool:
    return onset is not None and fits(state, case) and state.verdict in case.get("verdicts", ["stuck"]) and state.when >= onset - CLOCK_SLACK_S


def judge_fault(case: dict[str, Any], states: list[Seen], onset: float | None, how: How) -> tuple[list[str], list[str]]:
    problems, notes = [], []
    hit = next((state for state in states if accepted(state, case, onset)), None)
    if onset is None:
        problems.append("the fault did not happen")
    elif hit is None:
        problems.append("not named")
    elif (late := hit.at - onset) > case["max_s"]:
        (problems if how.judge_lateness else notes).append(f"late: {late:.1f} s of {case['max_s']:g}")
    problems += [f"forbidden {state}" for state in states if state.verdict in case.get("forbid_verdicts", [])]
    problems += [f"WRONG NAME {state}" for state in states if state.verdict in PAGES and list(state.culprits) not in culprit_sets(case)]
    return problems, notes


def judge_control(case: dict[str, Any], states: list[Seen], how: How) -> tuple[list[str], list[str]]:
    problems, notes = [], []
    rules = [*case.get("allowed", []), *case.get("wanted", [])]
    for state in states:
        if state.verdict in PAGES or state.verdict in case.get("forbid_verdicts", []):
            problems.append(f"FALSE PAGE {state}")
        elif state.verdict != "recovered" and not any(_allows(rule, state) for rule in rules):
            (problems if how.strict else notes).append(f"undue {state}")
    for rule in case.get("wanted", []):
        if not any(_allows(rule, state) for state in states):
            (problems if how.strict else notes).append(f"no {rule['verdict']} seen")
    return problems, notes


def _allows(rule: dict[str, Any], state: Seen) -> bool:
    if state.verdict != rule["verdict"] or state.cause not in rule.get("causes", [state.cause]):
        return False
    return "culprit_sets" not in rule or list(state.culprits) in [sorted(each) for each in rule["culprit_sets"]]
