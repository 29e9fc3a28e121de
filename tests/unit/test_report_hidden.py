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
    ],
)
def test_texts(given, left):
    assert hidden.hide({"summary": given, "run": {"node": "node05", "command": []}})["summary"] == left


@pytest.mark.parametrize("broken", [{}, {"run": 3}, {"run": {"command": 7, "labels": None}}, {"hosts": [1], "nodes": [2], "ranks": {"0": 3}}])
def test_documents_of_any_form_pass(broken):
    assert hidden.hide(broken).keys() == broken.keys()
