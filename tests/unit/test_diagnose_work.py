"""What a suspect is found to do: threads that the main thread waits for, the kernel's view, spinning, and samples that are missing."""

from dataclasses import replace

import pytest
from build_jobs import MAIN, MONO, SITE, frames

from rankwatch.model import Frame, KernelWait, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, causes, progress, words
from rankwatch.monitor.diagnose.state import Watch
from rankwatch.monitor.diagnose.work import by_stack
from rankwatch.monitor.policy import Limits

NOW = MONO + 30
LIB = "/usr/lib/python3.11/"
JOIN = (Frame("Thread._wait_for_tstate_lock", LIB + "threading.py", 1132), Frame("Thread.join", LIB + "threading.py", 1112))
RESULT = (Frame("Condition.wait", LIB + "threading.py", 320), Frame("Future.result", LIB + "concurrent/futures/_base.py", 451))
GET = (Frame("Condition.wait", LIB + "threading.py", 320), Frame("Queue.get", LIB + "queue.py", 171))
LOOP = (
    Frame("EpollSelector.select", LIB + "selectors.py", 468),
    Frame("BaseEventLoop._run_once", LIB + "asyncio/base_events.py", 1884),
    Frame("run", LIB + "asyncio/runners.py", 190),
)
RUN = (Frame("Thread.run", LIB + "threading.py", 982), Frame("Thread._bootstrap", LIB + "threading.py", 1002))
POOL = (Frame("_WorkItem.run", LIB + "concurrent/futures/thread.py", 58), Frame("_worker", LIB + "concurrent/futures/thread.py", 83), *RUN)
IDLE_POOL = (Frame("_worker", LIB + "concurrent/futures/thread.py", 81), *RUN)
UPLOAD = frames("@botocore/httpsession.py:465:URLLib3Session.send", "train.py:20:upload")
SAVE = frames("@torch/serialization.py:1220:_save", "@torch/serialization.py:960:save", "train.py:24:write_shard")
SLEEP = frames("train.py:26:poll_for_ever")


def stack(main, *others, at=NOW - 1, active=False, pid=4001):
    threads = [Thread("MainThread", pid, tuple(main), active=active)]
    threads += [Thread(f"Thread-{number}", pid + number, tuple(lines)) for number, lines in enumerate(others, 1)]
    return Stack(pid, at, tuple(threads))


def held(main, at=NOW - 1):
    """A sample in which the main thread owns the GIL and sleeps with it."""
    sample = stack(main, at=at)
    return replace(sample, threads=(replace(sample.threads[0], owns_gil=True),))


def rank(main=(), *others, process=None, **state):
    sample = state.pop("stack", None) or (stack(main, *others) if main else None)
    return RankState(1, process=process or Process(4001, True, "S"), heartbeat_at=NOW, stack=sample, **state)


def found(state, watch=None):
    return by_stack(state, MONO, State(watches={1: watch} if watch else {}), NOW)


def seen(watch_state, **fields):
    base = Watch(MONO, NOW, 0.0, 0, (), looks=3, busy_ratio=0.0)
    return found(watch_state, replace(base, **fields))


# -- other threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [JOIN, GET], ids=["join", "queue.get"])
def test_a_main_thread_that_waits_for_a_thread_is_judged_by_that_thread(wait):
    finding = found(rank((*wait, *frames("train.py:40:finish", *MAIN)), (*UPLOAD, *RUN)))
    assert (finding.cause, finding.domain, finding.at, finding.confidence) == ("external_io", "network", "train.py:20:upload", "likely")
    assert "its main thread waits in train.py:40:finish for thread Thread-1, which is in train.py:20:upload" in finding.evidence


def test_only_a_pools_own_threads_explain_a_wait_for_its_result():
    """A log shipper that talks to the network all day is not what the future waits for."""
    finding = found(rank((*RESULT, *frames("train.py:40:finish", *MAIN)), (*UPLOAD, *RUN), (*SAVE, *POOL), IDLE_POOL))
    assert (finding.cause, finding.at) == ("checkpointing", "train.py:24:write_shard")
    finding = found(rank((*RESULT, *frames("train.py:40:finish", *MAIN)), (*UPLOAD, *RUN), IDLE_POOL))
    assert (finding.cause, finding.at) == ("not_entered", "train.py:40:finish")


def test_threads_that_do_different_things_leave_the_cause_open():
    finding = found(rank((*JOIN, *frames("train.py:40:finish", *MAIN)), (*UPLOAD, *RUN), (*SAVE, *RUN)))
    assert (finding.cause, finding.at) == ("not_entered", "train.py:40:finish")
    assert "thread Thread-1 is in train.py:20:upload" in finding.evidence


def test_a_thread_of_the_job_without_known_work_is_named():
    finding = found(rank((*JOIN, *frames("train.py:40:finish", *MAIN)), (*SLEEP, *RUN)))
    assert (finding.cause, finding.says) == ("not_entered", "its main thread waits for thread Thread-1, which is in train.py:26:poll_for_ever")
    assert finding.at == "train.py:26:poll_for_ever"


EVENT = (Frame("Condition.wait", LIB + "threading.py", 327), Frame("Event.wait", LIB + "threading.py", 629))
WATCHDOG = frames("train.py:10:watchdog")


@pytest.mark.parametrize("wait", [EVENT, EVENT[:1], GET], ids=["event", "condition", "queue"])
def test_a_thread_of_the_job_is_not_taken_for_what_an_event_or_a_queue_waits_for(wait):
    """A watchdog or a heartbeat of the job's own is a thread as well."""
    finding = found(rank((*wait, *frames("train.py:17:read_shard_index", *MAIN)), (*WATCHDOG, *RUN)))
    assert (finding.cause, finding.says, finding.at) == ("not_entered", "it is in train.py:17:read_shard_index", "train.py:17:read_shard_index")
    assert "thread Thread-1 is in train.py:10:watchdog" in finding.evidence


def test_an_upload_in_a_thread_does_not_explain_a_wait_for_an_event():
    finding = found(rank((*EVENT, *frames("train.py:17:read_shard_index", *MAIN)), (*UPLOAD, *RUN)))
    assert (finding.cause, finding.at) == ("not_entered", "train.py:17:read_shard_index")


def test_a_rank_in_its_own_code_is_not_judged_by_its_threads():
    finding = found(rank(frames("train.py:52:train_step", *MAIN), (*UPLOAD, *RUN)))
    assert (finding.cause, finding.at) == ("not_entered", "train.py:52:train_step")


def test_an_idle_event_loop_is_told_and_what_cannot_be_known_of_it():
    finding = found(rank((*LOOP, *frames("train.py:60:main"))))
    assert (finding.cause, finding.says, finding.at) == (
        "not_entered",
        "its asyncio event loop has nothing to run, started by train.py:60:main",
        "train.py:60:main",
    )
    assert finding.missing_evidence == ("what its suspended coroutines wait for: samples show running code only",)


def test_an_event_loop_that_waits_for_its_executor_is_judged_by_that_thread():
    finding = found(rank((*LOOP, *frames("train.py:60:main")), (*SAVE, *POOL)))
    assert (finding.cause, finding.at) == ("checkpointing", "train.py:24:write_shard")


# -- the kernel's view ---------------------------------------------------------------------------------------------------


def in_kernel(state="S", **wait):
    children = wait.pop("children", ())
    return Process(4001, True, state, main_wait=KernelWait(4001, state, **wait), children=children)


def test_input_from_a_terminal_is_a_person():
    finding = found(rank(frames("train.py:52:confirm", *MAIN), process=in_kernel(call="read", fd=0, target="/dev/pts/3")))
    assert (finding.cause, finding.limit, finding.says) == ("debugger", "never", "it waits for input from a person in train.py:52:confirm")
    assert "its main thread is in read of /dev/pts/3" in finding.evidence


def test_a_read_of_another_file_is_evidence_only():
    finding = found(rank(frames("train.py:52:load", *MAIN), process=in_kernel(call="read", fd=7, target="/data/a.bin", mount="nfs4 filer:/data at /data")))
    assert finding.cause == "not_entered"
    assert "its main thread is in read of /data/a.bin on nfs4 filer:/data at /data" in finding.evidence


@pytest.mark.parametrize("children", [("sh", "aws"), ("rsync",), ("s5cmd", "python")])
def test_a_child_that_transfers_is_external_io(children):
    waits = (Frame("Popen._wait", LIB + "subprocess.py", 2011), Frame("run", LIB + "subprocess.py", 550))
    finding = found(rank((*waits, *frames("train.py:30:push", *MAIN)), process=Process(4001, True, "S", children=children)))
    assert (finding.cause, finding.limit, finding.at) == ("external_io", "io", "train.py:30:push")
    finding = found(rank(frames("train.py:30:push", *MAIN), process=in_kernel(call="wait4", children=children)))  # os.system
    assert (finding.cause, finding.at) == ("external_io", "train.py:30:push")


def test_another_child_is_named_and_no_cause():
    waits = (Frame("Popen._wait", LIB + "subprocess.py", 2011), Frame("run", LIB + "subprocess.py", 550))
    finding = found(rank((*waits, *frames("train.py:30:probe", *MAIN)), process=Process(4001, True, "S", children=("nvidia-smi",))))
    assert finding.cause == "not_entered"
    assert finding.says == "it waits for a child process (nvidia-smi) in subprocess.py:2011:Popen._wait, called from train.py:30:probe"


def test_dead_loader_workers_are_evidence():
    main = frames("@torch/utils/data/dataloader.py:1310:_try_get_data", "train.py:40:epoch", *MAIN)
    finding = found(rank(main, process=Process(4001, True, "S", dead_children=((4100, 9), (4101, 0)))))
    assert finding.cause == "data_loading"
    assert "child pid 4100 is dead (signal 9) and nobody has collected it" in finding.evidence
    assert "child pid 4101 is dead and nobody has collected it" in finding.evidence


def test_a_dead_or_stopped_child_is_told_of_any_rank_that_has_not_come():
    pool = (Frame("Event.wait", LIB + "threading.py", 622), Frame("ApplyResult.get", LIB + "multiprocessing/pool.py", 768))
    process = Process(4001, True, "S", dead_children=((4100, 9),), stopped_children=(4102,))
    for main in (frames("train.py:40:batches", *MAIN), (*pool, *frames("train.py:12:main"))):
        finding = found(rank(main, process=process))
        assert finding.cause == "not_entered"
        assert "child pid 4100 is dead (signal 9) and nobody has collected it" in finding.evidence
        assert "child pid 4102 is stopped (state T): `kill -CONT 4102` continues it" in finding.evidence


def test_a_lost_child_is_told_at_once_where_the_rank_waits_in_multiprocessing():
    pipe = (Frame("Connection._recv", LIB + "multiprocessing/connection.py", 395), Frame("Queue.get", LIB + "multiprocessing/queues.py", 103))
    process = Process(4001, True, "S", dead_children=((4100, 9),))
    finding = found(rank((*pipe, *frames("train.py:15:batches", *MAIN)), process=process))
    assert finding.says == "it is in train.py:15:batches; its child pid 4100 is dead (signal 9) and nobody has collected it"
    finding = found(rank((*pipe, *frames("train.py:15:batches", *MAIN)), process=Process(4001, True, "S", stopped_children=(4100,))))
    assert finding.says == "it is in train.py:15:batches; its child pid 4100 is stopped (state T)"
    assert "4100" not in found(rank(frames("train.py:15:batches", *MAIN), process=process)).says


def test_a_pool_of_processes_that_does_nothing_may_have_lost_a_task():
    pool = (Frame("Event.wait", LIB + "threading.py", 622), Frame("ApplyResult.get", LIB + "multiprocessing/pool.py", 768))
    finding = found(rank((*pool, *frames("train.py:12:main"))))
    assert any("a worker that is killed is replaced, and its task never returns" in line for line in finding.evidence)


def letters(letter, since, looks=20):
    return State(letters={1: (letter, since, looks)})


def test_one_long_sleep_in_the_kernel_is_uninterruptible_with_its_file():
    wait = {"asleep_s": 12.0, "wchan": "rpc_wait_bit_killable", "call": "write", "target": "/ckpt/a.pt", "mount": "nfs4 filer:/ckpt at /ckpt"}
    finding = causes.of(rank(SAVE, process=in_kernel("D", **wait)), MONO, letters("D", NOW - 14), NOW, Limits())
    assert (finding.cause, finding.domain, finding.at) == ("uninterruptible", "storage", "train.py:24:write_shard")
    assert finding.says == "its process waits in the kernel in rpc_wait_bit_killable (state D), write of /ckpt/a.pt on nfs4 filer:/ckpt at /ckpt"
    assert finding.missing_evidence == ()


def test_many_short_sleeps_in_the_kernel_are_work():
    """A rank that writes fast is found in state D at every look."""
    finding = causes.of(rank(SAVE, process=in_kernel("D", asleep_s=0.4, wchan="balance_dirty_pages")), MONO, letters("D", NOW - 14), NOW, Limits())
    assert finding.cause == "checkpointing"


def test_a_driver_that_does_not_answer_is_the_nodes():
    finding = causes.of(rank(SAVE, process=in_kernel("D", asleep_s=9.0, wchan="nv_wait_for_gpu")), MONO, letters("D", NOW - 14), NOW, Limits())
    assert (finding.cause, finding.domain) == ("uninterruptible", "node")


def test_an_unreadable_wait_is_told_as_such():
    finding = causes.of(rank(SAVE, process=Process(4001, True, "D", wchan="0")), MONO, letters("D", NOW - 14), NOW, Limits())
    assert (finding.cause, finding.says) == ("uninterruptible", "its process waits in the kernel (state D)")
    assert finding.missing_evidence == ("which file or device the kernel waits for",)


def test_a_thread_that_the_main_thread_waits_for_may_be_the_one_in_the_kernel():
    wait = KernelWait(4002, "D", 20.0, "folio_wait_bit", "fsync", 9, "/ckpt/a.pt", "fuse.s3fs bucket at /ckpt")
    state = rank((*JOIN, *frames("train.py:40:finish", *MAIN)), (*SAVE, *RUN), process=Process(4001, True, "S", blocked_threads=(wait,)))
    finding = causes.of(state, MONO, State(), NOW, Limits())
    assert (finding.cause, finding.at) == ("uninterruptible", "train.py:24:write_shard")
    assert finding.says.startswith("its main thread waits for thread Thread-1, which waits in the kernel in folio_wait_bit (state D), fsync of /ckpt/a.pt")


def test_a_frozen_cgroup_is_a_stop():
    process = replace(in_kernel("S", asleep_s=9.0), wchan="do_freezer_trap")
    finding = causes.of(rank(SAVE, process=process), MONO, State(), NOW, Limits())
    assert (finding.cause, finding.limit, finding.ready, finding.says) == ("stopped", "at_once", True, "its cgroup is frozen (do_freezer_trap)")


def test_a_tracer_is_named():
    finding = causes.of(rank(SAVE, process=Process(4001, True, "t", tracer="gdb (pid 77)")), MONO, letters("t", NOW - 9), NOW, Limits())
    assert (finding.cause, finding.limit, finding.says) == ("debugger", "never", "gdb (pid 77) traces it (state t), most likely a debugger")


# -- names, evaluation, missing samples ----------------------------------------------------------------------------------


def test_a_native_writer_named_like_a_save_is_one_while_bytes_move():
    state = rank(frames("train.py:30:save_checkpoint", *MAIN))
    assert seen(state, last_progress=NOW - 2, why="130.0 MB moved in 5 s").cause == "checkpointing"
    assert seen(state, last_progress=NOW - 2, why="100% of a core in its process tree").cause == "not_entered"
    assert found(state).cause == "not_entered"
    other = rank(frames("train.py:30:load_batch", *MAIN))
    assert seen(other, last_progress=NOW - 2, why="130.0 MB moved in 5 s").cause == "not_entered"


def test_a_save_that_waits_in_a_collective_is_no_checkpointing():
    main = frames("@torch/distributed/distributed_c10d.py:3700:all_gather", "train.py:18:save_checkpoint", *MAIN)
    finding = seen(rank(main), last_progress=NOW - 2, why="130.0 MB moved in 5 s")
    assert (finding.cause, finding.says, finding.at) == (
        "not_entered",
        "it waits in all_gather, called from train.py:18:save_checkpoint",
        "train.py:18:save_checkpoint",
    )


def test_an_evaluation_is_told_with_the_cause_that_it_has():
    finding = found(rank(frames("train.py:31:score", "train.py:80:evaluate", *MAIN)))
    assert (finding.cause, finding.says) == ("not_entered", "it is in train.py:31:score, while it evaluates")
    main = frames("@torch/utils/data/dataloader.py:1310:_try_get_data", "train.py:82:evaluate", *MAIN)
    finding = found(rank(main))
    assert finding.cause == "data_loading"
    assert finding.says.endswith(", called from train.py:82:evaluate, while it evaluates")


def test_a_dataset_that_downloads_is_the_networks():
    main = frames(
        "@urllib3/response.py:700:HTTPResponse.read", "data.py:44:__getitem__", "@torch/utils/data/_utils/fetch.py:54:fetch", "train.py:82:epoch", *MAIN
    )
    finding = found(rank(main))
    assert (finding.cause, finding.domain, finding.at) == ("data_loading", "network", "data.py:44:__getitem__")


@pytest.mark.parametrize("reason", ["py-spy gave no answer within 1.8 s", "process is gone"])
def test_a_rank_without_a_stack_has_an_open_cause_and_says_what_is_missing(reason):
    finding = seen(rank(stack=Stack(4001, NOW - 1, error=reason)), last_progress=NOW - 2, why="80% of a core in its process tree")
    assert (finding.cause, finding.says, finding.at, finding.confidence) == ("not_entered", "", "", "likely")
    assert finding.missing_evidence == (f"stack of rank 1 ({reason})",)
    assert finding.evidence == ("progress: 80% of a core in its process tree, 2 s ago",)


# -- samples -------------------------------------------------------------------------------------------------------------


def watched(states, step=6.0):
    """The watch after these looks, `step` seconds apart."""
    watch = None
    for number, state in enumerate(states):
        watch = progress.observe(watch, state, MONO + number * step, 5.0, Limits())
    return watch


def look(number, main, cpu=0.0, *, native=False, pid=4001, thread=None, active=True, **process):
    at = MONO + number * 6.0
    sample = replace(stack(main, at=at, active=active, pid=pid), native=native)
    if thread is not None:
        sample = replace(sample, threads=(replace(sample.threads[0], native_id=thread),))
    return RankState(1, process=Process(4001, True, "R", tree_cpu_s=cpu, **process), stack=sample)


def chain(*looks):
    return [replace(each, earlier_stack=looks[number - 1].stack if number else None) for number, each in enumerate(looks)]


HERE, THERE = frames("train.py:52:spin", *MAIN), frames("train.py:53:spin", *MAIN)


def test_the_same_line_at_full_speed_is_told_as_a_long_calculation_or_an_endless_loop():
    watch = watched(chain(*(look(number, HERE, cpu=number * 6.0) for number in range(4))))
    assert (watch.same_samples, watch.same_since, watch.why) == (3, MONO, "100% of a core in its process tree")
    state = rank(stack=stack(HERE, at=NOW - 1, active=True))
    text = found(state, replace(watch, looks=3)).evidence[-1]
    assert text == "4 samples over 18 s show the same line while it uses 100% of a core: a long calculation, or a loop that never ends"


def test_a_child_that_works_is_no_loop_of_the_main_thread():
    watch = watched(chain(*(look(number, HERE, cpu=number * 6.0, active=False) for number in range(4))))
    state = rank(stack=stack(HERE, at=NOW - 1, active=False))
    assert not [line for line in found(state, watch).evidence if "loop" in line]


def test_another_line_is_movement_and_starts_the_count_anew():
    watch = watched(chain(look(0, HERE), look(1, HERE), look(2, THERE)))
    assert (watch.same_samples, watch.why) == (0, "its stack moves")


@pytest.mark.parametrize(
    "later", [look(1, THERE, native=True), look(1, THERE, pid=4009), look(1, THERE, thread=4077)], ids=["native", "another process", "another thread"]
)
def test_samples_that_are_not_of_the_same_thread_taken_alike_are_not_compared(later):
    watch = watched(chain(look(0, HERE), later))
    assert (watch.last_progress, watch.same_samples) == (None, 0)


def test_a_name_with_and_without_its_class_is_the_same_function():
    """py-spy qualifies names from Python 3.11 on, the rank's own server does not."""
    long = (Frame("Model.training_step", "/job/model.py", 20), Frame("main", "/job/train.py", 60))
    short = (Frame("training_step", "/job/model.py", 20), Frame("main", "/job/train.py", 60))
    assert watched(chain(look(0, long), look(1, short))).last_progress is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"io_bytes": 9_000_000}, "9.0 MB moved in 6 s"),
        ({"disk_bytes": 9_000_000}, "9.0 MB moved in 6 s"),
        ({"io_bytes": 9_000_000, "disk_bytes": 9_000_000}, "9.0 MB moved in 6 s"),
        ({"net_bytes": 9_000_000}, "9.0 MB moved over the network in 6 s"),
        ({"io_bytes": 9_000, "net_bytes": 3_000}, ""),
    ],
)
def test_bytes_on_files_storage_and_sockets_are_progress(fields, why):
    assert watched([look(0, HERE), look(1, HERE, **fields)]).why == why


def test_frames_of_a_frameworks_checkout_are_told_only_without_a_line_of_the_job():
    from rankwatch.monitor.diagnose.frames import where

    megatron = Frame("train", "/ws/Megatron-LM/megatron/training/training.py", 1500)
    assert where((megatron, Frame("<module>", "/ws/pretrain_gpt.py", 90))) == "pretrain_gpt.py:90:<module>"
    assert where((Frame("forward_step", "/ws/pretrain_gpt.py", 60), megatron)) == "pretrain_gpt.py:60:forward_step"
    assert where((megatron, Frame("run", SITE + "x.py", 1))) == "training.py:1500:train"


# -- ends ----------------------------------------------------------------------------------------------------------------


def ended(**process):
    return causes.of(rank(process=Process(4001, False, exit_code=-9, **process)), MONO, State(), NOW, Limits())


def test_a_kill_for_lack_of_memory_says_where_the_kernel_says_so():
    finding = ended(oom_killed=True, oom_note="memory.events of the memory cgroup /job: oom_kill rose from 0 to 1", rss_bytes=57_000_000_000)
    assert (finding.cause, finding.says) == ("oom_killed", "it was killed by the kernel: its memory cgroup had no memory left")
    assert finding.evidence[1:] == ("memory.events of the memory cgroup /job: oom_kill rose from 0 to 1", "it held 57.0 GB when it was last looked at")
    finding = ended(oom_killed=True, oom_note="the kernel's log: Out of memory: Killed process 4001 (python)")
    assert finding.says == "it was killed by the kernel: the node had no memory left"


def test_a_kill_of_another_origin_says_what_was_looked_at():
    finding = ended(oom_note="memory.events of the memory cgroup /job: oom_kill did not rise")
    assert (finding.cause, finding.missing_evidence) == ("killed", ())
    assert "memory.events of the memory cgroup /job: oom_kill did not rise" in finding.evidence
    finding = ended()
    assert finding.cause == "killed"
    assert finding.missing_evidence == ("who killed it: neither the memory cgroup's count of out-of-memory kills nor the kernel's log could be read",)


def test_a_save_that_holds_the_gil_is_a_save():
    """torch.save opens its file with the GIL held."""
    main = frames("@torch/serialization.py:828:_open_zipfile_writer_file.__init__", "@torch/serialization.py:1002:save", "train.py:30:finish", *MAIN)
    state = replace(rank(stack=held(main)), heartbeat_at=NOW - 12, ping_ok=True)
    finding = causes.of(state, MONO, State(), NOW, Limits())
    assert (finding.cause, finding.domain, finding.at) == ("checkpointing", "storage", "train.py:30:finish")
    assert "no Python thread has run for 12 s" in finding.evidence
    state = replace(rank(stack=held(frames("train.py:30:parse", *MAIN))), heartbeat_at=NOW - 12, ping_ok=True)
    assert causes.of(state, MONO, State(), NOW, Limits()).cause == "gil_held"


def test_a_rank_that_has_not_beaten_once_since_it_joined_has_not_got_the_gil():
    """The agent's thread is there before the rank has joined, so what holds the GIL was called at once."""
    silent = replace(rank(stack=held(frames("train.py:14:tokenize", *MAIN))), heartbeat_at=None, stage_since=NOW - 12, ping_ok=True)
    finding = causes.of(silent, MONO, State(), NOW, Limits())
    assert (finding.cause, finding.at, finding.limit) == ("gil_held", "train.py:14:tokenize", "pause")
    assert "no Python thread has run for 12 s" in finding.evidence
    assert causes.of(replace(silent, stage_since=NOW - 2), MONO, State(), NOW, Limits()).cause == "not_entered"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"probes": {"collectives": {"status": "off"}}, "heartbeat_at": None}, id="the probe that beats is off"),
        pytest.param({"probes": {"collectives": {"status": "failed"}}, "heartbeat_at": NOW - 60}, id="it has switched itself off"),
        pytest.param({"agent": "armed", "heartbeat_at": None}, id="the agent has not joined"),
    ],
)
def test_where_nothing_beats_silence_says_nothing(more):
    state = replace(rank(frames("train.py:14:tokenize", *MAIN)), stage_since=NOW - 12, ping_ok=True, **more)
    assert causes.of(state, MONO, State(), NOW, Limits()).cause == "not_entered"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"stack": stack(frames("train.py:14:sleep", *MAIN))}, id="nobody owns the GIL, and the main thread sleeps"),
        pytest.param({"last_step_at": NOW - 1, "stack": held(frames("train.py:14:step", *MAIN))}, id="it steps"),
        pytest.param(
            {"stack": held(frames("train.py:14:a", *MAIN)), "earlier_stack": held(frames("train.py:15:b", *MAIN), at=NOW - 4)}, id="its main thread moves"
        ),
    ],
)
def test_a_heartbeat_that_stops_while_python_runs_is_no_held_gil(more):
    """Its thread has ended, or the job has frozen the clocks of its process."""
    state = replace(rank(stack=more["stack"]), heartbeat_at=NOW - 60, ping_ok=True, **more)
    assert causes.of(state, MONO, State(), NOW, Limits()).cause == "not_entered"
    early = replace(state, heartbeat_at=NOW - 4, last_step_at=None, earlier_stack=None, stack=held(frames("train.py:14:x", *MAIN)))
    assert causes.of(early, MONO, State(), NOW, Limits()).cause == "gil_held"


def test_what_the_agent_could_not_see_is_not_said_to_be_no_exception():
    def ended(agent):
        state = replace(rank(), agent=agent, process=Process(4001, False, exit_code=1))
        return words.advice("exited", causes.of(state, MONO, State(), NOW, Limits()))

    assert "left no exception" in ended("claimed")[0]
    assert "left no exception" not in ended("silent")[0]
    assert "the last lines of its log say whether by an exception" in ended("loaded")[0]
