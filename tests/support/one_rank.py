"""Real processes under the agent without a launcher: makes the slot directory itself and reads slots as bytes (wire/layout.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rankwatch
from rankwatch.wire import env, layout

PACKAGE = Path(rankwatch.__file__).parent
SITE = PACKAGE / "agent" / "site"


class Node:
    """`ranks` ranks on this machine: their slots, their environment, their processes. Use as a context manager: nothing outlives the block."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.folder, self.ranks = folder, ranks
        self.processes: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        for rank in range(ranks):
            (folder / env.slot_name(rank)).write_bytes(layout.pack_header(rank, 0).ljust(layout.SLOT_BYTES, b"\0"))

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_exc: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def environ(self, rank: int = 0, **more: str) -> dict[str, str]:
        """What a rank gets: torchrun's variables and the launcher's."""
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks, "MASTER_PORT": self.port}
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RANKWATCH_", "PYTHON"))},
            **{name: str(value) for name, value in numbers.items()},
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SITE),
            "TORCH_FR_BUFFER_SIZE": "2000",
            env.SLOT_DIR: str(self.folder),
            env.AGENT_DIR: str(PACKAGE),
            env.LAUNCHER_PID: str(os.getpid()),
            env.ATTEMPT: "0",
            **more,
        }

    def start(self, code: str, rank: int = 0, argv: list[str] | None = None, **more: str) -> subprocess.Popen[str]:
        """Run Python source (from a file, as a script would be) or `argv` as a rank."""
        script = self.folder / f"script_{len(self.processes)}.py"
        script.write_text(code)
        process = subprocess.Popen(
            argv or [sys.executable, str(script)],
            env=self.environ(rank, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, code: str, rank: int = 0, timeout_s: float = 60, **more: Any) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `code` as a rank."""
        process = self.start(code, rank, **more)
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def slot(self, rank: int = 0) -> bytes:
        return (self.folder / env.slot_name(rank)).read_bytes()

    def record(self, name: str, rank: int = 0) -> dict[str, Any]:
        """A JSON record; {} when it is empty or was never written."""
        found = layout.read_record(self.slot(rank), layout.RECORDS[name])
        return json.loads(found[2]) if found and found[2] else {}

    def threads(self, rank: int = 0) -> list[dict[str, Any]]:
        """The threads that compile now."""
        slot, live = self.slot(rank), []
        for n in range(layout.THREADS):
            found = layout.read_record(slot, layout.RECORDS[f"thread_{n}"])
            if found and found[2]:
                live.append(decode_thread(found[2]))
        return live

    def events(self, rank: int = 0, kind: str = "") -> list[dict[str, Any]]:
        """Whole entries of the ring, oldest first; only those of `kind` if given."""
        slot = self.slot(rank)
        entries = [layout.unpack(slot[layout.event_offset(n) : layout.event_offset(n) + layout.EVENT_BYTES]) for n in range(layout.EVENT_SLOTS)]
        events = [json.loads(entry[2]) for entry in sorted(filter(None, entries))]
        return [event for event in events if not kind or event["kind"] == kind]

    def ask(self, handler: str, rank: int = 0, timeout_s: float = 1.0) -> bytes:
        """Body of the worker server's answer."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(timeout_s)
            client.connect(str(self.folder / env.socket_name(rank)))
            client.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
            answer = b""
            while chunk := client.recv(65536):
                answer += chunk
        return answer.partition(b"\r\n\r\n")[2]


def decode_thread(payload: bytes) -> dict[str, Any]:
    native_id, started_ns, phase_ns, depth, split, splits = layout.THREAD_HEADER.unpack_from(payload)
    texts = payload[layout.THREAD_HEADER.size :].decode().split("\0")
    numbers = {"native_id": native_id, "started_ns": started_ns, "phase_ns": phase_ns, "depth": depth, "split": split, "splits": splits}
    return {**numbers, **dict(zip(layout.THREAD_TEXTS, texts, strict=True))}


def until(what: Callable[[], Any], process: subprocess.Popen[str] | None = None, deadline_s: float = 40.0) -> Any:
    """The first true answer of `what()`. AssertionError after deadline_s, or once `process` has ended without one."""
    end = time.monotonic() + deadline_s
    while True:
        ended = process is not None and process.poll() is not None
        if answer := what():
            return answer
        assert not ended, f"the process ended with {process.returncode}: {process.communicate()}"  # type: ignore[union-attr]
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.02)


def printed(process: subprocess.Popen[str], deadline_s: float = 60.0) -> Mapping[str, Any]:
    """The next line of the process's stdout, which is JSON. AssertionError with its stderr when it ends or stays silent."""
    assert process.stdout is not None
    silent = threading.Timer(deadline_s, process.kill)
    silent.start()
    line = process.stdout.readline()
    silent.cancel()
    assert line, f"it said nothing: {process.communicate()}"
    answer: Mapping[str, Any] = json.loads(line)
    return answer


def go_on(process: subprocess.Popen[str]) -> None:
    """Let a process that reads a line of its stdin go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
