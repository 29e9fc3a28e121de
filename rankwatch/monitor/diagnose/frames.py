"""What a stack says: the line of the user's code, and whether it is a known kind of work. Innermost frame first everywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankwatch.model import Domain, Frame, Stack
from rankwatch.monitor.diagnose import known_work
from rankwatch.monitor.diagnose.known_work import PRECEDENCE, Known, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python3|<stdlib>|^<frozen|torchinductor_|(^|/)rankwatch/(agent|wire)/"
    r"|(^|/)torch/(_\w+|ao|amp|autograd|backends|compiler|cuda|distributed|fx|jit|library|multiprocessing|nn|optim|profiler|utils|(serialization|functional|storage|hub|library|_\w+)\.py)(/|$)"
)
# checkouts of frameworks: code that a job may have changed, but whose line is told only where there is none of the job's own
_FRAMEWORK = re.compile(
    r"(^|/)(megatron/(core|training|legacy)|deepspeed/(runtime|ops|launcher|utils|comm)|(lightning/)?(pytorch|fabric)/(loops|trainer|strategies|plugins|callbacks|utilities)"
    r"|pytorch_lightning|transformers/(models|integrations|utils|trainer\w*\.py|modeling_\w+\.py)|src/accelerate|src/(peft|trl)|torchtitan/(components|models|distributed|train\.py)"
    r"|nemo/(core|collections|lightning|utils)|fairseq2?/(trainer|tasks|models|utils|data|recipes)|composer/(trainer|core|callbacks))(/|$|\.py$)"
)
_PYTHON_FILE = re.compile(r"\.pyw?$|\.ipynb|ipykernel|ipython-input|^<stdin>$|^<string>$")
_POINT_TO_POINT = re.compile(r"^(recv|irecv|send|isend|batch_isend_irecv|monitored_barrier|recv_object_list|send_object_list)$")
_PIPELINE = re.compile(r"torch/distributed/pipelining/\w+\.py$")
_BLOCKED = re.compile(r"torch/distributed/|torch/autograd/graph\.py$|torch/autograd/__init__\.py$|torch/cuda/(streams|__init__)\.py$")
_THREAD_WAIT = re.compile(
    r"((<stdlib>|/lib/python3[^/]*)/(threading|queue|selectors|concurrent/futures/\w+|asyncio/\w+|multiprocessing/(pool|dummy/\w+))"
    r"|(site|dist)-packages/(anyio/_backends/\w+|trio/_core/\w+|uvloop/\w+|wandb/agents/\w+|joblib/parallel))\.py$"
)


@dataclass(frozen=True, slots=True)
class Recognised:
    """A known kind of work. frame: the library's innermost frame of it; does: a clause after "it".

    own: the job's own code runs inside it. inside: other kinds that are seen further in (a dataset that downloads).
    """

    kind: Work
    frame: Frame
    does: str = ""
    domain: Domain = "user_code"
    own: bool = False
    inside: tuple[Work, ...] = ()


def function(frame: Frame) -> str:
    """Bare name: `_try_get_data` of `_MultiProcessingDataLoaderIter._try_get_data` (py-spy qualifies from Python 3.11 on)."""
    return frame.name.rsplit(".", 1)[-1]


def is_user(frame: Frame) -> bool:
    """Python code that belongs to the job, not to Python, torch or an installed package."""
    return bool(_PYTHON_FILE.search(frame.file)) and not _LIBRARY.search(frame.file)


def user_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if is_user(frame))


def where(frames: Sequence[Frame]) -> str:
    """`train.py:31:load_batch`: innermost line of the job's code, "" where there is none: what is told as `at`.

    A framework's checkout counts only where nothing else of the job's is on the stack.
    """
    own = user_frames(frames)
    return next((frame.short for frame in own if not _FRAMEWORK.search(frame.file)), own[0].short if own else "")


def innermost(frames: Sequence[Frame]) -> str:
    """The same for a sentence: without a line of the job's code the innermost Python line."""
    return where(frames) or next((frame.short for frame in frames if _PYTHON_FILE.search(frame.file)), "")


def recognise(stack: Stack | None) -> Recognised | None:
    """The kind of work that the main thread is in, None when no rule knows it."""
    return recognise_frames(stack.main) if stack is not None else None


def recognise_frames(frames: Sequence[Frame]) -> Recognised | None:
    """The same of any thread. A library that only called the job's code says nothing; `known_work` tells the exceptions."""
    found: dict[Work, tuple[Known, Frame, bool, int]] = {}
    own = False
    for depth, frame in enumerate(frames):
        known = known_work.entries(frame.file, function(frame))
        for each in known:
            old = found.get(each.kind)
            if old is None and (not own or each.over_user):
                found[each.kind] = (each, frame, own, depth)
            elif old is not None and each.kind == "external_io" and not own:  # what the job called says more than the socket that it ends in
                found[each.kind] = (each, frame, own, old[3])
        own = own or (not known and is_user(frame) and not _FRAMEWORK.search(frame.file))
    kind = next((kind for kind in PRECEDENCE if kind in found), None)
    if kind is None:
        return None
    transfer = found.get("external_io")
    if kind == "checkpointing" and transfer is not None:
        saver = found[kind]
        uploads = saver[0].wrapper and transfer[0].domain == "network"  # what a framework's save method does at the moment is an upload
        prepares = transfer[2] and transfer[3] > saver[3]  # the job's own function, called by dataset.map, reads a file
        kind = "external_io" if uploads or prepares else kind
    entry, frame, own, depth = found[kind]
    inside = tuple(other for other in PRECEDENCE if other in found and found[other][3] < depth)
    return Recognised(kind, frame, entry.does, entry.domain, own, inside)


def evaluation(frames: Sequence[Frame]) -> Frame | None:
    """The frame that shows an evaluation, of the job or of a framework, by its function's name."""
    for frame in frames:
        if (is_user(frame) or known_work.EVALUATING_LIBRARIES.search(frame.file)) and known_work.evaluates(function(frame)):
            return frame
    return None


def waits_for_thread(frames: Sequence[Frame]) -> Frame | None:
    """The innermost Python frame, if the thread waits there for another thread or an event loop: what it waits for is elsewhere."""
    for frame in frames:
        if _PYTHON_FILE.search(frame.file):
            return frame if _THREAD_WAIT.search(frame.file) else None
    return None


def in_event_loop(frames: Sequence[Frame]) -> bool:
    """Whether an event loop runs and none of the job's coroutines does."""
    for frame in frames:
        if is_user(frame):
            return False
        if "/asyncio/" in frame.file or "/uvloop/" in frame.file:
            return True
    return False


def in_point_to_point(stack: Stack | None) -> str:
    """`recv` and the like when the main thread waits in a point-to-point call: gloo's recorder does not see those.

    `work.wait()` of isend or irecv is a native call of the job's own line: see handles.py. torch.distributed.pipelining has a function for it.
    """
    for frame in stack.main if stack else ():
        if frame.file.endswith("distributed_c10d.py") and _POINT_TO_POINT.search(function(frame)):
            return function(frame)
        if function(frame) == "_wait_batch_p2p" and _PIPELINE.search(frame.file):
            return function(frame)
    return ""


def at_the_end(stack: Stack | None) -> bool:
    """Whether the script is over and the interpreter waits for a thread that is no daemon."""
    if stack is None or not stack.main or user_frames(stack.main):
        return False
    return any(frame.file.endswith("threading.py") and function(frame) == "_shutdown" for frame in stack.main)


def blocked(stack: Stack | None) -> bool | None:
    """Whether the main thread sits inside torch.distributed or the autograd engine; None without a stack."""
    if stack is None or not stack.main:
        return None
    return any(_BLOCKED.search(frame.file) for frame in stack.main)


def signature(stack: Stack) -> tuple[tuple[str, str, int], ...]:
    """What has to differ between two samples to be movement: function and line of the job's frames, else of all Python frames.

    Library frames stay out where the job's are known: a sleeping DataLoader polls, and so flickers, for ever.
    """
    frames = user_frames(stack.main) or tuple(frame for frame in stack.main if _PYTHON_FILE.search(frame.file))
    return tuple((frame.file, function(frame), frame.line) for frame in frames)


def comparable(earlier: Stack | None, later: Stack | None) -> bool:
    """Two samples of the same thread of one process, taken alike. Native and Python-only samples are not compared."""
    if earlier is None or later is None or earlier.pid != later.pid or earlier.native or later.native:
        return False
    return bool(earlier.main and later.main) and earlier.threads[0].native_id == later.threads[0].native_id


def moved(earlier: Stack | None, later: Stack | None) -> bool:
    """Two samples that can be compared and differ."""
    if earlier is None or later is None or not comparable(earlier, later):
        return False
    return signature(earlier) != signature(later)
