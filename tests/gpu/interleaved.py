"""What watching costs a compiled DDP step, in one process: off, and at TIMES its rate, block by block.

  python tests/gpu/interleaved.py OUT_DIR --gpus 1              about 4 minutes
  python tests/gpu/interleaved.py OUT_DIR --quads 30            two GPUs

Two processes of one training differ by more than the bar allows (overhead.py), and so do two blocks of one process; so the watching is done at 20 times
its rate: step hook, beats, and all that the launcher asks a healthy rank. A pair is two neighbouring blocks, the order off, on, on, off. What it costs at its
own rate is the pairs' median excess, and its interval by order statistics, over TIMES. torch's recorder, which NCCL has on by default, writes in both.
Exit status 0: the whole interval lies below the bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import gpu_output as output
from gpu_judging import median_interval
from gpu_watch import Running

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BAR = 1.005
HEAD = ("what", "off", "on", "ratio", "interval of the median", "at its own rate")


def run(options: argparse.Namespace, work: Path, deadline: output.Deadline) -> tuple[list[dict[str, Any]], str]:
    """The blocks of rank 0 in their order, and the end of the log."""
    blocks, steps = (8, 10) if options.dry_run_on_cpu else (4 * options.quads, options.steps)
    job = [str(output.JOBS / "interleaved_job.py"), "gpt", *output.backend(options), "--timeout-s", "1200"]
    job += ["--blocks", str(blocks), "--steps", str(steps), "--times", str(options.times)]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
    with Running(work / "job", job, options.gpus, env, ("--listen", "127.0.0.1:0", *(["--nccl-timing", "on"] if options.timing else []))) as running:
        while running.process.poll() is None and deadline.left_s > 0 and not running.truths("over"):
            time.sleep(0.2)
        found = [one for one in running.truths("block") if one["rank"] == 0]
        log = running.log.read_text(errors="replace")
    asked = next((line for line in reversed(log.splitlines()) if line.startswith("poker:")), "")
    return found, asked if len(found) == blocks else log[-1500:]


def row(blocks: list[dict[str, Any]], times: int) -> tuple[list[object], bool]:
    """The line of the table, and whether the bar is shown to hold."""
    pairs = [sorted(pair, key=lambda one: bool(one["on"])) for pair in zip(blocks[::2], blocks[1::2], strict=False)]
    middle, low, high, level = median_interval([on["s_per_step"] / off["s_per_step"] for off, on in pairs])
    off_ms, on_ms = (median(pair[which]["s_per_step"] for pair in pairs) * 1e3 for which in (0, 1))
    own, own_low, own_high = (1 + (ratio - 1) / times for ratio in (middle, low, high))
    verdict = "within the bar" if own_high <= BAR else "not shown" if own_low <= BAR else "OVER THE BAR"
    told = "not distinguishable from 0" if low <= 1.0 <= high else "distinguishable from 0"
    ratio, interval = f"x {middle:.4f}", f"{low:.4f}-{high:.4f} ({level:.1%})"
    said = f"x {own:.4f} ({own_low:.4f}-{own_high:.4f}); bar x {BAR}: {verdict}; {told}"
    return [f"compiled DDP step, watched {times}-fold, {len(pairs)} pairs", f"{off_ms:.3f} ms", f"{on_ms:.3f} ms", ratio, interval, said], own_high <= BAR


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quads", type=int, default=20, help="of blocks off, on, on, off (default %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="in one block (default %(default)s)")
    parser.add_argument("--times", type=int, default=20, help="its own rate (default %(default)s)")
    parser.add_argument("--timing", action="store_true", help="with NCCL's timing, in both kinds of blocks")


def main() -> int:
    options = output.arguments(__doc__ or "", 420.0, add)
    work = output.scratch("interleaved")
    blocks, log = run(options, work, output.Deadline(options.limit_s))
    output.say(log)
    complete = log.startswith("poker:")
    line, right = row(blocks, options.times) if len(blocks) >= 4 else (["nothing measured", *["-"] * 5], False)
    return output.finish(options, "interleaved", {"blocks": blocks, "log": log}, work, output.table(HEAD, [line]), complete=complete, right=right)


if __name__ == "__main__":
    sys.exit(main())
