"""What a rank may be doing, and how that looks from outside: stack samples, CPU, bytes, state letter, a compile's phases.

An Act says nothing of why the rank does it; faults and healthy look-alikes share them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from rankwatch.model import CompileActivity, Frame, Stack, Thread

SITE = "/venv/lib/python3.11/site-packages/"
STDLIB = "/usr/lib/python3.11/"
Frames = tuple[Frame, ...]


@cache
def frames(*lines: str) -> Frames:
    """`"train.py:31:load_batch"`, innermost first. A leading `@` puts the file into site-packages, `%` into the standard library."""
    found = []
    for text in lines:
        file, line, name = text.rsplit(":", 2)
        place = SITE + file[1:] if file[0] == "@" else STDLIB + file[1:] if file[0] == "%" else "/job/" + file
        found.append(Frame(name, place, int(line)))
    return tuple(found)


PLAIN = frames("train.py:60:main", "train.py:90:<module>")
WRAPPED = frames(
    "@lightning/pytorch/loops/fit_loop.py:217:run",
    "@lightning/pytorch/trainer/trainer.py:1065:_run_stage",
    "@lightning/pytorch/trainer/call.py:49:_call_and_handle_interrupt",
    "train.py:90:<module>",
)
COMPILER = frames("@torch/_dynamo/convert_frame.py:700:compile_inner", "@torch/_dynamo/eval_frame.py:736:compile_wrapper", "model.py:31:forward")


@dataclass(frozen=True, slots=True)
class Compile:
    """A compile: a new phase begins every phase_s seconds, never with 0."""

    frame: str
    compile_id: str
    phase_s: float = 0.0
    reason: str = ""
    splits: int = 0

    def activity(self, since: float, now: float) -> CompileActivity:
        number = int((now - since) / self.phase_s) if self.phase_s else 0
        phase = ("dynamo", "aot", "inductor", "kernel_compile")[number % 4] if self.phase_s else "inductor"
        split = min(self.splits, 1 + number // 4)
        return CompileActivity(
            self.compile_id, "forward", self.frame, phase, f"{phase}_{number}", since, since + number * self.phase_s, self.reason, split, self.splits
        )


@dataclass(frozen=True, slots=True)
class Act:
    """samples: main-thread stacks that alternate in time; one alone stands still. cpu, child_cpu: cores. io: bytes per second.

    frozen: no thread of the process runs. letter: of the process state, worked out from cpu when empty.
    """

    samples: tuple[Frames, ...]
    cpu: float = 0.0
    child_cpu: float = 0.0
    io: float = 0.0
    holds_gil: bool = False
    letter: str = ""
    wchan: str = ""
    frozen: bool = False
    compile: Compile | None = None
    children: tuple[Stack, ...] = ()
    mutes: bool = field(init=False)  # the agent's thread does not run meanwhile
    elsewhere: bool = field(init=False)  # children work or bytes move
    plain: bool = field(init=False)  # neither of these
    cores: float = field(init=False)  # with the little that other threads use
    shown_letter: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mutes", self.holds_gil or self.frozen)
        object.__setattr__(self, "elsewhere", bool(self.child_cpu or self.io))
        object.__setattr__(self, "plain", not self.mutes and not self.elsewhere)
        object.__setattr__(self, "cores", self.cpu + 0.0005)
        object.__setattr__(self, "shown_letter", self.letter or ("R" if self.cpu > 0.5 else "S"))

    def stack(self, at: float) -> Frames:
        return self.samples[int(at * 3) % len(self.samples)]

    def below(self, outer: Frames) -> Act:
        """The same, called from `outer`."""
        return replace(self, samples=tuple((*sample, *outer) for sample in self.samples))


def act(*lines: str, outer: Frames = PLAIN, **how: object) -> Act:
    return Act((frames(*lines) + outer,), **how)  # type: ignore[arg-type]


# -- ordinary work -------------------------------------------------------------------------------------------------------------

LOAD = frames("@torch/utils/data/dataloader.py:1291:_MultiProcessingDataLoaderIter._try_get_data", "@torch/utils/data/dataloader.py:730:__next__")
FORWARD = tuple(frames("@torch/nn/modules/linear.py:125:forward", f"model.py:{line}:forward") for line in (31, 38, 44))


@cache
def compute(outer: Frames = PLAIN, cpu: float = 1.0) -> Act:
    return Act(tuple((*sample, *outer) for sample in FORWARD), cpu=cpu)


@cache
def optimizer(outer: Frames = PLAIN) -> Act:
    return Act((frames("@torch/optim/adamw.py:220:step") + outer,), cpu=1.0)


@cache
def loading(outer: Frames = PLAIN) -> Act:
    return Act(((*LOAD, *outer),), child_cpu=0.9)


@cache
def python_work(outer: Frames = PLAIN) -> Act:
    return Act(tuple(frames(f"train.py:{line}:evaluate") + outer for line in (71, 72, 75)), cpu=1.0)


def compiling(rng: Random, *, splits: int = 0, recompile: bool = False) -> Act:
    """A compile that gets on: phases change, the rank or its workers use CPU."""
    in_workers = rng.random() < 0.3
    what = Compile(
        f"forward@model.py:{rng.choice((31, 38, 44))}",
        "0/1" if not recompile else "0/2",
        rng.uniform(0.7, 6.0),
        "L['x'].size()[0] == 8" if recompile else "",
        splits,
    )
    return Act((COMPILER + PLAIN,), cpu=0.01 if in_workers else 0.95, child_cpu=1.5 if in_workers else 0.0, compile=what)


@cache
def garbage_collection() -> Act:
    return Act((frames("train.py:40:collect") + PLAIN,), cpu=1.0, holds_gil=True)


def saving(rng: Random) -> Act:
    """A checkpoint that is being written."""
    return replace(_saver(rng), io=rng.uniform(1e6, 2e8), cpu=rng.uniform(0.0, 0.3))


def uploading(rng: Random) -> Act:
    return replace(_transfer(rng), io=rng.uniform(1e5, 1e7))


# -- what a rank gets lost in --------------------------------------------------------------------------------------------------


def asleep(rng: Random) -> Act:
    """Not where it should be, and doing nothing."""
    return rng.choice(
        (
            act("train.py:31:wait_for_file"),
            act("%threading.py:327:wait", "%queue.py:171:get", "train.py:34:next_item"),
            act("%subprocess.py:1264:wait", "train.py:35:run_tool"),
            act("%selectors.py:415:select", "%multiprocessing/connection.py:930:wait", "train.py:36:gather_results"),
        )
    )


def spinning(rng: Random) -> Act:
    """An endless loop: it uses a core and gets nowhere."""
    line = rng.choice((51, 55))
    return Act((frames(f"train.py:{line}:search") + PLAIN, frames(f"train.py:{line + 1}:search") + PLAIN), cpu=1.0)


def loader_stuck(rng: Random) -> Act:
    where = frames("dataset.py:22:__getitem__", "@torch/utils/data/_utils/fetch.py:54:fetch")
    worker = Stack(9, 0.0, (Thread("MainThread", 9, where),))
    main = LOAD + frames("train.py:34:epoch") + PLAIN
    if rng.random() < 0.3:  # num_workers=0: the dataset's own code, in the rank itself
        return Act((frames("dataset.py:22:__getitem__") + where[1:] + frames("@torch/utils/data/dataloader.py:790:_next_data") + PLAIN,))
    return Act((main,), children=(worker,))


def _saver(rng: Random) -> Act:
    return rng.choice(
        (
            act("@torch/serialization.py:1220:_save", "@torch/serialization.py:960:save", "train.py:30:save_checkpoint"),
            act(
                "@torch/distributed/checkpoint/filesystem.py:380:_write_files_from_queue",
                "@torch/distributed/checkpoint/state_dict_saver.py:180:save",
                "train.py:30:save_checkpoint",
            ),
            act("@safetensors/torch.py:280:save_file", "train.py:30:save_checkpoint"),
        )
    )


def save_stalled(rng: Random) -> Act:
    return _saver(rng)


def _transfer(rng: Random) -> Act:
    return rng.choice(
        (
            act("%socket.py:718:readinto", "@urllib3/connectionpool.py:540:urlopen", "@requests/sessions.py:710:send", "train.py:26:fetch_shard"),
            act("%ssl.py:1167:read", "@botocore/httpsession.py:464:send", "@s3fs/core.py:2200:_call_s3", "train.py:27:upload"),
            act("@wandb/sdk/wandb_run.py:1800:log", "train.py:28:report"),
        )
    )


def transfer_stalled(rng: Random) -> Act:
    return _transfer(rng)


def compile_hung(rng: Random) -> Act:
    what = Compile(f"forward@model.py:{rng.choice((31, 38, 44))}", "0/1", 0.0, "L['x'].size()[0] == 8")
    return Act((COMPILER + PLAIN,), cpu=0.001, compile=what)


def native_hold(rng: Random) -> Act:
    return act("native.py:77:parse", holds_gil=True, cpu=rng.choice((0.0, 1.0)))


def breakpoint_(rng: Random) -> Act:
    return act("%pdb.py:231:_cmdloop", "%bdb.py:90:trace_dispatch", "train.py:44:main")


def in_kernel(rng: Random) -> Act:
    where = rng.choice((("rpc_wait_bit_killable", "train.py:29:read_config"), ("folio_wait_bit_common", "train.py:32:load_shard")))
    return act(where[1], letter="D", wchan=where[0])


STOPPED = Act((), letter="T", frozen=True)


# -- inside torch.distributed --------------------------------------------------------------------------------------------------


@cache
def waiting(op: str, line: int, nccl: bool, backward: bool) -> Act:
    """In a collective: gloo shows torch's frames, an NCCL waiter spins somewhere in the job's own code."""
    if nccl:
        return Act((frames(f"train.py:{line}:step") + PLAIN,), cpu=1.0)
    if backward:
        return Act((frames("@torch/autograd/graph.py:829:_engine_run_backward", "@torch/_tensor.py:625:backward", f"train.py:{line}:step") + PLAIN,))
    return Act((frames(f"@torch/distributed/distributed_c10d.py:3252:{op}", "@torch/distributed/c10d_logger.py:81:wrapper", f"train.py:{line}:step") + PLAIN,))


IN_STORE = act("@torch/distributed/distributed_c10d.py:1750:init_process_group", "train.py:12:setup")
IN_NEW_GROUP = act("@torch/distributed/distributed_c10d.py:5400:new_group", "train.py:14:setup")
RECEIVING = act("@torch/distributed/distributed_c10d.py:2600:recv", "train.py:52:pipeline")
IMPORTING = Act(tuple(frames(f"@transformers/models/auto/modeling_auto.py:{line}:<module>") + PLAIN[1:] for line in (10, 20, 30)), cpu=0.7)
