"""Asks one rank all that the launcher asks it, at many times the rate: `poker.py PID SOCKET TIMES`. Paused and resumed by SIGSTOP and SIGCONT."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable

from rankwatch.monitor.nvml import Devices
from rankwatch.monitor.processes import Processes
from rankwatch.monitor.worker_server import ServerError, WorkerServer

SAY_S = 5.0


def main() -> None:
    pid, path, times = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    server, processes = WorkerServer(path), Processes()
    # name -> (how often a second the launcher does it to a healthy rank on NCCL, how)
    asks: dict[str, tuple[float, Callable[[], object]]] = {
        "status": (1.0, server.status),
        "recorders": (0.2, server.recorders),
        "wait counters": (0.2, server.wait_counters),
        "/proc": (2.0, lambda: processes.look(pid)),
    }
    with contextlib.suppress(ImportError):
        import pynvml

        asks["NVML"] = (0.1, Devices(pynvml).look)
    due = dict.fromkeys(asks, 0.0)
    done: Counter[str] = Counter()
    said = time.monotonic()
    while True:
        now = time.monotonic()
        for name, (rate, ask) in asks.items():
            if now >= due[name]:
                due[name] = max(due[name], now - 0.1) + 1 / (rate * times)  # what a pause has left undone is not made up for
                with contextlib.suppress(ServerError):
                    ask()
                    done[name] += 1
        if now - said >= SAY_S:
            said = now
            print("poker:", ", ".join(f"{name} {count}" for name, count in done.items()), flush=True)
        time.sleep(max(0.0, min(due.values()) - time.monotonic()))


if __name__ == "__main__":
    main()
