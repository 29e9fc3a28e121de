"""What `--probe numerics` costs a training step on a CPU. Run by hand: `python tests/bench/bench_numerics.py [BLOCKS]`; a minute or two."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from one_rank import Node

STEPS = Path(__file__).with_name("numerics_steps.py")
MODELS = ((2, 128), (4, 256))  # layers, width


def measure(device: str, layers: int, width: int, blocks: int) -> dict[str, float]:
    """One process as a rank with the probe; what it printed."""
    with tempfile.TemporaryDirectory() as folder, Node(Path(folder)) as node:
        argv = [sys.executable, str(STEPS), device, str(layers), str(width), str(blocks)]
        process = node.start("", argv=argv, RANKWATCH_MORE_PROBES="numerics")
        out, err = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(err)
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found


def main() -> None:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for layers, width in MODELS:
        found = measure("cpu", layers, width, blocks)
        print(
            f"{found['parameters_m']:.1f} M parameters in {found['tensors']} tensors: step {found['step_ms']:.1f} ms,"
            f" with the probe x {found['ratio']:.4f} (quietest x {found['quietest_ratio']:.4f}); looks took {found['share']:.3%} of it; aim <= 0.5 %"
        )


if __name__ == "__main__":
    main()
