"""What watching costs a compiled DDP step, inside one process: polls, step hook and beats are off and on, block by block.

  python tests/gpu/interleaved.py OUT_DIR --gpus 1              about 4 minutes
  python tests/gpu/interleaved.py OUT_DIR --quads 20            two GPUs

Two processes of the same training differ by more than the bar allows (overhead.py), one does not. A pair is two neighbouring blocks, the order is
off, on, on, off. torch's recorder, which NCCL has on by default, writes in both. The interval of the median ratio is that of order statistics over pairs.
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
HEAD = ("what", "off", "on", "ratio", "interval of the median", "remarks")


def run(options: argparse.Namespace, work: Path, deadline: output.Deadline) -> tuple[list[dict[str, Any]], int, str]:
    """The blocks of rank 0 in their order, how often the launcher has looked until then, and the end of the log where blocks are missing."""
    blocks, steps = (8, 10) if options.dry_run_on_cpu else (4 * options.quads, options.steps)
    job = [str(output.JOBS / "interleaved_job.py"), "gpt", *output.backend(options), "--timeout-s", "1200", "--blocks", str(blocks), "--steps", str(steps)]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
    polls = 0
    with Running(work / "job", job, options.gpus, env, ("--listen", "127.0.0.1:0", *(["--nccl-timing", "on"] if options.timing else []))) as running:
        while running.process.poll() is None and deadline.left_s > 0 and not running.truths("over"):
            time.sleep(0.2)
        polls = int(running.state().get("health", {}).get("polls", 0))
        found = [one for one in running.truths("block") if one["rank"] == 0]
        return found, polls, "" if len(found) == blocks else running.log.read_text(errors="replace")[-1500:]


def row(blocks: list[dict[str, Any]], polls: int) -> tuple[list[object], bool]:
    """The line of the table, and whether the bar is shown to hold."""
    pairs = [sorted(pair, key=lambda one: bool(one["on"])) for pair in zip(blocks[::2], blocks[1::2], strict=False)]
    middle, low, high, level = median_interval([on["s_per_step"] / off["s_per_step"] for off, on in pairs])
    off_ms, on_ms = (median(pair[which]["s_per_step"] for pair in pairs) * 1e3 for which in (0, 1))
    verdict = "within the bar" if high <= BAR else "not shown" if low <= BAR else "OVER THE BAR"
    told = "not distinguishable from 0" if low <= 1.0 <= high else "distinguishable from 0"
    ratio, interval = f"x {middle:.4f}", f"{low:.4f}-{high:.4f} ({level:.1%})"
    remarks = f"bar x {BAR}: {verdict}; {told}; {polls} polls"
    return [f"compiled DDP step, {len(pairs)} pairs", f"{off_ms:.3f} ms", f"{on_ms:.3f} ms", ratio, interval, remarks], high <= BAR


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quads", type=int, default=15, help="of blocks off, on, on, off (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="in one block (default %(default)s)")
    parser.add_argument("--timing", action="store_true", help="with NCCL's timing, in both kinds of blocks")


def main() -> int:
    options = output.arguments(__doc__ or "", 420.0, add)
    work = output.scratch("interleaved")
    blocks, polls, trouble = run(options, work, output.Deadline(options.limit_s))
    if trouble:
        output.say(trouble)
    line, right = row(blocks, polls) if len(blocks) >= 4 else (["nothing measured", *["-"] * 5], False)
    raw = {"blocks": blocks, "polls": polls, "trouble": trouble}
    return output.finish(options, "interleaved", raw, work, output.table(HEAD, [line]), complete=not trouble, right=right)


if __name__ == "__main__":
    sys.exit(main())
