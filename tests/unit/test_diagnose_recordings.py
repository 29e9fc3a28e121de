"""Recorded jobs, gloo and NCCL, played back: rank, cause and moment of each verdict are those of the truth that was recorded beside them."""

import pytest
from recordings import Recording, first, kinds


def test_gloo_a_rank_that_left_the_loop_early_is_named():
    told = Recording("gloo_01_uneven_batches").play(-2, 8)
    assert kinds(told) == [("stuck", "mismatch", (2,))]
    at, verdict = first(told, "stuck")
    assert at <= 5
    assert verdict.waiting_ranks == (0, 1)
    assert verdict.at == "01_uneven_batches.py:34:main"


def test_gloo_a_collective_save_on_one_rank_breaks_the_habit_of_both():
    """Two ranks, two operations, no majority: nobody has ever called all_gather before, and all_reduce is due."""
    told = Recording("gloo_02_save_inside_rank0").play(-2, 8)
    assert kinds(told) == [("stuck", "mismatch", (0,))]
    at, verdict = first(told, "stuck")
    assert (at <= 5, verdict.confidence) == (True, "likely")
    assert "all_gather" in verdict.summary or "allgather" in verdict.summary


def test_gloo_a_loader_worker_that_holds_a_lock_is_named_with_the_workers_line():
    told = Recording("gloo_07_dataloader_fork_lock").play(-2, 20)
    assert kinds(told) == [("slow", "data_loading", (1,)), ("stuck", "data_loading", (1,))]
    at, verdict = first(told, "stuck")
    assert at <= 11  # half of the timeout of 20 s: an empty loader pauses in healthy jobs too
    assert verdict.waiting_ranks == (0,)


def test_nccl_a_sleeping_rank_is_named_with_its_line():
    told = Recording("nccl_01_loader_sleep").play(-5, 16)
    assert kinds(told) == [("slow", "not_entered", (1,)), ("stuck", "not_entered", (1,))]
    at, verdict = first(told, "stuck")
    assert at <= 8
    assert (verdict.waiting_ranks, verdict.group.seq, verdict.group.op) == ((0,), 754, "all_reduce")
    assert "load_batch" in verdict.at


def test_nccl_two_sizes_at_one_number_hang_and_the_unusual_one_is_named():
    told = Recording("nccl_02_shape_mismatch").play(-5, 8)
    assert {kind[:2] for kind in kinds(told)} == {("stuck", "mismatch")}
    at, verdict = first(told, "stuck")
    assert at <= 5
    assert verdict.group.seq == 607
    assert 1 in verdict.culprit_ranks
    assert "4096" in verdict.summary
    assert "16777216" in verdict.summary


def test_nccl_a_device_that_does_not_start_the_collective_is_named():
    """Everybody has called it: no divergence of the code, the device of rank 1 is behind."""
    told = Recording("nccl_06_gpu_kernel_hang").play(-5, 17)
    assert {kind[1] for kind in kinds(told)} == {"all_entered"}
    _, verdict = first(told, "stuck")
    assert verdict.culprit_ranks == (1,)
    assert "its device has not started it" in verdict.summary


def test_nccl_a_killed_rank_is_the_first_cause():
    job = Recording("nccl_07_sigkill")
    assert kinds(job.play(-5, 0)) == []
    job.exits[1] = -9
    told = job.play(0.5, 1.5)
    assert kinds(told) == [("failed", "killed", (1,))]


def test_nccl_a_rank_that_holds_the_gil_is_named_with_the_line_that_called_it():
    told = Recording("nccl_08_gil_held").play(-5, 16)
    assert kinds(told) == [("slow", "gil_held", (1,)), ("stuck", "gil_held", (1,))]
    at, verdict = first(told, "stuck")
    assert at <= 10
    assert "parse_native" in verdict.at
    assert verdict.waiting_ranks == (0,)


def test_nccl_a_collective_inside_a_cuda_graph_is_told_carefully_and_never_pages():
    told = Recording("nccl_10_cudagraph_stop", steps=500, last_step_at=5_000.0, step_s=0.03, cudagraph={"recorded": 1}).play(-5, 100)
    assert kinds(told) == [("slow", "unknown", ())]
    at, verdict = first(told, "slow")
    assert at >= 60
    assert verdict.confidence == "partial"
    assert "CUDA graph" in verdict.summary
    assert any("wait_input" in line for line in verdict.evidence)


@pytest.mark.parametrize("poll", [0.25, 0.5, 1.0])
def test_nccl_a_healthy_job_is_left_alone(poll):
    assert kinds(Recording("nccl_12_healthy").play(-8, 26, poll)) == []
