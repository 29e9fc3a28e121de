"""By hand, on a machine with one GPU: `python tests/gpu/run_numerics.py [BLOCKS]`. What `--probe numerics` costs a step there, and that it never waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "support")]
from bench_numerics import measure  # noqa: E402

MODELS = ((6, 512), (24, 1024))  # layers, width
WANTED = ("no_wait", "capture_ok", "nan_found")


def main() -> None:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    failed = False
    for layers, width in MODELS:
        found = measure("cuda", layers, width, blocks)
        failed |= not all(found[name] for name in WANTED) or found["ratio"] > 1.005
        print(json.dumps(found), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
