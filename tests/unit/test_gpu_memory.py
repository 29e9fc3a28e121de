"""What held a GPU's memory when an allocation failed: in words, in the incident of the rank that ended of it, with advice by the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch import gpu_memory
from rankwatch.gpu_memory import OutOfMemory, breakdown, failed, is_out_of_memory, line, numbers
from rankwatch.model import Crash, RankState
from rankwatch.monitor.diagnose import gpu_oom
from rankwatch.report import markdown, text

GIB = 1 << 30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 139.81 GiB of which 1.81 GiB is free. Process 77 has 3.50 GiB memory "
    "in use. Including non-PyTorch memory, this process has 134.50 GiB memory in use. Of the allocated memory 130.00 GiB is allocated by PyTorch, with "
    "3.50 GiB allocated in private pools (e.g., CUDA Graphs), and 4.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OOM = {
    "wall_ns": 1, "device": 1, "tried": 2 * GIB, "total": 140 * GIB, "free": GIB, "where": "train.py:31:step", "allocated": 130 * GIB, "reserved": 136 * GIB,
    "active": 130 * GIB, "inactive_split": 3 * GIB, "peak_allocated": 131 * GIB, "pools": {"0_1": 3 * GIB, "0_2": GIB},
}  # fmt: skip
RECORD = {
    "device": 1, "allocated": 130 * GIB, "reserved": 136 * GIB, "peak_allocated": 131 * GIB, "peak_reserved": 136 * GIB, "inactive_split": 3 * GIB,
    "active": 130 * GIB, "pools": {"0_1": 3 * GIB, "0_2": GIB}, "retries": 4, "ooms": 1, "oom": OOM,
}  # fmt: skip


def test_torchs_own_words_are_understood():
    assert failed({}, f"{MESSAGE}\nRuntimeError: {MESSAGE}") == OutOfMemory(
        device=1, tried=2 * GIB, total=int(139.81 * GIB), free=int(1.81 * GIB), allocated=130 * GIB, cached=4 * GIB, pools=int(3.5 * GIB), others=int(3.5 * GIB)
    )  # fmt: skip


def test_the_record_of_that_moment_comes_first():
    found = failed(RECORD, "CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert breakdown(found) == (
        "tried to allocate 2.0 GiB; GPU 1 of 140.0 GiB: 130.0 GiB allocated, 6.0 GiB reserved by torch and free (3.0 GiB of it in parts of blocks in use), "
        "of both 4.0 GiB in private pools of CUDA graphs, 1.0 GiB free, 3.0 GiB outside torch's allocator; peak 131.0 GiB allocated"
    )


def test_a_record_of_another_failure_is_not_mixed_in():
    assert failed(RECORD, MESSAGE.replace("2.00 GiB.", "20.00 MiB.")).peak is None
    assert failed(RECORD, "").tried == 2 * GIB


def test_a_message_alone_that_says_nothing_gives_nothing():
    assert breakdown(failed({}, "CUDA out of memory")) == ""
    assert breakdown(failed({}, "Tried to allocate 1.2.3 GiB")) == "tried to allocate 0 MiB; the GPU: nothing is known of what it held"


@pytest.mark.parametrize("rubbish", [{"oom": []}, {"oom": {"tried": "x", "pools": 3}}, {"allocated": float("nan")}, {"pools": {"a": None}}, {"ooms": True}])
def test_what_a_rank_has_written_is_never_trusted(rubbish: dict[str, Any]):
    assert line(numbers(rubbish)) == ""
    assert breakdown(failed(rubbish, "")) == ""


def test_one_line_says_what_a_rank_holds():
    assert line(numbers(RECORD)) == (
        "GPU 1: 130.0 GiB allocated (peak 131.0 GiB), 136.0 GiB reserved, 3.0 GiB free in parts of blocks in use, 4.0 GiB in private pools of CUDA graphs, "
        "4 allocation retries, 1 failed allocations"
    )


@pytest.mark.parametrize(
    ("type_name", "message", "expected"),
    [
        ("torch.OutOfMemoryError", "x", True),
        ("torch.cuda.OutOfMemoryError", "x", True),
        ("RuntimeError", "CUDA out of memory. Tried", True),
        ("MemoryError", "out of memory", False),
        ("RuntimeError", "CUDA error: invalid argument", False),
    ],
)
def test_which_exceptions_are_of_a_gpus_memory(type_name, message, expected):
    assert is_out_of_memory(type_name, message) is expected


@pytest.mark.parametrize(
    ("oom", "words"),
    [
        (OutOfMemory(tried=2 * GIB, allocated=80 * GIB, cached=6 * GIB), ("expandable_segments", "its part of the model")),
        (OutOfMemory(tried=2 * GIB, allocated=80 * GIB, cached=GIB, pools=30 * GIB), ("mark_dynamic", "its part of the model")),
        (OutOfMemory(tried=2 * GIB, total=140 * GIB, free=0, allocated=80 * GIB, cached=GIB), ("nvidia-smi", "its part of the model")),
        (OutOfMemory(tried=2 * GIB, total=140 * GIB, free=GIB, allocated=135 * GIB, cached=GIB), ("its part of the model",)),
        (OutOfMemory(), ("its part of the model",)),
    ],
    ids=["in pieces", "graphs", "somebody else", "full", "nothing known"],
)
def test_the_advice_follows_the_numbers(oom: OutOfMemory, words: tuple[str, ...]):
    told = gpu_oom.advice(oom)
    assert len(told) == len(words)
    assert all(word in step for word, step in zip(words, told, strict=True))


def test_the_crash_of_a_rank_tells_what_held_its_memory():
    evidence, advice = gpu_oom.found(RankState(1, memory=RECORD), Crash("torch.OutOfMemoryError", MESSAGE))
    assert evidence[0].startswith("tried to allocate 2.0 GiB; GPU 1 of 139.8 GiB: 130.0 GiB allocated, 6.0 GiB reserved")
    assert evidence[1] == "3 earlier allocations went through only after the cache had been emptied"
    assert any("expandable_segments" in step for step in advice)
    assert any("held by other processes" in step for step in advice)


def test_pools_that_only_the_graph_probe_has_counted_are_used():
    rank = RankState(1, cudagraph={"pool_bytes": 40 * GIB})
    evidence, advice = gpu_oom.found(
        rank, Crash("torch.OutOfMemoryError", MESSAGE.replace(" with 3.50 GiB allocated in private pools (e.g., CUDA Graphs),", ""))
    )
    assert "of both 40.0 GiB in private pools" in evidence[0]
    assert "mark_dynamic" in advice[0]


def test_any_other_crash_is_left_alone():
    assert gpu_oom.found(RankState(1, memory=RECORD), Crash("ValueError", "bad batch")) == ((), ())


def test_reports_have_a_section_of_it():
    doc = {"memory": {"1": {"line": line(numbers(RECORD)), **numbers(RECORD)}}, "cause": "crashed"}
    for rendered in (text.render(doc), markdown.render(doc)):
        assert "Memory of the GPU" in rendered
    rows = text.memory_rows(doc)
    assert rows[0] == f"rank 1, {line(numbers(RECORD))}"
    assert rows[1].startswith("rank 1, the allocation that failed last at train.py:31:step: tried to allocate 2.0 GiB; GPU 1 of 140.0 GiB: ")
    assert gpu_memory.size(512 << 20) == "512 MiB"


def test_a_document_without_it_has_none():
    assert "Memory" not in text.render({})
