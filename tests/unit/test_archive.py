"""--archive-dir: names that are safe, a thread that delays nobody, links that work while the job runs and after."""

import os
import threading

import build_status
import pytest

from rankwatch import shown
from rankwatch.config import Options
from rankwatch.monitor.archive import MAX_WAITING, Archive
from rankwatch.monitor.files import FIRST_PAGE_S, PAGE_EVERY_S, RunFiles
from rankwatch.monitor.web import Web
from rankwatch.report import archive as names
from rankwatch.serve.http import Request


class Said(list):
    def __call__(self, text):
        self.append(text)


@pytest.mark.parametrize(
    ("job", "run_dir", "name"),
    [
        ("48213", "/s/20261130T030300Z-48213", "20261130T030300Z-48213"),
        ("48213", "/s/run7/", "48213-run7"),
        ("../../etc", "/s/a b", "etc-a_b"),
        ("", "", "run"),
        ("x" * 500, "/r", "x" * 120),
    ],
)
def test_the_folder_is_named_for_job_and_run_and_stays_one_folder(job, run_dir, name):
    assert names.run_name(job, run_dir) == name


def test_links_lead_to_the_archive_where_it_has_an_address():
    live = build_status.job()
    assert shown.page_url(live, "i-1") == "http://127.0.0.1:27435/incidents/i-1/"
    kept = build_status.job(archive_url=names.run_url("https://pages.example/rw/", "48213-run7"))
    assert shown.page_url(kept, "i-1") == "https://pages.example/rw/48213-run7/incidents/i-1/index.html"
    assert names.run_url("", "48213-run7") == ""
    assert shown.page_url(build_status.job(status_url=""), "i-1") == ""


class TestArchive:
    def test_files_appear_whole_below_the_runs_folder_as_readable_as_the_archive(self, tmp_path):
        os.chmod(tmp_path, 0o755)
        archive = Archive(str(tmp_path), "job-run", Said())
        assert archive.put("incidents/i-1/index.html", lambda: b"page")
        assert archive.flush(10)
        path = tmp_path / "job-run" / "incidents" / "i-1" / "index.html"
        assert path.read_bytes() == b"page"
        assert path.stat().st_mode & 0o777 == 0o644
        assert [file.name for file in path.parent.iterdir()] == ["index.html"]

    def test_a_place_that_is_not_there_is_said_once_and_never_made(self, tmp_path):
        said = Said()
        archive = Archive(str(tmp_path / "missing"), "job-run", said)
        archive.put("index.html", lambda: b"1")
        archive.put("report.txt", lambda: b"1")
        assert archive.flush(10)
        assert (len(said), archive.dropped) == (1, 2)
        assert "No such file" in said[0]
        assert not (tmp_path / "missing").exists()

    def test_a_folder_that_somebody_has_replaced_by_a_link_is_not_followed(self, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "job-run").symlink_to(tmp_path / "elsewhere")
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"1")
        assert archive.flush(10)
        assert list((tmp_path / "elsewhere").iterdir()) == []
        assert "symbolic link" in said[0]

    def test_a_page_that_cannot_be_made_ends_nothing(self, tmp_path):
        archive = Archive(str(tmp_path), "job-run", Said())
        archive.put("index.html", lambda: b"%d" % (1 // 0))
        archive.put("report.txt", lambda: b"text")
        assert archive.flush(10)
        assert (tmp_path / "job-run" / "report.txt").read_bytes() == b"text"

    def test_a_place_that_hangs_delays_nobody_and_only_the_newest_version_waits(self, tmp_path):
        goes_on, begun = threading.Event(), threading.Event()

        def hangs():
            begun.set()
            assert goes_on.wait(30)
            return b"old"

        archive = Archive(str(tmp_path), "job-run", Said())
        archive.put("index.html", hangs)
        assert begun.wait(30)
        assert not archive.flush(0.01)
        assert all(archive.put("index.html", lambda number=number: b"%d" % number) for number in range(1000))
        assert not all(archive.put(f"{number}.txt", lambda: b"") for number in range(MAX_WAITING + 1))
        goes_on.set()
        assert archive.flush(30)
        assert (tmp_path / "job-run" / "index.html").read_bytes() == b"999"

    def test_a_mount_that_cannot_rename_is_written_in_place(self, tmp_path, monkeypatch):
        def refuses(*paths):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "replace", refuses)
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"page")
        assert archive.flush(10)
        assert (tmp_path / "job-run" / "index.html").read_bytes() == b"page"
        assert said == []


class FakeWriter:
    root = "/run"

    def __init__(self):
        self.names = []

    def write(self, name, data):
        self.names.append(name)

    def path_of(self, name):
        return f"/run/{name}"


class FakeArchive:
    def __init__(self):
        self.rendered = {}

    def put(self, name, render):
        self.rendered[name] = render()


class TestRunFiles:
    def test_pages_of_an_incident_are_kept_without_links_to_files_that_stay_behind(self):
        kept = FakeArchive()
        files = RunFiles(FakeWriter(), archive=kept)
        picture = build_status.stuck_status()
        opened = picture.open_incidents[0]
        files.incident(opened, picture)
        assert set(kept.rendered) == {f"incidents/{opened.id}/{name}" for name in ("incident.json", "report.txt", "index.html")}
        page = kept.rendered[f"incidents/{opened.id}/index.html"].decode()
        assert "stacks/rank_1.txt" in page
        assert 'href="stacks/' not in page

    def test_other_nodes_leave_the_archive_to_the_first(self):
        kept = FakeArchive()
        files = RunFiles(FakeWriter(), "nodes/b-1/", kept)
        picture = build_status.stuck_status()
        files.incident(picture.open_incidents[0], picture)
        files.state(picture, 5.0, final=True)
        assert kept.rendered == {}

    def test_the_last_state_is_written_when_incidents_change_and_now_and_then(self):
        writer, files = FakeWriter(), None
        files = RunFiles(writer)
        healthy, stuck = build_status.healthy_status(), build_status.stuck_status()
        written = []
        for picture, now, final in (
            (healthy, 0.0, False), (healthy, FIRST_PAGE_S, False), (healthy, FIRST_PAGE_S + 1, False), (stuck, FIRST_PAGE_S + 2, False),
            (stuck, FIRST_PAGE_S + 3, False), (stuck, FIRST_PAGE_S + 2 + PAGE_EVERY_S, False), (stuck, FIRST_PAGE_S + 3 + PAGE_EVERY_S, True),
        ):  # fmt: skip
            files.state(picture, now, final)
            written.append(writer.names.count("index.html"))
        assert written == [0, 1, 1, 2, 2, 3, 4]


def test_the_server_answers_links_to_the_archive_too():
    picture = build_status.stuck_status(job=build_status.job(archive_url="https://pages.example/rw/48213-run7/"))
    web = Web(Options(), RunFiles(FakeWriter()), lambda: picture, Said())
    routes = web.routes()
    incident = picture.open_incidents[0].id
    for path, words in (("", "load_batch"), ("index.html", "load_batch"), (f"incidents/{incident}/index.html", "load_batch"), ("api/v1/state", '"schema"')):
        answer = routes["/48213-run7/"](Request(f"/48213-run7/{path}", nonce="n"))
        assert answer.status == 200
        assert words in answer.payload.decode()
    assert routes["/48213-run7/"](Request("/48213-run7/48213-run7/")).status == 404
    assert "/48213-run7/" not in Web(Options(), RunFiles(FakeWriter()), build_status.stuck_status, Said()).routes()
