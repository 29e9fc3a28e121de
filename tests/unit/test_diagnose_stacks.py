"""Frames and stacks: the job's own line, known kinds of work, equal stacks together."""

import pytest
from build_jobs import frames

from rankwatch.model import Frame, Stack, StackGroup, Thread
from rankwatch.monitor.diagnose import frames as reading
from rankwatch.monitor.diagnose.stacks import group_stacks


def stack(*lines):
    return Stack(1, 0.0, (Thread("MainThread", 1, frames(*lines)),))


@pytest.mark.parametrize(
    ("file", "user"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("/home/me/torch/train.py", True),
        ("/opt/conda/lib/python3.11/threading.py", False),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/home/me/pytorch/torch/distributed/distributed_c10d.py", False),
        ("/home/me/pytorch/torch/library.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<stdlib>/selectors.py", False),
        ("libc.so.6", False),
        ("/tmp/torchinductor_me/ab/cab.py", False),
    ],
)
def test_the_jobs_own_code_is_told_from_libraries(file, user):
    assert reading.is_user(Frame("f", file, 1)) is user


def test_where_is_the_innermost_line_of_the_job():
    assert reading.where(frames("@torch/utils/data/dataloader.py:1291:_try_get_data", "train.py:34:epoch", "train.py:70:main")) == "train.py:34:epoch"
    assert reading.where(frames("@torch/library.py:665:_del_library")) == ""
    assert reading.where((Frame("nanosleep", "libc.so.6", 0),)) == ""


def test_a_sentence_names_a_librarys_line_where_there_is_none_of_the_job():
    assert reading.innermost(frames("@torch/a.py:3:f", "train.py:34:epoch")) == "train.py:34:epoch"
    assert reading.innermost((Frame("nanosleep", "libc.so.6", 0), *frames("@torch/a.py:3:f"))) == "a.py:3:f"


def test_equal_stacks_share_a_group_culprits_first_and_the_smallest_first():
    waiting = stack("@torch/distributed/distributed_c10d.py:3252:all_reduce", "train.py:50:step")
    same_but_library_line = stack("@torch/distributed/distributed_c10d.py:3299:all_reduce", "train.py:50:step")
    other = stack("@torch/distributed/distributed_c10d.py:5356:barrier", "train.py:51:step")
    stacks = {0: waiting, 1: stack("train.py:31:load_batch"), 2: same_but_library_line, 3: other, 4: Stack(5, 0.0, error="gone")}
    assert group_stacks(stacks, culprits=(1,), waiting=(0, 2, 3)) == (
        StackGroup((1,), frames("train.py:31:load_batch"), "culprit"),
        StackGroup((3,), other.main, "waiting"),
        StackGroup((0, 2), waiting.main, "waiting"),
    )


def test_a_culprit_never_shares_a_group_with_a_waiting_rank():
    same = stack("train.py:50:step")
    assert [(group.ranks, group.role) for group in group_stacks({0: same, 1: same}, culprits=(1,), waiting=(0,))] == [((1,), "culprit"), ((0,), "waiting")]


def test_no_stacks_give_no_groups():
    assert group_stacks({}, (), ()) == ()
