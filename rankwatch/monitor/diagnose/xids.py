"""What the NVIDIA driver's error numbers (Xid) mean, as far as a stuck job needs to know. Source: NVIDIA's Xid catalogue (GPU deployment docs)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["device", "link", "program", "consequence"]


class Xid(NamedTuple):
    """kind: whose fault it most often is. device, link: the node's; program: a kernel of the job; consequence: of an earlier one."""

    meaning: str
    kind: Kind


XIDS: dict[int, Xid] = {
    13: Xid("graphics engine exception, most often an access out of bounds by a kernel", "program"),
    31: Xid("GPU memory page fault, most often an illegal address in a kernel", "program"),
    32: Xid("corrupted push buffer: driver or PCIe link", "device"),
    38: Xid("driver firmware error", "device"),
    43: Xid("GPU stopped processing, a fault of the program that used it", "program"),
    45: Xid("cleaned up after an earlier error or the end of the program", "consequence"),
    48: Xid("double-bit ECC error", "device"),
    61: Xid("internal micro-controller breakpoint", "device"),
    62: Xid("internal micro-controller halted", "device"),
    63: Xid("a bad row or page of its memory was noted for replacement", "consequence"),
    64: Xid("a bad row or page of its memory could not be replaced", "device"),
    69: Xid("graphics engine class error, most often a fault of a kernel", "program"),
    74: Xid("NVLink error", "link"),
    79: Xid("GPU has fallen off the bus", "device"),
    92: Xid("many single-bit ECC errors", "consequence"),
    94: Xid("ECC error, contained to the program that met it", "device"),
    95: Xid("ECC error, not contained", "device"),
    109: Xid("context switch timed out", "device"),
    119: Xid("GPU system processor (GSP) does not answer", "device"),
    120: Xid("GPU system processor (GSP) error", "device"),
    121: Xid("chip-to-chip link error", "link"),
    140: Xid("ECC error, not recovered", "device"),
    143: Xid("GPU initialisation failed", "device"),
    **dict.fromkeys(range(144, 151), Xid("NVLink error", "link")),
    154: Xid("the driver asks for a reset of the GPU or the node", "device"),
}
_UNKNOWN = Xid("see NVIDIA's Xid catalogue", "device")

ADVICE: dict[Kind, tuple[str, ...]] = {
    "device": (
        "Drain the node, keep `nvidia-bug-report.sh` and dmesg, reset the GPU (nvidia-smi --gpu-reset) or reboot, and run `dcgmi diag -r 3` before it takes a "
        "job again; a second error of this kind is a case for the vendor (RMA).",
    ),
    "link": ("Drain the node and look at its links: `nvidia-smi nvlink -e`, the fabric manager's log, the baseboard; reset all GPUs of the node together.",),
    "program": (
        "Most often a kernel of the job reads or writes where it must not: run this rank with CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, to find it. "
        "If the same node shows it with other jobs, drain it.",
    ),
}


def xid(code: int) -> Xid:
    """What a number means; of one that is not in the table, where to look."""
    return XIDS.get(code, _UNKNOWN)
