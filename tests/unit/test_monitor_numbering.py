"""gloo's status counts sends and receives, its recorder does not: numbers of ranks are made comparable by the entries, which hold both."""

import pytest

from rankwatch.model import Group
from rankwatch.monitor.recorder import RecorderView
from rankwatch.monitor.worker_server import GENERIC, NCCL

WALL = 1_796_018_525.0
DEFAULT = Group("0", "default_pg", "gloo", (0, 1), 1800.0)


def entry(op_id, seq, retired=True, backend="gloo"):
    return {
        "collective_seq_id": seq, "op_id": op_id, "p2p_seq_id": 0, "is_p2p": False, "record_id": seq - 1, "pg_id": 0, "process_group": ["0", "default_pg"],
        "profiling_name": f"{backend}:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
        "state": "completed" if backend == "nccl" else "scheduled", "retired": retired, "time_created_ns": int((WALL + seq) * 1e9), "timeout_ms": 1_800_000,
    }  # fmt: skip


def status(entered, done):
    return {"pg_status": {"0": {"last_enqueued_collective": str(entered), "last_started_collective": "-1", "last_completed_collective": str(done)}}}


def read(*entries, recorder=GENERIC):
    view = RecorderView()
    view.take({recorder: {"entries": list(entries)}}, (DEFAULT,), WALL + 100)
    return view


MIXED = read(entry(1, 1), entry(5, 2), entry(9, 3, retired=False))  # three sends and receives before #2, and three more before #3


@pytest.mark.parametrize(
    ("told", "numbers", "more"),
    [
        pytest.param((9, 9), (3, 3), False, id="as it was read"),
        pytest.param((9, 5), (3, 2), False, id="in the newest that was read"),
        pytest.param((5, 1), (2, 1), False, id="a status that is older than the entries"),
        pytest.param((13, 9), (4, 3), True, id="in one that was not read"),
        pytest.param((17, 13), (5, 4), True, id="two of them at least"),
        pytest.param((17, 17), (4, 4), True, id="one at least, and done"),
    ],
)
def test_the_numbers_of_a_mixed_group_are_collectives_and_lower_bounds_beyond_what_was_read(told, numbers, more):
    entered, done = MIXED.numbers(GENERIC, status(*told), (DEFAULT,))
    assert (entered["0"], done["0"]) == numbers
    assert MIXED.mixed(GENERIC, status(*told), (DEFAULT,)) == {"0": more}


def test_a_group_without_sends_and_receives_goes_by_the_status_alone():
    view = read(entry(1, 1), entry(2, 2))
    assert view.numbers(GENERIC, status(40, 39), (DEFAULT,)) == ({"0": 40}, {"0": 39})
    assert view.mixed(GENERIC, status(40, 39), (DEFAULT,)) == {}


def test_the_numbers_of_nccl_are_left_alone():
    """What its entries call op_id is no number of the status."""
    view = read(entry(7, 1, backend="nccl"), entry(9, 2, backend="nccl"), recorder=NCCL)
    assert view.numbers(NCCL, status(5, 4), (DEFAULT,)) == ({"0": 5}, {"0": 4})
    assert view.mixed(NCCL, status(5, 4), (DEFAULT,)) == {}


def test_a_mixed_group_stays_so_when_an_answer_holds_none_of_its_entries():
    view = read(entry(1, 1), entry(5, 2))
    other = {**entry(1, 1), "pg_id": 1, "process_group": ["1", ""]}
    view.take({GENERIC: {"entries": [other]}}, (DEFAULT,), WALL + 101, whole=False)
    assert view.mixed(GENERIC, status(5, 5), (DEFAULT,)) == {"0": False}


def test_a_group_of_that_name_that_was_made_anew_begins_anew():
    again = Group("0", "default_pg", "gloo", (0, 1), 1800.0, generation=1, created_wall_at=WALL + 50)
    assert MIXED.mixed(GENERIC, status(9, 9), (again,)) == {}


def test_an_entry_that_says_nothing_of_the_status_makes_no_group_mixed():
    view = read({**entry(1, 1), "op_id": None}, {key: value for key, value in entry(2, 2).items() if key != "op_id"})
    assert view.mixed(GENERIC, status(9, 9), (DEFAULT,)) == {}
