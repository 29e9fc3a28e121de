"""A page that many ask for: made once for each state, by one of them, and each answer with a nonce of its own."""

import threading

import pytest

from rankwatch.serve import shared
from rankwatch.serve.http import Request, Response
from rankwatch.serve.shared import Shared

TEXT = "text/html; charset=utf-8"


class Page:
    """A route that counts, over a state that a test sets."""

    def __init__(self):
        self.state = object()
        self.made = []
        self.during = lambda: None
        self.shared = Shared(self.route, lambda: self.state)

    def route(self, request):
        self.made.append(request.nonce)
        self.during()
        return Response(f"<script nonce={request.nonce}>{len(self.made)}", TEXT)

    def ask(self, nonce="n"):
        return self.shared(Request("/", nonce=nonce))


@pytest.fixture
def page():
    return Page()


def test_a_page_asked_for_by_many_at_once_is_rendered_once(page):
    begun, go_on, answers = threading.Event(), threading.Event(), []

    def slowly():
        begun.set()
        assert go_on.wait(20)

    page.during = slowly
    threads = [threading.Thread(target=lambda n=n: answers.append((n, page.ask(f"nonce-{n}")))) for n in range(16)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(page.made) == 1
    assert {(n, answer.body) for n, answer in answers} == {(n, f"<script nonce=nonce-{n}>1".encode()) for n in range(16)}


def test_a_page_is_rendered_anew_for_a_new_state_only(page):
    assert [page.ask().body[-1:] for _ in range(3)] == [b"1"] * 3
    page.state = object()
    assert [page.ask().body[-1:] for _ in range(2)] == [b"2"] * 2


def test_a_state_that_changes_while_the_page_is_rendered_is_rendered_too(page):
    page.during = lambda: setattr(page, "state", object()) if len(page.made) == 1 else None
    assert [page.ask().body[-1:] for _ in range(3)] == [b"1", b"2", b"2"]


def test_no_client_sees_the_nonce_that_the_page_is_rendered_with(page):
    """Else who asks first would know the nonce of a page that is still to be made."""
    assert [page.ask(nonce).body for nonce in ("a", "b")] == [b"<script nonce=a>1", b"<script nonce=b>1"]
    assert page.made[0] not in ("a", "b")
    assert len(page.made[0]) >= 16


def test_an_answer_keeps_its_type_status_and_headers():
    one = Shared(lambda request: Response("x", TEXT, 404, {"A": "b"}), object)
    assert one(Request("/", nonce="n")) == Response(b"x", TEXT, 404, {"A": "b"})


def test_an_answer_that_is_no_page_is_not_kept(page):
    codes = iter((503, 200))
    one = Shared(lambda request: Response(status=next(codes)), lambda: page)
    assert [one(Request("/")).status for _ in range(3)] == [503, 200, 200]


def test_a_page_that_fails_fails_for_who_asked_and_is_tried_again(page):
    page.during = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        page.ask()
    page.during = lambda: None
    assert page.ask().status == 200


def test_who_waits_for_a_page_for_too_long_is_told_to_come_back(page, monkeypatch):
    monkeypatch.setattr(shared, "WAIT_S", 0)
    page.during = lambda: asked.append(page.ask()) if not asked else None
    asked = []
    assert page.ask().status == 200
    assert (asked[0].status, asked[0].headers) == (503, {"Retry-After": "1"})
    assert len(page.made) == 1
