"""incident.json keeps its contract whatever is missing, hostile or huge."""

import dataclasses
import json
import math
import re

import build_status
import pytest

from rankwatch import shown
from rankwatch.model import Change, Crash, Frame, Group, Incident, Stack, StackGroup, Status, Thread, Verdict
from rankwatch.report import incident, markdown, page, run, state, status, text, who

CONTRACT = {
    "schema": int,
    "id": str,
    "verdict": str,
    "cause": str,
    "domain": str,
    "culprit_ranks": list,
    "waiting_ranks": list,
    "unknown_ranks": list,
    "since": float,
    "opened_at": float,
    "updated_at": float,
    "closed_at": (float, type(None)),
    "summary": str,
    "advice": list,
    "group": (dict, type(None)),
    "timeout_s": (float, type(None)),
    "timeout_left_s": (float, type(None)),
    "compile": dict,
    "stacks": dict,
    "stack_groups": list,
    "confidence": str,
    "evidence": list,
    "missing_evidence": list,
    "history": list,
    "action": (dict, type(None)),
}


def bare(**changes):
    verdict = Verdict("k", "stuck", "unknown", "unknown", (3,), (), since=0.0, summary="")
    return dataclasses.replace(Incident("i-1", verdict, opened_at=1.0, opened_wall_at=2.0, updated_wall_at=3.0, history=()), **changes)


def check(document):
    for key, kind in CONTRACT.items():
        assert isinstance(document[key], kind), key
    assert document["schema"] == 1
    for key in ("culprit_ranks", "waiting_ranks", "unknown_ranks"):
        assert all(type(rank) is int for rank in document[key])
    assert all(key.isdigit() and (stack is None or isinstance(stack, str)) for key, stack in document["stacks"].items())
    assert all(key.isdigit() for key in document["compile"])
    assert document["summary"].strip()
    assert len(document["summary"].splitlines()) == 1
    json.dumps(document, allow_nan=False, ensure_ascii=False).encode("utf-8")
    return document


@pytest.mark.parametrize("build", [build_status.stuck_status, build_status.compiling_status, build_status.crashed_status])
def test_the_document_keeps_the_contract(build):
    picture = build()
    check(incident.to_json(picture.open_incidents[0], picture))


def test_an_incident_of_which_nothing_else_is_known_keeps_it_too():
    empty = Status(job=build_status.job(run_dir="", versions={}, command=()), snapshot=None)
    document = check(incident.to_json(bare(), empty))
    assert document["stacks"] == {"3": None}
    assert document["group"] is None
    assert document["summary"] == "rank 3 unknown"
    for rendered in (text.render(document), page.render(document), markdown.render(document)):
        assert "rank 3" in rendered


def test_every_culprit_has_a_stack_or_null():
    picture = build_status.stuck_status()
    document = incident.to_json(dataclasses.replace(picture.open_incidents[0], stacks={0: build_status.stack(1, build_status.WAIT)}), picture)
    assert document["stacks"]["1"] is None
    assert document["stacks"]["0"].startswith("Process 1")


def test_a_stack_without_text_is_written_from_its_frames_and_an_empty_one_is_null():
    threads = (Thread("MainThread", 7, (Frame("f", "/a.py", 3),)),)
    child = Stack(pid=9, at=0.0, text="Process 9: worker\n")
    assert incident.stack_text(Stack(pid=7, at=0.0, threads=threads)) == "Thread 7: MainThread\n    f (/a.py:3)\n"
    assert incident.stack_text(Stack(pid=7, at=0.0, threads=threads, subprocesses=(child,))).endswith("-- child process 9\nProcess 9: worker\n")
    assert incident.stack_text(Stack(pid=7, at=0.0, error="permission denied")) is None
    assert incident.stack_text(None) is None


def test_the_summary_is_one_line_whatever_it_was():
    verdict = build_status.stuck_verdict(summary="a\nb\u2028c\x1b[31m\x85 d\udcff")
    assert incident.summary(verdict) == "a b c\\x1b[31m d\\udcff"


def test_infinity_and_nan_become_null():
    picture = build_status.stuck_status()
    opened = dataclasses.replace(picture.open_incidents[0], verdict=build_status.stuck_verdict(timeout_s=math.inf, timeout_left_s=math.nan))
    document = check(incident.to_json(opened, picture))
    assert (document["timeout_s"], document["timeout_left_s"]) == (None, None)


def test_since_is_taken_from_the_clock_where_the_incident_does_not_say():
    picture = build_status.stuck_status()
    document = incident.to_json(dataclasses.replace(picture.open_incidents[0], since_wall_at=0.0), picture)
    assert document["since"] == build_status.WALL - 60


def test_compile_shows_the_present_phase_and_the_kept_one_after_the_end():
    picture = build_status.compiling_status()
    opened = picture.open_incidents[0]
    kept = dataclasses.replace(opened, compiling={3: build_status.compiling_activity(phase="dynamo")})
    assert incident.to_json(kept, picture)["compile"]["3"]["phase"] == "inductor"
    over = dataclasses.replace(kept, closed_at=build_status.NOW, closed_wall_at=build_status.WALL)
    assert incident.to_json(over, picture)["compile"]["3"]["phase"] == "dynamo"
    assert incident.to_json(opened, picture)["compile"]["3"]["elapsed_s"] == 41.0


HOSTILE = "<script>alert(1)</script>\u2028</pre>'\" \udcff\x00\x1b[2J\u202e"


def hostile():
    frames = (Frame(HOSTILE, f"/tmp/{HOSTILE}/tr\u00e4in \u65e5\u672c.py", 3), Frame("main", "/a.py", 1))
    verdict = build_status.stuck_verdict(summary=HOSTILE, at=HOSTILE, advice=(HOSTILE,), evidence=(HOSTILE,), missing_evidence=(HOSTILE,))
    opened = build_status.stuck_incident(
        verdict=verdict,
        stacks={1: Stack(1, 0.0, (Thread(HOSTILE, 1, frames),), HOSTILE)},
        stack_groups=(StackGroup((1,), frames, "culprit"), StackGroup((0,), frames[1:], "waiting")),
        hosts={1: HOSTILE},
        compiling={1: build_status.compiling_activity(frame=HOSTILE, recompile_reason=HOSTILE)},
    )
    crash = Crash(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    rank = build_status.rank_state(1, crash=crash, agent_detail=HOSTILE, node=HOSTILE, probes={HOSTILE: {"status": HOSTILE, "detail": HOSTILE}})
    job = build_status.job(job_id=HOSTILE, run_dir=f"/{HOSTILE}", command=(HOSTILE,), labels={HOSTILE: HOSTILE}, capabilities={HOSTILE: HOSTILE})
    return build_status.stuck_status(job=job, snapshot=build_status.snapshot((rank,)), open_incidents=(opened,))


def test_hostile_text_neither_becomes_markup_nor_moves_a_cursor():
    picture = hostile()
    document = check(incident.to_json(picture.open_incidents[0], picture))
    json.dumps([state.to_json(picture), run.to_json(picture)], ensure_ascii=False, allow_nan=False).encode("utf-8")
    for rendered in (page.render(document), status.render(picture)):
        rendered.encode("utf-8")
        assert "<script>alert" not in rendered
        assert rendered.count("<script") == 1
        assert "&lt;script&gt;alert(1)" in rendered
    for rendered in (page.render(document), status.render(picture), text.render(document), markdown.render(document)):
        assert not set(rendered) & set("\x00\x1b\u2028\u202e\udcff")


def test_unicode_paths_stay_readable():
    picture = hostile()
    document = incident.to_json(picture.open_incidents[0], picture)
    assert "tr\u00e4in \u65e5\u672c.py" in text.render(document)
    assert "tr\u00e4in \u65e5\u672c.py" in page.render(document)


def test_markdown_of_hostile_text_formats_nothing():
    assert markdown.escape("[x](http://y) *b* <i> #1 @team `c` a|b") == "\\[x\\](http://y) \\*b\\* \\<i\\> \\#1 \\@team \\`c\\` a\\|b"
    assert markdown.code("a`b``c") == "``` a`b``c ```"
    assert markdown.block(["````"]).startswith("`````\n")


def test_places_guards_and_commands_are_one_code_span_each():
    place = "output_graph.py:3119:OutputGraph._call_user_compiler"
    assert markdown.escape(f"rank 1 at {place} for 3 s") == f"rank 1 at `{place}` for 3 s"
    assert markdown.escape("in c10d_logger.py:83:_exception_logger.<locals>.wrapper.") == "in `c10d_logger.py:83:_exception_logger.<locals>.wrapper`."
    guard = "0/0: rounds == 2 # for _ in range(rounds): # model.py:192 in block"
    assert markdown.escape(f"recompiled because: {guard}") == f"recompiled because: `{guard}`"
    assert markdown.escape(f"f@a.py:3 (0/1): dynamo; recompiled because {guard}") == f"`f@a.py:3` (0/1): dynamo; recompiled because `{guard}`"
    assert markdown.escape(f"x (torch.compile of f (recompiled: {guard})); y") == f"x (torch.compile of f (recompiled: `{guard}`)); y"
    document = {**incident.to_json(build_status.stuck_incident(), build_status.stuck_status()), "advice": ["`kill -CONT 77` continues it."]}
    assert "- `kill -CONT 77` continues it.\n" in markdown.render(document)


def test_those_behind_a_straggler_wait_at_every_collective():
    document = {"waiting_ranks": [0, 2], "group": {"desc": "default_pg", "op": "", "seq": 0}}
    assert text.waiting_words({**document, "straggling": {"late_by_s": 0.2}}) == "2 ranks: 0,2 at every collective of default_pg"
    assert text.waiting_words(document) == "2 ranks: 0,2 in a collective of default_pg"


def test_what_a_culprits_worker_does_is_in_the_report():
    picture = build_status.stuck_status()
    opened = picture.open_incidents[0]
    frame = Frame("decode", "/job/data.py", 126)
    stack = dataclasses.replace(opened.stacks[1], subprocesses=(Stack(77, 1.0, (Thread("MainThread", 77, (frame,)),)),))
    document = incident.to_json(dataclasses.replace(opened, stacks={**opened.stacks, 1: stack}), picture)
    assert document["child_stacks"] == {"1": [{"pid": 77, "frames": ["decode (/job/data.py:126)"]}]}
    assert "child process 77 of rank 1\n    decode (/job/data.py:126)\n" in text.render(document)
    assert "**Stack of child process 77 of rank 1** (innermost first)" in markdown.render(document)


def test_a_compile_that_is_over_is_told_with_one_set_of_figures():
    row = {"frame": "f@a.py:3", "compile_id": "0/1", "phase": "dynamo", "phase_s": 0.2, "elapsed_s": 29.0}
    assert text.compile_words(row, over=True) == "f@a.py:3 (0/1): compiled for 29 s or more, seen last in dynamo"
    summary = (
        "recovered after 55 s (2 waiting ranks lost 110 rank-s): rank 1 has not entered all_reduce #19 of default_pg "
        "(torch.compile of f@a.py:3 [0/1] has run for 24 s, phase dynamo (build_guards) for 0 s) for 54 s; ranks 0,2 wait; the group's timeout comes in 9 s"
    )
    assert shown.past(summary) == (
        "recovered after 55 s (2 waiting ranks lost 110 rank-s): rank 1 had not entered all_reduce #19 of default_pg "
        "(torch.compile of f@a.py:3 [0/1] ran, seen last in phase dynamo (build_guards)); ranks 0,2 waited"
    )


def test_a_compile_that_had_just_ended_is_over_with_the_incident():
    assert shown.past("rank 1 has not entered all_reduce #19 of default_pg (it has just compiled f@a.py:3) for 9 s; rank 0 waits") == (
        "rank 1 had not entered all_reduce #19 of default_pg (it had just compiled f@a.py:3); rank 0 waited"
    )


def test_groups_without_a_description_have_the_name_that_verdicts_give_them():
    assert shown.group_label(Group("1", "undefined", "gloo", (0, 1), 60.0)) == "group 1"
    assert shown.group_label(Group("0", "default_pg", "gloo", (0, 1), 60.0)) == "default_pg"


def test_report_txt_puts_the_culprit_first():
    picture = build_status.stuck_status()
    rendered = text.render(incident.to_json(picture.open_incidents[0], picture))
    order = [
        rendered.index(word) for word in ("STUCK (not_entered", "What to do", "Who waits", "Stacks, grouped", "Process groups", "Evidence", "Missing", "Files")
    ]
    assert order == sorted(order)


PAGED = [{"at": 30.0, "verdict": "slow"}, {"at": 41.0, "verdict": "stuck"}]
DIED = [{"at": 41.0, "verdict": "failed"}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": "stuck"}, "yes: it does not end by itself"),
        ({"verdict": "slow"}, "no: it may end by itself"),
        ({"verdict": "failed", "domain": "user_code"}, "no: a ticket for the owner of the job"),
        ({"verdict": "failed", "domain": "node"}, "yes: it does not end by itself"),
        ({"verdict": "straggler"}, "no: a ticket"),
        ({"verdict": "stuck", "closed_at": 1.0}, "no: it is over"),
        ({"verdict": "slow", "job": {"ended_at": 1.0}}, "no: the job has ended"),
        ({"verdict": "slow", "job": {"ended_at": 1.0, "state": "restarting"}}, "no: the workers were restarted"),
        (
            {"verdict": "stuck", "history": PAGED, "job": {"ended_at": 79.0}, "closed_at": 79.0, "closed_by": "job_ended"},
            "yes, 00:00:41Z to the end of the job 00:01:19Z; nothing to do now",
        ),
        ({"verdict": "recovered", "history": PAGED, "closed_at": 79.0}, "yes, 00:00:41Z to 00:01:19Z; it is over"),
        ({"verdict": "failed", "domain": "user_code", "history": PAGED}, "yes, from 00:00:41Z on; now a ticket for the owner of the job"),
        (
            {"verdict": "failed", "domain": "node", "cause": "killed", "culprit_ranks": [1], "hosts": {"1": "node05"}, "history": DIED}
            | {"job": {"ended_at": 79.0}},
            "yes, 00:00:41Z; the job has ended, and node node05 may fail the next one: see What to do before it runs there; "
            "nothing to do where somebody killed the rank on purpose",
        ),
        (
            {"verdict": "failed", "domain": "storage", "cause": "crashed", "history": DIED, "job": {"ended_at": 79.0, "state": "restarting"}},
            "yes, 00:00:41Z; the workers run again, and the storage may end them again: see What to do",
        ),
        ({"verdict": "failed", "domain": "user_code", "run": {"labels": {"owner": "alice"}}}, "no: a ticket for alice"),
    ],
)
def test_who_must_be_woken(changes, words):
    assert text.page_words(changes) == words


@pytest.mark.parametrize("key", [key for key in CONTRACT if key != "verdict"])
def test_a_document_of_another_age_without_a_key_still_renders(key):
    picture = build_status.compiling_status()
    document = incident.to_json(picture.open_incidents[0], picture)
    del document[key]
    for rendered in (text.render(document), page.render(document), markdown.render(document)):
        assert "SLOW" in rendered.upper()


def test_run_json_hides_secrets_and_says_how_it_ended():
    picture = build_status.stuck_status(state="failed", exit_code=1)
    document = run.to_json(picture)
    assert document["command"][-2:] == ["--hub-token", "***"]
    assert document["environment_set"] == {"TORCH_FR_BUFFER_SIZE": "2000", "MY_API_TOKEN": "***"}
    assert (document["exit_code"], document["ended_at"], document["verdicts"]) == (1, build_status.WALL, {"stuck": 1})
    assert run.to_json(build_status.healthy_status())["ended_at"] is None


def test_the_state_is_kept_for_the_newest_picture_and_made_anew_for_another():
    picture = build_status.healthy_status()
    assert state.to_json(picture) is state.to_json(picture)
    assert state.to_json(build_status.stuck_status())["state"] == "stuck"


def test_the_revision_changes_when_there_is_something_new_to_draw():
    healthy = state.to_json(build_status.healthy_status())["revision"]
    assert healthy == state.to_json(build_status.healthy_status())["revision"]
    assert healthy != state.to_json(build_status.stuck_status())["revision"]


@pytest.mark.parametrize(
    ("picture", "headline"),
    [
        (build_status.healthy_status(), "No trouble: 8 of 8 ranks running."),
        (build_status.healthy_status(snapshot=None), "No rank has reported yet."),
        (build_status.healthy_status(state="done", exit_code=0), "The job has ended with exit code 0."),
        (build_status.compiling_status(), build_status.compiling_incident().verdict.summary),
    ],
)
def test_the_headline(picture, headline):
    assert state.to_json(picture)["headline"] == headline


def test_a_recovered_incident_keeps_who_waited_and_shows_no_rank_that_has_moved_on():
    over = dataclasses.replace(
        build_status.stuck_incident(),
        verdict=build_status.stuck_verdict(verdict="recovered"),
        history=(*build_status.stuck_incident().history, Change(build_status.WALL, "recovered", "not_entered", (1,))),
        closed_at=build_status.NOW,
        closed_wall_at=build_status.WALL,
    )
    document = check(incident.to_json(over, build_status.healthy_status(closed_incidents=(over,))))
    assert (document["ranks"], document["groups"]) == ({}, [])
    assert who.clusters(document, text.call_words(document)) == [
        (1, "1", "culprit", "culprit: not_entered", "train.py:31:load_batch", True),
        (7, "0,2-7", "collective_wait", "waiting", "all_reduce seq 26 of default_pg", False),
    ]
    assert text.render(document).count("recovered (not_entered)") == 1
    assert "to 03:12:44Z; it is over" in page.render(document)
    ended = incident.to_json(dataclasses.replace(over, final=True), build_status.stuck_status())
    assert ended["ranks"]["1"]["culprit"] is True


def ended_status():
    """The stuck job after Ctrl-C: the incident is still open, its picture is from before the end."""
    picture = build_status.stuck_status(job=build_status.job(labels={"owner": "alice@example", "team": "nlp"}))
    opened = dataclasses.replace(picture.open_incidents[0], final=True, kept=incident.picture(picture.open_incidents[0], picture))
    ranks = tuple(build_status.rank_state(rank, stage="exiting") for rank in range(8))
    snapshot = build_status.snapshot(ranks, ending="SIGINT to the launcher", final=True, now=build_status.NOW + 9, wall_at=build_status.WALL + 9)
    return dataclasses.replace(picture, snapshot=snapshot, open_incidents=(opened,), state="failed", exit_code=1)


def test_the_document_of_a_job_that_has_ended_says_how_and_keeps_the_picture_from_before():
    picture = ended_status()
    document = check(incident.to_json(picture.open_incidents[0], picture))
    assert document["job"] == {"ended_at": build_status.WALL + 9, "exit_code": 1, "ending": "SIGINT to the launcher", "state": "failed"}
    assert document["timeout_left_s"] is None
    assert document["timeout_at"] == build_status.WALL + 540
    assert (document["closed_by"], document["closed_at"], document["final"]) == ("job_ended", build_status.WALL + 9, True)
    assert document["summary"].endswith("it has been in load_batch (train.py:31); ranks 0,2-7 waited")
    assert (document["ranks"]["1"]["label"], document["ranks"]["0"]["label"]) == ("culprit: not_entered", "waiting")
    assert document["groups"][0]["behind"] == "1"


def test_the_report_of_a_job_that_has_ended_speaks_of_the_past():
    picture = ended_status()
    document = incident.to_json(picture.open_incidents[0], picture)
    rendered = text.render(document)
    for words in (
        "the job ended 03:12:53Z with exit code 1 (SIGINT to the launcher)",
        "until then: rank 1 had not entered",
        "the group's timeout was due at 03:21:44Z",
        "page     yes, 03:12:44Z to the end of the job 03:12:53Z; nothing to do now",
        "owner: alice@example",
        "labels: team=nlp",
        "Who waited",
    ):
        assert words in rendered
    for words in ("watchdog ends", "live:", "so far", "Full stacks"):
        assert words not in rendered
    html = page.render(document)
    assert "the job ended 03:12:53Z with exit code 1 (SIGINT to the launcher)" in html
    assert 'id="countdown"' not in html
    assert "Who did what" in html
    assert "alice@example" in html
    assert "shutdown" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_a_timeout_that_has_passed_is_told_as_such():
    picture = ended_status()
    document = incident.to_json(picture.open_incidents[0], picture)
    document["job"]["ended_at"] = document["timeout_at"] + 1
    assert "the group timed out at 03:21:44Z" in text.times_words(document)


def test_an_incident_that_a_restart_ended_has_not_recovered():
    end = {"ended_at": build_status.WALL, "exit_code": None, "ending": "torchrun stops the workers after rank 1 failed", "state": "restarting", "attempt": 1}
    closed = dataclasses.replace(build_status.stuck_incident(), closed_at=build_status.NOW, closed_wall_at=build_status.WALL, kept={"job": end})
    document = check(incident.to_json(closed, build_status.healthy_status()))
    words = "torchrun restarted the workers 03:12:44Z as attempt 1 (torchrun stops the workers after rank 1 failed)"
    assert words in text.render(document)
    assert words in page.render(document)


def test_full_stacks_are_in_the_report_only_where_no_file_holds_them():
    picture = build_status.stuck_status()
    document = incident.to_json(picture.open_incidents[0], picture)
    assert "Full stacks" not in text.render(document)
    document["run"]["run_dir"] = ""
    assert "Process 21107: python3 -u train.py" in text.render(document)


def test_threads_of_rankwatch_are_not_shown_and_threads_that_only_pass_through_it_are():
    own = 'Thread 9 "" (idle)\n    wait (/usr/lib/libc.so.6:0)\n    _Heartbeat._run (/opt/rankwatch/agent/probes/collectives.py:290)'
    mixed = 'Thread 7 "MainThread" (idle)\n    _on (/opt/rankwatch/agent/probes/compile.py:3)\n    main (/home/a/train.py:1)'
    shown_text = incident.stack_text(Stack(pid=7, at=0.0, text=f"Process 7\n\n{mixed}\n\n{own}\n"))
    assert shown_text == f"Process 7\n\n{mixed}\n"


def test_secrets_in_exceptions_and_summaries_reach_no_document():
    picture = build_status.crashed_status()
    crash = Crash("OSError", "403 for https://bob:hunter2@hub/x?token=hunter2", traceback="Traceback\nOSError: password='hunter2'\n")
    ranks = tuple(dataclasses.replace(state, crash=crash) if state.rank == 2 else state for state in picture.snapshot.nodes[0].ranks)
    opened = dataclasses.replace(
        picture.open_incidents[0],
        verdict=dataclasses.replace(picture.open_incidents[0].verdict, summary="rank 2 crashed: password=hunter2", evidence=("api_key: hunter2",)),
    )
    picture = dataclasses.replace(picture, snapshot=build_status.snapshot(ranks), open_incidents=(opened,))
    documents = (incident.to_json(opened, picture), run.to_json(picture), state.to_json(picture))
    assert "hunter2" not in json.dumps(documents)
    assert "hunter2" not in text.render(documents[0]) + page.render(documents[0]) + markdown.render(documents[0]) + status.render(picture)
