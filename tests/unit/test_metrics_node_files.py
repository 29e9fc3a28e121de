"""The threads behind --textfile-dir and --dcgm-job-mapping-dir: bounded, counted, said once."""

import dataclasses
import threading

import build_status

from rankwatch.config import Options
from rankwatch.model import Gpu
from rankwatch.monitor import node_files
from rankwatch.monitor.node_files import NodeFiles, Periodic, gpus

WAIT_S = 20.0


def until_set(event):
    assert event.wait(WAIT_S)


class Notices:
    def __init__(self):
        self.texts = []
        self.said = threading.Event()

    def __call__(self, text):
        self.texts.append(text)
        self.said.set()


def test_work_is_done_at_once_and_a_last_time_at_the_end():
    calls, first = [], threading.Event()

    def work(final):
        calls.append(final)
        first.set()

    periodic = Periodic("t", work, Notices(), every_s=3600)
    periodic.start()
    until_set(first)
    periodic.finish()
    until_set(periodic.done)
    assert calls == [False, True]
    assert periodic.failed == 0


def test_a_trouble_is_counted_each_time_and_said_once_until_it_changes():
    errors = [OSError(28, "No space left on device")] * 3 + [
        None,
        OSError(28, "No space left on device"),
        OSError(30, "Read-only file system"),
        ValueError("odd"),
    ]
    calls, over = [], threading.Event()

    def work(final):
        calls.append(final)
        if len(calls) > len(errors):
            over.set()
            return
        if errors[len(calls) - 1] is not None:
            raise errors[len(calls) - 1]

    notices = Notices()
    periodic = Periodic("t", work, notices, every_s=0)
    periodic.start()
    until_set(over)
    periodic.finish()
    until_set(periodic.done)
    assert periodic.failed == 6
    assert notices.texts == ["No space left on device", "No space left on device", "Read-only file system", "ValueError: odd"]


def test_a_directory_that_does_not_answer_holds_nobody_up():
    inside, release = threading.Event(), threading.Event()

    def work(final):
        inside.set()
        until_set(release)

    periodic = Periodic("t", work, Notices())
    periodic.start()
    until_set(inside)
    files = NodeFiles(Options(), build_status.stuck_status, Notices())
    files._running.append(periodic)
    files.finish()
    files.wait(0.0)
    assert not periodic.done.is_set()
    release.set()
    until_set(periodic.done)


def test_both_directories_are_kept_until_the_job_is_over(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_GPUS", "4,5")
    for name in ("text", "jobs"):
        (tmp_path / name).mkdir()
    now = {"status": build_status.stuck_status()}
    notices = Notices()
    options = Options(textfile_dir=str(tmp_path / "text"), dcgm_job_mapping_dir=str(tmp_path / "jobs"))
    files = NodeFiles(options, lambda: now["status"], notices)
    files.start()
    files.start()
    assert len(files._running) == 2
    now["status"] = build_status.crashed_status(state="failed", exit_code=1)
    files.finish()
    files.wait(WAIT_S)
    (text,) = (tmp_path / "text").iterdir()
    assert text.read_text().startswith("# rankwatch final")
    assert list((tmp_path / "jobs").iterdir()) == []
    assert (notices.texts, files.failed) == ([], 0)


def test_a_missing_directory_is_said_in_one_line_and_counted(tmp_path):
    notices = Notices()
    files = NodeFiles(Options(textfile_dir=str(tmp_path / "none")), build_status.stuck_status, notices)
    files.start()
    until_set(notices.said)
    files.finish()
    files.wait(WAIT_S)
    assert notices.texts == [
        f"--textfile-dir {tmp_path}/none cannot be written: No such file or directory; it is tried again every 15 s, the job is not affected"
    ]
    assert files.failed == 2


def test_without_the_options_there_is_no_thread():
    files = NodeFiles(Options(), build_status.stuck_status, Notices())
    files.start()
    files.finish()
    files.wait(0.0)
    assert files._running == []


def test_the_drivers_word_on_the_ranks_gpus_is_taken(monkeypatch):
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_files.dcgm_jobs, "has_device", lambda number: False)
    ranks = tuple(build_status.rank_state(rank, gpu=Gpu(index=rank + 4, uuid=f"GPU-{rank}", at=0.0)) for rank in range(2))
    status = build_status.healthy_status(snapshot=build_status.snapshot(ranks))
    assert gpus(status) == {"4", "5"}
    assert gpus(build_status.healthy_status()) == set()
    assert gpus(dataclasses.replace(status, snapshot=None)) == set()
