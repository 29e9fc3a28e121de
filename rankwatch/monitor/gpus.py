"""The GPUs of this node's ranks: asks monitor/nvml.py's process now and then, and never waits for it.

Needs the extra `gpu` (nvidia-ml-py); without it, or without a driver, `note` says so once and nothing is started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rankwatch.model import Gpu

EVERY_S, SUSPECTED_EVERY_S = 10.0, 2.0
ANSWER_S = 10.0
END_S = 0.1
KEEP_S = 30.0  # an older look says nothing of now
FAILURES = 5
MAX_ANSWER_BYTES = 1 << 20
MAX_XIDS = 16
ABSENT = "absent (pip install 'rankwatch[gpu]')"
_CODE = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);from rankwatch.monitor.nvml import main;main()"
_NUMBERS = ("utilisation_ratio", "sm_clock_hz", "power_w", "temperature_c", "memory_used_bytes", "memory_total_bytes", "ecc_uncorrected")


class Helper(Protocol):
    """A process that looks when it is asked."""

    def ask(self) -> None: ...

    def read(self) -> bytes | None:
        """What it has written since the call before, b"" for nothing yet, None once it has ended."""

    def close(self) -> None: ...


class NvmlProcess:
    """The real one. It hears no Ctrl-C (a session of its own) and ends when its stdin does, also when the launcher is killed."""

    def __init__(self) -> None:
        argv = [sys.executable, "-c", _CODE, json.dumps(sys.path)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def ask(self) -> None:
        os.write(self._in, b"\n")

    def read(self) -> bytes | None:
        try:
            return os.read(self._out, MAX_ANSWER_BYTES) or None
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """It is waited for a moment only: one that hangs in the driver cannot end."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank as far as its GPU can be told from it. visible: its CUDA_VISIBLE_DEVICES, None where it is not set."""

    rank: int
    local_rank: int
    pid: int
    visible: str | None = None


class GpuWatch:
    """Called from the loop's thread only. `note` is "" while looks come in."""

    def __init__(self, off: str = "", start: Callable[[], Helper] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """off: why it is switched off."""
        self._clock = clock
        self._start: Callable[[], Helper] = start or NvmlProcess
        self._helper: Helper | None = None
        self._answer = b""
        self._asked_at: float | None = None
        self._looked_at = -1e9
        self._failures = 0
        self._looks: dict[int, Gpu] = {}
        self._processes: dict[int, dict[int, int]] = {}  # index -> pid -> bytes
        self._before: dict[int, int] = {}  # pid -> index: a GPU that is lost shows no process
        self._ecc_before: dict[int, int] = {}
        self.off = off or ("" if start is not None or importlib.util.find_spec("pynvml") is not None else ABSENT)
        self.note = self.off

    def look(self, suspected: bool) -> None:
        """Take what has come in; ask again where that is due."""
        if self.off:
            return
        now = self._clock()
        try:
            self._collect(now)
            if self._asked_at is None and now - self._looked_at >= (SUSPECTED_EVERY_S if suspected else EVERY_S):
                self._helper = self._helper or self._start()
                self._helper.ask()
                self._asked_at = self._looked_at = now
        except OSError as error:
            self._failed(f"its helper cannot be used: {error.strerror or error}")

    def of(self, places: Sequence[Place]) -> dict[int, Gpu]:
        """The newest look at the GPU of each of these ranks; empty where there is none that is young enough."""
        now = self._clock()
        looks = {index: gpu for index, gpu in self._looks.items() if now - gpu.at <= KEEP_S or gpu.lost or gpu.xids}
        found = assign(places, looks, self._processes, self._before)
        self._before = {place.pid: found[place.rank].index for place in places if place.rank in found and found[place.rank].by == "process"}
        return found

    def close(self) -> None:
        """End the helper."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _collect(self, now: float) -> None:
        if self._helper is None or self._asked_at is None:
            return
        data = self._helper.read()
        if data is None:
            self._failed("its helper has ended")
            return
        self._answer += data
        if b"\n" in self._answer:
            line, self._answer, self._asked_at = self._answer.partition(b"\n")[0], b"", None
            self._take(line, now)
        elif len(self._answer) > MAX_ANSWER_BYTES:
            self._failed("its answer has no end")
        elif now - self._asked_at > ANSWER_S:
            self.note = f"the NVIDIA driver has not answered for {now - self._asked_at:.0f} s"

    def _take(self, line: bytes, now: float) -> None:
        try:
            answer = json.loads(line)
            if error := answer.get("error"):
                self._failed(str(error), ended=False)
                return
            looks = {int(row["index"]): row for row in answer["gpus"]}
            self._looks = {index: self._gpu(index, row, now) for index, row in looks.items()}
            self._processes = {index: {int(pid): int(used) for pid, used in row.get("processes") or ()} for index, row in looks.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._failed(f"its answer does not decode: {error}")
            return
        self._failures, self.note = 0, "" if looks else "no GPU"

    def _gpu(self, index: int, row: Mapping[str, Any], now: float) -> Gpu:
        before = self._looks.get(index)
        numbers = {name: row[name] for name in _NUMBERS if isinstance(row.get(name), (int, float))}
        ecc = numbers.get("ecc_uncorrected")
        first = self._ecc_before.setdefault(index, int(ecc)) if ecc is not None else 0
        xids = (*(before.xids if before is not None else ()), *((int(code), now) for code in row.get("xids") or ()))
        return Gpu(
            index=index, uuid=str(row.get("uuid", "")), at=now, throttled=tuple(str(name) for name in row.get("throttled") or ()),
            ecc_new=max(0, int(ecc or 0) - first), remap_pending=row.get("remap_pending"), remap_failed=row.get("remap_failed"),
            xids=xids[-MAX_XIDS:], lost=str(row.get("lost", "")), **numbers,
        )  # fmt: skip

    def _failed(self, why: str, ended: bool = True) -> None:
        """ended: the helper is of no more use."""
        self._failures += 1
        self._asked_at, self._answer = None, b""
        missing = any(word in why for word in ("LibraryNotFound", "DriverNotLoaded", "ModuleNotFoundError"))
        if ended or missing or self._failures >= FAILURES:
            self.close()
        if missing:
            self.off = self.note = f"no NVIDIA driver here ({why})"
        elif self._failures >= FAILURES:
            self.off = self.note = f"switched off after {FAILURES} failures, the last: {why}"
        else:
            self.note = why


def assign(
    places: Sequence[Place], looks: Mapping[int, Gpu], processes: Mapping[int, Mapping[int, int]], before: Mapping[int, int] | None = None
) -> dict[int, Gpu]:
    """Which rank has which GPU: the one on which its process holds most memory, or did (before: pid -> index); where the driver knows none of the
    ranks' processes (a container has numbers of its own), the one that its local rank stands for among the visible GPUs."""
    found: dict[int, Gpu] = {}
    for place in places:
        held = {index: used[place.pid] for index, used in processes.items() if place.pid in used and index in looks}
        index = (before or {}).get(place.pid)
        if held and (index is None or index not in looks or not looks[index].lost):
            index = max(held, key=lambda index: (held[index], -index))
        if index is not None and index in looks:
            found[place.rank] = replace(looks[index], by="process")
    if found:
        return found  # a rank without one has not begun to use its GPU
    for place in places:
        if (index := _by_order(place, looks)) is not None:
            found[place.rank] = replace(looks[index], by="order")
    return found


def _by_order(place: Place, looks: Mapping[int, Gpu]) -> int | None:
    if place.visible is None:
        return place.local_rank if place.local_rank in looks else None
    names = [name.strip() for name in place.visible.split(",") if name.strip()]
    if not names:
        return None
    name = names[0] if len(names) == 1 else names[place.local_rank] if place.local_rank < len(names) else ""
    if name.isdigit():
        return int(name) if int(name) in looks else None
    return next((index for index, gpu in looks.items() if name and gpu.uuid.startswith(name)), None)


def visible_devices(pid: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process as it was started; None where it is not set or not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read(1 << 20)
    except OSError:
        return None
    found = next((part for part in environ.split(b"\0") if part.startswith(b"CUDA_VISIBLE_DEVICES=")), None)
    return found.partition(b"=")[2].decode("utf-8", "replace") if found is not None else None
