"""Which process becomes the rank, with real processes that join real gloo groups."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from one_rank import Node, go_on, printed, until

from rankwatch.wire import env

pytestmark = pytest.mark.ranks

JOIN = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
TELL = "import os, sys, json\ndef tell(**what): print(json.dumps({'pid': os.getpid(), **what}), flush=True)\n"
HOLD = "sys.stdin.readline()\n"


def test_a_wrapper_that_imports_torch_gives_way_to_the_trainer_that_it_starts(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TELL + JOIN + "tell(claimed=os.environ['RANKWATCH_CLAIMED'])\n" + HOLD)
    wrapper = f"import subprocess, sys, os, torch\nprint(os.getpid(), flush=True)\nsys.exit(subprocess.call([sys.executable, {str(trainer)!r}]))\n"
    with Node(tmp_path) as node:
        process = node.start(wrapper)
        assert process.stdout is not None
        wrapper_pid = int(process.stdout.readline())
        assert node.record("owner")["pid"] == wrapper_pid
        assert node.record("owner")["state"] == "armed"
        joined = printed(process)
        owner = until(lambda: node.record("lifecycle").get("stage") == "joined" and node.record("owner"), process)
        assert (owner["pid"], owner["state"], owner["ppid"]) == (joined["pid"], "claimed", wrapper_pid)
        assert joined["claimed"] == str(joined["pid"])
        _out, err = process.communicate("\n", timeout=30)
        assert process.returncode == 0, err
        assert node.record("lifecycle")["stage"] == "exiting"
        assert node.record("owner")["pid"] == joined["pid"]  # the wrapper ends later and writes nothing


@pytest.mark.slow_ranks
def test_of_two_pythons_of_a_shell_the_one_that_joins_is_the_rank(tmp_path: Path) -> None:
    for name, code in {"prepare.py": "import torch\n", "train.py": TELL + JOIN + "tell()\n", "report.py": "import torch\n"}.items():
        (tmp_path / name).write_text(code)
    script = " && ".join(f"{sys.executable} {tmp_path / name}" for name in ("prepare.py", "train.py", "report.py"))
    with Node(tmp_path) as node:
        process = node.start("", argv=["sh", "-c", script])
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert f'"pid": {node.record("owner")["pid"]}' in out
        assert node.record("owner")["state"] == "claimed"


def test_a_child_with_a_world_of_its_own_is_not_the_rank(tmp_path: Path) -> None:
    """Before its parent joined (same RANK, so it looks like the rank and gives way later) and after (it is inert)."""
    child = tmp_path / "child.py"
    child.write_text(
        TELL
        + "import torch.distributed as dist\n"
        + "dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, world_size=1)\n"
        + "tell(claimed=os.environ.get('RANKWATCH_CLAIMED'), agent='rankwatch.agent.boot' in sys.modules)\n"
        + HOLD
    )
    parent = TELL + (
        "import subprocess\n"
        f"def child(name): return subprocess.Popen([sys.executable, {str(child)!r}, {str(tmp_path)!r} + '/' + name], stdin=subprocess.PIPE)\n"
        "early = child('early'); sys.stdin.readline()\n" + JOIN + "tell()\n"
        "late = child('late'); sys.stdin.readline()\n"
        "early.communicate(b'x'); late.communicate(b'x')\n"
    )
    with Node(tmp_path) as node:
        process = node.start(parent)
        early = printed(process)
        assert node.record("owner")["pid"] == early["pid"]
        go_on(process)
        rank = printed(process)
        late = printed(process)
        assert (late["claimed"], late["agent"]) == (str(rank["pid"]), False)
        assert node.record("owner")["pid"] == rank["pid"] == process.pid
        assert node.record("lifecycle")["stage"] == "joined"
        _out, err = process.communicate("\n", timeout=30)
        assert process.returncode == 0, err
        assert node.record("owner")["pid"] == rank["pid"]


@pytest.mark.slow_ranks
def test_children_of_a_rank_end_as_they_like_and_the_rank_goes_on(tmp_path: Path) -> None:
    """fork + sys.exit, fork + exception, DataLoader workers by fork and by spawn: none of them writes, none takes the socket along."""
    code = (
        TELL
        + JOIN
        + """
import rankwatch, torch
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, n): return float(n)
def main():
    before = os.environ["RANKWATCH_CLAIMED"]
    def fork(what):
        pid = os.fork()
        if pid == 0:
            sys.stderr = open(os.devnull, "w")
            rankwatch.step()
            what()
        return os.waitpid(pid, 0)[1]
    def leave(): sys.exit(5)
    def fail(): raise RuntimeError("of the child")
    ends = [os.waitstatus_to_exitcode(fork(what)) for what in (leave, fail)]
    for context in ("fork", "spawn"):
        list(DataLoader(Data(), num_workers=1, multiprocessing_context=context))
    tell(ends=ends, same=before == os.environ["RANKWATCH_CLAIMED"])
    sys.stdin.readline()
if __name__ == "__main__":
    main()
"""
    )
    code = code.replace(JOIN, "if __name__ == '__main__':\n    import torch.distributed as dist\n    dist.init_process_group('gloo')\n")
    with Node(tmp_path) as node:
        process = node.start(code)
        told = printed(process)
        assert (told["ends"], told["same"]) == ([5, 1], True)
        assert node.ask("ping") is not None
        assert node.record("owner")["pid"] == process.pid
        assert node.record("lifecycle")["stage"] == "joined"
        assert node.record("lifecycle")["exception"] is None
        assert node.record("steps") == {}
        _out, err = process.communicate("\n", timeout=30)
        assert process.returncode == 0, err
        assert "terminate called" not in err


def test_a_fork_child_of_a_process_that_has_not_joined_may_become_the_rank(tmp_path: Path) -> None:
    code = (
        TELL
        + """
import torch
pid = os.fork()
if pid == 0:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    tell()
    sys.exit(0)
os.waitpid(pid, 0)
"""
    )
    with Node(tmp_path) as node:
        status, out, err = node.run(code)
        assert status == 0, err
        assert f'"pid": {node.record("owner")["pid"]}' in out
        assert node.record("owner")["state"] == "claimed"
        assert node.record("lifecycle")["stage"] == "exiting"


@pytest.mark.slow_ranks
def test_the_last_state_of_a_killed_rank_stays(tmp_path: Path) -> None:
    code = TELL + JOIN + "import rankwatch\n[rankwatch.step() for _ in range(3)]\ntell()\n" + HOLD
    with Node(tmp_path) as node:
        process = node.start(code)
        printed(process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -9
        assert (node.record("owner")["pid"], node.record("lifecycle")["stage"], node.record("steps")["count"]) == (process.pid, "joined", 3)
        assert node.record("groups")["groups"][0]["ranks"] == "0"
        node.run("import torch\n")  # another Python of the same rank imports torch: the evidence stays
        assert node.record("owner")["pid"] == process.pid


def test_the_last_rank_removes_the_directory_of_a_dead_launcher(tmp_path: Path) -> None:
    base = tmp_path / "rankwatch.abcdefgh"
    folder = base / "a0"
    folder.mkdir(parents=True)
    (base / "owner.json").write_text("{}")
    with Node(folder) as node:
        launcher = node.start("import time; time.sleep(600)", RANK="")
        process = node.start(TELL + JOIN + "tell()\n" + HOLD, **{env.LAUNCHER_PID: str(launcher.pid)})
        printed(process)
        launcher.kill()
        launcher.wait()
        for script in folder.glob("script_*"):
            script.unlink()
        _out, err = process.communicate("\n", timeout=30)
        assert process.returncode == 0, err
        assert not base.exists()
        folder.mkdir(parents=True)
