"""Three ranks, all in all_reduce #754 on NCCL, which does not complete; what the driver and RAS say of them is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rankwatch.model import Collective, Gpu, Group, JobSnapshot, NodeReport, Process, RankState, Ras, Verdict
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

MONO, WALL = 5_000.0, 1_800_000_000.0
GROUP = Group("0", "default_pg", "nccl", (0, 1, 2), 600.0, 0, WALL - 600)

Look = Callable[[float], JobSnapshot]


def gpu(index: int, **more: Any) -> Gpu:
    return replace(Gpu(index, f"GPU-{index}", 1e9, utilisation_ratio=1.0, sm_clock_hz=1.98e9, power_w=131.0), **more)


def job(gpus: Mapping[int, Gpu] | None = None, started: Mapping[int, bool] | None = None, ras: Ras | None = None, gpu_note: str = "") -> Look:
    """The job at any moment after the fault. A GPU's `at` is that moment where it lies in the future."""

    def look(t: float) -> JobSnapshot:
        now = MONO + t
        ranks = []
        for rank in range(3):
            entry = Collective("0", 0, 754, "all_reduce", ((1024,),), ((1024,),), ("Float",), WALL, 600.0, started=(started or {}).get(rank))
            found = (gpus or {}).get(rank)
            seen = replace(found, at=min(found.at, now)) if found is not None else None
            process = Process(4000 + rank, True, "S", t, t, started_at=MONO - 600)
            ranks.append(
                RankState(
                    rank, node="n0", stage="joined", heartbeat_at=now, ping_ok=True, process=process, groups=(GROUP,), enqueued={"0": 754},
                    completed={"0": 753}, collectives=(entry,), collectives_at=now, gpu=seen, steps=200, last_step_at=MONO, step_s=0.1,
                )
            )  # fmt: skip
        return JobSnapshot(now, WALL + t, 3, 0, (NodeReport("n0", tuple(ranks), gpu_note=gpu_note),), gap_s=0.5, started_at=MONO - 600, ras=ras)

    return look


def all_in(look: Look, until_s: float = 20.0) -> Verdict:
    """The last verdict of a look every half second."""
    state, told, t = State(), (), 0.0
    while t <= until_s:
        snapshot = look(t)
        state, told, _wants = diagnose(state, snapshot, snapshot.now, Limits())
        t += 0.5
    assert len(told) == 1, told
    return told[0]
