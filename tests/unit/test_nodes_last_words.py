"""What a launcher that takes over says of what its judge had found."""

import dataclasses
import json
from urllib.parse import parse_qs, urlsplit

import pytest
from build_status import NOW, stuck_status

from rankwatch.monitor.nodes import last_words, questions
from rankwatch.monitor.nodes.pull import Puller
from rankwatch.serve import handler

HEAD = len("GET  HTTP/1.1\r\n")


def stuck(number=0, **verdict):
    incident = stuck_status().open_incidents[0]
    return dataclasses.replace(incident, id=f"i-{number}", opened_at=NOW + number, verdict=dataclasses.replace(incident.verdict, **verdict))


def heard(target):
    return last_words.read(parse_qs(urlsplit(target).query)["open"][0])


def told(incidents):
    return heard(questions.report(None, 0, {}, "", news=questions.News(last_words.words(incidents, 11_564.2))))


def test_an_open_incident_arrives_without_its_countdown():
    one = stuck(summary='rank 1 sits in load_batch("ü&=%");\n 3 ranks wait; 540 s are left', culprit_ranks=(1,))
    found = told([one])
    assert (found.at, found.num_open) == (11_564.2, 1)
    assert found.seen == (last_words.Seen("i-0", "stuck", one.verdict.cause, "1", 'rank 1 sits in load_batch("ü&=%"); 3 ranks wait'),)


def test_it_is_said_with_who_saw_it_when():
    lines = last_words.lines(told([stuck(culprit_ranks=(1,), summary="rank 1 sleeps")]), "worker-0")
    assert lines == ["as worker-0 last saw it at 03:12:44Z: STUCK rank=1 cause=not_entered: rank 1 sleeps"]


def test_of_many_the_gravest_are_told_in_a_request_that_every_launcher_takes():
    longest = "".join(f"&%ü{number}" for number in range(200))
    many = [stuck(number, verdict="slow", summary=longest) for number in range(30)] + [stuck(99, summary=longest)]
    words = last_words.words(many, 1e9)
    wants = {kind: range(0, 200_000, 3000) for kind in ("stacks", "native_stack", "recorder", "ping")}
    order = questions.Order("k" * 64, tuple(range(0, 200_000, 3000)), longest)
    url = "https://" + "h" * 504
    for given in (None, order):
        target = questions.report(1 << 60, 1 << 60, wants, url, given, questions.News(words, "1"))
        assert len(target) + HEAD <= handler.MAX_LINE
    found = told(many)
    assert found.seen[0].id == "i-99"
    assert found.num_open == 31
    assert last_words.lines(found, "")[-1] == f"as it last saw it at 03:12:44Z: {31 - len(found.seen)} more incidents open"
    assert len(told([stuck(number, summary="") for number in range(40)]).seen) <= last_words.MAX_INCIDENTS


def test_that_nothing_is_open_any_more_is_told_too():
    found = told([])
    assert (found.num_open, last_words.lines(found, "worker-0")) == (0, [])


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", "[1]", '[1,1,["a"]]', '[1,1,"abcde f"]', "[NaN,1e999]", '["a",1]', "[1,1,7]", "[" * 50_000],
)
def test_what_is_no_such_text_tells_nothing(text):
    assert last_words.read(text) is None


def test_what_another_launcher_says_moves_no_cursor():
    found = last_words.read(json.dumps([1e300, 1, ["i", "stuck", "x", "1", "a\x1b[2J\nb"]]))
    assert last_words.lines(found, "n") == ["as n last saw it at ?: STUCK rank=1 cause=x: a\\x1b[2J b"]


def test_news_reaches_a_puller_that_is_not_started():
    puller = Puller("secret", print, lambda: "", lambda: None)
    puller.tell(questions.News(over="1"))
    puller.stop()
