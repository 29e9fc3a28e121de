"""Healthy GPU jobs that look stuck, under `rankwatch torchrun` with default options: no page, nothing above `slow`, exit code 0.

python tests/gpu/controls.py OUT_DIR
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_output as output
from gpu_cases import CONTROLS, Control
from gpu_judging import Judged, judge_control
from gpu_watch import POLL_S, Running, Seen

SETTLE_S = 1.0
MARGIN_S = 8.0
HEAD = ("control", "result", "exit", "wall", "longest step", "verdicts; remarks")


@dataclass(slots=True)
class Row:
    name: str
    judged: Judged
    seen: Seen
    code: int | None
    wall_s: float
    longest_s: float  # step of the job: how long it really stood still

    def line(self) -> list[object]:
        told = " -> ".join(dict.fromkeys(str(state) for state in self.seen.states)) or "-"
        remarks = "".join(f"; {problem}" for problem in self.judged.problems)
        return [self.name, self.judged.word, "-" if self.code is None else self.code, f"{self.wall_s:.0f} s", output.seconds(self.longest_s), told + remarks]


def enact(control: Control, options: argparse.Namespace, work: Path, deadline: output.Deadline) -> Row:
    job = [str(output.JOBS / "control_job.py"), control.name, *output.backend(options), "--timeout-s", str(control.timeout_s)]
    with Running(work / control.name, job, options.gpus, dict(control.env)) as running:
        while running.process.poll() is None and running.wall_s < control.limit_s and deadline.left_s > MARGIN_S:
            time.sleep(POLL_S)
            running.look()
        code, wall_s = running.process.poll(), running.wall_s
        time.sleep(SETTLE_S)
        seen = running.look()
        longest = max((float(one["longest_s"]) for one in running.truths("end")), default=0.0)
    return Row(control.name, judge_control(control, seen, code), seen, code, wall_s, longest)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="*", help="shell patterns of names, comma-separated")
    parser.add_argument("--jobs", type=int, default=5, help="jobs side by side (default %(default)s)")


def main() -> int:
    options = output.arguments(__doc__ or "", 330.0, add)
    patterns = options.only.split(",")
    table = {one.name: one for one in CONTROLS if one.cpu or not options.dry_run_on_cpu}
    controls = {name: one for name, one in table.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    if not controls:
        raise SystemExit(f"no control fits {options.only}; there are {', '.join(table)}")
    deadline, work = output.Deadline(options.limit_s), output.scratch("controls")

    def told(row: Row) -> str:
        return "  ".join(str(word) for word in row.line())

    rows = output.side_by_side(list(controls), lambda name: enact(controls[name], options, work, deadline), options.jobs, deadline, told)
    complete = len(rows) == len(controls) and not any(row.code is None and deadline.left_s <= MARGIN_S for row in rows.values())
    right = all(row.judged.word == "right" for row in rows.values())
    raw = {"rows": {name: asdict(row) for name, row in rows.items()}}
    return output.finish(options, "controls", raw, work, output.table(HEAD, [row.line() for row in rows.values()]), complete=complete, right=right)


if __name__ == "__main__":
    sys.exit(main())
