"""The pages in Chromium: of a real job at four ranks from its start to its end, and of synthetic jobs of up to 16,384 ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from browser import Browser
from build_status import LOAD, WAIT, compiling_status, job, stack, stuck_incident, stuck_status, stuck_verdict
from build_world import LargeJob, without
from jobs import Job, wait_for

from rankwatch.model import Change, PhaseLook, StackGroup, Status, WaitedOn
from rankwatch.report import incident, page, status

pytestmark = [pytest.mark.stack]

CULPRIT = "[...document.querySelectorAll('.card.culprit')].map(function(e){return e.textContent}).join()"


TABLES_CUT_OFF = """[...document.querySelectorAll('table')].filter(t => !t.closest('.scroll') && t.scrollWidth > t.parentElement.clientWidth)
.map(t => t.innerText)"""


def clean(browser: Browser, own: str) -> None:
    """Nothing went wrong, nothing was asked of anybody else, and nobody is shut out, in light and in dark."""
    assert browser.console == []
    assert [url for url in browser.requests if not url.startswith((own, "data:"))] == []
    for dark in (False, True):
        browser.dark(dark)
        assert browser.axe() == []
    browser.dark(False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.ranks
@pytest.mark.slow_ranks
def test_a_real_job_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    """One job for all of it, since starting it is the expensive part."""
    archive = tmp_path / "archive"
    archive.mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    options = ("--listen", url.removeprefix("http://"), "--archive-dir", str(archive), "--external-url", "https://pages.example/rw")
    started = Job(tmp_path, "trouble.py", "asleep", "--timeout", "120", nproc=4, torchrun=("--master-port", str(free_port())), options=options)
    with started as work, Browser(tmp_path) as browser:
        wait_for(lambda: "status https://pages.example/rw" in work.text, 60, "the first line")
        browser.open(f"{url}/")
        seen = browser.ask("performance.timeOrigin")
        browser.until(f"{CULPRIT}.includes('rank 1')", 90, "the page shows the culprit by itself")
        browser.until("document.getElementById('badge').textContent === 'stuck'", 60, "the page shows the verdict by itself")
        assert browser.ask("performance.timeOrigin") == seen, "it was loaded once"
        before = browser.ask("document.querySelector('[data-deadline]').textContent")
        browser.until(f"document.querySelector('[data-deadline]').textContent !== {before!r}", 10, "the countdown ticks")
        shown = browser.ask("document.querySelector('main').innerText")
        for words in ("load_batch_that_never_comes", "What to do", "0,2-3", "default_pg", "steps a second"):
            assert words in shown
        assert browser.ask("document.querySelector('header').getBoundingClientRect().bottom") < 1000, "what is stuck and what to do is on the first screen"
        stops = browser.tab_stops()
        assert stops[0] == "A to the ranks"
        assert "A Stacks, evidence and commands of this incident" in stops
        clean(browser, url)

        browser.scripts(False)
        browser.open(f"{url}/")
        browser.scripts(True)
        assert "load_batch_that_never_comes" in browser.ask("document.querySelector('main').innerText"), "complete without scripts"

        doc = work.incident(60, verdict="stuck", culprit_ranks=[1])
        browser.open(f"{url}/incidents/{doc['id']}/index.html")
        shown = browser.ask("document.querySelector('main').innerText")
        for words in ("load_batch_that_never_comes", "What to do", "the marked frame is where it leaves the others", "The last ten minutes", "py-spy dump"):
            assert words in shown
        assert browser.ask("document.querySelectorAll('svg.time rect').length") >= 4
        assert browser.ask("document.querySelectorAll('button.copy').length") == 2
        clean(browser, url)
        link = re.search(r"STUCK .* report=https://pages.example/rw(/\S+)", work.text)
        assert link, work.text
        browser.open(url + link[1])
        assert "load_batch_that_never_comes" in browser.ask("document.title + document.querySelector('main').innerText"), "the link works while the job runs"

        browser.open(f"{url}/")
        os.kill(work.process.pid, signal.SIGINT)
        work.end(60)
        browser.until("document.getElementById('stale').textContent.includes('no answer')", 30, "the page says that it is old")

        kept = work.run_dir / "index.html"
        for where in (kept, archive / link[1].split("/")[1] / "index.html"):
            browser.open(where.as_uri())
            shown = browser.ask("document.querySelector('main').innerText")
            assert "The job was ended by SIGINT" in shown
            assert "load_batch_that_never_comes" in shown
            clean(browser, "file:")
        browser.ask("document.querySelector('.do a, td a').click()")
        browser.until("document.title.startsWith('STUCK')", 10, "the last state leads to the incident's page")
        browser.open((archive / link[1].lstrip("/")).as_uri())
        assert "load_batch_that_never_comes" in browser.ask("document.querySelector('main').innerText"), "the link works after the job, in the archive"
        clean(browser, "file:")


def large(world_size: int) -> Status:
    """Rank 27 is stuck, node 1 does not answer, all others wait."""
    snapshot = without(LargeJob(world_size, "asleep", 27, entries=2).look(20.0), {1: 40.0})
    at, last = snapshot.wall_at, world_size - 1
    waiting = tuple(rank for rank in range(world_size) if rank != 27 and rank // 8 != 1)
    summary = f"rank 27 has not entered all_reduce seq 201 of default_pg: it has been in load_batch (train.py:31) for 60 s; {len(waiting)} ranks wait"
    verdict = stuck_verdict(
        culprit_ranks=(27,), waiting_ranks=waiting, unknown_ranks=tuple(range(8, 16)), confidence="partial", summary=summary,
        advice=("Look at load_batch in train.py:31 on rank 27: what does it wait for?",), evidence=(f"{world_size - 8} of {world_size} ranks seen",),
        group=WaitedOn("0", "default_pg", tuple(range(world_size)), "all_reduce", 201), missing_evidence=("node0001 has not answered for 40 s",),
    )  # fmt: skip
    looks = (
        PhaseLook(at - 300, (("running", f"0-{last}"),), at - 61),
        PhaseLook(at - 60, (("collective_wait", f"0-7,16-26,28-{last}"), ("culprit", "27"), ("no_report", "8-15")), at),
    )
    opened = stuck_incident(
        verdict=verdict, hosts={27: "node0003"}, pids={27: 4242}, opened_wall_at=at - 55, updated_wall_at=at, since_wall_at=at - 60, recorder_files=(),
        history=(Change(at - 55, "slow", "not_entered", (27,)), Change(at, "stuck", "not_entered", (27,))),
        stacks={27: stack(4242, LOAD), 0: stack(4000, WAIT)}, stack_groups=(StackGroup((27,), LOAD, "culprit"), StackGroup((0,), WAIT, "waiting")),
    )  # fmt: skip
    run = job(world_size=world_size, nnodes=world_size // 8, node="node0000", started_wall_at=at - 5000)
    return Status(run, snapshot, (verdict,), (opened,), state="stuck", timeline=looks)


@pytest.mark.parametrize("world_size", [pytest.param(64, marks=pytest.mark.slow_ranks), 1024, pytest.param(16_384, marks=pytest.mark.slow_ranks)])
def test_pages_of_large_jobs_are_small_clean_and_show_the_culprit(world_size: int, tmp_path: Path) -> None:
    picture = large(world_size)
    pages = {"status": status.render(picture, live=False), "incident": page.render(incident.to_json(picture.open_incidents[0], picture))}
    with Browser(tmp_path) as browser:
        for name, html in pages.items():
            assert len(html.encode()) < 150_000
            where = tmp_path / f"{name}.html"
            where.write_text(html, encoding="utf-8")
            browser.open(where.as_uri())
            assert browser.ask("document.querySelectorAll('svg.map .mark').length") == 1
            shown = browser.ask("document.querySelector('main').innerText")
            assert "27" in shown
            assert "no report" in shown
            clean(browser, "file:")


def test_pages_are_read_on_a_narrow_screen(tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.resize(400, 800)
        for number, picture in enumerate((stuck_status(), compiling_status())):
            for name, html in (("s", status.render(picture, live=False)), ("i", page.render(incident.to_json(picture.open_incidents[0], picture)))):
                where = tmp_path / f"{name}{number}.html"
                where.write_text(html, encoding="utf-8")
                browser.open(where.as_uri())
                assert browser.ask("document.documentElement.scrollWidth") <= 400, name
                assert browser.ask(TABLES_CUT_OFF) == [], name
                assert browser.ask("getComputedStyle(document.querySelector('td')).overflowWrap") == "normal", "words are broken by letter"
                clean(browser, "file:")


def test_the_accessibility_check_finds_what_is_wrong(tmp_path: Path) -> None:
    where = tmp_path / "bad.html"
    where.write_text('<!doctype html><title>t</title><img src="data:,"><p style="color:#ccc;background:#fff">pale</p>', encoding="utf-8")
    with Browser(tmp_path) as browser:
        browser.open(where.as_uri())
        assert {found.partition(":")[0] for found in browser.axe()} >= {"image-alt", "color-contrast", "html-has-lang"}
