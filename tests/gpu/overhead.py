"""What rankwatch costs on GPUs, everything on (timing, probes, polls each second), against plain torchrun.

  python tests/gpu/overhead.py OUT_DIR                          about 5 minutes on 2 GPUs
  python tests/gpu/overhead.py OUT_DIR --pairs 20 --part training

training: a model like GPT-2 124M, compiled DDP, bf16 autocast, AdamW. A set is one plain and two watched jobs, with and without NCCL's timing; their turns
follow each other, there and back; a pair's ratio is the median of its turns' ratios. The interval of the median ratio is that of order statistics over sets.
all_reduce: 1 MiB back to back, eager: the worst case. In microseconds an operation: without torch's recorder, with it, with its timing, and under rankwatch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import gpu_output as output
from gpu_judging import median_interval
from gpu_turns import Contender, Field, OutOfTime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

BAR = 1.005
RECORDER_OFF = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_ENABLE_TIMING": "0"}
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_ENABLE_TIMING": "0"}
TIMING = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_ENABLE_TIMING": "1"}
MODES = {  # mode -> (environment, under rankwatch)
    "recorder off": (RECORDER_OFF, False),
    "recorder": (RECORDER, False),
    "recorder, timing": (TIMING, False),
    "rankwatch, no timing": (RECORDER, True),
    "rankwatch, timing": (TIMING, True),
}
WATCHED = {"all on": {"TORCH_NCCL_ENABLE_TIMING": "1"}, "no timing": {"TORCH_NCCL_ENABLE_TIMING": "0"}}  # kind of watched job -> environment
HEAD = ("what", "plain", "with", "ratio", "interval of the median", "remarks")


def training(options: argparse.Namespace, work: Path, deadline: output.Deadline, cache: Mapping[str, str], sets: list[dict[str, Any]]) -> None:
    """Fills `sets`: of one plain job and one watched job of each kind. `together` sets live at a time."""
    steps = 10 if options.dry_run_on_cpu else options.steps
    while len(sets) < options.pairs:
        numbers = range(len(sets), min(options.pairs, len(sets) + options.together))
        with Field(options, work, deadline) as field:
            jobs = {
                number: {
                    "plain": field.add("plain", number, "gpt", dict(cache), watched=False),
                    **{kind: field.add(kind, number, "gpt", {**cache, **env}, watched=True) for kind, env in WATCHED.items()},
                }
                for number in numbers
            }
            field.wait(field.contenders)
            rows: dict[int, dict[str, Any]] = {number: {"number": number, **{kind: [] for kind in jobs[number]}} for number in numbers}
            for turn in range(options.turns):
                for number, contenders in jobs.items():
                    field.check(10.0)
                    order = list(contenders.items())
                    for kind, contender in order if (turn + number) % 2 == 0 else order[::-1]:
                        rows[number][kind].append(contender.turn(steps))
            for row in rows.values():
                row["ratio"] = {kind: median(b / a for a, b in zip(row["plain"], row[kind], strict=True)) for kind in WATCHED}
                told = ", ".join(f"{kind} {median(row[kind]) * 1e3:.2f} ms x {row['ratio'][kind]:.4f}" for kind in WATCHED)
                output.say(f"set {row['number']}: plain {median(row['plain']) * 1e3:.2f} ms, {told}")
                row["polls"] = [turn["polls"] for kind in WATCHED for turn in jobs[row["number"]][kind].turns]
            sets.extend(rows.values())


def warmed(options: argparse.Namespace, field: Field, cache: Mapping[str, str]) -> Contender:
    """The job that fills the compile cache which all others read."""
    return field.add("first", 0, "gpt", dict(cache), watched=False)


def calls(options: argparse.Namespace, field: Field, contenders: list[Contender], rounds: list[dict[str, float]]) -> None:
    steps = 200 if options.dry_run_on_cpu else options.calls
    for turn in range(options.call_turns):
        for number in range(options.call_jobs):
            one: dict[str, float] = {}
            here = [contender for contender in contenders if contender.number == number]
            for contender in here if (turn + number) % 2 == 0 else here[::-1]:
                field.check(8.0)
                one[contender.mode] = contender.turn(steps) * 1e6
            rounds.append(one)
            output.say("us an op: " + ", ".join(f"{mode} {one[mode]:.1f}" for mode in MODES))


def training_rows(sets: list[dict[str, Any]]) -> list[list[object]]:
    rows: list[list[object]] = []
    plain_ms = median(median(row["plain"]) for row in sets) * 1e3
    for kind in WATCHED:
        middle, low, high, level = median_interval([row["ratio"][kind] for row in sets])
        verdict = "within the bar" if middle <= BAR else "OVER THE BAR"
        told = "not distinguishable from 0" if low <= 1.0 <= high else "distinguishable from 0"
        rows.append([
            f"compiled DDP step, {kind}, {len(sets)} pairs", f"{plain_ms:.2f} ms", f"{median(median(row[kind]) for row in sets) * 1e3:.2f} ms",
            f"x {middle:.4f}", f"{low:.4f}-{high:.4f} ({level:.1%})",
            f"bar x {BAR}: {verdict}; {told}; {median(polls for row in sets for polls in row['polls']):g} polls in a watched turn",
        ])  # fmt: skip
    return rows


def call_rows(rounds: list[dict[str, float]]) -> list[list[object]]:
    rows: list[list[object]] = []
    for mode in MODES:
        ratios = [one[mode] / one["recorder off"] for one in rounds]
        values = [one[mode] for one in rounds]
        middle, low, high, level = median_interval(ratios)
        rows.append([
            f"1 MiB all_reduce: {mode}", f"{median(one['recorder off'] for one in rounds):.1f} us", f"{median(values):.1f} us", f"x {middle:.3f}",
            f"{low:.3f}-{high:.3f} ({level:.0%})", f"{len(rounds)} rounds, {min(values):.1f}-{max(values):.1f} us",
        ])  # fmt: skip
    return rows


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("both", "training", "all_reduce"), default="both")
    parser.add_argument("--pairs", type=int, default=10, help="of a plain and a watched job (default %(default)s)")
    parser.add_argument("--together", type=int, default=5, help="sets that live at a time: about 7 GiB of GPU memory a job (default %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each job (default %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="measured in one turn (default %(default)s)")
    parser.add_argument("--call-jobs", type=int, default=3, help="jobs of each mode (default %(default)s)")
    parser.add_argument("--call-turns", type=int, default=2, help="of each of these (default %(default)s)")
    parser.add_argument("--calls", type=int, default=40_000, help="operations in one turn (default %(default)s)")


def main() -> int:
    options = output.arguments(__doc__ or "", 480.0, add)
    deadline, work = output.Deadline(options.limit_s), output.scratch("overhead")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    sets: list[dict[str, Any]] = []
    rounds: list[dict[str, float]] = []
    trouble = ""
    try:
        with Field(options, work, deadline) as field:
            first = warmed(options, field, cache) if options.part != "all_reduce" else None
            small = [
                field.add(mode, number, "all_reduce", dict(env), watched=watched)
                for number in range(options.call_jobs if options.part != "training" else 0)
                for mode, (env, watched) in MODES.items()
            ]
            field.wait(field.contenders)
            if first is not None:
                output.say(f"first: {first.turn(10) * 1e3:.2f} ms a step, {first.running.truths('ready')[0]['reserved_bytes'] / 2**30:.1f} GiB reserved")
            if small:
                calls(options, field, small, rounds)
        if options.part != "all_reduce":
            training(options, work, deadline, cache, sets)
    except Exception as error:  # what was measured until then is worth its device time
        trouble = str(error) if isinstance(error, OutOfTime) else repr(error)
        output.say(trouble)
    rows = [*(training_rows(sets) if sets else []), *(call_rows(rounds) if rounds else [])]
    raw = {"sets": sets, "all_reduce_us": rounds, "trouble": trouble}
    right = not sets or median(row["ratio"]["all on"] for row in sets) <= BAR
    return output.finish(options, "overhead", raw, work, output.table(HEAD, rows or [["nothing measured", *["-"] * 5]]), complete=not trouble, right=right)


if __name__ == "__main__":
    sys.exit(main())
