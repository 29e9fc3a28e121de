"""--archive-dir: names that are safe, a thread that delays nobody, links that work while the job runs and after."""

import dataclasses
import errno
import os
import stat
import threading
from types import SimpleNamespace

import build_status
import pytest

from rankwatch import shown
from rankwatch.config import Options
from rankwatch.monitor import archive as archive_module
from rankwatch.monitor.archive import MAX_WAITING, Archive
from rankwatch.monitor.files import FIRST_PAGE_S, PAGE_EVERY_S, RunFiles
from rankwatch.monitor.web import Web
from rankwatch.report import archive as names
from rankwatch.serve.http import Request


class Said(list):
    def __call__(self, text):
        self.append(text)


OTHER = 54321  # somebody else's uid


def owned_by(monkeypatch, path, uid):
    """This folder belongs to uid."""
    inode, lstat, fstat = path.stat().st_ino, os.lstat, os.fstat

    def shown(status):
        return SimpleNamespace(st_uid=uid, st_mode=status.st_mode, st_nlink=status.st_nlink) if status.st_ino == inode else status

    monkeypatch.setattr(os, "lstat", lambda *where, **how: shown(lstat(*where, **how)))
    monkeypatch.setattr(os, "fstat", lambda fd: shown(fstat(fd)))


def refuse_renames(monkeypatch, number):
    def refuses(*paths, **folders):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuses)


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


def test_links_lead_to_the_launcher_and_lines_to_the_run_directory_while_the_archive_takes_nothing():
    failing = build_status.job(archive_url="https://pages.example/rw/48213-run7/", archive_failed=True)
    assert shown.page_url(failing, "i-1") == "http://127.0.0.1:27435/incidents/i-1/"
    assert not shown.archived(failing)


class TestArchive:
    def test_it_has_failed_while_the_newest_page_could_not_be_written(self, tmp_path):
        archive = Archive(str(tmp_path / "late"), "job-run", Said())
        assert not archive.failed
        archive.put("index.html", lambda: b"1")
        assert archive.flush(10)
        assert archive.failed
        (tmp_path / "late").mkdir()
        archive.put("index.html", lambda: b"2")
        assert archive.flush(10)
        assert not archive.failed

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

    def test_a_folder_of_another_user_is_not_written_and_said_once(self, tmp_path, monkeypatch):
        """Whoever owns it may lay a link there, in the place of a page."""
        (tmp_path / "job-run").mkdir()
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "job-run" / "index.html").symlink_to(tmp_path / "precious")
        monkeypatch.setattr(archive_module, "_uid_here", lambda folder: OTHER + 1)
        owned_by(monkeypatch, tmp_path / "job-run", OTHER)
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"1")
        archive.put("report.txt", lambda: b"1")
        assert archive.flush(10)
        assert (tmp_path / "precious").read_text() == "mine"
        assert os.listdir(tmp_path / "job-run") == ["index.html"]
        assert len(said) == 1
        assert f"{tmp_path}/job-run belongs to another user (uid {OTHER})" in said[0]

    def test_a_mount_that_says_one_user_for_everybody_is_ours(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"page")
        assert archive.flush(10)
        assert (tmp_path / "job-run" / "index.html").read_bytes() == b"page"
        assert (said, os.listdir(tmp_path / "job-run")) == ([], ["index.html"])

    def test_a_sticky_folder_that_refuses_the_rename_is_no_mount_without_renames(self, tmp_path, monkeypatch):
        refuse_renames(monkeypatch, errno.EPERM)
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "job-run").mkdir()
        (tmp_path / "job-run" / "index.html").symlink_to(tmp_path / "precious")
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"page")
        assert archive.flush(10)
        assert (tmp_path / "precious").read_text() == "mine"
        assert (len(said), archive.dropped) == (1, 1)

    @pytest.mark.parametrize("way", ["link", "pipe", "second name"])
    def test_writing_in_place_goes_into_a_file_of_one_name_only(self, tmp_path, monkeypatch, way):
        refuse_renames(monkeypatch, errno.ENOSYS)
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "job-run").mkdir()
        path = tmp_path / "job-run" / "index.html"
        {"link": path.symlink_to, "second name": path.hardlink_to, "pipe": lambda _target: os.mkfifo(path)}[way](tmp_path / "precious")
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"page")
        assert archive.flush(10)
        assert (tmp_path / "precious").read_text() == "mine"
        assert (len(said), archive.dropped) == (1, 1)

    def test_what_everybody_may_write_they_may_not_write_below(self, tmp_path):
        os.chmod(tmp_path, 0o1777)
        before = os.umask(0)
        try:
            archive = Archive(str(tmp_path), "job-run", Said())
            archive.put("incidents/i-1/index.html", lambda: b"page")
            assert archive.flush(10)
        finally:
            os.umask(before)
        assert [stat.S_IMODE((tmp_path / "job-run" / part).stat().st_mode) & 0o002 for part in ("", "incidents", "incidents/i-1")] == [0, 0, 0]

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
        refuse_renames(monkeypatch, errno.ENOSYS)
        archive = Archive(str(tmp_path), "job-run", said := Said())
        archive.put("index.html", lambda: b"page")
        assert archive.flush(10)
        assert (tmp_path / "job-run" / "index.html").read_bytes() == b"page"
        assert said == []


class TestClaim:
    NAMES = ("777-out", "777-out-20261130T030300Z", "777-out-20261130T030300Z-abc")

    def test_each_run_has_a_folder_of_its_own(self, tmp_path):
        archives = [Archive(str(tmp_path), self.NAMES[0], said := Said()) for _run in range(2)]
        assert [archive.claim(self.NAMES) for archive in archives] == list(self.NAMES[:2])
        for number, archive in enumerate(archives):
            archive.put("index.html", lambda number=number: b"%d" % number)
            assert archive.flush(10)
        assert [(tmp_path / name / "index.html").read_bytes() for name in self.NAMES[:2]] == [b"0", b"1"]
        assert said == []

    def test_a_second_call_changes_nothing(self, tmp_path):
        archive = Archive(str(tmp_path), self.NAMES[0], Said())
        assert [archive.claim(self.NAMES), archive.claim(self.NAMES)] == [self.NAMES[0]] * 2

    def test_a_folder_of_another_user_is_left_alone_with_a_line(self, tmp_path, monkeypatch):
        (tmp_path / self.NAMES[0]).mkdir()
        owned_by(monkeypatch, tmp_path / self.NAMES[0], OTHER)
        assert Archive(str(tmp_path), self.NAMES[0], said := Said()).claim(self.NAMES) == self.NAMES[1]
        assert len(said) == 1
        assert f"{tmp_path}/777-out belongs to another user (uid {OTHER})" in said[0]

    @pytest.mark.parametrize("root", ["missing", "file"])
    def test_where_no_folder_can_be_made_the_name_is_still_nobody_elses(self, tmp_path, root):
        (tmp_path / "file").write_text("")
        assert Archive(str(tmp_path / root), self.NAMES[0], Said()).claim(self.NAMES) == self.NAMES[-1]

    def test_a_place_that_does_not_answer_is_not_waited_for_and_keeps_no_folder_of_it(self, tmp_path, monkeypatch):
        goes_on, gone, mkdir, rmdir = threading.Event(), threading.Event(), os.mkdir, os.rmdir
        monkeypatch.setattr(os, "mkdir", lambda *where: (goes_on.wait(30), mkdir(*where)))
        monkeypatch.setattr(os, "rmdir", lambda path: (rmdir(path), gone.set()))
        assert Archive(str(tmp_path), self.NAMES[0], Said()).claim(self.NAMES, 0.0) == self.NAMES[-1]
        goes_on.set()
        assert gone.wait(30)
        assert os.listdir(tmp_path) == []

    def test_names_are_made_from_the_start_and_a_nonce(self):
        assert names.run_names("777", "/tmp/a/out", 1796007780.0, "abc") == self.NAMES


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


def test_the_address_that_is_told_is_the_one_of_this_runs_page():
    job = build_status.job()
    options = Options(external_url="https://pages.example/rw", archive_dir="/shared")
    picture = build_status.healthy_status(job=job)
    web = Web(options, RunFiles(FakeWriter()), lambda: picture, Said())
    assert web.url == ""
    picture = dataclasses.replace(picture, job=dataclasses.replace(job, archive_url="https://pages.example/rw/48213-run7/"))
    assert web.url == "https://pages.example/rw/48213-run7/"
