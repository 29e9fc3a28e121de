"""The lines: one line each whatever the job wrote, exact where the design gives the words, parseable as logfmt and JSON."""

import dataclasses
import json
import shlex

import build_status
import pytest

from rankwatch.model import Change, Crash, Frame, Process, WaitedOn
from rankwatch.notify import lines


def logfmt(line):
    """{key: value} of the fields after the verdict."""
    return dict(word.split("=", 1) for word in shlex.split(line) if "=" in word)


def verdict_line(**changes):
    picture = build_status.stuck_status()
    return lines.verdict(build_status.stuck_incident(verdict=build_status.stuck_verdict(**changes)), picture)


def test_the_first_line_of_one_rank():
    picture = build_status.healthy_status(job=build_status.job(world_size=1, run_dir="/r", status_url=""))
    assert lines.watching(picture) == "[rankwatch] 0.1.0 watching 1 rank on 1 node; compile ok, ddp ok, collectives ok, stacks ok; status off run=/r"


def test_the_first_line_says_what_does_not_work_and_why():
    capabilities = {"compile": "ok", "ddp": "missing: DDPOptimizer is gone", "collectives": "ok", "stacks": "ptrace is denied", "steps": "off"}
    line = lines.watching(build_status.healthy_status(job=build_status.job(capabilities=capabilities)))
    assert "compile ok, ddp missing: DDPOptimizer is gone, collectives ok, stacks ptrace is denied, steps off; status" in line


def test_the_second_line_leaves_out_what_nobody_knows():
    bare = build_status.snapshot(tuple(build_status.rank_state(rank, compile_totals={}, groups=()) for rank in range(4)))
    picture = build_status.healthy_status(snapshot=bare, job=build_status.job(world_size=4))
    assert lines.stepping(picture, after_s=0.4) == "[rankwatch] all 4 ranks stepping after 0.4 s"
    assert lines.stepping(build_status.healthy_status(), after_s=74) == "[rankwatch] all 8 ranks stepping after 74 s (compile 61 s); smallest timeout 600 s"


def test_the_verdict_line_has_the_keys_in_their_order():
    words = verdict_line(advice=("Look.",)).split(" ")
    assert words[:3] == ["[rankwatch]", "03:12:44Z", "STUCK"]
    assert [word.split("=")[0] for word in words[3:]] == [
        "rank",
        "host",
        "pid",
        "cause",
        "domain",
        "at",
        "for",
        "waiting",
        "op",
        "group",
        "seq",
        "timeout_in",
        "do",
        "report",
    ]


def test_an_open_incident_repeats_with_the_time_that_has_passed():
    picture = build_status.stuck_status()
    later = dataclasses.replace(picture, snapshot=dataclasses.replace(picture.snapshot, now=build_status.NOW + 60, wall_at=build_status.WALL + 60))
    assert lines.verdict(build_status.stuck_incident(), later).startswith("[rankwatch] 03:13:44Z STUCK rank=1 ")
    assert logfmt(lines.verdict(build_status.stuck_incident(), later))["for"] == "120s"


def test_values_with_blanks_are_quoted_and_come_back_whole():
    line = verdict_line(at='a b="c"\\d')
    assert logfmt(line)["at"] == 'a b="c"\\d'


def test_hostile_text_stays_on_its_line():
    line = verdict_line(at="x\ny\u2028z\x1b[2J\r", group=WaitedOn("g\n", "", (0,), "op\x00", 1))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_many_waiting_ranks_are_cut():
    line = verdict_line(waiting_ranks=tuple(range(0, 16_384, 2)))
    assert logfmt(line)["waiting"].endswith(",...(8192)")
    assert len(line) < 600


def test_ranks_nobody_reports_are_counted_in_the_line():
    picture = build_status.stuck_status(job=build_status.job(world_size=64))
    assert 'note="8 of 64 ranks seen"' in lines.verdict(build_status.stuck_incident(), picture)


def test_a_verdict_without_anything_still_is_a_line():
    incident = build_status.stuck_incident(
        verdict=build_status.stuck_verdict(culprit_ranks=(), waiting_ranks=(), group=None, at="", timeout_left_s=None, advice=()), hosts={}, pids={}
    )
    picture = build_status.stuck_status(snapshot=None, job=build_status.job(run_dir=""))
    assert lines.verdict(incident, picture) == "[rankwatch] 03:12:44Z STUCK cause=not_entered domain=user_code for=0s"


def test_the_report_can_be_named():
    assert lines.verdict(build_status.stuck_incident(), build_status.stuck_status(), "/x y/r.txt").endswith(' report="/x y/r.txt"')


def test_a_compile_says_frame_phase_and_reason():
    picture = build_status.compiling_status()
    fields = logfmt(lines.verdict(picture.open_incidents[0], picture))
    assert (fields["frame"], fields["phase"], fields["compiling_for"], fields["split"]) == ("forward@model.py:31", "inductor", "41s", "2/4")
    assert fields["reason"].startswith("tensor 'x' size mismatch")


def test_each_incident_counts_once_by_the_gravest_verdict_it_had():
    recovered = dataclasses.replace(
        build_status.stuck_incident(),
        verdict=build_status.stuck_verdict(verdict="slow"),
        history=(Change(1.0, "slow", "unknown", (1,)), Change(2.0, "stuck", "unknown", (1,)), Change(3.0, "slow", "unknown", (1,))),
        lost_rank_s=0.0,
    )
    picture = build_status.healthy_status(
        closed_incidents=(recovered, dataclasses.replace(build_status.compiling_incident(), lost_rank_s=30.0)), state="done", exit_code=0
    )
    assert lines.done(picture) == (
        f"[rankwatch] done 9m44s: 1 stuck, 1 slow; 30 rank-s lost waiting (rank 3 recompiling forward@model.py:31: 30 rank-s); run={picture.job.run_dir}"
    )


def test_the_costliest_three_are_named_in_the_unit_of_the_whole_and_the_rest_summed():
    costs = (1500.0, 540.0, 90.0, 45.0, 15.0)
    over = tuple(
        dataclasses.replace(build_status.stuck_incident(), id=str(cost), lost_rank_s=cost, verdict=build_status.stuck_verdict(at=f"train.py:{cost:.0f}:f"))
        for cost in costs
    )
    line = lines.done(build_status.healthy_status(closed_incidents=over, state="done", exit_code=0))
    assert "; 36 rank-min lost waiting (" in line
    assert [part.rsplit(": ", 1)[1] for part in line[line.index("(") + 1 : line.index(")")].split("; ")] == [
        "25 rank-min",
        "9 rank-min",
        "1.5 rank-min",
        "1 rank-min",
    ]
    assert "; 2 more: " in line


def test_incidents_of_one_rank_and_reason_are_one_cost():
    over = tuple(dataclasses.replace(build_status.stuck_incident(), id=str(number), lost_rank_s=12.0) for number in range(2))
    line = lines.done(build_status.healthy_status(closed_incidents=over, state="done", exit_code=0))
    assert "24 rank-s lost waiting (rank 1 not_entered at train.py:31:load_batch: 24 rank-s); run=" in line


@pytest.mark.parametrize(
    ("ending", "words"), [("SIGINT to the launcher", ", ended by SIGINT, exit code 1: "), ("torchrun stops the workers", ", exit code 1: ")]
)
def test_the_last_line_says_that_the_run_was_interrupted(ending, words):
    snapshot = dataclasses.replace(build_status.healthy_status().snapshot, ending=ending)
    picture = build_status.healthy_status(snapshot=snapshot, state="failed", exit_code=1)
    assert lines.done(picture).startswith(f"[rankwatch] done 9m44s{words}")
    assert json.loads(lines.done(picture, as_json=True))["ended_by"] == ("SIGINT" if "SIGINT" in ending else "")


def test_restarts_are_counted_and_an_incident_that_a_restart_ended_says_so():
    closed = dataclasses.replace(
        build_status.stuck_incident(), closed_at=build_status.NOW, closed_wall_at=build_status.WALL, kept={"job": {"state": "restarting", "attempt": 1}}
    )
    picture = build_status.healthy_status(closed_incidents=(closed,), restarts=1, state="done", exit_code=0)
    assert ": 1 stuck, 0 slow, 1 restart; " in lines.done(picture)
    fields = logfmt(lines.verdict(closed, picture))
    assert (fields["by"], fields["attempt"]) == ("restart", "1")


def test_a_repeated_line_is_marked():
    picture = build_status.stuck_status()
    line = lines.verdict(picture.open_incidents[0], picture, repeat=2)
    assert (line.split(" ")[2], logfmt(line)["repeat"]) == ("STUCK", "2")
    assert json.loads(lines.verdict(picture.open_incidents[0], picture, repeat=2, as_json=True))["repeat"] == 2


def test_the_place_is_never_a_frame_of_rankwatch():
    own = (Frame("_on_event", "/venv/lib/python3.11/site-packages/rankwatch/agent/probes/compile.py", 77), *build_status.LOAD)
    opened = dataclasses.replace(
        build_status.stuck_incident(verdict=build_status.stuck_verdict(at="compile.py:77:_on_event")), stacks={1: build_status.stack(21107, own)}
    )
    assert logfmt(lines.verdict(opened, build_status.stuck_status()))["at"] == "train.py:31:load_batch"


def test_the_last_line_of_a_healthy_run():
    picture = build_status.healthy_status(state="done", exit_code=0)
    assert lines.done(picture) == f"[rankwatch] done 9m44s: 0 stuck, 0 slow; 0 rank-s lost waiting; run={picture.job.run_dir}"


def test_json_lines_are_objects_with_an_event_and_numbers_as_numbers():
    picture = build_status.stuck_status()
    record = json.loads(lines.verdict(picture.open_incidents[0], picture, as_json=True))
    assert (record["event"], record["culprit_ranks"], record["for_s"], record["timeout_in_s"]) == ("stuck", [1], 60.0, 540.0)
    assert (record["pid"], record["seq"], record["waiting_ranks"]) == ([21107], 26, [0, 2, 3, 4, 5, 6, 7])
    assert not {"rank", "waiting", "for", "timeout_in"} & set(record)
    assert record["time"] == build_status.WALL
    assert json.loads(lines.done(picture, as_json=True))["verdicts"] == {"stuck": 1}
    assert json.loads(lines.watching(picture, as_json=True))["can_compile"] == "ok"


class TestFailedBlock:
    def test_the_first_cause_leads_though_a_victim_died_later(self):
        crashed = build_status.crashed_status()
        victim = dataclasses.replace(
            crashed.open_incidents[0], id="v", verdict=dataclasses.replace(crashed.open_incidents[0].verdict, since=build_status.NOW, culprit_ranks=(0,))
        )
        block = lines.failed_block(dataclasses.replace(crashed, open_incidents=(victim, crashed.open_incidents[0])), {})
        assert "FAILED: rank 2 crashed" in block
        assert 'raise ValueError("bad shard 17")' in block
        assert block.index("rank 2 crashed") < block.index("exception of rank 2") < block.index("report: ")

    def test_an_incident_that_had_recovered_is_not_the_cause(self):
        over = dataclasses.replace(build_status.stuck_incident(), closed_at=1.0, closed_wall_at=1.0)
        block = lines.failed_block(dataclasses.replace(build_status.crashed_status(), closed_incidents=(over,)), {})
        assert "FAILED: rank 2 crashed" in block

    def test_the_log_speaks_where_nothing_else_does(self):
        crashed = build_status.crashed_status()
        ranks = tuple(dataclasses.replace(state, crash=None) for state in crashed.snapshot.nodes[0].ranks)
        silent = dataclasses.replace(crashed, snapshot=build_status.snapshot(ranks))
        block = lines.failed_block(silent, {2: "\n".join(f"line {number}\x1b[0m" for number in range(100))})
        assert "end of the log of rank 2:" in block
        assert "line 99\\x1b[0m" in block
        assert "line 84" not in block

    def test_a_long_traceback_keeps_the_users_line_and_the_exception_and_no_secret(self):
        crashed = build_status.crashed_status()
        library = "".join(f'  File "/venv/lib/python3.11/site-packages/torch/m{number}.py", line 1, in f{number}\n    f()\n' for number in range(60))
        text = (
            f'Traceback (most recent call last):\n  File "/home/alice/proj/train.py", line 31, in load_batch\n    load(batch)\n{library}OSError: token=abc123\n'
        )
        crash = Crash("OSError", "token=abc123", traceback=text)
        ranks = tuple(dataclasses.replace(state, crash=crash if state.crash else None) for state in crashed.snapshot.nodes[0].ranks)
        block = lines.failed_block(dataclasses.replace(crashed, snapshot=build_status.snapshot(ranks)), {})
        for words in ("line 31, in load_batch", "load(batch)", "... 59 library frames", "in f59", "OSError: token=***"):
            assert words in block
        assert "abc123" not in block

    def test_without_an_incident_the_rank_that_went_first_is_named(self):
        ranks = tuple(
            build_status.rank_state(rank, process=Process(pid=rank, alive=False, exit_code=code, exited_at=at))
            for rank, code, at in ((0, -15, 9.0), (1, -9, 5.0), (2, 0, 1.0))
        )
        picture = build_status.healthy_status(snapshot=build_status.snapshot(ranks), state="failed", exit_code=1)
        assert "FAILED: rank 1 went first, with killed by SIGKILL; 1 other rank failed after it" in lines.failed_block(picture, {})

    def test_nothing_is_said_where_nothing_is_known(self):
        assert lines.failed_block(build_status.healthy_status(), {}) == ""
        assert lines.failed_block(build_status.healthy_status(snapshot=None)) == ""


@pytest.mark.parametrize(
    ("value", "shown"), [("a", "a"), ("a b", '"a b"'), ("", '""'), ('"', '"\\""'), ("x=y", '"x=y"'), ("/p/" + "q" * 300, "/p/" + "q" * 300)]
)
def test_quoting(value, shown):
    assert lines.quoted(value) == shown
