"""By hand, on a machine with two GPUs (one for never_joins): `python tests/gpu/run_nccl.py OUT_DIR [KIND ...]`.

Prints one table: what was named, when, how the job ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB = Path(__file__).with_name("nccl_job.py")
CASES = {  # kind -> (accepted (verdict, cause), culprits, seconds to wait)
    "asleep": ({("stuck", "not_entered")}, [1], 60),
    "gil_held": ({("stuck", "gil_held")}, [1], 60),
    "killed": ({("failed", "killed")}, [1], 40),
    "mismatch": ({("stuck", "mismatch")}, [0, 1], 60),
    "compile_alone": ({("slow", "compiling")}, [1], 120),
    "healthy": (set(), [], 120),
    "never_joins": ({("slow", "store_wait")}, [1], 60),
}


def run(kind: str, out: Path) -> dict[str, object]:
    accepted, culprits, limit_s = CASES[kind]
    run_dir = out / kind
    command = [sys.executable, "-m", "rankwatch", "--run-dir", str(run_dir), "torchrun", "--nproc-per-node", "2", str(JOB), kind]
    log = (out / f"{kind}.log").open("wb")
    began = time.time()
    job = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": os.getcwd() + ":" + os.environ.get("PYTHONPATH", "")}
    )
    named: dict[str, object] = {}
    while job.poll() is None and time.time() - began < limit_s + 60 and not (named and accepted):
        time.sleep(0.25)
        named = named or match(run_dir, accepted, culprits)
    if job.poll() is None:
        time.sleep(3)
        job.send_signal(signal.SIGINT)
    code = job.wait(90)
    named = named or match(run_dir, accepted, culprits)
    incidents = [json.loads(path.read_text()) for path in sorted(run_dir.glob("incidents/*/incident.json"))]
    seen = [f"{change['verdict']}/{change['cause']}" for doc in incidents for change in doc["history"]]
    return {"kind": kind, "ok": bool(named) if accepted else not incidents, "code": code, "wall_s": round(time.time() - began, 1), "seen": seen, **named}


def match(run_dir: Path, accepted: set[tuple[str, str]], culprits: list[int]) -> dict[str, object]:
    for path in run_dir.glob("incidents/*/incident.json"):
        doc = json.loads(path.read_text())
        if (doc["verdict"], doc["cause"]) in accepted and doc["culprit_ranks"] == culprits:
            return {"after_s": round(doc["updated_at"] - doc["since"], 1), "summary": doc["summary"]}
    return {}


def main() -> None:
    out = Path(sys.argv[1])
    kinds = sys.argv[2:] or list(CASES)
    results = []
    for kind in kinds:
        results.append(run(kind, out))
        print(json.dumps(results[-1]), flush=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    raise SystemExit(any(not result["ok"] for result in results))


if __name__ == "__main__":
    main()
