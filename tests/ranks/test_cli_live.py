"""`status`, `top`, `stacks`, `ls` and `open` on jobs that run, and after their end."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import netns
import pytest
from cluster import Cluster
from jobs import Job, wait_for
from netns import Network

pytestmark = pytest.mark.ranks
COMMAND_S = 60
OTHER_USER = 65534
ASK = """
import json, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as client:
    client.settimeout(20)
    try:
        client.connect(sys.argv[1]); client.sendall(b'{"do":"info"}\\n'); print(len(client.recv(100)))
    except OSError as error:
        print(type(error).__name__)
"""


def rankwatch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankwatch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, env={**os.environ, "COLUMNS": "100", **env})


def as_json(*words: str) -> Any:
    done = rankwatch(*words, "--json")
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


def other_user(path: Path) -> str:
    """What a process of another user is told at this socket: a number of bytes, or the exception's name."""
    done = subprocess.run([sys.executable, "-S", "-c", ASK, str(path), str(OTHER_USER)], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    return done.stdout.strip()


def test_a_job_is_looked_at_from_outside_while_it_runs_and_after_its_end(tmp_path: Path) -> None:
    """Rank 1 sleeps, rank 0 waits for it. One job for all questions: its start is what costs."""
    with Job(
        tmp_path,
        "many_nodes.py",
        "asleep",
        "--timeout",
        "600",
        nproc=2,
        options=("--listen", "127.0.0.1:0", "--limit", "notice_s=1"),
        torchrun=("--standalone",),
    ) as job:
        run = str(job.run_dir)
        job.training()
        state = wait_for(lambda: state if (state := as_json("status", run))["incidents"]["open"] else None, 40, "rank 1 is named")
        assert (state["odd"], state["run"]["world_size"]) == ("1", 2)

        shown = rankwatch("top", run, "--count", "1")
        assert shown.stderr == ""
        assert shown.returncode in (0, 3)
        assert "\n0  w!\n" in shown.stdout
        assert "rank 1 has not entered all_reduce" in shown.stdout

        began = time.monotonic()
        stacks = rankwatch("stacks", run, "--out", str(tmp_path / "stacks"))
        print(f"\nstacks of 2 ranks: {time.monotonic() - began:.2f} s, the command's start included")
        assert stacks.returncode == 0, stacks.stderr
        first, others = stacks.stdout.split("\n\n")
        assert first.splitlines()[0] == "rank 1 (culprit)"
        assert first.splitlines()[1].startswith("    load_batch_that_never_comes (")
        assert others.splitlines()[0] == "rank 0 (waiting)"
        assert "load_batch_that_never_comes" in (tmp_path / "stacks" / "rank_1.txt").read_text()

        native = as_json("stacks", run, "--ranks", "1", "--native")
        assert [row["native"] for row in native["ranks"]] == [True]
        assert "sleep" in native["groups"][0]["frames"][0], "a C frame"

        (row,) = [row for row in as_json("ls") if row["path"] == run or os.path.realpath(row["path"]) == os.path.realpath(run)]
        assert row["running"]
        link = as_json("open", run)
        assert link["link"] == state["run"]["status_url"]
        assert f":127.0.0.1:{link['port']} " in link["ssh"]

        control = json.loads((job.run_dir / "control.json").read_text())
        path = Path(control["socket"])
        assert control["pid"] == job.process.pid
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        if os.geteuid() == 0:
            assert other_user(path) == "PermissionError"
            path.parent.chmod(0o755)
            path.chmod(0o666)
            assert other_user(path) in ("0", "ConnectionResetError", "BrokenPipeError"), "the kernel tells who asks"
            path.parent.chmod(0o700)

        job.process.terminate()
        job.end()
        assert not path.parent.exists()
        ended = rankwatch("status", run)
        assert ended.stdout.startswith(("ENDED  job ", "STUCK  job ")), "by what was open when it was ended on purpose"
        assert "The job was ended by SIGTERM" in ended.stdout
        assert ended.returncode == (3 if ended.stdout.startswith("STUCK") else 0)
        gone = rankwatch("stacks", run)
        assert (gone.returncode, gone.stdout) == (3, "")
        assert "the job has ended with" in gone.stderr


@pytest.mark.slow_ranks
def test_a_launcher_that_hangs_is_told_and_left(tmp_path: Path) -> None:
    """The launcher is stopped: no command waits for it without bound."""
    with Job(tmp_path, "many_nodes.py", "trained", "--seconds", "60", nproc=2, options=("--listen", "off"), torchrun=("--standalone",)) as job:
        job.training()
        wait_for((job.run_dir / "control.json").exists, 30, "it listens")
        os.kill(job.process.pid, 19)
        try:
            began = time.monotonic()
            done = rankwatch("stacks", str(job.run_dir))
            assert (done.returncode, done.stdout) == (3, "")
            assert time.monotonic() - began < 30
        finally:
            os.kill(job.process.pid, 18)
        wait_for(lambda: rankwatch("stacks", str(job.run_dir)).returncode == 0, 30, "it answers again")


@pytest.mark.slow_ranks
@pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")
def test_node_0_gives_the_stacks_of_ranks_of_other_nodes_and_a_member_only_its_own(tmp_path: Path) -> None:
    """Asked through the pull that the judge makes anyway."""
    with Network(2) as network, Cluster(network, tmp_path, "many_nodes.py", "asleep", "--rank", "2", "--timeout", "600", nproc=2) as cluster:
        cluster.training()
        first, second = cluster.nodes
        wait_for(lambda: as_json("status", str(first.run_dir))["ranks_seen"] == 4, 40, "node 0 sees all ranks")
        began = time.monotonic()
        done = rankwatch("stacks", str(first.run_dir))
        print(f"\nstacks of 2 ranks here and 2 elsewhere: {time.monotonic() - began:.2f} s, the command's start included")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "rank 2" in done.stdout
        assert "load_batch_that_never_comes" in done.stdout
        refused = rankwatch("stacks", str(first.run_dir), "--native", "--ranks", "2")
        assert refused.returncode == 3
        assert "run `rankwatch stacks --native` there" in refused.stdout
        (home,) = second.run_dir.glob("nodes/*")
        wait_for(lambda: as_json("open", str(home))["judge"], 40, "the member knows its judge")
        own = rankwatch("stacks", str(home))
        assert own.returncode == 0, own.stdout + own.stderr
        assert "load_batch_that_never_comes" in own.stdout
        other = rankwatch("stacks", str(home), "--ranks", "0")
        assert other.returncode == 3
        assert "it runs on another node; ask there, or the launcher that judges the job" in other.stdout
