"""A launcher as its control socket shows it: real socket, answers that the test gives, no job."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from rankwatch.serve.control import NAME, Answer, Control, ControlError, Request


class FakeLauncher:
    """Listens in a directory of its own below `place`, and has a run directory. A context manager. state: the document that it gives.

    place: a short folder, as a socket's path must be; its own where none is given.
    """

    def __init__(self, run_dir: Path, state: dict[str, Any], place: str = "", **info: Any) -> None:
        self.state = state
        self.state["run"]["run_dir"] = str(run_dir)
        self.compiles: dict[str, Any] = {}
        self.stacks: Answer = {}
        self.asked: list[dict[str, Any]] = []
        self.info = {"pid": os.getpid(), "state": state["state"], "verdict": "", "ranks": "0-3", "judge": "", "token_file": "", **info}
        self.run_dir = run_dir
        self._made = "" if place else tempfile.mkdtemp(prefix="rw-", dir="/tmp")
        self.place = place or self._made
        folder = tempfile.mkdtemp(prefix="rankwatch.", dir=self.place)
        self._control = Control(os.path.join(folder, NAME), self._answer)
        self.path = self._control.path
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "control.json").write_text(json.dumps({"schema": 1, "node": socket.gethostname(), "pid": os.getpid(), "socket": self.path}))
        self.write_run()

    def write_run(self, **changes: Any) -> None:
        """run.json, as it is at the start; changes: as at the end."""
        run = {"state": "running", "started_at": 1000.0, "ended_at": None, "exit_code": None, "command": ["rankwatch", "torchrun", "train.py"]}
        (self.run_dir / "run.json").write_text(json.dumps({**self.state["run"], **run, **changes}))

    def end(self, exit_code: int) -> None:
        """The job ends: run.json says so, nobody listens any more."""
        self.write_run(ended_at=1100.0, exit_code=exit_code, state="failed" if exit_code else "done")
        self._control.stop()

    def __enter__(self) -> FakeLauncher:
        self._control.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._control.stop()
        if self._made:
            shutil.rmtree(self._made)

    def _answer(self, request: Request) -> Answer:
        self.asked.append(dict(request))
        if request["do"] == "info":
            return {**self.info, "run": self.state["run"]}
        if request["do"] == "state":
            return dict(self.state)
        if request["do"] == "compile":
            return self.compiles
        if request["do"] == "stacks" and self.stacks:
            return self.stacks
        raise ControlError("another dump is under way; ask again when it is over")
