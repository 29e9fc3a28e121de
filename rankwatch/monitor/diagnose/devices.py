"""What is known of the devices of ranks that are all in a collective that does not complete: driver errors, stopped work, links. Pure.

Equal operations on every rank prove that the code did not diverge; so the trouble lies with a device or the network, and the question is whose.
A GPU at 100 % says nothing: one that waits for its peers in NCCL is as busy as one that hangs in a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch.model import Confidence, Domain, Gpu, RasProblem, RasRank
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.xids import ADVICE, Kind, xid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

XID_BEFORE_S = 60.0  # an error this long before the wait may be its cause
SETTLED_S = 2.0  # the driver's utilisation is a mean over up to a second
BUSY_RATIO, IDLE_RATIO = 0.95, 0.05
MAX_LINES = 6
_THROTTLE_ADVICE = ("Its clocks are held down by the hardware: look at cooling and power of the node (`nvidia-smi -q -d PERFORMANCE`), drain it if it lasts.",)
_BLOCKED_ADVICE = (
    "Work that was queued on that GPU before the collective does not end: a kernel that spins, a wait for an event or another stream. Its native stack "
    "shows where the host waits; compute-sanitizer or cuda-gdb shows the kernel.",
)
_NETWORK_ADVICE = ("Look at the links between these nodes: switch and port counters, `ibstat`, NCCL_DEBUG=INFO of the next run.",)


@dataclass(frozen=True, slots=True)
class Devices:
    """What the devices tell. culprits: ranks whose device is at fault as far as that is known; says: the clause about them."""

    culprits: tuple[int, ...] = ()
    domain: Domain = "network"
    confidence: Confidence = "likely"
    says: str = ""
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def look(wait: Wait, members: Sequence[int], scene: Scene) -> Devices:
    """Strongest evidence first: what the driver reports of a GPU, whose device has not started the collective, what RAS says, an idle GPU among
    busy ones, a throttled GPU."""
    gpus = {rank: gpu for rank in members if rank in scene.ranks and (gpu := scene.ranks[rank].gpu) is not None}
    evidence = [*_of_driver(gpus, wait), *_of_ras(scene), *_utilisation(gpus, wait)]
    missing = tuple(_missing(wait, members, gpus, scene))
    for found in (_faulty(gpus, wait), _behind(wait), _lost_peers(scene), _idle(gpus, wait, members), _throttled(gpus, wait, members)):
        if found is not None:
            lines = dict.fromkeys((*found.evidence, *evidence))
            return Devices(found.culprits, found.domain, found.confidence, found.says, tuple(lines)[:MAX_LINES], missing, found.advice)
    return Devices(says="device or network, rank unknown", evidence=tuple(evidence)[:MAX_LINES], missing=missing)


def troubles(gpu: Gpu, since: float) -> list[tuple[str, Kind]]:
    """What the driver reports that stops work on this GPU, from shortly before `since` on."""
    found: list[tuple[str, Kind]] = [(f"the driver has lost it ({gpu.lost})", "device")] if gpu.lost else []
    for code in dict.fromkeys(code for code, at in gpu.xids if at >= since - XID_BEFORE_S):
        if xid(code).kind != "consequence":
            found.append((f"Xid {code} ({xid(code).meaning})", xid(code).kind))
    if gpu.ecc_new:
        found.append((f"{gpu.ecc_new} uncorrected ECC error{'' if gpu.ecc_new == 1 else 's'} since the job began", "device"))
    return found


def _faulty(gpus: Mapping[int, Gpu], wait: Wait) -> Devices | None:
    found = {rank: told for rank, gpu in sorted(gpus.items()) if (told := troubles(gpu, wait.since))}
    if not found:
        return None
    # links fail at both ends and a program's fault may hit every rank: a device's own fault is the better name
    worst: Kind = next(kind for kind in ("device", "link", "program") if any(kind == each for told in found.values() for _text, each in told))
    culprits = tuple(rank for rank, told in found.items() if any(kind == worst for _text, kind in told))
    text = next(text for text, kind in found[culprits[0]] if kind == worst)
    sure = all(gpus[rank].by == "process" for rank in culprits) and worst == "device"
    says = f"{words.ranks_text(culprits)}: {text} on GPU {gpus[culprits[0]].index}"
    return Devices(culprits, "node", "certain" if sure else "likely", says, advice=ADVICE[worst])


def _behind(wait: Wait) -> Devices | None:
    if not wait.behind:
        return None
    line = f"{words.ranks_text(wait.behind)}: {wait.behind_why}"
    blocked = "not started" in wait.behind_why
    domain: Domain = "node" if blocked else "network"
    return Devices(wait.behind, domain, "likely", line, (line,), advice=_BLOCKED_ADVICE if blocked else ())


def _lost_peers(scene: Scene) -> Devices | None:
    """Processes whose RAS thread does not answer its peers: it needs no GIL and no GPU, only the process and the network."""
    lost = [problem for problem in _problems(scene) if problem.kind in ("INCOMPLETE", "TIMEOUT", "DEAD")]
    if not lost:
        return None
    ranks = tuple(sorted({entry.rank for problem in lost for entry in problem.ranks if entry.rank is not None}))
    who = words.ranks_text(ranks) if ranks else ", ".join(dict.fromkeys(_who(entry) for problem in lost for entry in problem.ranks)) or "some processes"
    return Devices(ranks, "network", "likely", f"NCCL's RAS gets no answer from {who}", advice=_NETWORK_ADVICE)


def _idle(gpus: Mapping[int, Gpu], wait: Wait, members: Sequence[int]) -> Devices | None:
    """A GPU that does nothing while those of all the others sit in the collective's kernel."""
    if len(gpus) < len(members) or len(gpus) < 2 or any(gpu.at < wait.since + SETTLED_S or gpu.utilisation_ratio is None for gpu in gpus.values()):
        return None
    idle = tuple(rank for rank, gpu in sorted(gpus.items()) if (gpu.utilisation_ratio or 0.0) <= IDLE_RATIO)
    busy = [rank for rank, gpu in gpus.items() if (gpu.utilisation_ratio or 0.0) >= BUSY_RATIO]
    if not idle or len(idle) >= len(busy) + len(idle) or len(idle) + len(busy) < len(gpus):
        return None
    says = f"{words.ranks_text(idle)}: its GPU does nothing while the others' are in the collective" if len(idle) == 1 else (
        f"the GPUs of {words.ranks_text(idle)} do nothing while the others' are in the collective"
    )  # fmt: skip
    return Devices(idle, "node", "likely", says, advice=_BLOCKED_ADVICE)


def _throttled(gpus: Mapping[int, Gpu], wait: Wait, members: Sequence[int]) -> Devices | None:
    held = tuple(rank for rank, gpu in sorted(gpus.items()) if gpu.throttled and gpu.at >= wait.since)
    if not held or len(held) >= len(members):
        return None
    says = f"{words.ranks_text(held)}: the hardware holds the clocks of GPU {gpus[held[0]].index} down ({', '.join(gpus[held[0]].throttled)})"
    return Devices(held, "node", "partial", says, advice=_THROTTLE_ADVICE)


def _of_driver(gpus: Mapping[int, Gpu], wait: Wait) -> list[str]:
    lines = []
    for rank, gpu in sorted(gpus.items()):
        told = [text for text, _kind in troubles(gpu, wait.since)]
        told += [f"clocks held down by the hardware ({', '.join(gpu.throttled)})"] if gpu.throttled else []
        told += ["a replacement of bad memory rows is pending (takes a reset)"] if gpu.remap_pending else []
        told += ["a replacement of bad memory rows has failed"] if gpu.remap_failed else []
        if told:
            by = "" if gpu.by == "process" else "; which GPU it has is guessed by its local rank"
            lines.append(f"rank {rank}, GPU {gpu.index}: {', '.join(told)}{by}")
    return lines[:4]


def _utilisation(gpus: Mapping[int, Gpu], wait: Wait) -> list[str]:
    known = {rank: gpu.utilisation_ratio for rank, gpu in sorted(gpus.items()) if gpu.utilisation_ratio is not None and gpu.at >= wait.since + SETTLED_S}
    if not known:
        return []
    if min(known.values()) >= BUSY_RATIO:
        return [f"the GPUs of {words.ranks_text(known)} are all busy, as one that waits in NCCL is: that tells none from the others"]
    shown = ", ".join(f"rank {rank} {ratio:.0%}" for rank, ratio in list(known.items())[:8])
    return [f"GPU utilisation: {shown}"]


def _problems(scene: Scene) -> tuple[RasProblem, ...]:
    ras = scene.snapshot.ras
    return ras.problems if ras is not None and ras.state == "problems" else ()


def _of_ras(scene: Scene) -> list[str]:
    ras = scene.snapshot.ras
    if ras is None:
        return []
    if ras.state == "ok":
        many = f" of {ras.processes} processes" if ras.processes else ""
        return [f"NCCL's RAS{many} sees nothing wrong: it counts launches on the host and does not see whether a kernel runs"]
    lines = []
    for problem in _problems(scene)[:3]:
        launched = [f"{_who(entry)} {entry.launched}" for entry in problem.ranks if entry.launched is not None][:4]
        names = [_who(entry) for entry in problem.ranks if entry.launched is None][:4]
        detail = f": {', '.join(launched or names)}" if launched or names else ""
        lines.append(f"NCCL's RAS, two polls alike: {problem.what}{detail}")
    return lines


def _who(entry: RasRank) -> str:
    return f"rank {entry.rank}" if entry.rank is not None else f"process {entry.pid} on {entry.node}"


def _missing(wait: Wait, members: Sequence[int], gpus: Mapping[int, Gpu], scene: Scene) -> list[str]:
    """Exactly what could not be looked at, of a collective on NCCL."""
    if not wait.on_nccl:
        return []
    found = []
    at = wait.view.at_frontier() if wait.view is not None else {}
    known = any((entry := at.get(rank)) is not None and entry.started is not None for rank in members)
    if not known and not wait.behind:
        found.append("which device has started it (--nccl-timing on would tell: TORCH_NCCL_ENABLE_TIMING is off)")
    blind = {rank for rank in members if rank not in gpus}
    if blind:
        notes = dict.fromkeys(note for _, note in sorted({scene.gpu_notes[rank] for rank in blind if rank in scene.gpu_notes}))
        found.append(f"state of the GPUs of {words.ranks_text(blind)}" + (f" (gpu probe: {'; '.join(notes)})" if notes else ""))
    ras = scene.snapshot.ras
    if ras is None or ras.state not in ("ok", "problems"):
        found.append("NCCL's RAS as a second opinion" + (f" ({ras.note})" if ras is not None and ras.note else ""))
    return found
