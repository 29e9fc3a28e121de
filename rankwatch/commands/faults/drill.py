"""One drill: start the job, wait for its fault, do what has to be done from outside, compare what rankwatch says with what was planted."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwatch.commands.faults.launch import Job, copied, incidents
from rankwatch.commands.faults.outside import CannotEnact, HeldThread, MemoryCgroup, open_fifo, thread_of
from rankwatch.commands.faults.table import Fault
from rankwatch.config import hidden
from rankwatch.model import PAGING

START_S = 90.0  # until the fault is planted: on a loaded machine the imports alone may take half a minute
NAMING_S = 75.0  # from there to the verdict; the slowest rule here takes 35 s
EVIDENCE_S = 4.0  # for the stacks, which come after the verdict
TICKETS = ("crashed", "exited")  # of the job's own code: whom that wakes can do nothing before the morning

INTRODUCTION = """\
rankwatch demo --fault {name}: {help}.
  planted   {planted}
  expected  {expected}
  job       {nproc} ranks on gloo, group timeout {timeout:g} s; {script}
  started   {command}
  log       {log}
"""


@dataclass(slots=True)
class Outcome:
    """What a drill showed. named: the incident as it was when it was right; wrong: paging incidents of ranks that did nothing, or of no trouble at all."""

    planted_at: float | None = None
    named: dict[str, Any] | None = None
    named_after_s: float = 0.0
    recovered: bool = False
    wrong: tuple[str, ...] = ()


def drill(fault: Fault, run_dir: Path, options: list[str]) -> int:
    """0: rankwatch said what was planted, 3: it did not, 4: this machine cannot enact it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    script = copied(Path(__file__).with_name("jobs") / fault.script, run_dir)
    planted, log = run_dir / "planted", run_dir / "demo.log"
    planted.unlink(missing_ok=True)
    flags = [*fault.flags, *options]
    command = [sys.executable, "-m", "rankwatch", "--run-dir", str(run_dir), *flags, "torchrun", "--standalone", "--nproc-per-node", str(fault.nproc)]
    command += [str(script), fault.name, str(planted), f"{fault.timeout_s:g}"]
    told = " ".join(["rankwatch", "--run-dir", str(run_dir), *hidden.words(flags), "torchrun", "--nproc-per-node", str(fault.nproc), script.name, "..."])
    print(
        INTRODUCTION.format(
            name=fault.name, help=fault.help, planted=fault.planted, expected=expected(fault), nproc=fault.nproc, timeout=fault.timeout_s,
            script=script, command=told, log=log,
        ),
        flush=True,
    )  # fmt: skip
    cgroup = None
    try:
        cgroup = MemoryCgroup() if fault.outside == "limit_memory" else None
        outcome = _run(fault, cgroup.command(command) if cgroup else command, run_dir, planted, log)
    except CannotEnact as error:
        print(f"\ndemo: {fault.name} cannot be enacted here: {error}")
        return 4
    finally:
        if cgroup is not None:
            cgroup.remove()
    code = _judge(fault, outcome, run_dir)
    if "--alertmanager" in flags and set(fault.verdicts) & set(PAGING):
        print("the alert:      was posted to Alertmanager, unless a line above says that it was not taken; it resolves within 12 minutes from now")
    return code


def expected(fault: Fault) -> str:
    """`STUCK rank=1 cause=not_entered`, as the line on stderr will say it."""
    who = f"rank={','.join(map(str, fault.culprits))}" if fault.culprits else "no rank or rank=1"
    verdict = " or ".join(verdict.upper() for verdict in fault.verdicts)
    if set(fault.causes) & set(TICKETS) and "failed" in fault.verdicts:
        page = "a ticket, nobody is paged" if fault.verdicts == ("failed",) else "failed is a ticket, stuck pages"
    else:
        page = "this one pages" if set(fault.verdicts) & set(PAGING) else "nobody is paged" + (", and it recovers" if fault.recovers else "")
    return f"{verdict} {who} cause={' or '.join(fault.causes)} ({page})"


def matches(fault: Fault, doc: dict[str, Any]) -> bool:
    """Whether this incident says what was planted; for one that recovers, whether it has said so."""
    verdicts = {change["verdict"] for change in doc["history"]} if fault.recovers else {doc["verdict"]}
    return bool(verdicts & set(fault.verdicts)) and doc["cause"] in fault.causes and tuple(doc["culprit_ranks"]) in (fault.culprits, *fault.also_culprits)


def misnamed(fault: Fault, doc: dict[str, Any]) -> bool:
    """A page with another rank's name, or any page where nothing is to be paged."""
    paged = [change for change in doc["history"] if change["verdict"] in PAGING]
    if not set(fault.verdicts) & set(PAGING):
        return bool(paged)
    return any(tuple(change["culprit_ranks"]) not in (fault.culprits, *fault.also_culprits) for change in paged)


def _run(fault: Fault, command: list[str], run_dir: Path, planted: Path, log: Path) -> Outcome:
    outcome, held = Outcome(), None
    job = Job(command, log)
    try:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            running = job.running  # asked first: what it wrote before its end is read after it
            if outcome.planted_at is None:
                outcome.planted_at = _time_in(planted)
                if outcome.planted_at is not None:
                    end = time.monotonic() + NAMING_S
                    held = _hold(fault, job)
            if (outcome.planted_at is not None and _told_enough(fault, outcome, outcome.planted_at, run_dir)) or not running:
                break
            time.sleep(0.2)
    finally:
        job.interrupt()  # first, so that what is released below is no recovery
        if held is not None:
            held.release()
        if fault.outside == "open_fifo":
            open_fifo(planted.with_name(planted.name + ".fifo"))
        job.wait()
    docs = list(incidents(run_dir))
    if outcome.named is not None:
        last = next((doc for doc in docs if doc["id"] == outcome.named["id"]), outcome.named)
        outcome.recovered = any(change["verdict"] == "recovered" for change in last["history"])
    outcome.wrong = tuple(doc["summary"] for doc in docs if misnamed(fault, doc))
    return outcome


def _told_enough(fault: Fault, outcome: Outcome, planted_at: float, run_dir: Path) -> bool:
    """Whether the job may be ended: the fault is named and its stacks are there. One that recovers runs to its end."""
    for doc in incidents(run_dir):
        if matches(fault, doc):
            if outcome.named is None:
                outcome.named_after_s = time.time() - planted_at
            outcome.named = doc
            enough = any(doc["stacks"].values()) or time.time() - planted_at - outcome.named_after_s > EVIDENCE_S
            return enough and not fault.recovers
    return False


def _time_in(planted: Path) -> float | None:
    try:
        return float(planted.read_text())
    except (OSError, ValueError):
        return None


def _hold(fault: Fault, job: Job) -> HeldThread | None:
    if fault.outside not in ("trace_rank_1", "hold_gloo_of_rank_1"):
        return None
    pid = job.ranks().get(1)
    if pid is None:
        raise CannotEnact("rank 1 is no child of the launcher")
    return HeldThread(pid if fault.outside == "trace_rank_1" else thread_of(pid, "gloo_tcp"))


def _judge(fault: Fault, outcome: Outcome, run_dir: Path) -> int:
    print(f"\nplanted:        {fault.planted}")
    if outcome.planted_at is None:
        print(f"rankwatch said: nothing was asked of it: the fault was not reached; see {run_dir / 'demo.log'} and `rankwatch doctor`")
        return 3
    documents = list(incidents(run_dir))
    for doc in documents:
        print(f"rankwatch said: {' -> '.join(dict.fromkeys(change['verdict'] for change in doc['history']))}, cause {doc['cause']}: {doc['summary']}")
    if not documents:
        print("rankwatch said: nothing")
    if outcome.named is None:
        print(f"that is WRONG:  not {expected(fault)} within {NAMING_S:.0f} s; see {run_dir}, and `rankwatch doctor` for what is off on this machine")
        return 3
    if outcome.wrong:
        print(f"that is WRONG:  it paged for {len(outcome.wrong)} that it should not have")
        return 3
    if fault.recovers and not outcome.recovered:
        print("that is WRONG:  it was not told that it is over")
        return 3
    print(f"that is right:  rank and cause, {outcome.named_after_s:.1f} s after the fault began")
    folder = run_dir / "incidents" / outcome.named["id"]
    print(f"look at:        {folder / 'index.html'}, {folder / 'report.txt'}, or: rankwatch report {run_dir}")
    return 0
