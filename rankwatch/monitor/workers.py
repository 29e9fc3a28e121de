"""Who runs on this node: what the launcher hands to the monitor each time it has started the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DUMP, HEARTBEAT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING, HANDLING = "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
WATCHDOG_SETTINGS = (DUMP, HEARTBEAT, MONITORING, HANDLING)


def switched_on(text: str) -> bool:
    """How torch reads a switch in the environment (getCvarBool)."""
    return text.strip().lower() in ("1", "y", "yes", "t", "true")


@dataclass(frozen=True, slots=True)
class Worker:
    """One child of the launcher. Its pid may be a shell or a wrapper: the rank is the process that claims the slot.

    stdout, stderr: log paths, "" when not redirected. error_file: where torchelastic's `record` leaves an exception, "" if nowhere.
    """

    rank: int
    local_rank: int
    pid: int
    stdout: str = ""
    stderr: str = ""
    error_file: str = ""


@dataclass(frozen=True, slots=True)
class Workers:
    """One start of this node's workers. slot_dir None: no slots in this attempt, slot_reason says why.

    script_problem: why Python cannot start the job's script, as the launcher has seen it; "" where it can.
    environment: of the ranks, what is set there of NCCL's watchdog. nccl_timing: TORCH_NCCL_ENABLE_TIMING is on there.
    history: when recorders are read beside suspicions: "off" never, "on" regularly even where torch makes no promise, "auto" where it does.
    """

    attempt: int
    group_rank: int
    world_size: int
    nnodes: int
    node: str
    slot_dir: str | None
    slot_reason: str
    workers: tuple[Worker, ...]
    script_problem: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    nccl_timing: bool = False
    history: str = "auto"
