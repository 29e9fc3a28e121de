"""What rankwatch says of a GPU's memory and of the GPU, against torch's own counters and the driver: one GPU, about a minute.

Rows: numbers at steps; the GPU of the rank by the driver (extra `gpu`); NCCL's RAS on a healthy job; an allocation that fails and is caught (an event,
no incident); one that ends the job (what held the memory, in the incident); threads of the rank, and its memory before and after full recorder dumps.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request

import gpu_output as output
from gpu_watch import Running

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from typing import Any

DUMPS = 64
CLOSE_BYTES = 1 << 20  # the agent reads within a step, the job after one
WAIT_S = 60.0


def told(running: Running, event: str) -> dict[str, Any]:
    """The newest of these notes, once there is one; {} when the job ends or time is up before."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if found := running.truths(event):
            return found[-1]
        if running.process.poll() is not None:
            return {}
        time.sleep(0.1)
    return {}


def rank_row(running: Running) -> dict[str, Any]:
    rows = running.state().get("ranks") or [{}]
    return dict(rows[0])


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def dumps(pid: int) -> dict[str, Any]:
    """Resident memory of a rank before and after DUMPS full dumps of its recorder."""
    from rankwatch.monitor.worker_server import WorkerServer
    from rankwatch.wire.env import socket_name

    with open(f"/proc/{pid}/environ", "rb") as file:
        folder = next(part.partition(b"=")[2].decode() for part in file.read().split(b"\0") if part.startswith(b"RANKWATCH_SLOT_DIR="))
    server = WorkerServer(f"{folder}/{socket_name(0)}", deadline_s=5.0)
    try:
        before = rss_bytes(pid)
        sizes = [sum(map(len, server.recorders().values())) for _ in range(DUMPS)]
    except Exception as error:
        return {"error": repr(error)}
    return {"before": before, "after": rss_bytes(pid), "dumps": DUMPS, "answer": sizes[-1]}


def numbers(running: Running) -> list[Any]:
    """/metrics against torch.cuda.memory_stats, of a job that allocates nothing new."""
    theirs = told(running, "numbers").get("numbers", {})
    url = re.search(rb"status (http://[^\s;]+)", running.log.read_bytes())
    with urllib.request.urlopen(f"{url[1].decode()}/metrics" if url else "", timeout=5) as answer:
        text = answer.read().decode()
    ours = {name: int(float(value)) for name, value in re.findall(r"rankwatch_device_memory_(allocated|reserved)_bytes\{[^}]*\} (\S+)", text)}
    equal = bool(ours) and all(abs(theirs.get(name, 0) - value) < CLOSE_BYTES for name, value in ours.items())
    return ["numbers", equal, f"torch {json.dumps(theirs)}; /metrics {json.dumps(ours)}; page: {rank_row(running).get('gpu_memory')}"]


def driver(running: Running) -> list[Any]:
    gpu = rank_row(running).get("gpu") or {}
    return ["driver", gpu.get("by") == "process" and gpu.get("index") == 0, json.dumps(gpu)[:300]]


def ras() -> list[Any]:
    from rankwatch.monitor.ras import parse, question

    try:
        found = parse(question("localhost:28028"), time.monotonic())
    except Exception as error:
        return ["ras", False, repr(error)]
    return ["ras", found.state == "ok", f"{found.state}, {found.processes} processes {found.note}"]


def caught(work: Path, options: argparse.Namespace, rows: list[list[Any]], raw: dict[str, Any]) -> None:
    with Running(work / "caught", [str(output.JOBS / "memory_job.py"), "caught", *output.backend(options)], 1, {}, ("--listen", "127.0.0.1:0")) as running:
        process = told(running, "process")
        rows += [numbers(running), driver(running), ras()]
        raw["threads"] = {"joined": process.get("threads"), "training": told(running, "numbers").get("threads")}
        raw["dumps"] = dumps(int(process["pid"]))
        (running.truth / "go_on").touch()
        told(running, "after")
        events = [json.loads(line) for line in (running.run_dir / "events.jsonl").read_text().splitlines()]
        event = next((one for one in events if one.get("event") == "cuda_oom"), {})
        code = running.process.wait(60)
        incidents = list(running.run_dir.glob("incidents/*/incident.json"))
        rows.append(["caught", bool(event) and code == 0 and not incidents, f"exit {code}, {len(incidents)} incidents, event {json.dumps(event)[:260]}"])
        before, after = raw["dumps"].get("before", 0), raw["dumps"].get("after", 0)
        rows.append(["threads, dumps", True, f"{json.dumps(raw['threads'])}; {DUMPS} full dumps: {before / 1e6:.0f} -> {after / 1e6:.0f} MB {raw['dumps']}"])


def uncaught(work: Path, options: argparse.Namespace, rows: list[list[Any]]) -> None:
    with Running(work / "uncaught", [str(output.JOBS / "memory_job.py"), "uncaught", *output.backend(options)], 1) as running:
        told(running, "numbers")
        (running.truth / "go_on").touch()
        code = running.process.wait(90)
        texts = [json.loads(path.read_text()) for path in running.run_dir.glob("incidents/*/incident.json")]
        said = " ".join([*(texts[0]["evidence"] if texts else []), *(texts[0]["advice"] if texts else [])])
        right = len(texts) == 1 and texts[0]["culprit_ranks"] == [0] and "tried to allocate" in said
        rows.append(["uncaught", right and code == 1, f"exit {code}; {said[:500]}"])


def main() -> int:
    options = output.arguments(__doc__ or "", 200.0)
    work = output.scratch("memory")
    rows: list[list[Any]] = []
    raw: dict[str, Any] = {}
    trouble = ""
    try:
        caught(work, options, rows, raw)
        uncaught(work, options, rows)
    except Exception as error:
        trouble = repr(error)
    text = output.table(("what", "result", "seen"), [[name, "right" if right else "WRONG", seen] for name, right, seen in rows])
    right = all(row[1] for row in rows) and not trouble
    return output.finish(options, "memory", {"rows": rows, "raw": raw, "trouble": trouble}, work, f"{text}\n{trouble}".rstrip(), complete=True, right=right)


if __name__ == "__main__":
    sys.exit(main())
