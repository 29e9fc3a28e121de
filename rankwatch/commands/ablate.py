"""`rankwatch ablate`: the same job once per backend of torch.compile, compared; which layer is to blame, and which frame."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankwatch.cli import fail, say
from rankwatch.commands.ablation import compare, ladder, runs
from rankwatch.commands.ablation.advice import next_steps
from rankwatch.commands.ablation.bisect import Bisection, bisect
from rankwatch.commands.ablation.compare import Floor
from rankwatch.commands.ablation.judge import INCONCLUSIVE, LAYER_FOUND, UNSEEN, Conclusion, Outcome, Run, asked_of, conclude, confirmed, outcome
from rankwatch.commands.ablation.text import Shown, finite, render, to_json
from rankwatch.commands.faults.launch import forwarded, torch_is_missing
from rankwatch.config import RUNS, Options, seconds

DESCRIPTION = """\
Runs a job once per backend of torch.compile, the script unchanged, and compares exit, error, numbers and step time.
The first rung from which on everything up to the job's own backend differs names the layer to blame.
"""
EPILOG = """\
rungs, lowest first:
{rungs}

{numbers}
A layer that was found runs once more, and is named only if it repeats. Inductor's random numbers are made eager's (fallback_random), or dropout
would differ in a healthy job. A job that two equal runs of the lowest rung prove to be unseeded is inconclusive unless it fails.

How a run ends: after its last step each rank waits for the others (files, no collective) and leaves by SystemExit(0): every `finally` runs, code after
the loop does not. A script that ends by itself before is fine. What the script writes it writes in every run: give it a scratch output directory.
All ranks have to be on this machine. The options of rankwatch stand before the word ablate and hold for each run; those that tell people (on-incident,
alertmanager, webhook, textfile-dir) only where they are given there, not from files or the environment.

Exit codes: 0 no difference, 2 wrong usage, 3 layer found, 4 inconclusive.
"""
STEPS, TIMEOUT, BISECT_RUNS = 10, "10m", 24
NOTHING_YET = "nothing was run"
LEAST_TIMEOUT_S = 5.0  # what a rank needs to import torch, at the least
QUIET = ("--on-incident=", "--alertmanager=", "--webhook=", "--textfile-dir=off")
"""A planned failure pages nobody, whatever files and environment say."""


def main(argv: list[str], options: Options) -> int:
    """0: no difference, 2: wrong usage, 3: a layer is to blame, 4: inconclusive."""
    own, job_words = _split(argv)
    arguments = _parser().parse_args(own)
    try:
        rungs = ladder.parse(arguments.ladder)
        timeout_s = seconds(arguments.timeout)
    except ValueError as error:
        return fail(f"ablate: {error}")
    if not job_words or Path(job_words[0]).name != "torchrun":
        return fail("ablate: the job stands after --, as in: rankwatch ablate -- torchrun --nproc-per-node 2 train.py")
    if several_nodes(job_words):
        return fail("ablate: --nnodes above 1: all ranks have to be on this machine, since each launcher would decide for itself which run comes next")
    wrong = _out_of_range(arguments, timeout_s)
    if wrong:
        return fail(f"ablate: {wrong}")
    if torch_is_missing():
        return INCONCLUSIVE
    folder = Path(arguments.out or options.run_dir or f"{RUNS}/ablate-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}").absolute()
    try:
        if (folder / "rungs").exists():
            return fail(f"ablate: {folder} holds an ablation already; name another directory with --out")
        folder.mkdir(parents=True, exist_ok=True, mode=options.run_dir_mode)
        (folder / "report.txt").write_text("", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return fail(f"ablate: cannot write into {folder} ({reason}); name another directory with --out")
    words = forwarded(options)
    words += [quiet for quiet in QUIET if quiet.partition("=")[0] not in words]
    job = runs.Job(tuple(job_words[1:]), tuple(words), arguments.steps, arguments.seed, timeout_s)
    ablation = Ablation(job, folder, rungs, arguments.rtol, arguments.slower_than, (lambda _text: None) if arguments.json else _tell)
    try:
        ablation.climb()
        if arguments.bisect and ablation.conclusion.code == LAYER_FOUND:
            ablation.bisect(arguments.bisect_runs)
    except BaseException as error:
        ablation.stopped(error)
        raise
    finally:  # an interrupt and an error leave what the runs before them showed
        text, document = _write(ablation.shown(("torchrun", *job_words[1:]), arguments.bisect), folder)
    sys.stdout.write(document if arguments.json else "\n" + text)
    return ablation.conclusion.code


def _out_of_range(arguments: argparse.Namespace, timeout_s: float) -> str:
    """What is wrong with the numbers of the command line; "" where nothing is."""
    if arguments.steps < 2:
        return "--steps 2 or more: the first step shows how many optimizers there are"
    if timeout_s < LEAST_TIMEOUT_S:
        return f"--timeout {LEAST_TIMEOUT_S:g} s or more: in less no rank has imported torch"
    if arguments.rtol is not None and not 0.0 < arguments.rtol < 1.0:  # false for nan
        return f"--rtol {arguments.rtol:g}: a number above 0 and below 1, such as 0.01"
    if arguments.slower_than is not None and not (math.isfinite(arguments.slower_than) and arguments.slower_than >= 1.0):
        return f"--slower-than {arguments.slower_than:g}: a ratio of 1 or more, such as 1.2"
    if arguments.bisect_runs < 1:
        return "--bisect-runs 1 or more"
    return ""


def _write(shown: Shown, folder: Path) -> tuple[str, str]:
    """report.txt and ablate.json, each before the other's text is made: an error in one leaves the other."""
    try:
        text = render(shown)
        (folder / "report.txt").write_text(text, encoding="utf-8")
    finally:
        document = json.dumps(finite(to_json(shown)), indent=1, allow_nan=False) + "\n"
        (folder / "ablate.json").write_text(document, encoding="utf-8")
    return text, document


class Ablation:
    """The runs so far and what they say."""

    def __init__(self, job: runs.Job, folder: Path, rungs: Sequence[str], rtol: float | None, slower_than: float | None, tell: Callable[[str], None]) -> None:
        self._job, self._folder, self._rungs, self._rtol, self._slower_than, self._tell = job, folder, rungs, rtol, slower_than, tell
        self._runs: list[tuple[Run, Outcome]] = []
        self._repeats: set[int] = set()
        self._floor: Floor | None = None
        self._bisection: Bisection | None = None
        self._bisection_folders: list[str] = []
        self._number = 0
        self.conclusion = Conclusion(INCONCLUSIVE, NOTHING_YET)

    def climb(self) -> None:
        """Run the ladder, and the rung to blame once more."""
        lowest = self._run(self._rungs[0])
        self._keep(lowest)
        if not self._runs[0][1].bad:
            self._keep(self._run(self._rungs[0]), repeat=True)
            for rung in self._rungs[1:]:
                if ladder.worth_running(rung, self._rungs, asked_of([run for run, _found in self._runs])):
                    self._keep(self._run(rung))
        self._conclude()
        if self.conclusion.code == LAYER_FOUND:
            again = self._run(self.conclusion.rung)
            first = next(found for run, found in self._runs if run.rung == self.conclusion.rung)
            self._keep(again, repeat=True)
            self.conclusion = confirmed(self.conclusion, self._runs[-1][1], first)
        self._tell(self.conclusion.words)

    def bisect(self, most_runs: int) -> None:
        """Find the frames; those that gave several graphs (splits of DDP, recompiles) are then taken apart."""
        from_dynamo = self.conclusion.rung == ladder.EAGER
        blamed = next(run for run, _found in self._runs if run.rung == self.conclusion.rung)
        if from_dynamo:
            frames = self._frames_seen_by_dynamo()
        else:
            known = [run for run, found in self._runs if run.rung not in (ladder.OFF, self.conclusion.rung) and not found.bad]
            frames = _frames([*known, blamed])
        self._bisection = bisect(frames, lambda switched: self._still_bad(switched, skip=from_dynamo), most_runs)
        graphs = _graphs_of(self._bisection.culprits, [run for run, _found in self._runs])
        left = most_runs - len(self._bisection.tried)
        if len(self._bisection.culprits) == 1 and len(graphs) > 1 and not from_dynamo and left > 0:
            finer = bisect(graphs, lambda switched: self._still_bad(switched, skip=False), left)
            self._bisection.tried += finer.tried
            if finer.culprits:
                self._bisection.culprits = finer.culprits

    def stopped(self, error: BaseException) -> None:
        """An interrupt, or an error of our own: no conclusion but one that stands already."""
        if self.conclusion.words == NOTHING_YET:
            self.conclusion = Conclusion(INCONCLUSIVE, f"stopped in run {self._number} by {type(error).__name__}{f': {error}' if str(error) else ''}")

    def shown(self, command: Sequence[str], bisected: bool) -> Shown:
        """What there is to tell."""
        culprits = self._bisection.culprits if self._bisection else ()
        blamed = next((found for run, found in self._runs if run.rung == self.conclusion.rung), None)
        return Shown(
            command, self._job.steps, self._job.seed, str(self._folder), self._runs, frozenset(self._repeats), self._floor,
            asked_of([run for run, _found in self._runs]), self.conclusion, self._bisection, self._bisection_folders,
            next_steps(self.conclusion, blamed, culprits, bisected),
        )  # fmt: skip

    def _run(self, rung: str) -> Run:
        self._number += 1
        name = f"{self._number:02d}-{rung}"
        self._tell(f"{name}: {ladder.HELP[rung]}")
        return runs.run(self._job, rung, self._folder / "rungs" / name)

    def _keep(self, run: Run, repeat: bool = False) -> None:
        """Judge a run. The repeat of the lowest rung gives the floor, by which all runs, earlier ones too, are then held."""
        lowest = self._runs[0][0] if self._runs else None
        if repeat:
            self._repeats.add(len(self._runs))
        self._runs.append((run, Outcome(UNSEEN, "")))
        if lowest is not None and repeat and len(self._runs) == 2:
            self._floor = compare.floor_of(lowest.ranks, run.ranks, compare.rtol_for(_dtypes([lowest, run])))
        if self._floor is not None:
            rtol = compare.rtol_for(_dtypes([one for one, _found in self._runs])) if self._rtol is None else self._rtol
            self._floor = dataclasses.replace(self._floor, rtol=rtol)
        self._runs = [
            (one, outcome(one, lowest if number else None, self._floor if number else None, self._slower_than if number > 1 else None))
            for number, (one, _found) in enumerate(self._runs)
        ]
        found = self._runs[-1][1]
        self._tell(f"    {found.kind} after {run.steps} steps, {run.wall_s:.0f} s: {found.words}")

    def _conclude(self) -> None:
        rungs = [pair for number, pair in enumerate(self._runs) if number not in self._repeats]
        asked = asked_of([run for run, _found in self._runs])
        if len(self._runs) > 1 and self._runs[1][1].kind not in ("ok", "wrong numbers"):
            again = self._runs[1][1]
            self.conclusion = Conclusion(INCONCLUSIVE, f"two equal runs of {self._rungs[0]} end differently: {again.kind}, {again.words}")
        elif len(rungs) < 2 and not rungs[0][1].bad:
            self.conclusion = Conclusion(INCONCLUSIVE, "nothing was compiled; torch.compile was asked for nothing that these rungs would change")
        else:
            self.conclusion = conclude(rungs, self._floor, asked)

    def _still_bad(self, switched: Sequence[str], skip: bool) -> bool | None:
        run = self._bisect_run(self.conclusion.rung, switched, skip)
        found = outcome(run, self._runs[0][0], self._floor, self._slower_than)
        self._tell(f"    {found.kind}: {found.words}")
        return None if found.kind == UNSEEN else found.bad

    def _bisect_run(self, rung: str, switched: Sequence[str], skip: bool) -> Run:
        folder = self._folder / "bisect" / f"{len(self._bisection_folders) + 1:02d}"
        self._bisection_folders.append(str(folder))
        self._tell(f"bisect {folder.name}: {len(switched)} switched: {', '.join(switched)[:120]}")
        return runs.run(self._job, rung, folder, eager=() if skip else switched, skip=switched if skip else ())

    def _frames_seen_by_dynamo(self) -> list[str]:
        """A run in which Dynamo leaves every frame of the user's alone, and says which they were."""
        run = runs.run(self._job, self.conclusion.rung, self._folder / "bisect" / "00-frames", skip=["*"])
        return list(dict.fromkeys(frame for rank in run.ranks.values() for frame in rank.frames))


def several_nodes(words: Sequence[str]) -> bool:
    """Whether torchrun is asked for more than one node."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--nnodes", "--nnode"):
            value = value if equals else words[number + 1] if number + 1 < len(words) else "1"
            return value.split(":")[-1] != "1"
    return False


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our words, the job's): parted by the first `--`, else by the word torchrun."""
    words = list(argv)
    at = next((number for number, word in enumerate(words) if word == "--" or Path(word).name == "torchrun"), len(words))
    return words[:at], words[at + 1 :] if at < len(words) and words[at] == "--" else words[at:]


def _parser() -> argparse.ArgumentParser:
    rungs = "\n".join(f"  {rung:27} {ladder.HELP[rung]}" for rung in ladder.RUNGS)
    numbers = " ".join((compare.__doc__ or "").partition("What counts as equal: ")[2].split())
    parser = argparse.ArgumentParser(
        prog="rankwatch ablate",
        usage="rankwatch [options] ablate [--ladder RUNGS] [--steps N] [--bisect] [--out DIR] [...] -- torchrun ... train.py",
        description=DESCRIPTION,
        epilog=EPILOG.format(rungs=rungs, numbers=_wrapped(f"The lowest rung runs twice: {numbers}")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ladder", metavar="RUNGS", default=ladder.DEFAULT, help="rungs by name, with commas (default: all)")
    parser.add_argument("--steps", metavar="N", type=int, default=STEPS, help=f"optimizer steps a run (default {STEPS})")
    parser.add_argument("--seed", metavar="N", type=int, help="seed torch, random and numpy in every rank at its start (default: as the job does)")
    parser.add_argument("--bisect", action="store_true", help="then find the compiled frame, switched to eager by halves, that makes the failure go away")
    parser.add_argument("--bisect-runs", metavar="N", type=int, default=BISECT_RUNS, help=f"at most so many runs for it (default {BISECT_RUNS})")
    parser.add_argument("--timeout", metavar="TIME", default=TIMEOUT, help=f"of one run; a longer one hangs (default {TIMEOUT})")
    parser.add_argument("--rtol", metavar="X", type=float, help="relative tolerance at the first step (default: by element type, see below)")
    parser.add_argument("--slower-than", metavar="RATIO", type=float, help="count a rung as different whose steps take so many times the lowest rung's")
    parser.add_argument("--out", metavar="DIR", help="directory for all of it (default rankwatch-runs/ablate-<utc>)")
    parser.add_argument("--json", action="store_true", help="print ablate.json instead of the report")
    return parser


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 150, break_long_words=False, break_on_hyphens=False)


def _tell(text: str) -> None:
    say(f"ablate: {text}")


def _dtypes(found: Sequence[Run]) -> set[str]:
    return {dtype for run in found for rank in run.ranks.values() for dtype in rank.dtypes}


def _frames(found: Sequence[Run]) -> list[str]:
    """Frames with operations, in the order in which they were compiled."""
    return list(dict.fromkeys(graph.frame for run in found for rank in run.ranks.values() for graph in rank.graphs if graph.ops > 0))


def _graphs_of(frames: Sequence[str], found: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(graph.key for run in found for rank in run.ranks.values() for graph in rank.graphs if graph.frame in frames))
