"""Runs healthy jobs that look stuck, drills, or a folder of cases under rankwatch, and prints one table.

  python tests/ranks/enact.py controls                               tests/ranks/controls: none of these may be paged
  python tests/ranks/enact.py faults                                 every `rankwatch demo --fault`: the right rank and cause
  python tests/ranks/enact.py FOLDER                                 any folder with an expect.json (and held_expect.json)
  python tests/ranks/enact.py FOLDER --slots 7 --hogs 4 --repeat 3   seven cases side by side, each pinned to two CPUs of its own beside 4 busy loops

Columns: verdicts in the order seen; seconds from the onset to the first incident that names the right rank and cause, and to the page; exit code.
For controls "named" is the age of the wait at the first notice. Exit status: 0 all right, 1 some wrong, 2 usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from case_table import COMMAND, How, drills, read_table
from enacting import Result, enact

CONTROLS = Path(__file__).with_name("controls")
HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(200_000))"
HEAD = f"{'case':<32} {'result':<7} {'named':>7} {'paged':>7} {'exit':>5} {'wall':>6}  verdicts; remarks"


def cases(what: str) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder to run in and its table."""
    if what == "faults":
        return Path.cwd(), drills()
    folder = CONTROLS if what == "controls" else Path(what).resolve()
    return folder, read_table(folder)


def worker(number: int, cpus: list[int] | None, num_hogs: int, jobs: queue.SimpleQueue[Any], done: queue.SimpleQueue[Result]) -> None:
    """Takes cases until there are none. What this thread starts inherits its CPUs."""
    if cpus:
        os.sched_setaffinity(0, cpus)  # 0 is the calling thread
    hogs = [subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.DEVNULL) for _ in range(num_hogs)]
    try:
        while True:
            try:
                name, case, folder, work, turn, how = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                done.put(enact(name, case, folder, work, turn, how))
            except Exception as error:  # a broken case must not end the table
                done.put(Result(name, turn, False, [], None, None, None, 0.0, [f"runner: {error!r}"], []))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def line(result: Result) -> str:
    named, paged = (f"{value:.1f} s" if value is not None else "-" for value in (result.named_s, result.paged_s))
    word = "n/a" if result.unable else "right" if result.right else "WRONG"
    remarks = "; ".join([*result.problems, *(f"({note})" for note in result.notes)])
    told = " -> ".join(result.verdicts()) or "-"
    code = "-" if result.exit_code is None else str(result.exit_code)
    return f"{result.name:<32} {word:<7} {named:>7} {paged:>7} {code:>5} {result.wall_s:>5.0f}s  {told}{'; ' + remarks if remarks else ''}"


def summary(results: list[Result]) -> str:
    """One row a case over its repetitions."""
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_name[result.name].append(result)
    rows = [f"\n{'case':<32} {'right':>6} {'first named':>16} {'paged':>16}  verdicts"]
    for name, turns in sorted(by_name.items()):
        told = list(dict.fromkeys(verdict for result in turns for verdict in result.verdicts()))
        right = f"{sum(result.right for result in turns)}/{len(turns)}"
        spans = [_span([value for result in turns if (value := getattr(result, key)) is not None]) for key in ("named_s", "paged_s")]
        rows.append(f"{name:<32} {right:>6} {spans[0]:>16} {spans[1]:>16}  {', '.join(told) or '-'}")
    wrong = [result for result in results if not result.right]
    names = sum("WRONG NAME" in problem for result in results for problem in result.problems)
    pages = sum("FALSE PAGE" in problem for result in results for problem in result.problems)
    rows.append(f"{len(results) - len(wrong)} right, {len(wrong)} wrong; {names} wrong names on a page, {pages} false pages")
    return "\n".join(rows)


def _span(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{min(values):.1f} s" if len(values) == 1 else f"{min(values):.1f}-{max(values):.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="controls, faults, or a folder with an expect.json")
    parser.add_argument("--command", default=COMMAND, help="launcher template with {python}, {run_dir}, {port} (default: %(default)s)")
    parser.add_argument("--only", default="*", help="shell patterns of case names, comma-separated; the suffix .py may be left out")
    parser.add_argument("--slots", "--jobs", type=int, default=1, help="cases side by side; with more than one each has its own share of the CPUs")
    parser.add_argument("--hogs", type=int, default=0, help="busy processes beside each case; lateness is then reported, not judged")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--strict", action="store_true", help="undue and missing notices are wrong as well")
    parser.add_argument("--full", action="store_true", help="faults run on after they were named")
    parser.add_argument("--linger", type=float, default=5.0, help="seconds that a named fault is watched on (default %(default)s)")
    parser.add_argument("--limit-factor", type=float, help="stretches all time limits (default 1, with hogs 3)")
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for run directories and logs (default: a temporary one, kept when something is wrong)")
    options = parser.parse_args()
    folder, table = cases(options.what)
    patterns = options.only.split(",")
    names = [name for name in table if any(fnmatch.fnmatch(each, pattern) for each in (name, name.removesuffix(".py")) for pattern in patterns)]
    if not names:
        parser.error(f"no case fits {options.only}; there are {', '.join(table)}")
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // options.slots
    if options.slots > 1 and share < 1:
        parser.error(f"--slots {options.slots} on {len(cpus)} CPUs")
    share = min(share, 2)
    factor = options.limit_factor or (3.0 if options.hogs else 1.0)
    how = How(options.command, options.strict, options.full, options.linger, factor, judge_lateness=not options.hogs)
    work = (options.keep or Path(tempfile.mkdtemp(prefix="enact_"))).resolve()
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Result] = queue.SimpleQueue()
    for turn in range(options.repeat):
        for name in names:
            place = work / f"turn{turn}" / name
            shutil.rmtree(place, ignore_errors=True)
            jobs.put((name, table[name], folder, place, turn, how))
    pairs = [cpus[number * share : (number + 1) * share] if options.slots > 1 else None for number in range(options.slots)]
    threads = [threading.Thread(target=worker, args=(number, pair, options.hogs, jobs, done)) for number, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    print(HEAD, flush=True)
    results = []
    for _ in range(options.repeat * len(names)):
        results.append(done.get())
        print(line(results[-1]), flush=True)
    for thread in threads:
        thread.join()
    print(summary(results))
    if options.json_out:
        options.json_out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if options.keep or not all(result.right for result in results):
        print(f"run directories and logs: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
