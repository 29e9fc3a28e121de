"""A demo's job: `rankwatch [options] torchrun SCRIPT` as a subprocess, its lines told, its incidents read, its end seen to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rankwatch.config import COMMAND_LINE, OPTIONS, Options

WITHOUT_TORCH = 4
NO_TORCH = "rankwatch demo: there is no torch in {python}: install it there (pip install torch), or run the rankwatch of the environment that has it"


def torch_is_missing() -> bool:
    """Says so on stderr, once for all demos."""
    try:
        missing = find_spec("torch") is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        print(NO_TORCH.format(python=sys.executable), file=sys.stderr)
    return missing


def forwarded(options: Options) -> list[str]:
    """The options of this command line except --run-dir, as words for the job's: a drill with --on-incident pages whom it would page."""
    words: list[str] = []
    for option in OPTIONS:
        if option.name == "run-dir" or options.origins.get(option.field) != COMMAND_LINE:
            continue
        value = getattr(options, option.field)
        if option.shape == "table":
            given = [name for name in value if options.origins.get(f"{option.field}.{name}") == COMMAND_LINE]
            words += [word for name in given for word in (option.flag, f"{name}={value[name]}")]
        elif option.shape == "list":
            words += [option.flag, ",".join(value)]
        else:
            words += [option.flag, f"{value:04o}" if option.name == "run-dir-mode" else str(value)]
    return words


def copied(script: Path, run_dir: Path) -> Path:
    """The script in the run directory: there it is the job's own code wherever rankwatch is installed, and can be read beside the stacks."""
    folder = run_dir / "job"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(script, folder / script.name))


def incidents(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The documents that a run has left so far, in order."""
    for path in sorted(run_dir.glob("incidents/*/incident.json")):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # pruned this moment; files are replaced whole


class Job:
    """A running job. rankwatch's own lines are shown as they come, everything goes into the log."""

    def __init__(self, command: list[str], log: Path) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        self._telling = threading.Thread(target=self._tell, args=(log,), daemon=True)
        self._telling.start()

    def _tell(self, log: Path) -> None:
        assert self.process.stdout is not None
        with self.process.stdout, log.open("wb") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                if line.startswith(b"[rankwatch]"):
                    print(line.decode("utf-8", "replace"), end="", flush=True)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> dict[int, int]:
        """rank -> pid of the launcher's children that torchrun started as ranks."""
        found = {}
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                pids = [int(pid) for pid in path.read_text().split()]
            except OSError:
                continue
            for pid in pids:
                try:
                    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                rank = next((word[5:] for word in words if word.startswith(b"RANK=")), b"")
                if rank.isdigit():
                    found[int(rank)] = pid
        return found

    def end(self) -> None:
        """A planned end, waited for."""
        self.interrupt()
        self.wait()

    def interrupt(self) -> None:
        """SIGTERM, which ranks that wait in C++ obey at once (Ctrl-C they do not); ranks that are stopped are let go, so that they can take it."""
        ranks = self.ranks()
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        for pid in ranks.values():
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    def wait(self) -> None:
        """Until it has ended, or 40 s: then it is killed, ranks first."""
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            for pid in (*self.ranks().values(), self.process.pid):
                os.kill(pid, signal.SIGKILL)  # children of a launcher that has not reaped them: the pids are theirs
            self.process.wait()
        self._telling.join(5)
