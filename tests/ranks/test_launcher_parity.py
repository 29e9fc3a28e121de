"""`rankwatch torchrun` ends as torchrun does: exit code, stdout, error file, log files. Each case runs both, side by side.

The ranks are plain Python without torch wherever the case allows it: what is compared is the launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

STOCK = [sys.executable, "-m", "torch.distributed.run"]
OURS = [sys.executable, "-m", "rankwatch", "--listen", "off"]
DEADLINE_S = 90

JOB = """
import json, os, sys, time
seen = {
    "rank": os.environ["RANK"], "local": os.environ["LOCAL_RANK"], "world": os.environ["WORLD_SIZE"], "argv": sys.argv[1:], "path": sys.path[1:],
    "names": sorted(os.environ), "handlers": [str(__import__("signal").getsignal(n)) for n in (2, 13, 15)], "hook": sys.excepthook is sys.__excepthook__,
}
os.write(1, (json.dumps(seen) + "\\n").encode())
what = os.environ.get("JOB_DOES", "")
if what == "wait":
    open(os.environ["JOB_READY"] + os.environ["RANK"], "w").close()
    time.sleep(120)
if what == "exit" and seen["rank"] == "1":
    sys.exit(3)
if what == "exit":
    time.sleep(120)
if what == "raise":
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        if seen["rank"] == "1":
            raise ValueError("no such sample")
        time.sleep(120)
    main()
"""


class Pair:
    """torchrun and `rankwatch torchrun` with the same arguments, each in a folder of its own."""

    def __init__(self, tmp_path: Path, arguments: list[str], does: str = "", **env: str) -> None:
        self.dirs = {"stock": tmp_path / "stock", "ours": tmp_path / "ours"}
        self.processes = {}
        for name, folder in self.dirs.items():
            folder.mkdir()
            (folder / "job.py").write_text(JOB)
            command = STOCK if name == "stock" else [*OURS, "--run-dir", str(folder / "run"), "torchrun"]
            unset = ("RANKWATCH_", "SLURM_", "XDG_", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")  # an empty list of GPUs forbids --virtual-local-rank
            environ = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
            environ |= {
                "OMP_NUM_THREADS": "1",
                "JOB_DOES": does,
                "JOB_READY": str(folder / "ready"),
                "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
                **env,
            }
            with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
                self.processes[name] = subprocess.Popen([*command, *arguments], cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def ready(self, ranks: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while not all((folder / f"ready{rank}").exists() for folder in self.dirs.values() for rank in range(ranks)):
            assert time.monotonic() < end, "the ranks do not start"
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        for process in self.processes.values():
            process.send_signal(number)

    def codes(self) -> tuple[int, int]:
        """Exit codes of torchrun and of rankwatch, once both have ended; nothing of ours is left in the slot places."""
        end = time.monotonic() + DEADLINE_S
        try:
            codes = tuple(process.wait(max(0.1, end - time.monotonic())) for process in self.processes.values())
        finally:
            for process in self.processes.values():
                process.kill()
        assert _slot_directories_of(self.processes["ours"].pid) == []
        return codes  # type: ignore[return-value]

    def read(self, file: str) -> tuple[str, str]:
        stock, ours = ((folder / file).read_text(errors="replace") for folder in self.dirs.values())
        return stock.replace(str(self.dirs["stock"]), "DIR"), ours.replace(str(self.dirs["ours"]), "DIR")

    def seen(self) -> tuple[list[dict], list[dict]]:
        """What the ranks printed, by rank, without the prefixes of --tee."""
        both = []
        for text in self.read("out"):
            found = [json.loads(line[line.index("{") :]) for line in text.splitlines()]
            both.append(sorted(found, key=lambda doc: (doc["rank"], doc["local"])))
        return both[0], both[1]


def _slot_directories_of(pid: int) -> list[str]:
    found = []
    for owner in [*Path("/dev/shm").glob("rankwatch.*/owner.json"), *Path("/tmp").glob("rankwatch.*/owner.json")]:
        try:
            text = owner.read_text()
        except FileNotFoundError:
            continue  # another job's, which has just ended
        if json.loads(text)["pid"] == pid:
            found.append(str(owner.parent))
    return found


def same_ranks(pair: Pair) -> None:
    """Each rank sees the same arguments, import path, signal handlers and excepthook; its environment has only our documented names more."""
    stock, ours = pair.seen()
    for theirs, mine in zip(stock, ours, strict=True):
        more = set(mine.pop("names")) ^ set(theirs.pop("names"))
        assert more - {"RANKWATCH_PTRACE_OPT_IN"} == {
            "RANKWATCH_AGENT_DIR",
            "RANKWATCH_LAUNCHER_PID",
            "RANKWATCH_ATTEMPT",
            "RANKWATCH_SLOT_DIR",
            "PYTHONPATH",
            "TORCH_FR_BUFFER_SIZE",
        }
        assert mine == theirs


def test_a_job_that_ends_well(tmp_path):
    """-m, both spellings of a flag, --virtual-local-rank, arguments that look like ours."""
    arguments = ["--nproc_per_node=2", "--max-restarts", "1", "--virtual-local-rank", "-m", "job", "--run-dir", "theirs", "--help"]
    pair = Pair(tmp_path, arguments)
    assert pair.codes() == (0, 0)
    same_ranks(pair)
    assert [doc["local"] for doc in pair.seen()[1]] == ["0", "0"]
    assert pair.seen()[1][0]["argv"] == ["--run-dir", "theirs", "--help"]
    run = tmp_path / "ours" / "run"
    assert run.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "ours" / "error.json").exists()


def test_a_rank_that_exits_with_3_after_a_restart_with_logs(tmp_path):
    arguments = ["--nproc-per-node", "2", "--max-restarts=1", "--tee", "3", "--log-dir", "logs", "--role", "tr", "job.py"]
    pair = Pair(tmp_path, arguments, does="exit")
    assert pair.codes() == (1, 1)
    same_ranks(pair)
    assert len(pair.seen()[1]) == 4
    logs = [
        sorted(re.sub(r"^[^/]*/", "", str(path.relative_to(folder / "logs"))) for path in (folder / "logs").rglob("*.log")) for folder in pair.dirs.values()
    ]
    assert logs[0] == logs[1]
    assert "attempt_1/1/stdout.log" in logs[1]
    stock, ours = (re.findall(r"exitcode  : (-?\d+)", text) for text in pair.read("err"))
    assert stock == ours == ["-15", "3"]


def test_an_exception_leaves_the_same_error_file(tmp_path):
    pair = Pair(tmp_path, ["--standalone", "--nproc-per-node", "2", "job.py"], does="raise")
    assert pair.codes() == (1, 1)
    messages = [json.loads(text)["message"] for text in pair.read("error.json")]
    for message in messages:
        message["extraInfo"]["timestamp"] = 0
        message["extraInfo"]["py_callstack"] = message["extraInfo"]["py_callstack"].splitlines()[-1]
    assert messages[0] == messages[1]
    assert messages[1]["message"] == "ValueError: no such sample"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher(tmp_path, number):
    """--no-python too: the rank is a program of its own."""
    pair = Pair(tmp_path, ["--nproc-per-node", "2", "--no-python", sys.executable, "job.py"], does="wait")
    pair.ready(2)
    pair.signal(number)
    assert pair.codes() == (1, 1)
    same_ranks(pair)
    stock, ours = (re.findall(r"got signal: (\d+)", text) for text in pair.read("err"))
    assert stock[-1] == ours[-1] == str(int(number))
    assert through_torch(pair, 0) == through_torch(pair, 1)  # no frame of ours stands between torch's


def through_torch(pair: Pair, which: int) -> str:
    """The traceback from torch's main to its loop, in which the signal may fall anywhere."""
    text = pair.read("err")[which]
    start = text.rindex("/torch/distributed/elastic/multiprocessing/errors/__init__.py")
    return text[start : text.index(", in _invoke_run", start)]


def test_help_and_wrong_flags_are_torchruns_own(tmp_path):
    """torch's parser answers, under the name that the user typed it for."""
    environ = {**os.environ, "COLUMNS": "120"}
    stock_program = "import sys; sys.argv = ['torchrun', *sys.argv[1:]]; from torch.distributed.run import main; sys.exit(main())"
    for words in (["--help"], ["--nproc-per-nod", "x", "--no-such-flag", "job.py"]):
        both = [
            subprocess.run([*command, *words], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=DEADLINE_S)
            for command in ([sys.executable, "-c", stock_program], [*OURS, "torchrun"])
        ]
        assert both[0].returncode == both[1].returncode
        assert both[0].stdout == both[1].stdout
        ours = "[rankwatch] rankwatch's own options go before the word torchrun: rankwatch --help\n" if words == ["--help"] else ""
        assert both[0].stderr + ours == both[1].stderr
    assert list(tmp_path.iterdir()) == []


def test_two_static_nodes_on_one_machine(tmp_path):
    """Two launchers side by side: global ranks, slots by global rank, one run dir for each."""
    (tmp_path / "job.py").write_text(JOB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("RANKWATCH_", "SLURM_", "PYTHONPATH"))}
    nodes = []
    for node in (0, 1):
        arguments = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", "job.py"]
        command = [*OURS, "--run-dir", f"run{node}", "torchrun", *arguments]
        nodes.append(
            subprocess.Popen(command, cwd=tmp_path, env={**environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [node.communicate(timeout=DEADLINE_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    ranks = [sorted(json.loads(line)["rank"] for line in out.splitlines()) for out, _ in outputs]
    assert ranks == [["0", "1"], ["2", "3"]]


def test_rankwatch_inside_a_rank_of_rankwatch(tmp_path):
    """The inner run's ranks belong to the inner launcher: its pid, its slots, no claim of the outer rank."""
    (tmp_path / "show.py").write_text(
        "import json, os, signal\n"
        "names = ('RANKWATCH_LAUNCHER_PID', 'RANKWATCH_SLOT_DIR', 'RANKWATCH_CLAIMED', 'PYTHONPATH')\n"
        "print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)\n"
    )
    inner = [*OURS, "--run-dir", "inner", "torchrun", "--standalone", "--nproc-per-node", "1", "show.py"]
    (tmp_path / "outer.py").write_text(
        "import os, subprocess, sys\n"
        "os.environ['RANKWATCH_CLAIMED'] = str(os.getpid())\n"
        "os.environ['OUTER_SLOTS'] = os.environ['RANKWATCH_SLOT_DIR']\n"
        "print(os.environ['RANKWATCH_LAUNCHER_PID'], os.environ['RANKWATCH_SLOT_DIR'], flush=True)\n"
        f"sys.exit(subprocess.run({inner!r}).returncode)\n"
    )
    done = subprocess.run(
        [*OURS, "--run-dir", "outer", "torchrun", "--standalone", "--nproc-per-node", "1", "outer.py"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith(("RANKWATCH_", "PYTHONPATH"))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    outer, shown = done.stdout.splitlines()
    seen = json.loads(shown)
    outer_pid, outer_slots = outer.split()
    assert seen["RANKWATCH_CLAIMED"] is None
    assert seen["RANKWATCH_LAUNCHER_PID"] != outer_pid
    assert seen["RANKWATCH_SLOT_DIR"] != outer_slots
    assert seen["PYTHONPATH"].count("agent/site") == 1
