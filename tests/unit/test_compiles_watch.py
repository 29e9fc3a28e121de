"""When the document is made and written, what attempts leave, how steps are sorted, and where it is served."""

import json

import pytest
from build_compiles import FRAME, compiled, resized, snapshot
from build_status import NOW, stuck_status

from rankwatch.config import Options
from rankwatch.monitor.compile_watch import CompileWatch
from rankwatch.monitor.compiles import rank_sets
from rankwatch.monitor.compiles.stepping import Stepping
from rankwatch.monitor.web import Web


class Files:
    """Remembers what was to be written."""

    def __init__(self):
        self.documents = []
        self.lines = []

    def compiles(self, document):
        self.documents.append(document)

    def compile_text(self, line):
        self.lines.append(line)


@pytest.fixture
def files():
    return Files()


@pytest.fixture
def watch(files):
    return CompileWatch(files, cpu=lambda: 0.0)


def look(watch, at, events=(), final=False, **fields):
    return watch.look(list(events), snapshot(2, at=at, final=final, **fields), (0, 1), stuck_status())


def test_a_job_without_torch_compile_has_no_document(watch, files):
    assert look(watch, 0.0, compile_totals={"frames": 0, "requested": {"count": 0}}) == {}
    assert look(watch, 9.0, final=True) == {}
    assert files.documents == []


def test_it_is_made_every_two_seconds_and_written_every_five_while_it_changes(watch, files):
    made = []
    for tick in range(24):  # 12 s
        event = compiled(0, f"0/{tick}", at=tick * 0.5)
        made.append(look(watch, tick * 0.5, [event])["as_of"])
    assert len(set(made)) == 6
    assert [document["as_of"] - files.documents[0]["as_of"] for document in files.documents] == [0.0, 6.0]


def test_one_that_only_counts_steps_is_left_alone_for_a_minute(watch, files):
    for at in range(0, 70, 2):
        look(watch, float(at), [compiled(0)] if at == 0 else (), steps=at)
    assert [document["as_of"] - files.documents[0]["as_of"] for document in files.documents] == [0.0, 60.0]


def test_the_last_look_is_written_and_has_regime_and_advice(watch, files):
    look(watch, 0.0, [compiled(0), compiled(1)])
    look(watch, 0.5, [resized(1, "0/1", 4, 5, at=0.5)], final=True)
    assert [document["over"] for document in files.documents] == [False, True]
    assert files.documents[-1]["frames"][0]["recompiles"] == 1
    assert {"regime", "advice"} <= set(files.documents[-1])


def test_a_document_that_is_dear_is_made_less_often(files):
    spent = iter(range(10_000))
    watch = CompileWatch(files, cpu=lambda: next(spent) * 0.1)  # 0.1 s of a core each
    made = {look(watch, at * 0.5, [compiled(0, f"0/{at}")])["as_of"] for at in range(40)}
    assert len(made) == 2


def test_a_new_attempt_begins_a_new_book_and_keeps_a_summary(watch):
    look(watch, 0.0, [compiled(0), compiled(0, "1/0", frame="g@m.py:1")])
    watch.begin(1)
    document = look(watch, 10.0, [compiled(0)])
    assert [row["frame"] for row in document["frames"]] == [FRAME]
    assert [(attempt["attempt"], attempt["frames_compiled"]) for attempt in document["attempts"]] == [(0, 2)]


def test_the_document_is_served(watch):
    status = stuck_status(compile=look(watch, 0.0, [compiled(0)]))
    for shown, code in ((status, 200), (stuck_status(), 404)):
        route = Web(Options(), None, lambda shown=shown: shown, print).routes()["/api/v1/compile"]
        response = route(None)
        assert response.status == code
        assert json.loads(response.body).get("schema") == (1 if code == 200 else None)


def test_steps_are_sorted_by_the_compiles():
    stepping = Stepping()
    for count in range(1, 4):
        stepping.look(count, NOW + count, 1.0)
    stepping.compiled(3)
    stepping.look(4, NOW + 12, 8.0)
    for count in range(5, 15):
        stepping.look(count, NOW + 12 + count * 0.5, 0.5)
    assert stepping.medians() == (1.0, 8.0, 0.5)


def test_a_slow_step_that_was_missed_between_two_looks_is_worked_out():
    stepping = Stepping()
    stepping.look(10, NOW, 0.1)
    stepping.compiled(11)
    stepping.look(15, NOW + 3.4, 0.1)
    assert stepping.medians() == (0.1, pytest.approx(3.0), 0.1)


@pytest.mark.parametrize(("ranks", "text"), [((), ""), ((0,), "0"), ((1, 2, 3, 7), "1-3,7"), (range(0, 10, 2), "0,2,4,6,8")])
def test_sets_of_ranks_are_written_as_everywhere(ranks, text):
    mask = rank_sets.bits(ranks)
    assert rank_sets.written(mask) == text
    assert rank_sets.members(mask) == list(ranks)
    assert rank_sets.written(mask, 4) in (text, "0,2,...(5)", "1-3,...(4)")
