"""What is remembered by name is let go once nothing can ask for it any more."""

import io

import pytest
from build_calls import WALL, entry

from rankwatch.export import samples
from rankwatch.model import Change, Group, Incident, IncidentChange, JobInfo, JobSnapshot, NodeReport, RankState, Status, Verdict
from rankwatch.monitor import announce, files, recorder, stacks
from rankwatch.monitor.announce import Announcer
from rankwatch.monitor.files import RunFiles
from rankwatch.monitor.recorder import RecorderView
from rankwatch.monitor.worker_server import GENERIC
from rankwatch.monitor.writer import Writer

JOB = JobInfo("j", "run", ("rankwatch",), "host", 2, 1, 0, {}, {}, 1000.0)
DEFAULT = Group("0", "default_pg", "gloo", (0, 1), 600.0)
SNAPSHOT = JobSnapshot(100.0, 1100.0, 2, 0, (NodeReport("host", (RankState(0), RankState(1))),))


def incident(number, verdict="slow", lost=2.0):
    judged = Verdict(f"k{number}", verdict, "not_entered", "user_code", (1,), (0,), 90.0, "rank 1 is late")
    return Incident(f"i-{number}", judged, 100.0, 1100.0, 1100.0, (Change(1100.0, verdict, "not_entered", (1,)),), lost_rank_s=lost)


def status(*closed):
    return Status(JOB, SNAPSHOT, closed_incidents=tuple(closed))


def call(number, name="0", pg_id=0, at=0.0, **more):
    return entry(number, ("all_reduce", ((4,),)), name=name, pg_id=pg_id, record_id=number, at=at, **more)


def test_an_answer_without_its_older_entries_is_taken_as_the_whole_one_is():
    again = Group("1", "undefined", "gloo", (0, 1), 600.0, generation=2, created_wall_at=WALL + 50)
    entries = [
        *(call(number, "1", 1, at=10) for number in range(1, 300)),
        *(call(number, "1", 2, at=60) for number in range(300, 310)),
        *(call(number, p2p=number % 3 == 0) for number in range(310, 800)),
        *(call(number, "2", 3) for number in range(800, 803)),
    ]
    whole, cut = RecorderView(), RecorderView()
    kept = recorder.newest({"entries": entries, "pg_status": {"0": {}}})
    assert kept["pg_status"] == {"0": {}}
    assert len(kept["entries"]) < 300
    for view, document in ((whole, {"entries": entries}), (cut, kept)):
        view.saw(GENERIC, 0, 0)
        view.take({GENERIC: document}, (DEFAULT, again), WALL + 100)
    assert cut.collectives == whole.collectives
    assert cut.lost == whole.lost == 0
    counted = {"pg_status": {str(pg_id): {"last_enqueued_collective": pg_id} for pg_id in range(4)}}
    assert cut.names_all(GENERIC, counted)
    assert cut.numbers(GENERIC, counted, (DEFAULT, again)) == whole.numbers(GENERIC, counted, (DEFAULT, again))


def test_a_short_answer_is_taken_as_it_is():
    document = {"entries": [call(1)]}
    assert recorder.newest(document) is document
    assert recorder.newest({}) == {}
    odd = [*range(200), None]
    assert len(recorder.newest({"entries": odd})["entries"]) == recorder.KEEP_PER_GROUP + 1


def test_an_operation_that_failed_is_forgotten_with_its_entry():
    view = RecorderView()
    view.take({GENERIC: {"entries": [call(1, retired=False)]}}, (DEFAULT,), WALL + 1)
    view.take({GENERIC: {"entries": [call(1)]}}, (DEFAULT,), WALL + 700)
    assert [each.done for each in view.collectives] == [False]
    assert len(view._failed) == 1
    view.take({GENERIC: {"entries": [call(number) for number in range(2, 80)]}}, (DEFAULT,), WALL + 701)
    assert view._failed == set()


def test_the_group_that_was_seen_last_keeps_its_name_longest(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_NAMED", 3)
    view = RecorderView()
    for pg_id in range(1, 9):
        view.take({GENERIC: {"entries": [call(1), call(2, str(pg_id), pg_id)]}}, (DEFAULT,), WALL)
    named = [pg_id for pg_id in range(9) if view.names_all(GENERIC, {"pg_status": {str(pg_id): {}}})]
    assert named == [0, 7, 8]


def test_counters_of_incidents_do_not_shrink_when_these_are_forgotten(monkeypatch):
    monkeypatch.setattr(samples, "MAX_BY_NAME", 3)
    ledger = samples.Ledger()
    for number in range(10):
        ledger.note(status(*(incident(known) for known in range(max(0, number - 1), number + 1))))
    assert ledger.count("slow") == 10
    assert ledger.lost_rank_s == 20.0
    assert len(ledger._reached) == len(ledger._lost_s) == 3
    ledger.note(status(incident(9)))
    assert (ledger.count("slow"), ledger.count("stuck")) == (10, 0)


def test_lines_of_forgotten_incidents_are_not_repeated_and_not_kept(monkeypatch):
    monkeypatch.setattr(announce, "MAX_SAID", 3)
    announcer = Announcer(io.StringIO())
    for number in range(8):
        announcer.changed(IncidentChange("opened", incident(number)), status(incident(number - 1)))
    assert list(announcer._said) == ["i-6", "i-7"]
    assert announcer.flush(10)


def test_ids_of_refused_incidents_are_kept_up_to_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_INCIDENTS", 1)
    monkeypatch.setattr(files, "MAX_REFUSED", 3)
    writer = Writer(str(tmp_path), lambda text: None)
    run = RunFiles(writer)
    assert run.admit(incident(0, "stuck"))
    assert [run.admit(incident(number)) for number in range(1, 9)] == [False] * 8
    assert list(run._refused) == ["i-6", "i-7", "i-8"]
    assert not run.admit(incident(1))
    assert writer.flush(20)


def test_processes_that_never_answered_are_kept_up_to_a_number(monkeypatch):
    class Silent:
        def __init__(self, path):
            pass

        def traceback(self):
            raise stacks.ServerError("no answer", silent=True)

    monkeypatch.setattr(stacks, "MAX_UNANSWERED", 3)
    monkeypatch.setattr(stacks, "WorkerServer", Silent)
    capture = stacks.StackCapture(executable="")
    for pid in range(8):
        with pytest.raises(stacks.ServerError):
            capture._ask(stacks.Target(pid, pid, "socket"))
    assert list(capture._unanswered) == [5, 6, 7]
