"""CUDA graphs and Triton tuning, as rankwatch tells them, against torch's own accounting. One GPU is enough.

  python tests/gpu/cudagraph.py OUT_DIR

A row a stage of jobs/graphs_job.py: bytes of the private pools by torch's snapshot and in the rank's slot (which /api/v1/state must say too), seconds until
they were equal, re-recordings (torch's tree manager / ours), skips, captures by hand, and what reading the pools costs (median and most, ms).
Then the tuning: AUTOTUNE blocks and choices in the job's log against the configurations that rankwatch counted, and what it showed meanwhile.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gpu_output as output
from gpu_watch import Running

from rankwatch.monitor.slots import SlotReader
from rankwatch.wire import env as names

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

EQUAL_LIMIT_S = 40.0  # the agent reads the pools again after 30 s at the latest
STAGE_LIMIT_S = 240.0
HEAD = ("stage", "result", "pools by torch", "by rankwatch", "equal after", "re-records", "skips", "captures", "reading ms", "remarks")
CHOICES = re.compile(rb"AUTOTUNE benchmarking takes [\d.]+ seconds? and [\d.]+ seconds? precompiling for (\d+) choices")
BLOCK = re.compile(rb"^(?:\[[^\]]*\]:)?AUTOTUNE \w+\(", re.M)


class Rank:
    """Rank 0 of the job as rankwatch sees it."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._slot: SlotReader | None = None
        self.details: list[str] = []  # progress texts of compiles, in the order seen

    def look(self) -> dict[str, Any]:
        """{"cudagraph": record, "compile": record}, {} while there is no slot."""
        if self._slot is None:
            for pid in self._running.rank_pids():
                for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if one.startswith(f"{names.SLOT_DIR}=".encode()):
                        self._slot = SlotReader(str(Path(one.partition(b"=")[2].decode()) / names.slot_name(0)))
        if self._slot is None:
            return {}
        state = self._slot.read()
        for activity in state.compiling:
            text = f"{activity.phase}: {activity.detail}" if activity.detail else activity.phase
            if text not in self.details[-1:]:
                self.details.append(text)
        return {"cudagraph": dict(state.cudagraph), "compile": dict(state.compile_totals)}

    def by_api(self) -> int | None:
        """Bytes of the pools as the status address says them."""
        rows = self._running.state().get("compile")
        return rows[0]["cudagraph_pool_bytes"] if rows else None


def compare(stage: dict[str, Any], rank: Rank, running: Running, deadline: output.Deadline) -> dict[str, Any]:
    """Waits until the slot says what torch says; what it said, and since when."""
    total, began = sum(stage.get("pools", {}).values()), time.monotonic()
    while True:
        seen = rank.look().get("cudagraph", {})
        waited = time.monotonic() - began
        equal = (seen.get("pool_bytes") or 0) == total
        if equal or waited > EQUAL_LIMIT_S or deadline.left_s < 5 or running.process.poll() is not None:
            break
        time.sleep(0.1)
    end = time.monotonic() + 4.0  # the status address tells what the last poll has read
    while (by_api := rank.by_api() or 0) != total and time.monotonic() < end:
        time.sleep(0.3)
    problems = [] if equal else [f"pools differ: {stage.get('pools')} against {seen.get('pools')} {seen.get('pools_reason', '')}".strip()]
    if seen.get("pools") is not None and len(stage.get("pools", {})) <= 6 and equal and seen["pools"] != stage.get("pools", {}) and total:
        problems.append(f"single pools differ: {stage['pools']} against {seen['pools']}")
    if by_api != total:
        problems.append(f"/api/v1/state says {by_api}")
    for key, ours in (("rerecords", seen.get("rerecords", 0)), ("skips", seen.get("skips", 0)), ("graphs", seen.get("recordings", 0))):
        if stage.get(key, 0) != ours:
            problems.append(f"{key}: torch {stage.get(key, 0)}, rankwatch {ours}")
    if stage["manual"] != seen.get("captures", 0):
        problems.append(f"captures by hand: {stage['manual']}, rankwatch {seen.get('captures', 0)}")
    return {"stage": stage, "seen": seen, "by_api": by_api, "equal_s": waited if equal else None, "problems": problems}


def row(found: dict[str, Any]) -> list[object]:
    stage, seen = found["stage"], found["seen"]
    reading = stage.get("reading_ms") or stage.get("snapshot_ms")
    reasons = seen.get("skip_reasons")
    remarks = [*found["problems"], *([f"skips: {json.dumps(reasons)[:200]}"] if reasons and "mutated" in stage["name"] else [])]
    return [
        stage["name"], "WRONG" if found["problems"] else "right", sum(stage.get("pools", {}).values()), seen.get("pool_bytes") or 0,
        output.seconds(found["equal_s"]), f"{stage.get('rerecords', 0)}/{seen.get('rerecords', 0)}", f"{stage.get('skips', 0)}/{seen.get('skips', 0)}",
        f"{stage['manual']}/{seen.get('captures', 0)}", f"{reading[1]:.2f} {reading[2]:.2f}" if reading else "-",
        "; ".join([f"{stage.get('segments', 0)} segments, {stage.get('graphs', 0)} graphs", *remarks]),
    ]  # fmt: skip


def tuning(before: dict[str, Any], after: dict[str, Any], log: bytes, details: list[str]) -> dict[str, Any]:
    """What the log tells of max-autotune against what was counted from `before` to `after`."""
    choices = [int(found) for found in CHOICES.findall(log)]
    counted = {key: after.get(key, 0) - before.get(key, 0) for key in ("configs_tried", "tunings", "kernels_done", "jit_kernels")}
    problems = []
    if not choices:
        problems.append("no AUTOTUNE block in the log")
    if counted["configs_tried"] < sum(choices):
        problems.append(f"{counted['configs_tried']} configurations counted, {sum(choices)} choices in the log")
    if counted["tunings"] < len(choices):
        problems.append(f"{counted['tunings']} tunings counted, {len(choices)} blocks in the log")
    if not any(re.search(r"\d+/\d+", text) for text in details):
        problems.append("no progress was shown")
    return {"blocks": len(BLOCK.findall(log)), "choices": choices, "counted": counted, "details": details, "problems": problems}


def run(options: argparse.Namespace, work: Path, deadline: output.Deadline, found: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Fills `found`; the tuning, and why it ended early."""
    job = [str(output.JOBS / "graphs_job.py"), "graphs", *output.backend(options), "--timeout-s", "600"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton"), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    told: dict[str, Any] = {}
    with Running(work / "graphs", job, 1, env, ("--listen", "127.0.0.1:0")) as running:
        rank, number, before = Rank(running), 0, {}
        since = time.monotonic()
        while not running.truths("end"):
            rank.look()
            stage = next((one for one in running.truths("stage") if one["number"] == number), None)
            if stage is None:
                if running.process.poll() is not None:
                    return told, f"the job ended: {running.log.read_text(errors='replace')[-1500:]}"
                if deadline.left_s < 8 or time.monotonic() - since > STAGE_LIMIT_S:
                    return told, f"stage {number} does not end"
                time.sleep(0.05)
                continue
            if stage["name"] == "before the tuning":
                time.sleep(1.0)
                before, rank.details = rank.look()["compile"], []
            elif stage["name"] == "after the tuning":
                time.sleep(1.5)
                told = tuning(before, rank.look()["compile"], running.log.read_bytes(), list(rank.details))
                before, rank.details = rank.look()["compile"], []
            elif stage["name"] == "coordinate descent":
                time.sleep(1.5)
                after = rank.look()["compile"]
                told["descent"] = {"tried": after.get("configs_tried", 0) - before.get("configs_tried", 0), "details": list(rank.details)}
            else:
                found.append(compare(stage, rank, running, deadline))
            output.say(f"stage {stage['name']}: {found[-1]['problems'] or 'equal'}")
            (running.truth / f"next_{number}").touch()
            number, since = number + 1, time.monotonic()
    return told, ""


def main() -> int:
    options = output.arguments(__doc__ or "", 300.0)
    deadline, work = output.Deadline(options.limit_s), output.scratch("cudagraph")
    found: list[dict[str, Any]] = []
    told, trouble = run(options, work, deadline, found)
    text = output.table(HEAD, [row(one) for one in found])
    if told:
        text += (
            f"\n\ntuning: {len(told['choices'])} AUTOTUNE blocks with {sum(told['choices'])} choices in the log; counted {json.dumps(told['counted'])}; "
            f"shown {len(told['details'])} moments, such as {told['details'][1:6]}; {'; '.join(told['problems']) or 'right'}"
        )
        text += f"\ncoordinate descent: {json.dumps(told.get('descent', {}))[:600]}"
    if trouble:
        text += f"\n{trouble}"
    right = not any(one["problems"] for one in found) and not told.get("problems", ["no tuning"])
    return output.finish(options, "cudagraph", {"stages": found, "tuning": told, "trouble": trouble}, work, text, complete=not trouble, right=right)


if __name__ == "__main__":
    sys.exit(main())
