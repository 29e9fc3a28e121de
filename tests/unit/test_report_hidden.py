"""rankwatch report --redact: nothing of paths, hosts and arguments is left, and the report still says what was wrong."""

import json

import build_status
import pytest

from rankwatch.report import hidden, incident, markdown, page, text

SECRETS = ("alice", "node05", "3e-4", "/home", "/scratch", "127.0.0.1:27435")


def document(build=build_status.stuck_status):
    picture = build(job=build_status.job(labels={"owner": "alice@example.org"}))
    return incident.to_json(picture.open_incidents[0], picture)


@pytest.mark.parametrize("build", [build_status.stuck_status, build_status.compiling_status, build_status.crashed_status])
@pytest.mark.parametrize("render", [text.render, markdown.render, page.render, json.dumps])
def test_no_form_of_the_report_has_them(build, render):
    rendered = render(hidden.hide(document(build)))
    assert [word for word in SECRETS if word in rendered] == []


def test_what_was_wrong_is_still_said():
    rendered = text.render(hidden.hide(document()))
    for words in ("STUCK (not_entered, user_code), certain", "rank 1 on host1, pid 21107", "load_batch (.../train.py:31)", "torch/autograd/graph.py:841"):
        assert words in rendered


def test_library_frames_stay_folded():
    views = page.stack_views(hidden.hide(document(build_status.compiling_status)))
    assert [(folded, len(frames)) for folded, frames in views[0].runs] == [(False, 1), (True, 3), (False, 3)]


def test_the_document_itself_is_not_changed():
    given = document()
    before = json.dumps(given)
    hidden.hide(given)
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["rankwatch", "torchrun", "--nnodes=2", "/a/train.py", "--lr", "3e-4", "name"], "rankwatch torchrun --nnodes=*** train.py --lr *** ***"),
        (["rankwatch", "torchrun", "-m", "my.module"], "rankwatch torchrun -m ***"),
        ([], ""),
    ],
)
def test_of_a_command_names_stay_and_values_go(given, left):
    assert " ".join(hidden.command(given)) == left


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("open('/data/set/a.bin') failed", "open('.../a.bin') failed"),
        ("connect to 10.1.2.3 or http://x.example:80/a?b", "connect to *** or http://***"),
        ("~/secret/place/file", ".../file"),
        ("3/4 of it, train.py:31", "3/4 of it, train.py:31"),
        ("Process 7: python3 train.py --name project\nThread 7", "Process 7: ***\nThread 7"),
        ("node05-2 and xnode05 but node05", "node05-2 and xnode05 but host1"),
        ("/home/alice/ACME Corp (secret)/sub/train.py", ".../train.py"),
        ("/home/alice/a:b/c.py", ".../c.py"),
        ("in /home/alice/lr=0.1,client=acme[1]&(x)/b.py:3 or host:/export/home/x", "in .../b.py:3 or host:.../x"),
        ("No such file: '/home/alice/ACME Corp/set.bin' and \"~/My Things/x\"", "No such file: '.../set.bin' and \".../x\""),
        ("~alice/secret/x, ../../acme/y, /a/b:/c/d", ".../x, .../y, .../d"),
        ("rank 1's 3/4 of it; and/or; 5 // 2; a / b / c", "rank 1's 3/4 of it; and/or; 5 // 2; a / b / c"),
        ("/x/lib/python3.11/site-packages/torch/a.py:3", ".../lib/python3.11/site-packages/torch/a.py:3"),
        ("/x/site-packages/torch/a.py,/home/alice/acme/b.py", ".../b.py"),
        ("fd00::5 or [fd00::5]:29500 or fe80::1%eth0, 2001:db8:0:0:0:0:0:7", "*** or ***:29500 or ***, ***"),
        ("at 03:12:44 std::abort ::1 c10::Error 0000:3b:00.0 seq 1:2", "at 03:12:44 std::abort ::1 c10::Error 0000:3b:00.0 seq 1:2"),
    ],
)
def test_texts(given, left):
    assert hidden.hide({"summary": given, "run": {"node": "node05", "command": []}})["summary"] == left


PROJECT = "/home/alice/lr=0.1,client=acmecorp/My Project's (2)"


@pytest.mark.parametrize(
    "frames",
    [
        {"crash": {"0": {"traceback": f'  File "{PROJECT}/train.py", line 3, in f\n'}}},
        {"stacks": {"0": f"Thread 7\n    f ({PROJECT}/train.py:3)\n"}},
        {"stack_groups": [{"ranks": "0", "frames": [f"f ({PROJECT}/train.py:3)"]}]},
        {"run": {"command": ["torchrun", f"{PROJECT}/train.py"]}},
    ],
)
def test_a_path_that_the_document_knows_is_hidden_whole_wherever_it_stands(frames):
    given = {"summary": f"f ({PROJECT}/train.py:3) for 60 s, at {PROJECT}/train.py:3:f", **frames}
    hidden_doc = json.dumps(hidden.hide(given))
    assert "f (.../train.py:3) for 60 s, at .../train.py:3:f" in hidden_doc
    assert [word for word in ("alice", "acme", "My", "(2)/") if word in hidden_doc] == []


def test_files_of_the_run_directory_are_hidden_whole():
    given = {"summary": f"see {PROJECT}/run-1/incidents/1/report.txt", "run": {"command": [], "run_dir": f"{PROJECT}/run-1"}}
    hidden_doc = hidden.hide(given)
    assert (hidden_doc["summary"], hidden_doc["run"]["run_dir"]) == ("see .../report.txt", ".../run-1")


def told(summary, *arguments, **run):
    return hidden.hide({"summary": summary, "verdict": "stuck", "run": {"command": ["rankwatch", "torchrun", "train.py", *arguments], **run}})["summary"]


@pytest.mark.parametrize(
    ("arguments", "given", "left"),
    [
        (["--client", "acme"], "no set of acme; acme-2, acme.py and lacme stay", "no set of ***; acme-2, acme.py and lacme stay"),
        (["--tags=team=acme,project=owl", "x=gnu"], "of acme, owl, gnu", "of ***, ***, ***"),
        (["--lr", "3e-4", "--layers", "12", "--name", "ab"], "lr 3e-4, 12 layers, ab", "lr ***, 12 layers, ab"),
        (["--backend", "nccl", "--mode", "stuck"], "rank 1 stuck in nccl", "rank 1 stuck in nccl"),
        (["--data", "/scratch/acme set"], "no /scratch/acme set/a.bin in '/scratch/acme set'", "no .../a.bin in '***'"),
        (["--model", "acme/opt-1"], "no acme/opt-1 there", "no *** there"),
    ],
)
def test_values_of_arguments_go_as_whole_words_unless_every_text_has_them(arguments, given, left):
    assert told(given, *arguments) == left


@pytest.mark.parametrize(
    ("job_id", "left"),
    [("acme7", "job ***, run .../20261130T030300Z-***"), ("48213", "job 48213x, rank 7"), ("7", "rank 7 of job 7"), ("none", "none")],
)
def test_the_id_of_the_job_is_hidden_where_it_can_be_told_from_other_words(job_id, left):
    assert told(left.replace("***", job_id).replace("...", "/scratch"), job_id=job_id) == left


@pytest.mark.parametrize("render", [text.render, markdown.render, page.render, json.dumps])
def test_no_form_of_the_report_has_the_id_of_the_job(render):
    assert "48213" not in render(hidden.hide(document()))


def test_a_word_of_ours_stays_where_it_is_one():
    doc = hidden.hide({"state": "training", "at": "training", "crash": {}, "run": {"command": ["x", "--mode=training", "crash"]}})
    assert (doc["state"], doc["at"], doc["crash"]) == ("training", "***", {})


@pytest.mark.parametrize("broken", [{}, {"run": 3}, {"run": {"command": 7, "labels": None}}, {"hosts": [1], "nodes": [2], "ranks": {"0": 3}}])
def test_documents_of_any_form_pass(broken):
    assert hidden.hide(broken).keys() == broken.keys()
