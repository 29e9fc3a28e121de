"""The Slurm scripts really run: a stand-in for srun starts real launchers, on this machine and in the namespaces of two nodes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import netns
import pytest
from jobs import JOBS
from netns import Network
from standin_slurm import Slurm, directives

SLURM = Path(__file__).parents[2] / "launch" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
JOB = str(JOBS / "many_nodes.py")


@pytest.mark.stack
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_clean_and_sbatch_reads_all_its_directives(script: Path) -> None:
    done = subprocess.run(["shellcheck", "--shell=bash", "--enable=quote-safe-variables", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert directives(script.read_text()).keys() >= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--signal", "--output"}


def test_the_stand_in_refuses_what_slurm_would_not_read() -> None:
    with pytest.raises(ValueError, match="sbatch does not read it"):
        directives("#!/bin/bash\nset -e\n#SBATCH --nodes=1\n")
    with pytest.raises(ValueError, match="unknown here"):
        directives("#!/bin/bash\n#SBATCH --made-up=1\n")


@pytest.mark.ranks
def test_one_node_ends_with_the_jobs_code_and_leaves_its_verdict(tmp_path: Path) -> None:
    """Where the run's files lie, what the job is called, and the verdict where a pod's end is explained."""
    said = tmp_path / "termination-log"
    with Slurm(tmp_path, 48213) as slurm:
        process = slurm.sbatch(
            SLURM / "one_node.sbatch", JOB, "crashed", cwd=tmp_path, env={"RANKS_PER_NODE": "2", "OMP_NUM_THREADS": "1", "RANKWATCH_TERMINATION_LOG": str(said)}
        )
        assert process.wait(90) == 1, slurm.output.read_text()
    run = tmp_path / "rankwatch-runs" / "48213"
    document = json.loads((run / "run.json").read_text())
    assert (document["job_id"], document["world_size"], document["exit_code"]) == ("48213", 2, 1)
    (incident,) = [json.loads(path.read_text()) for path in run.glob("incidents/*/incident.json")]
    assert (incident["verdict"], incident["cause"], incident["culprit_ranks"]) == ("failed", "crashed", [1])
    lines = said.read_text().splitlines()
    assert lines[0].startswith("FAILED: rank 1 failed first: raised ValueError: sample 17 has no label")
    assert lines[-1].startswith("Job 48213, exit code 1. Report: ")
    assert Path(lines[-1].partition("Report: ")[2]).exists()


@pytest.mark.ranks
@pytest.mark.slow_ranks
@pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")
@pytest.mark.parametrize(("kind", "codes"), [("trained", {0}), ("crashed", {1, 143})], ids=["trained", "crashed"])
def test_many_nodes_meet_on_the_first_one_and_are_judged_together(tmp_path: Path, kind: str, codes: set[int]) -> None:
    """--kill-on-bad-exit ends the other launchers by SIGTERM once one has failed: srun's exit code is the highest of all, the verdict is told all the same."""
    with Network(2, resolves=True) as network:
        names, prefixes = [network.name(i) for i in range(2)], [network.argv(i, []) for i in range(2)]
        with Slurm(tmp_path, 48214, names, prefixes) as slurm:
            process = slurm.sbatch(
                SLURM / "many_nodes.sbatch", JOB, kind, "--rank", "2", cwd=tmp_path, env={"RANKS_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
            )  # fmt: skip
            assert process.wait(150) in codes, slurm.output.read_text()
            output = slurm.output.read_text()
    assert "watching 4 ranks on 2 nodes" in output, output
    run = tmp_path / "rankwatch-runs" / "48214"
    document = json.loads((run / "run.json").read_text())
    assert (document["job_id"], document["world_size"], document["exit_code"] in codes) == ("48214", 4, True)
    incidents = [json.loads(path.read_text()) for path in run.glob("incidents/*/incident.json")]
    if kind == "crashed":
        (incident,) = [one for one in incidents if one["verdict"] == "failed"]
        assert (incident["cause"], incident["culprit_ranks"], incident["hosts"]["2"]) == ("crashed", [2], "node1")
