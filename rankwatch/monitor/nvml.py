"""Reads the node's GPUs through the NVIDIA driver (NVML), in a process of its own: a hung driver hangs that process, a crash of its library ends it.

Run by monitor/gpus.py: each line on stdin asks for one look, each line on stdout is one, as JSON; it ends when stdin does. A look is
{"gpus": [{index, uuid, ...}]} as `look` gives it, or {"error": text}. Nothing is written to a device: its settings stay as they are.
Source: NVML API reference; names as in nvidia-ml-py (module pynvml) 11 to 13.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

THROTTLED = ((0x40, "thermal slowdown"), (0x80, "power brake"), (0x08, "hardware slowdown"))
"""Bits of the clocks' event reasons that the hardware sets; 0x08 is set together with one of the others, or alone."""
MAX_EVENTS = 32
MAX_PROCESSES = 64
_XID_EVENT = 0x8


class Devices:
    """The GPUs that the driver shows. What one of them does not support is left out of its look."""

    def __init__(self, nvml: Any) -> None:
        """Raises nvml.NVMLError without a driver."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = {
            index: handle for index in range(nvml.nvmlDeviceGetCount()) if (handle := self._known(nvml.nvmlDeviceGetHandleByIndex, index)) is not None
        }
        self._uuids = {index: _text(self._known(nvml.nvmlDeviceGetUUID, handle) or "") for index, handle in self._handles.items()}
        self._xids: dict[int, list[int]] = {}
        self._events = self._known(nvml.nvmlEventSetCreate)
        for handle in self._handles.values() if self._events is not None else ():
            self._known(nvml.nvmlDeviceRegisterEvents, handle, _XID_EVENT, self._events)

    def look(self) -> list[dict[str, Any]]:
        """Each GPU: index, uuid, and where known utilisation_ratio, sm_clock_hz, power_w, temperature_c, memory_used_bytes, memory_total_bytes,
        throttled, ecc_uncorrected, remap_pending, remap_failed, xids (new ones), processes ([[pid, bytes]]); lost: the driver's word, where it has lost it."""
        self._take_events()
        return [self._look_at(index, handle) for index, handle in self._handles.items()]

    def _look_at(self, index: int, handle: Any) -> dict[str, Any]:
        nvml, found = self._nvml, {"index": index, "uuid": self._uuids[index], "xids": self._xids.pop(index, [])}
        try:
            used = nvml.nvmlDeviceGetUtilizationRates(handle)
            found["utilisation_ratio"] = used.gpu / 100
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST:
                return {**found, "lost": str(error)}
        memory = self._known(nvml.nvmlDeviceGetMemoryInfo, handle)
        remapped = self._known(nvml.nvmlDeviceGetRemappedRows, handle)
        retired = self._known(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        reasons = self._known(self._clock_reasons(), handle)
        numbers = {
            "sm_clock_hz": _times(1e6, self._known(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            "power_w": _times(1e-3, self._known(nvml.nvmlDeviceGetPowerUsage, handle)),
            "temperature_c": self._known(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": getattr(memory, "used", None),
            "memory_total_bytes": getattr(memory, "total", None),
            "throttled": [name for bit, name in THROTTLED if reasons & bit] if isinstance(reasons, int) else None,
            "ecc_uncorrected": self._known(nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            "remap_pending": bool(remapped[2]) if remapped is not None else bool(retired) if retired is not None else None,
            "remap_failed": bool(remapped[3]) if remapped is not None else None,
        }
        processes = self._known(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        found["processes"] = [[process.pid, process.usedGpuMemory or 0] for process in processes[:MAX_PROCESSES]]
        return {**found, **{name: number for name, number in numbers.items() if number is not None}}

    def _clock_reasons(self) -> Callable[[Any], Any]:
        """The driver's newer name for the same bits, where the module has it."""
        newer: Callable[[Any], Any] | None = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return newer or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def _take_events(self) -> None:
        """Xids since the look before; a wait of 0 ms asks only what is there."""
        for _ in range(MAX_EVENTS if self._events is not None else 0):
            event = self._known(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                return
            index = self._known(self._nvml.nvmlDeviceGetIndex, event.device)
            if event.eventType == _XID_EVENT and index is not None:
                self._xids.setdefault(index, []).append(int(event.eventData))

    def _known(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the driver says; None for what this GPU, or these permissions, do not give."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def answer(devices: list[Devices], load: Callable[[], Any]) -> dict[str, Any]:
    """One look. devices: empty until the driver has answered once; a failed one is begun anew by the next."""
    try:
        if not devices:
            devices.append(Devices(load()))
        return {"gpus": devices[0].look()}
    except Exception as error:
        devices.clear()
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    devices: list[Devices] = []
    for _line in sys.stdin:
        print(json.dumps(answer(devices, lambda: __import__("pynvml"))), flush=True)


def _times(factor: float, number: float | None) -> float | None:
    return None if number is None else number * factor


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
