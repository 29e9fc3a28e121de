"""What does not come from the ranks themselves: the driver's view of their GPUs, NCCL's view of its communicators. Put into each snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankwatch.model import JobSnapshot, RankState
from rankwatch.monitor.gpus import GpuWatch, Place, visible_devices
from rankwatch.monitor.ras import RasWatch

SWITCHED_OFF = "off by --no-probe gpu"


class SecondOpinions:
    """Called from the loop's thread only; asks nobody in a way that it would have to wait for."""

    def __init__(self, environ: Mapping[str, str], no_probes: tuple[str, ...] = (), gpus: GpuWatch | None = None, ras: RasWatch | None = None) -> None:
        self._environ = environ
        self._gpus = gpus or GpuWatch(SWITCHED_OFF if "gpu" in no_probes else "")
        self._ras = ras or RasWatch(environ)
        self._visible: dict[int, str | None] = {}
        self._nccl = self._on_gpus = False  # a job on processors only starts no helper

    def into(self, snapshot: JobSnapshot, suspected: bool) -> JobSnapshot:
        """The snapshot with the GPUs of its ranks, and with NCCL's RAS while something is suspected in a group on NCCL."""
        states = list(snapshot.ranks().values())
        self._nccl = self._nccl or any("nccl" in group.backend for rank in states for group in rank.groups)
        self._on_gpus = self._on_gpus or self._nccl or any(rank.memory for rank in states)
        if self._on_gpus and not snapshot.final:
            self._gpus.look(suspected)
        nodes = []
        for node in snapshot.nodes:
            found = self._gpus.of([place for rank in node.ranks if (place := self._place(rank)) is not None])
            ranks = tuple(replace(rank, gpu=found[rank.rank]) if rank.rank in found else rank for rank in node.ranks)
            nodes.append(replace(node, ranks=ranks, gpu_note=self._gpus.note))
        ras = None
        if suspected and self._nccl and not snapshot.final:
            ras = self._ras.look({rank.rank: rank.process.pid for rank in states if rank.process is not None})
        return replace(snapshot, nodes=tuple(nodes), ras=ras)

    def capabilities(self) -> dict[str, str]:
        """{"gpu": "ok" or why not}; nothing where no job on GPUs is seen and nobody has asked for it."""
        if self._gpus.note and not self._nccl:
            return {}
        return {"gpu": self._gpus.note or "ok"}

    def forget(self) -> None:
        """Other processes run from now on."""
        self._ras.close()
        self._ras = RasWatch(self._environ)
        self._visible = {}

    def close(self) -> None:
        """End what was started."""
        self._gpus.close()
        self._ras.close()

    def _place(self, rank: RankState) -> Place | None:
        process = rank.process
        if process is None:
            return None
        if process.pid not in self._visible and process.alive:
            self._visible[process.pid] = visible_devices(process.pid)
        return Place(rank.rank, rank.local_rank, process.pid, self._visible.get(process.pid))
