"""What the launcher tells the monitor, and when: a recording monitor in the place of the real one, real torchrun, plain Python ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

DEADLINE_S = 90

DRIVER = '''
"""argv: events file, mode, torchrun arguments."""
import json, os, sys, time

from rankwatch import config
from rankwatch.launcher import supervision, torchrun
from rankwatch.monitor.policy import Limits

out, mode = open(sys.argv[1], "a", buffering=1), sys.argv[2]


def say(what, **more):
    out.write(json.dumps({"what": what, **more}) + "\\n")


def alive(pids):
    return {pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX" for pid in pids}


class Recorder:
    """Any other call is an AttributeError, which supervision says on stderr."""

    exit_request = None  # read at every poll of torchrun's agent

    def __init__(self, options, job, limits):
        say("init", job_id=job.job_id, world_size=job.world_size, nnodes=job.nnodes, run_dir=job.run_dir, env=job.set_environment, labels=job.labels)

    def start(self):
        say("start")
        if mode == "broken":
            raise RuntimeError("no luck")

    def workers_started(self, workers, directory=None):
        self.pids = {worker.rank: worker.pid for worker in workers.workers}
        slots = sorted(os.listdir(workers.slot_dir))
        logs = [[worker.rank, worker.local_rank, bool(worker.stdout), os.path.basename(worker.error_file)] for worker in workers.workers]
        say("workers_started", attempt=workers.attempt, group_rank=workers.group_rank, slots=slots, logs=logs, slot_dir=workers.slot_dir)

    def workers_failing(self, exits, deadline_s):
        living = alive(self.pids.values())
        say("workers_failing", exits=exits, deadline_s=deadline_s, alive=[rank for rank, pid in self.pids.items() if living[pid]])
        if mode == "hanging":
            time.sleep(60)

    def ending(self, reason):
        living = alive(self.pids.values())
        say("ending", reason=reason, alive=[rank for rank, pid in self.pids.items() if living[pid]])

    def workers_stopped(self, reason):
        say("workers_stopped", reason=reason)

    def restarting(self, attempt):
        say("restarting", attempt=attempt)

    def stop(self, exit_code):
        say("stop", exit_code=exit_code)
        print("BLOCK", file=sys.stderr, flush=True)


supervision.make_monitor = Recorder
if mode == "unknown":
    from torch.distributed.launcher import api

    api.LocalElasticAgent._stop_workers = lambda self, group, more: None
options = config.Options(run_dir="run", owner="ada", labels={"team": "vision"})
sys.exit(torchrun.run(sys.argv[3:], options, Limits.from_options(None, {}), ("rankwatch",), lambda text: print("[rankwatch]", text, file=sys.stderr)))
'''

JOB = """
import os, sys, time
rank, does = os.environ["RANK"], sys.argv[1]
with open(f"new{rank}", "w") as file:
    file.write(str(os.getpid()))
os.replace(f"new{rank}", f"ready{rank}")
if does == "fail" and rank == "1":
    time.sleep(0.3)
    sys.exit(7)
if does != "end":
    time.sleep(120)
"""


class Launcher:
    def __init__(self, tmp_path: Path, mode: str, *arguments: str) -> None:
        (tmp_path / "driver.py").write_text(DRIVER)
        (tmp_path / "job.py").write_text(JOB)
        self.path = tmp_path
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("RANKWATCH_", "SLURM_", "PYTHONPATH"))}
        self.process = subprocess.Popen(
            [sys.executable, "driver.py", "events", mode, *arguments],
            cwd=tmp_path,
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.err = ""

    def end(self) -> int:
        try:
            _, self.err = self.process.communicate(timeout=DEADLINE_S)
        finally:
            self.process.kill()
        return self.process.returncode

    def calls(self) -> list[dict]:
        path = self.path / "events"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_call(self, what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while what not in [call["what"] for call in self.calls()]:
            assert time.monotonic() < end, f"the monitor is not told of {what}"
            time.sleep(0.02)

    def wait_for_file(self, name: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not (self.path / name).exists():
            assert time.monotonic() < end, f"{name} does not come"
            time.sleep(0.02)


def test_a_failure_is_told_while_the_peers_live_and_each_attempt_has_its_own_slots(tmp_path):
    launcher = Launcher(tmp_path, "record", "--nproc-per-node", "3", "--max-restarts", "1", "--redirects", "3", "--log-dir", "logs", "job.py", "fail")
    assert launcher.end() == 1
    calls = launcher.calls()
    assert [call["what"] for call in calls] == [
        "init",
        "start",
        "workers_started",
        "workers_failing",
        "ending",
        "workers_stopped",
        "restarting",
        "workers_started",
        "workers_failing",
        "ending",
        "workers_stopped",
        "stop",
    ]
    init, _, first, failing, ending, stopped, restarting, second = calls[:8]
    assert (init["world_size"], init["nnodes"], init["run_dir"]) == (3, 1, str(tmp_path / "run"))
    assert init["labels"] == {"team": "vision", "owner": "ada"}
    assert init["env"]["RANKWATCH_SLOT_DIR"] == first["slot_dir"]
    assert first["slots"][:3] == ["rank_0.slot", "rank_1.slot", "rank_2.slot"]
    assert first["logs"] == [[0, 0, True, "error.json"], [1, 1, True, "error.json"], [2, 2, True, "error.json"]]
    assert (failing["exits"], failing["deadline_s"], failing["alive"]) == ({"1": 7}, 1.5, [0, 2])
    assert (ending["reason"], ending["alive"]) == ("torchrun stops the workers after rank 1 failed", [0, 2])
    assert stopped["reason"] == "torchrun stops the workers after rank 1 failed"
    assert restarting["attempt"] == second["attempt"] == 1
    assert second["slot_dir"] != first["slot_dir"]
    assert calls[-1]["exit_code"] == 1
    assert launcher.err.index("ChildFailedError") < launcher.err.index("BLOCK")  # ours comes below torchrun's summary
    assert "[rankwatch]" not in launcher.err
    assert not Path(second["slot_dir"]).parent.exists()


def test_a_signal_is_told_before_the_ranks_get_it(tmp_path):
    launcher = Launcher(tmp_path, "record", "--nproc-per-node", "1", "job.py", "wait")
    launcher.wait_for_file("ready0")
    launcher.wait_for_call("workers_started")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 1
    calls = launcher.calls()
    assert [call["what"] for call in calls] == ["init", "start", "workers_started", "ending", "stop"]
    assert (calls[3]["reason"], calls[3]["alive"]) == ("SIGTERM to the launcher", [0])


def test_a_monitor_that_fails_costs_one_line_and_nothing_else(tmp_path):
    launcher = Launcher(tmp_path, "broken", "--nproc-per-node", "1", "job.py", "end")
    assert launcher.end() == 0
    assert [call["what"] for call in launcher.calls()] == ["init", "start"]
    ours = [line for line in launcher.err.splitlines() if line.startswith("[rankwatch]")]
    assert ours == ["[rankwatch] supervision off: RuntimeError: no luck; the job runs on; `rankwatch doctor` tells more"]


def test_a_monitor_that_hangs_holds_torchrun_up_for_a_bounded_time(tmp_path):
    """The evidence pass has 1.5 s, the last look 4 s; then torchrun goes on without."""
    launcher = Launcher(tmp_path, "hanging", "--nproc-per-node", "2", "job.py", "fail")
    assert launcher.end() == 1
    calls = launcher.calls()
    assert [call["what"] for call in calls] == ["init", "start", "workers_started", "workers_failing"]
    assert not Path(calls[2]["slot_dir"]).parent.exists()


def test_a_torch_whose_methods_differ_runs_as_plain_torchrun(tmp_path):
    launcher = Launcher(tmp_path, "unknown", "--nproc-per-node", "1", "job.py", "end")
    launcher.end()
    ours = [line for line in launcher.err.splitlines() if line.startswith("[rankwatch]")]
    assert len(ours) == 1
    assert ours[0].startswith("[rankwatch] supervision off: torch ")
    assert "LocalElasticAgent._stop_workers is not the method that rankwatch knows; torchrun runs as it is" in ours[0]
    assert launcher.calls() == []
    assert (tmp_path / "ready0").exists()


def test_without_torch_the_next_step_is_said_and_the_code_is_that_of_a_missing_command(tmp_path):
    program = (
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "import rankwatch.launcher.torchrun as launcher\n"
        "launcher.find_spec = lambda name: None if name == 'torch' else real(name)\n"
        "from rankwatch.cli import main\n"
        "sys.exit(main(['torchrun', 'job.py']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 127
    assert done.stderr == f"[rankwatch] error: no torch in {sys.executable}: install torch there, or run the rankwatch of the environment that has it\n"


def test_the_directory_of_a_killed_launcher_goes_with_the_next_start_once_its_ranks_are_gone(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    killed = Launcher(first, "record", "--nproc-per-node", "1", "job.py", "wait")
    killed.wait_for_file("ready0")
    rank = int((first / "ready0").read_text())
    try:
        killed.wait_for_call("workers_started")
        base = Path(killed.calls()[-1]["slot_dir"]).parent
        killed.process.kill()
        killed.process.wait(DEADLINE_S)
        assert base.is_dir()
        assert Launcher(second, "record", "--nproc-per-node", "1", "job.py", "end").end() == 0
        assert base.is_dir()  # its rank still runs
    finally:
        os.kill(rank, signal.SIGKILL)
        killed.end()
    assert Launcher(third, "record", "--nproc-per-node", "1", "job.py", "end").end() == 0
    assert not base.exists()
