"""Who runs on this node: what the launcher hands to the monitor each time it has started the workers."""

from __future__ import annotations

from dataclasses import dataclass


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
