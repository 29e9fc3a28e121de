"""A Slurm that is this machine: what sbatch, srun and scontrol do for the scripts in launch/slurm, by the manual pages of Slurm 23.

    with Slurm(tmp_path, 48213) as slurm:
        slurm.sbatch(script, "train.py", cwd=tmp_path)

srun starts real processes: here, or with `prefixes` (words before the command, one list a node) in the namespaces of a netns.Network. Options that it
does not know end it, so that a script cannot use what nothing checks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PLACES = "STANDIN_SLURM_PREFIXES"
_SBATCH = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--signal", "--output", "--job-name"}
_SRUN = {"--ntasks", "--ntasks-per-node", "--cpus-per-task", "--kill-on-bad-exit"}


def directives(script: str) -> dict[str, str]:
    """What the #SBATCH lines say. As with sbatch, those below the first command are none; ValueError names one, and an option that is not known here."""
    found, commands = {}, False
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            name, _, value = shlex.split(line)[1].partition("=")
            if commands:
                raise ValueError(f"{line!r} stands below a command: sbatch does not read it")
            if name not in _SBATCH:
                raise ValueError(f"{line!r}: unknown here")
            found[name] = value
        commands = commands or (bool(line.strip()) and not line.startswith("#"))
    return found


class Slurm:
    """One allocation. names and prefixes: a node each. A context manager: nothing of it outlives the block."""

    def __init__(self, folder: Path, job_id: int, names: Sequence[str] = ("localhost",), prefixes: Sequence[Sequence[str]] = ((),)) -> None:
        self._bin = folder / "slurm-bin"
        self._bin.mkdir()
        self._job_id = job_id
        self._names = names
        self._prefixes = [list(prefix) for prefix in prefixes]
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder / "slurm.log"
        for program in ("srun", "scontrol"):
            path = self._bin / program
            here = str(Path(__file__).parent)
            path.write_text(
                f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {here!r})\nimport standin_slurm\nsys.exit(standin_slurm.{program}(sys.argv[1:]))\n"
            )
            path.chmod(0o755)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is None:
            return
        try:
            ours = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            ours = []
        for process in ours:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(10)

    def sbatch(self, script: Path, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Run the script as sbatch would, on the machine itself."""
        asked = directives(script.read_text())
        first = re.sub(r"\d+$", "", self._names[0])
        several = f"{first}[0-{len(self._names) - 1}]" if len(self._names) > 1 else self._names[0]
        slurm = {
            "SLURM_JOB_ID": str(self._job_id),
            "SLURM_JOB_NODELIST": several,
            "SLURM_NNODES": str(len(self._names)),
            "SLURM_NTASKS_PER_NODE": asked["--ntasks-per-node"],
            "SLURM_CPUS_PER_TASK": asked["--cpus-per-task"],
            "SLURM_GPUS_ON_NODE": asked["--gpus-per-node"],
            "SLURM_SUBMIT_DIR": str(cwd),
            _PLACES: json.dumps(self._prefixes),
        }
        path = f"{self._bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", str(script), *words],
                cwd=cwd,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **slurm, "PATH": path, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process


def srun(words: Sequence[str]) -> int:
    """Start the step's tasks, pass signals on to them; the highest exit code. With --kill-on-bad-exit the first failure ends the others."""
    options, command = {}, list(words)
    while command and command[0].startswith("-"):
        name, _, value = command.pop(0).partition("=")
        if name not in _SRUN:
            sys.exit(f"srun: unrecognized option {name} (unknown to the stand-in)")
        options[name] = value
    prefixes = json.loads(os.environ[_PLACES])
    count = int(options.get("--ntasks") or len(prefixes) * int(options["--ntasks-per-node"]))
    tasks = []
    for number in range(count):
        place = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number * len(prefixes) // count), "SLURM_NTASKS": str(count), "SLURM_STEP_ID": "0"}
        tasks.append(subprocess.Popen([*prefixes[int(place["SLURM_NODEID"])], *command], env={**os.environ, **place}))

    def pass_on(number: int, _frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    codes: dict[int, int] = {}
    while len(codes) < count:
        pid, status = os.wait()
        task = next((task for task in tasks if task.pid == pid), None)
        if task is None:
            continue  # what the script's shell has started before `exec srun`
        task.returncode = codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] and options.get("--kill-on-bad-exit") == "1":
            for other in tasks:
                if other.pid not in codes:
                    other.terminate()
    return max(code if code >= 0 else 128 - code for code in codes.values())


def scontrol(words: Sequence[str]) -> int:
    """`scontrol show hostnames node[0-1]`."""
    if list(words[:2]) != ["show", "hostnames"]:
        sys.exit("scontrol: the stand-in knows `show hostnames` only")
    found = re.fullmatch(r"([^[]+)(?:\[(\d+)-(\d+)\])?", words[2])
    if found is None:
        sys.exit(f"scontrol: not a list of hosts: {words[2]}")
    print("\n".join(f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)) if found[2] else found[1])
    return 0
