"""What rankwatch costs on GPUs, everything on (timing, probes, polls each second), against plain torchrun.

  python tests/gpu/overhead.py OUT_DIR                          about 5 minutes on 2 GPUs
  python tests/gpu/overhead.py OUT_DIR --pairs 20 --part training

training: a model like GPT-2 124M, compiled DDP, bf16 autocast, AdamW. A pair is one plain and one watched job; their turns follow each other, in ABBA order;
a pair's ratio is the median of its turns' ratios. The interval of the median ratio is that of order statistics over the pairs.
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
HEAD = ("what", "plain", "with", "ratio", "interval of the median", "remarks")


def training(options: argparse.Namespace, work: Path, deadline: output.Deadline, cache: Mapping[str, str], pairs: list[dict[str, Any]]) -> None:
    """Fills `pairs`. The jobs of `together` pairs live at a time."""
    steps = 10 if options.dry_run_on_cpu else options.steps
    while len(pairs) < options.pairs:
        numbers = range(len(pairs), min(options.pairs, len(pairs) + options.together))
        with Field(options, work, deadline) as field:
            both = {
                number: (
                    field.add("plain", number, "gpt", dict(cache), watched=False),
                    field.add("watched", number, "gpt", {**cache, "TORCH_NCCL_ENABLE_TIMING": "1"}, watched=True),
                )
                for number in numbers
            }
            field.wait(field.contenders)
            rows = {number: {"number": number, "plain_s": [], "watched_s": []} for number in numbers}
            for turn in range(options.turns):
                for number, (plain, watched) in both.items():
                    field.check(10.0)
                    order = (("plain_s", plain), ("watched_s", watched))
                    for key, contender in order if (turn + number) % 2 == 0 else order[::-1]:
                        rows[number][key].append(contender.turn(steps))
            for row in rows.values():
                row["ratio"] = median(b / a for a, b in zip(row["plain_s"], row["watched_s"], strict=True))
                output.say(f"pair {row['number']}: {median(row['plain_s']) * 1e3:.2f} -> {median(row['watched_s']) * 1e3:.2f} ms, x {row['ratio']:.4f}")
                row["polls"] = [turn["polls"] for turn in both[row["number"]][1].turns]
            pairs.extend(rows.values())


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


def training_row(pairs: list[dict[str, Any]]) -> list[object]:
    middle, low, high, level = median_interval([row["ratio"] for row in pairs])
    plain, watched = (median(median(row[key]) for row in pairs) * 1e3 for key in ("plain_s", "watched_s"))
    verdict = "within the bar" if middle <= BAR else "OVER THE BAR"
    told = "not distinguishable from 0" if low <= 1.0 <= high else "distinguishable from 0"
    return [
        f"compiled DDP step, {len(pairs)} pairs", f"{plain:.2f} ms", f"{watched:.2f} ms", f"x {middle:.4f}", f"{low:.4f}-{high:.4f} ({level:.1%})",
        f"bar x {BAR}: {verdict}; {told}; {median(polls for row in pairs for polls in row['polls']):g} polls in a watched turn",
    ]  # fmt: skip


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
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--together", type=int, default=5, help="pairs that live at a time: about 11 GiB of GPU memory a job (default %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each job (default %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="measured in one turn (default %(default)s)")
    parser.add_argument("--call-jobs", type=int, default=3, help="jobs of each mode (default %(default)s)")
    parser.add_argument("--call-turns", type=int, default=2, help="of each of these (default %(default)s)")
    parser.add_argument("--calls", type=int, default=40_000, help="operations in one turn (default %(default)s)")


def main() -> int:
    options = output.arguments(__doc__ or "", 480.0, add)
    deadline, work = output.Deadline(options.limit_s), output.scratch("overhead")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    pairs: list[dict[str, Any]] = []
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
            training(options, work, deadline, cache, pairs)
    except Exception as error:  # what was measured until then is worth its device time
        trouble = str(error) if isinstance(error, OutOfTime) else repr(error)
        output.say(trouble)
    rows = [*([training_row(pairs)] if pairs else []), *(call_rows(rounds) if rounds else [])]
    raw = {"pairs": pairs, "all_reduce_us": rounds, "trouble": trouble}
    right = not pairs or median(row["ratio"] for row in pairs) <= BAR
    return output.finish(options, "overhead", raw, work, output.table(HEAD, rows or [["nothing measured", *["-"] * 5]]), complete=not trouble, right=right)


if __name__ == "__main__":
    sys.exit(main())
