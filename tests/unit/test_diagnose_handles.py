"""Ranks in `work.wait()` of isend or irecv: a native call of the job's own line, which one native sample tells from a lock or a sleep."""

from dataclasses import replace

import pytest
from build_jobs import MONO, PAGING, Job, awaited, burn, coll, frames, group, init, mark, nap, recv, send, stepped

from rankwatch.model import Group, KernelWait, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import frames as stack_frames
from rankwatch.monitor.diagnose import handles

ASLEEP, RECEIVES, THREAD = "train.py:31:load_batch", "train.py:53:receive", "/usr/lib/python3.11/threading.py:327:wait"


def beside(stop, rank_of_stop=1, timeout=60):
    """0 in the collective, 1 in `stop`, 2 waits for a message of rank 1."""

    def script(rank):
        yield init(timeout)
        for _ in range(6):
            yield coll()
            yield nap(0.2)
        yield mark("onset")
        if rank == rank_of_stop:
            yield stop
            yield send("result")
        if rank == 2:
            yield awaited("result")
        for _ in range(50):
            yield coll()
            yield nap(0.2)

    return script


def on_pages(job):
    return {seen.verdict.culprit_ranks for seen in job.pages()}


def natively(job):
    return [rank for _, want in job.wants if want.kind == "native_stack" for rank in want.ranks]


def test_a_rank_that_waits_in_a_handle_is_not_named_beside_the_one_that_sleeps():
    job = Job(beside(nap(3600, ASLEEP)), 3).play(40)
    assert on_pages(job) == {(1,)}
    assert job.pages()[0].at - job.marks["onset"] <= 13
    assert any("rank 2 has not come either (it waits in a point-to-point call)" in line for line in job.pages()[0].verdict.evidence)


def test_a_rank_that_waits_in_a_handle_behind_one_that_works_is_never_paged():
    job = Job(beside(burn(25)), 3).play(60)
    assert job.pages() == []


@pytest.mark.parametrize("native", [True, False], ids=["native stacks", "refused"])
def test_that_holds_for_one_beside_the_group_as_well(native):
    """Rank 0 is in no group with the others: only a message ties rank 1 to it."""

    def script(rank):
        yield init(60)
        yield group("1", (1, 2), 60)
        for _ in range(6):
            if rank:
                yield coll(group="1")
            yield nap(0.2)
        if rank == 0:
            yield burn(25)
            yield send("result")
        if rank == 1:
            yield awaited("result")
        for _ in range(5):
            if rank:
                yield coll(group="1")
            yield nap(0.2)

    assert Job(script, 3, native=native).play(60).pages() == []


def test_without_native_stacks_who_may_wait_for_a_message_is_not_named_beside_one_that_does_not():
    job = Job(beside(nap(3600, ASLEEP, THREAD)), 3, native=False).play(40)
    page = job.pages()[0].verdict
    assert on_pages(job) == {(1,)}
    assert page.confidence == "partial"
    assert any(line.startswith("native stack of rank 2") and "py-spy may not pause it" in line for line in page.missing_evidence)


def test_a_rank_is_paused_once_in_a_wait_and_only_suspects_are():
    job = Job(beside(nap(3600, ASLEEP)), 3).play(40)
    assert sorted(natively(job)) == [1, 2]
    assert set(natively(Job(beside(nap(1.0, ASLEEP)), 3).play(40))) == set()


def test_of_a_ring_in_which_two_wait_for_messages_neither_is_named():
    def script(rank):
        yield init(60)
        for _ in range(6):
            yield coll()
            yield nap(0.2)
        if rank in (1, 2):
            yield awaited(f"never{rank}")
        yield coll()

    job = Job(script, 4).play(40)
    assert on_pages(job) == {()}
    assert any("rank 1 waits in work.wait() of a receive, called from train.py:53:receive" in line for line in job.pages()[0].verdict.evidence)
    assert job.pages()[0].verdict.advice[-2].startswith("Compare the calls of these ranks: the peer")


def stages(timeout, *, wait=awaited, stop=None):
    """A pipeline in which every stage waits for the one before it, rank 1 in `stop`, with a common step before."""

    def script(rank):
        yield init(timeout)
        for step in range(30):
            yield send(f"{rank}-{step}")
            yield recv(f"{(rank - 1) % 3}-{step}")
            yield coll()
            yield stepped()
            yield nap(0.2)
        yield mark("onset")
        yield stop if rank == 1 and stop is not None else wait("never")

    return script


@pytest.mark.parametrize(("stop", "named", "most_s"), [(None, (), 40), (nap(3600, ASLEEP), (1,), 70)], ids=["all wait", "one sleeps"])
def test_a_job_in_which_all_wait_for_messages_is_told_after_half_a_minute_and_after_a_whole_one_if_one_does_not(stop, named, most_s):
    job = Job(stages(600, stop=stop), 3).play(90)
    told = job.first("slow")
    assert (told.verdict.culprit_ranks, told.verdict.confidence) == (named, "partial")
    assert told.at - job.marks["onset"] <= most_s
    assert job.pages() == []


def test_it_is_paged_once_the_messages_own_timeout_is_near():
    job = Job(stages(60, stop=nap(3600, ASLEEP)), 3).play(62)
    assert {seen.verdict.verdict for seen in job.history if seen.verdict.verdict in PAGING} == {"timeout_imminent"}
    page = job.pages()[0]
    assert (page.verdict.culprit_ranks, page.verdict.waiting_ranks, page.verdict.timeout_s) == ((1,), (0, 2), 60)
    assert 30 <= page.at - job.marks["onset"] <= 46


def test_it_is_not_told_while_the_one_that_does_not_wait_works():
    assert Job(stages(600, stop=burn(3600)), 3).play(90).history == []


# -- one rank


def rank(*lines, active=False, call="futex", backend="gloo", native=()):
    main = Thread("MainThread", 1, frames(*lines), active=active)
    below = tuple(replace(frames("x:0:x")[0], name=name, file="libtorch_cpu.so") for name in native)
    return RankState(
        1, groups=(Group("0", "default_pg", backend, (0, 1), 60.0),), stack=Stack(9, MONO + 9, (main,)),
        process=Process(9, True, main_wait=KernelWait(9, "S", call=call)),
        native_stack=Stack(9, MONO + 8, (replace(main, frames=(*below, *main.frames)),), native=True) if native else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "found",
    [rank(RECEIVES), rank(RECEIVES, call=""), rank("@megatron/core/pipeline_parallel/p2p_communication.py:9:_communicate", RECEIVES),
     rank("@torch/distributed/pipelining/schedules.py:9:_step_microbatches", RECEIVES)],
    ids=["own line", "call not known", "a library's", "pipelining"],
)  # fmt: skip
def test_a_line_that_makes_a_native_call_and_sleeps_may_hide_a_message(found):
    assert handles.unread(found, MONO)


@pytest.mark.parametrize(
    "found",
    [rank(RECEIVES, active=True), rank(RECEIVES, call="clock_nanosleep"), rank(RECEIVES, backend="nccl"), rank(THREAD, RECEIVES),
     rank("@torch/distributed/distributed_c10d.py:9:all_reduce", RECEIVES), rank("@torch/nn/modules/linear.py:9:forward", RECEIVES)],
    ids=["runs", "sleeps for a time", "NCCL", "a thread's wait", "a collective", "torch"],
)  # fmt: skip
def test_a_line_that_tells_what_it_does_hides_none(found):
    assert not handles.opaque(found, MONO)


@pytest.mark.parametrize(
    ("native", "told"),
    [(("gloo::transport::tcp::UnboundBuffer::waitRecv", "c10d::ProcessGroupGloo::RecvWork::wait"), "work.wait() of a receive"),
     (("c10d::ProcessGroupGloo::SendWork::wait",), "work.wait() of a send"), (("pthread_cond_wait", "c10d::Work::wait"), "")],
    ids=["receive", "send", "collective"],
)  # fmt: skip
def test_its_native_frames_tell_a_message_from_a_collective(native, told):
    assert handles.message(rank(RECEIVES, native=native), MONO) == told
    assert handles.message(rank(RECEIVES, native=native), MONO + 8.5) == ""  # of an earlier wait


def test_a_native_sample_of_another_line_tells_nothing():
    there = rank(RECEIVES, native=("c10d::ProcessGroupGloo::RecvWork::wait",))
    assert handles.message(replace(there, stack=rank("train.py:54:receive").stack), MONO) == ""


def test_a_pipeline_schedule_of_torch_that_waits_for_a_message_is_known_by_its_function():
    schedule = ("@torch/distributed/pipelining/schedules.py:683:_wait_batch_p2p", "@torch/distributed/pipelining/schedules.py:869:step", "train.py:60:main")
    assert stack_frames.in_point_to_point(rank(*schedule).stack) == "_wait_batch_p2p"
    assert stack_frames.in_point_to_point(rank(ASLEEP, *schedule[1:]).stack) == ""
