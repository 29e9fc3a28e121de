"""What a stack says: the line of the user's code, and whether it is a known kind of work. Innermost frame first everywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rankwatch.model import Frame, Stack

Work = Literal["debugger", "compiling", "data_loading", "checkpointing", "external_io"]

_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python3|<stdlib>|^<frozen|torchinductor_|(^|/)rankwatch/agent/"
    r"|(^|/)torch/(_\w+|ao|amp|autograd|backends|compiler|cuda|distributed|fx|jit|library|multiprocessing|nn|optim|profiler|utils|(serialization|functional|storage|hub|library|_\w+)\.py)(/|$)"
)
_PYTHON_FILE = re.compile(r"\.pyw?$|\.ipynb|ipykernel|ipython-input|^<stdin>$|^<string>$")

# (kind, file pattern, function-name pattern): the first kind in this order that any frame of the main thread shows
_KINDS: tuple[tuple[Work, re.Pattern[str], re.Pattern[str]], ...] = (
    ("debugger", re.compile(r"(^|/)(pdb|bdb|ipdb)\.py$|/(ipdb|debugpy|pydevd|_pydevd_bundle|pudb)/|IPython/core/debugger"), re.compile("")),
    (
        "data_loading",
        re.compile(r"torch/utils/data/(dataloader\.py|_utils/(fetch|pin_memory)\.py)$"),
        re.compile(r"^(_try_get_data|_get_data|_next_data|__next__|__iter__|_shutdown_workers|_try_put_index|fetch|__init__)$"),
    ),
    ("data_loading", re.compile(r"/(webdataset|streaming/base|nvidia/dali|torchdata|ffcv|tensorflow/python/data|grain)/"), re.compile("")),
    (
        "checkpointing",
        re.compile(r"torch/serialization\.py$"),
        re.compile(r"^(_?save|_legacy_save|_?load|_legacy_load|load_tensor|persistent_load|write_record)$"),
    ),
    (
        "checkpointing",
        re.compile(
            r"torch/distributed/(_shard/)?checkpoint/|(^|/)safetensors/|/checkpoint_engine/|/lightning/fabric/plugins/io/|/orbax/|/megatron/.*checkpointing"
        ),
        re.compile(""),
    ),
    (
        "external_io",
        re.compile(
            r"(^|/)(requests|urllib3|botocore|boto3|s3fs|s3transfer|gcsfs|fsspec|aiohttp|httpx|httpcore|huggingface_hub|smart_open|wandb|mlflow|"
            r"google/cloud/storage|azure/storage|paramiko|redis|psycopg2?|pymongo|minio)/|(<stdlib>|/lib/python3[^/]*)/(http/client|urllib/request|ftplib|socket|ssl|smtplib|shutil)\.py$"
        ),
        re.compile(""),
    ),
    (
        "compiling",
        re.compile(
            r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py$|torch/_inductor/(async_compile|codecache|compile_fx|select_algorithm|autotune_process)\.py$"
        ),
        re.compile(r"^(?!__call__$)"),  # CompiledFxGraph.__call__ is the compiled code running, no compile
    ),
)
_POINT_TO_POINT = re.compile(r"^(recv|irecv|send|isend|batch_isend_irecv|monitored_barrier|recv_object_list|send_object_list)$")
_BLOCKED = re.compile(r"torch/distributed/|torch/autograd/graph\.py$|torch/autograd/__init__\.py$|torch/cuda/(streams|__init__)\.py$")


@dataclass(frozen=True, slots=True)
class Recognised:
    kind: Work
    frame: Frame


def function(frame: Frame) -> str:
    """Bare name: `_try_get_data` of `_MultiProcessingDataLoaderIter._try_get_data` (py-spy qualifies from Python 3.11 on)."""
    return frame.name.rsplit(".", 1)[-1]


def is_user(frame: Frame) -> bool:
    """Python code that belongs to the job, not to Python, torch or an installed package."""
    return bool(_PYTHON_FILE.search(frame.file)) and not _LIBRARY.search(frame.file)


def user_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if is_user(frame))


def where(frames: tuple[Frame, ...]) -> str:
    """`train.py:31:load_batch`: innermost line of the job's code, "" where there is none: what is told as `at`."""
    return next((frame.short for frame in frames if is_user(frame)), "")


def innermost(frames: tuple[Frame, ...]) -> str:
    """The same for a sentence: without a line of the job's code the innermost Python line."""
    return where(frames) or next((frame.short for frame in frames if _PYTHON_FILE.search(frame.file)), "")


def recognise(stack: Stack | None) -> Recognised | None:
    """The kind of work that the main thread is in, None when no rule knows it."""
    if stack is None:
        return None
    for kind, file, name in _KINDS:
        for frame in stack.main:
            if file.search(frame.file) and name.search(function(frame)):
                return Recognised(kind, frame)
    return None


def in_point_to_point(stack: Stack | None) -> str:
    """`recv` and the like when the main thread waits in a point-to-point call: gloo's recorder does not see those."""
    for frame in stack.main if stack else ():
        if frame.file.endswith("distributed_c10d.py") and _POINT_TO_POINT.search(function(frame)):
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
    return tuple((frame.file, frame.name, frame.line) for frame in frames)


def moved(earlier: Stack | None, later: Stack | None) -> bool:
    """Two samples of one process that differ. Native and Python-only samples are not compared."""
    if earlier is None or later is None or earlier.pid != later.pid or earlier.native != later.native:
        return False
    if not earlier.main or not later.main:
        return False
    return signature(earlier) != signature(later)
