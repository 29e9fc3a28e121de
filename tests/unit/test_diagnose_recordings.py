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


def test_nccl_without_timing_no_rank_is_named_and_the_reason_is_said():
    """The same fault: the recorder has no start to tell, both say "scheduled"."""
    told = Recording("nccl_06b_gpu_kernel_hang_notiming").play(-5, 17)
    assert {kind[1:] for kind in kinds(told)} == {("all_entered", ())}
    at, verdict = first(told, "slow")
    assert at <= 10
    assert verdict.waiting_ranks == (0, 1)
    assert any("no divergence of the code" in line for line in verdict.evidence)
    assert any("TORCH_NCCL_ENABLE_TIMING" in line for line in verdict.missing_evidence)
    assert first(told, "stuck")[0] <= 17


def test_nccl_a_rank_that_tunes_kernels_for_longer_than_a_minute_is_slow_and_no_page_while_it_progresses():
    told = Recording("nccl_05a_compile_skew_recovers").play(-3, 110)
    assert kinds(told) == [("slow", "compiling", (1,))]
    at, verdict = first(told, "slow")
    assert at <= 10
    assert verdict.waiting_ranks == (0,)
    assert (verdict.group.op, verdict.group.seq) == ("all_reduce", 40)
    assert "phase autotune (addmm_template_autotuning)" in verdict.summary
    tuning = told[90.0][0]  # the compile is over, its kernels are still being tuned
    assert tuning.cause == "compiling"
    assert told[100.0] == ()


def test_nccl_a_compile_is_known_from_torchs_own_counters_where_the_probe_is_silent():
    job = Recording("nccl_05a_compile_skew_recovers")
    del job.data["compiling"]
    told = job.play(-3, 110)
    assert kinds(told) == [("slow", "compiling", (1,))]
    assert first(told, "slow")[0] <= 10


@pytest.mark.parametrize("name", ["nccl_10b_cudagraph_stop_eager_log", "nccl_10c_cudagraph_stop_abort_log"])
def test_nccl_an_eager_call_behind_a_stopped_replay_names_the_rank_that_stopped_and_is_told_as_a_symptom(name):
    told = Recording(name, cudagraph={"recorded": 1}).play(-5, 17)
    assert kinds(told) == [("slow", "not_entered", (1,)), ("stuck", "not_entered", (1,))]
    at, verdict = first(told, "stuck")
    assert at <= 8
    assert (verdict.waiting_ranks, verdict.group.seq, "wait_input" in verdict.at) == ((0,), 16, True)
    line = next(line for line in verdict.evidence if line.startswith("rank 0 has enqueued all_reduce #16"))
    assert "its device has not started it" in line
    assert "a replay of a CUDA graph" in line


def test_nccl_an_abort_that_never_returns_is_told_with_the_command_that_ends_the_job():
    """The captured kernel holds the device: the process neither dies nor trains, its operations even count as completed after a while."""
    told = Recording("nccl_10c_cudagraph_stop_abort_log", cudagraph={"recorded": 1}).play(-5, 115)
    at, verdict = next((t, verdicts[0]) for t, verdicts in told.items() if verdicts and "the watchdog has fired" in verdicts[0].summary)
    assert at == 18.5
    assert any("up to 10 s later (4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 2500 ms as the job's environment has it)" in line for line in verdict.evidence)
    assert any(line.startswith("rank 0 printed: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=16") for line in verdict.evidence)
    at, verdict = next((t, verdicts[0]) for t, verdicts in told.items() if verdicts and "abort does not return" in verdicts[0].summary)
    assert at == 47.0  # 15 s after it began
    assert (verdict.verdict, verdict.culprit_ranks, verdict.waiting_ranks) == ("stuck", (1,), (0,))
    assert verdict.summary.endswith("the watchdog has fired 28 s ago, and its abort does not return: rank 0 must be ended by hand")
    assert verdict.advice[0].startswith("End rank 0 by hand: `kill -KILL 4000` on node0")
    assert "after 480 s (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC)" in verdict.advice[1]
    assert "rank 0 began to abort its communicator 15 s ago and has not told that it is done" in verdict.evidence
    assert ["abort does not return" in verdict.summary for verdict in told[115.0]] == [True]


def test_nccl_without_a_log_the_same_is_told_from_the_clock_and_the_log_is_missed():
    job = Recording("nccl_10c_cudagraph_stop_abort_log", cudagraph={"recorded": 1})
    del job.data["log"]
    told = job.play(-5, 60)
    verdict = told[30.0][0]
    assert verdict.summary.endswith("rank 0 waits; the timeout has passed 12 s ago")
    assert verdict.missing_evidence == ("what the watchdog of rank 0 has printed: it is on the terminal (torchrun --tee 3 keeps a log)",)
    assert next(t for t, verdicts in told.items() if verdicts and "abort does not return" in verdicts[0].summary) == 48.5


def test_nccl_a_watchdog_that_ends_its_process_in_time_is_not_called_stuck_in_its_abort():
    told = Recording("nccl_06b_gpu_kernel_hang_notiming").play(-5, 28.5)
    verdict = told[28.0][0]
    assert verdict.cause == "all_entered"
    assert "the watchdog has fired 10 s ago" in verdict.summary
    assert not any("abort does not return" in each.summary for verdicts in told.values() for each in verdicts)


def test_nccl_graphs_that_are_recorded_again_are_no_trouble():
    assert kinds(Recording("nccl_11_cudagraph_rerecord").play(-1, 19)) == []


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


@pytest.mark.parametrize("poll", [0.25, 0.5, 1.0])
def test_nccl_a_healthy_job_is_left_alone(poll):
    assert kinds(Recording("nccl_12_healthy").play(-8, 26, poll)) == []
