"""`rankwatch demo`: a real 4-rank DDP + torch.compile job on gloo with two planned troubles, and what rankwatch says of them; or one fault by name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rankwatch.commands.faults import outside
from rankwatch.commands.faults.drill import drill
from rankwatch.commands.faults.launch import WITHOUT_TORCH, Job, copied, forwarded, incidents, torch_is_missing
from rankwatch.commands.faults.table import find, listing
from rankwatch.config import RUNS, Options
from rankwatch.model import PAGING

STUCK_AFTER_S = 12.0  # the default, 20 % of the group's 5 minutes, would make it a long demo
DEADLINE_S = 240.0  # on a slow machine the first compile alone may take a minute
JOB = Path(__file__).with_name("demo_job.py")

INTRODUCTION = """\
rankwatch demo: four ranks, DDP and torch.compile on gloo, about a minute.
  1. after 20 steps rank 1 recompiles alone    -> expect SLOW, cause=compiling: named, but nobody is paged
  2. ten steps later rank 2 never comes back   -> expect STUCK, cause=not_entered: this one pages
The job knows nothing of rankwatch; it is started as `rankwatch --stuck-after {stuck:g} torchrun --nproc-per-node 4 demo_job.py`.
What the ranks themselves print goes to {log}.
"""
EPILOG = """\
faults (one of them instead of the show above; each takes half a minute to a minute and a half):
{listing}

rankwatch's own options stand before the word demo and hold for the demo's job: `rankwatch --on-incident CMD demo --fault killed` drills the on-call,
`rankwatch --alertmanager URL --label drill=true demo --fault stopped` the pager.
Exit codes: 0 rankwatch named what was planted, 2 wrong usage, 3 it did not, 4 this machine cannot enact it.
"""


def main(argv: list[str], options: Options) -> int:
    """`rankwatch [--run-dir DIR] demo [--fault NAME]`. 0: what was planted was named rightly, 2: wrong usage, 3: it was not, 4: not possible here."""
    parser = argparse.ArgumentParser(
        prog="rankwatch demo", description=__doc__, epilog=EPILOG.format(listing=listing()), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", metavar="NAME", help="enact this one and say whether rankwatch named it")
    name = parser.parse_args(argv).fault
    fault = find(name) if name is not None else None
    if name is not None and fault is None:
        print(f"rankwatch demo: there is no fault {name!r}; there are:\n{listing()}", file=sys.stderr)
        return 2
    if why := outside.unsupported():
        print(f"rankwatch demo: {why}", file=sys.stderr)
        return WITHOUT_TORCH
    if torch_is_missing():
        return WITHOUT_TORCH
    default = f"{RUNS}/demo-{fault.name + '-' if fault else ''}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    run_dir = Path(options.run_dir or default)
    return drill(fault, run_dir, forwarded(options)) if fault else run(run_dir, forwarded(options))


def run(run_dir: Path, options: list[str]) -> int:
    """Run the job, narrate it, end it once both troubles were named. 0: both named rightly; 3: not."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "demo.log"
    print(INTRODUCTION.format(stuck=STUCK_AFTER_S, log=log), flush=True)
    command = [sys.executable, "-m", "rankwatch", "--run-dir", str(run_dir), "--stuck-after", f"{STUCK_AFTER_S:g}", *options]
    job = Job([*command, "torchrun", "--standalone", "--nproc-per-node", "4", str(copied(JOB, run_dir))], log)
    try:
        stuck = _wait_for_stuck(job, run_dir)
    finally:
        job.end()
    code, text = judgement(list(incidents(run_dir)), stuck["id"] if stuck else "", run_dir)
    print(text, end="")
    return code


def judgement(found: list[dict[str, Any]], stuck: str, run_dir: Path) -> tuple[int, str]:
    """What rankwatch said of the two troubles, whether it is right, and where to look. stuck: the incident of the missing rank, "" for none.

    (0, text) when both were named rightly and only the second one paged; else (3, text).
    """
    compiling = next((doc for doc in found if doc["cause"] == "compiling" and doc["culprit_ranks"] == [1]), None)
    rows = [
        "",
        *(f"rankwatch said: {' -> '.join(dict.fromkeys(c['verdict'] for c in doc['history']))}, cause {doc['cause']}: {doc['summary']}" for doc in found),
    ]
    missed = [name for name, is_there in (("the lone recompile", compiling), ("the missing rank", stuck)) if not is_there]
    paged = [doc for doc in found if doc["id"] != stuck and any(change["verdict"] in PAGING for change in doc["history"])]
    if missed:
        rows.append(
            f"that is WRONG:  {' and '.join(missed)} was not named within {DEADLINE_S:.0f} s; see {run_dir}, and `rankwatch doctor` for what is off here"
        )
    elif paged:
        rows.append(f"that is WRONG:  it paged for {len(paged)} that it should not have; see {run_dir}")
    else:
        rows.append("that is right:  rank 1 was told while it recompiled and paged nobody, rank 2 was paged")
    if stuck:
        folder = run_dir / "incidents" / stuck
        places = (
            (str(folder / "index.html"), "the page for whoever is on call"),
            (str(folder / "report.txt"), "the same as text"),
            (str(folder / "stacks"), "py-spy stacks of the ranks that matter"),
            (str(run_dir / "events.jsonl"), "everything that was seen"),
            (f"rankwatch report {run_dir}", "every incident of the run, as text"),
        )
        width = max(len(place) for place, _ in places)
        rows += ["", "Where to look:", *(f"  {place:{width}}  {what}" for place, what in places)]
    return 3 if missed or paged else 0, "\n".join(rows) + "\n"


def _wait_for_stuck(job: Job, run_dir: Path) -> dict[str, Any] | None:
    """The incident of the missing rank, with its stacks; None when the job ended or time ran out before."""
    end = time.monotonic() + DEADLINE_S
    while job.running and time.monotonic() < end:
        for doc in incidents(run_dir):
            if doc["verdict"] == "stuck" and doc["culprit_ranks"] == [2] and any(doc["stacks"].values()):
                return doc
        time.sleep(0.2)
    return None
