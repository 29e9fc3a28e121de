"""When which line is said."""

import dataclasses
import io
import threading

from rankwatch.model import Incident, IncidentChange, JobInfo, JobSnapshot, NodeReport, Process, RankState, Status, Verdict
from rankwatch.monitor.announce import Announcer

JOB = JobInfo("j", "/run", ("rankwatch",), "host", 2, 1, 0, {}, {}, 1000.0)


def status(now, *ranks, incidents=()):
    snapshot = JobSnapshot(now, 1000.0 + now, 2, 0, (NodeReport("host", ranks),), started_at=100.0)
    return Status(JOB, snapshot, open_incidents=tuple(incidents))


def rank(number, **fields):
    return RankState(number, process=Process(number + 1, alive=True), **fields)


def incident(opened_at, closed_at=None):
    verdict = Verdict("k", "slow" if closed_at is None else "recovered", "not_entered", "user_code", (1,), (0,), opened_at - 5, "rank 1 is late")
    return Incident("i-1", verdict, opened_at, 1000.0, 1000.0, (), closed_at=closed_at, closed_wall_at=closed_at)


class Said:
    def __init__(self):
        self.out = io.StringIO()
        self.announcer = Announcer(self.out)

    def lines(self):
        assert self.announcer.flush(10)
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text.splitlines()


def test_the_first_line_waits_until_everything_is_known_and_comes_once():
    said = Said()
    said.announcer.look(status(101, rank(0), rank(1)), settled=False)
    assert said.lines() == []
    said.announcer.look(status(102, rank(0), rank(1)), settled=True)
    said.announcer.look(status(103, rank(0), rank(1)), settled=True)
    assert [line.split(";")[0] for line in said.lines()] == ["[rankwatch] 0.1.0 watching 2 ranks on 1 node"]


def test_the_second_line_comes_when_the_last_rank_steps_and_names_it():
    said = Said()
    said.announcer.look(status(110, rank(0, steps=1, last_step_at=110.0), rank(1)), settled=True)
    said.lines()
    said.announcer.look(status(119, rank(0, steps=5, last_step_at=118.0), rank(1, steps=1, last_step_at=119.0)), settled=True)
    said.announcer.look(status(120, rank(0, steps=6), rank(1, steps=2)), settled=True)
    assert said.lines() == ["[rankwatch] both ranks stepping after 19 s (slowest rank 1, +9 s)"]


def test_the_second_line_says_how_long_the_slowest_rank_compiled():
    said = Said()
    totals = [{"seconds": {"dynamo": 1.0, "aot": 2.0, "inductor": inductor, "triton": 0.0, "autotune": 0.0}} for inductor in (37.0, 58.0)]
    ranks = (rank(0, steps=1, last_step_at=164.0, compile_totals=totals[0]), rank(1, steps=1, last_step_at=174.0, compile_totals=totals[1]))
    said.announcer.look(status(174, *ranks), settled=True)
    assert said.lines()[-1] == "[rankwatch] both ranks stepping after 74 s (compile 61 s; slowest rank 1, +10 s)"


def test_a_job_without_optimizer_steps_by_its_collectives():
    said = Said()
    said.announcer.look(status(110, rank(0, completed={"0": 3}), rank(1, completed={"0": 20})), settled=True)
    assert len(said.lines()) == 1
    said.announcer.look(status(111, rank(0, completed={"0": 20}), rank(1, completed={"0": 20})), settled=True)
    assert "stepping after 11 s" in said.lines()[0]


def test_a_verdict_is_repeated_after_one_five_and_fifteen_minutes():
    said = Said()
    one = incident(200.0)
    said.announcer.changed(IncidentChange("opened", one), status(200, rank(0), rank(1), incidents=(one,)))
    assert [" SLOW rank=1 " in line for line in said.lines()] == [False, True]
    spoken = []
    for now in range(200, 3000):
        said.announcer.look(status(now, rank(0), rank(1), incidents=(one,)), settled=True)
        spoken += [(now - 200, line.rsplit("repeat=", 1)[1].split(" ")[0]) for line in said.lines()]
    assert spoken == [(60, "1"), (300, "2"), (900, "3"), (1800, "4"), (2700, "5")]


def test_the_repeats_of_a_verdict_that_got_worse_count_from_the_line_that_said_so():
    said = Said()
    one = incident(200.0)
    worse = dataclasses.replace(one, verdict=dataclasses.replace(one.verdict, verdict="stuck"))
    said.announcer.changed(IncidentChange("opened", one), status(200, rank(0), rank(1), incidents=(one,)))
    said.announcer.changed(IncidentChange("escalated", worse), status(255, rank(0), rank(1), incidents=(worse,)))
    said.lines()
    spoken = []
    for now in range(255, 600):
        said.announcer.look(status(now, rank(0), rank(1), incidents=(worse,)), settled=True)
        spoken += [now - 255 for _ in said.lines()]
    assert spoken == [60, 300]


def test_an_incident_that_opens_again_after_a_rest_is_repeated_once():
    said = Said()
    one = incident(200.0)
    said.announcer.changed(IncidentChange("opened", one), status(200, rank(0), rank(1), incidents=(one,)))
    said.lines()
    spoken = []
    for now in range(1200, 1210):
        said.announcer.look(status(now, rank(0), rank(1), incidents=(dataclasses.replace(one, times=7),)), settled=True)
        spoken += said.lines()
    assert [(" times=7 " in line, line.rsplit("repeat=", 1)[1].split(" ")[0]) for line in spoken] == [(True, "3")]


def test_who_is_blamed_now_is_said_with_who_was_before():
    said = Said()
    one = incident(200.0)
    said.announcer.changed(IncidentChange("opened", one), status(200, rank(0), rank(1), incidents=(one,)))
    said.lines()
    other = dataclasses.replace(one, was_ranks=(1,), verdict=dataclasses.replace(one.verdict, culprit_ranks=(0,), waiting_ranks=(1,)))
    said.announcer.changed(IncidentChange("updated", other, renamed=True), status(210, rank(0), rank(1), incidents=(other,)))
    assert " SLOW rank=0 was=1 " in said.lines()[0]


def test_the_end_of_an_incident_is_said():
    said = Said()
    said.announcer.changed(IncidentChange("closed", incident(200.0, closed_at=230.0)), status(230, rank(0), rank(1)))
    assert " RECOVERED rank=1 " in said.lines()[-1]


def test_the_block_at_the_end_leaves_out_the_advice_that_was_given_a_moment_ago():
    def end(after_s):
        said, one = Said(), incident(200.0)
        stuck = dataclasses.replace(one, verdict=dataclasses.replace(one.verdict, verdict="stuck", advice=("See its stack.", "Ask its owner.")))
        said.announcer.changed(IncidentChange("opened", stuck), status(200, rank(0), rank(1), incidents=(stuck,)))
        said.announcer.ended(status(200 + after_s, rank(0), rank(1), incidents=(stuck,)), True, {})
        return [line.removeprefix("[rankwatch] to do: ") for line in said.lines() if "to do: " in line]

    assert end(5) == ["Ask its owner."]
    assert end(50) == ["See its stack.", "Ask its owner."]


def test_a_blind_rank_is_said_once_after_thirty_seconds_and_only_while_it_lives():
    said = Said()
    blind = rank(1, agent="silent", agent_detail="why")
    dead = dataclasses.replace(rank(0, agent="silent"), process=Process(1, alive=False))
    for now in (129, 130.5, 131):
        said.announcer.look(status(now, dead, blind), settled=False)
    assert said.lines() == ["[rankwatch] BLIND rank=1: agent did not load (why); only its stacks and its exit are watched"]


def test_a_pipe_that_nobody_reads_blocks_no_caller():
    gate = threading.Event()

    class Pipe(io.StringIO):
        def write(self, text):
            gate.wait(20)
            return super().write(text)

    announcer = Announcer(Pipe())
    for _ in range(3000):
        announcer.notice("x")
    assert announcer.dropped > 0
    assert announcer.flush(0.05) is False
    gate.set()


def test_an_out_that_fails_in_any_way_is_survived():
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError(text)

    announcer = Announcer(Broken())
    announcer.notice("x")
    assert announcer.flush(10)
    announcer.notice("y")
    assert announcer.flush(10)
    assert announcer.dropped == 2


def test_a_closed_stderr_is_survived():
    out = io.StringIO()
    out.close()
    announcer = Announcer(out)
    announcer.notice("x")
    assert announcer.flush(10)
    assert announcer.dropped == 1


def test_ranks_without_agent_are_never_said_to_step():
    said = Said()
    said.announcer.look(status(110, rank(0, agent="off"), rank(1, agent="off")), settled=True)
    said.announcer.look(status(111, rank(0, agent="off"), rank(1, steps=3, last_step_at=110.0)), settled=True)
    assert not any("stepping" in line for line in said.lines())


def test_while_another_launcher_speaks_for_the_job_only_notices_are_said():
    said, opened = Said(), incident(110.0)
    said.announcer.speak(False, status(100, rank(0), rank(1)))
    said.announcer.look(status(111, rank(0), rank(1), incidents=[opened]), settled=True)
    said.announcer.changed(IncidentChange("opened", opened), status(111, rank(0), rank(1), incidents=[opened]), "/run/report.txt")
    said.announcer.notice("the run directory is full")
    assert said.lines() == ["[rankwatch] the run directory is full"]


def test_when_that_one_has_fallen_silent_what_is_open_is_said_here():
    said, opened = Said(), incident(110.0)
    now = status(130, rank(0), rank(1), incidents=[opened])
    said.announcer.speak(False, now)
    said.announcer.changed(IncidentChange("opened", opened), now, "/run/report.txt")
    said.announcer.speak(True, now)
    said.announcer.speak(True, now)
    first, second = said.lines()
    assert first.startswith("[rankwatch] the launcher of group rank 0 has stopped asking")
    assert " SLOW rank=1 " in second
    assert second.endswith("report=/run/report.txt")


def test_when_that_one_asks_again_it_is_said_once():
    said, now = Said(), status(130, rank(0), rank(1))
    for speaks in (False, True, False, False):
        said.announcer.speak(speaks, now)
    assert [line.split(":")[0] for line in said.lines()] == [
        "[rankwatch] the launcher of group rank 0 has stopped asking",
        "[rankwatch] the launcher of group rank 0 asks again",
    ]


def test_one_that_comes_to_speak_for_new_workers_begins_with_the_first_line():
    said, now = Said(), status(130, rank(0), rank(1))
    said.announcer.speak(False, now, anew=True)
    said.announcer.look(now, settled=True)
    said.announcer.speak(True, now, anew=True)
    said.announcer.look(now, settled=True)
    assert [line.split(";")[0] for line in said.lines()] == ["[rankwatch] 0.1.0 watching 2 ranks on 1 node"]


def taken_over(incidents=(), **told):
    said, now = Said(), status(130, rank(0), rank(1), incidents=incidents)
    said.announcer.speak(False, now)
    for opened in incidents:
        said.announcer.changed(IncidentChange("opened", opened), now)
    said.announcer.speak(True, now, **told)
    return said.lines()


def test_a_node_alone_says_that_it_may_see_no_trouble():
    assert taken_over()[0].endswith("their incidents are told here; alone it may see no trouble between nodes")
    assert taken_over([incident(110.0)])[0].endswith("their incidents are told here")


def test_what_the_other_launcher_had_found_is_said_by_the_one_that_takes_over():
    first, second = taken_over(last_words=["as worker-0 last saw it at 03:12:44Z: STUCK rank=1"])
    assert first.endswith("their incidents are told here")
    assert second == "[rankwatch] as worker-0 last saw it at 03:12:44Z: STUCK rank=1"


def test_one_that_has_said_that_it_ends_has_ended():
    assert taken_over(ended=True)[0].startswith("[rankwatch] the launcher of group rank 0 has ended: this one judges its own ranks")


def test_what_is_opened_at_the_look_that_takes_over_is_said_once():
    said, opened = Said(), incident(130.0)
    now = status(130, rank(0), rank(1), incidents=[opened])
    said.announcer.speak(False, now)
    said.announcer.speak(True, now)
    said.announcer.changed(IncidentChange("opened", opened), now, "/run/report.txt")
    assert [" SLOW rank=1 " in line for line in said.lines()].count(True) == 1
