"""Every NCCL fault, enacted on real GPUs under `rankwatch torchrun` with default options: is the right rank named, with the right cause, in time?

  python tests/gpu/faults.py OUT_DIR                            all of gpu_cases.FAULTS, several jobs at a time share the GPUs
  python tests/gpu/faults.py OUT_DIR --only 'graph*,spin' --jobs 2

named, paged: seconds from the onset until incident.json says so on disk; stacks: until all expected stacks lie there. "late" is right, but past the bar.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_output as output
from gpu_cases import FAULTS, Fault
from gpu_judging import Judged, judge_fault, settled
from gpu_watch import POLL_S, Running, Seen

LINGER_S = 6.0  # once the verdict is there, the rest of the evidence has this long
SETTLE_S = 2.0
MARGIN_S = 8.0  # before --limit-s running jobs are cut


@dataclass(slots=True)
class Row:
    name: str
    judged: Judged
    seen: Seen
    onset: float | None
    code: int | None
    wall_s: float
    cut: bool
    began: float

    def line(self) -> list[object]:
        told = " -> ".join(dict.fromkeys(str(state) for state in self.seen.states if state.verdict != "recovered")) or "-"
        remarks = "; ".join([*self.judged.problems, *self.judged.late, *(["cut at its limit"] if self.cut else [])])
        start = "-" if self.onset is None else f"{self.onset - self.began:.0f} s"
        times = [output.seconds(value) for value in (self.judged.named_s, self.judged.paged_s, self.judged.stacks_s)]
        end = "-" if self.code is None else self.code
        return [self.name, self.judged.word, *times, start, end, f"{self.wall_s:.0f} s", told + (f"; {remarks}" if remarks else "")]


HEAD = ("case", "result", "named", "paged", "stacks", "onset", "exit", "wall", "verdicts; remarks")


def enact(case: Fault, options: argparse.Namespace, work: Path, deadline: output.Deadline) -> Row:
    job = [str(output.JOBS / "fault_job.py"), case.name, *output.backend(options), "--timeout-s", str(case.timeout_s)]
    final_at: float | None = None
    cut = False
    with Running(work / case.name, job, options.gpus, dict(case.env)) as running:
        while True:
            time.sleep(POLL_S)
            seen, now = running.look(), time.time()
            onset = next((float(one["t"]) for one in running.truths("fault")), None)
            if running.process.poll() is not None:
                settle = time.time() + SETTLE_S
                while time.time() < settle:
                    running.look()
                    time.sleep(POLL_S)
                break
            if settled(case, seen, onset, options.gpus, now):
                break
            judged = judge_fault(case, seen, onset, options.gpus)
            held = onset is not None and now > onset + case.hold_s and not case.until_exit
            if held and not any(problem.startswith("no ") and not problem.startswith("no stack") for problem in judged.problems):
                final_at = final_at or now
                if now > final_at + LINGER_S:
                    break
            cut = running.wall_s > case.limit_s or deadline.left_s < MARGIN_S
            if cut:
                break
        code, wall_s = running.process.poll(), running.wall_s
    return Row(case.name, judge_fault(case, seen, onset, options.gpus), seen, onset, code, wall_s, cut, running.began)


def chosen(options: argparse.Namespace) -> dict[str, Fault]:
    patterns = options.only.split(",")
    table = {case.name: case.on_cpu() if options.dry_run_on_cpu else case for case in FAULTS if case.cpu or not options.dry_run_on_cpu}
    found = {name: case for name, case in table.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    if not found:
        raise SystemExit(f"no case fits {options.only}; there are {', '.join(table)}")
    return found


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="*", help="shell patterns of case names, comma-separated")
    parser.add_argument("--jobs", type=int, default=8, help="cases side by side (default %(default)s)")


def main() -> int:
    options = output.arguments(__doc__ or "", 540.0, add)
    cases, deadline, work = chosen(options), output.Deadline(options.limit_s), output.scratch("faults")

    def told(row: Row) -> str:
        return "  ".join(str(word) for word in row.line())

    rows = output.side_by_side(list(cases), lambda name: enact(cases[name], options, work, deadline), options.jobs, deadline, told)
    complete = len(rows) == len(cases) and not (deadline.left_s < MARGIN_S and any(row.cut for row in rows.values()))
    right = all(row.judged.word == "right" for row in rows.values())
    lines = [row.line() for row in rows.values()]
    lines += [[name, "not run", *["-"] * 7] for name in cases if name not in rows]
    raw = {"rows": {name: asdict(row) for name, row in rows.items()}, "not_run": [name for name in cases if name not in rows]}
    return output.finish(options, "faults", raw, work, output.table(HEAD, lines), complete=complete, right=right)


if __name__ == "__main__":
    sys.exit(main())
