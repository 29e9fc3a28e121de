"""--dcgm-job-mapping-dir: the job's line in a file a GPU, and nobody else's touched."""

import fcntl
import os
import stat

import pytest

from rankwatch.export import dcgm_jobs
from rankwatch.export.dcgm_jobs import JobMapping, edited, gpus_of


def everywhere(number):
    return True


def nowhere(number):
    return False


@pytest.mark.parametrize(
    ("environ", "known", "local_ranks", "present", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "4,5"}, {0: 0, 1: 1}, (0, 1), nowhere, {"4", "5"}),
        ({"SLURM_JOB_GPUS": "4,5", "SLURM_STEP_GPUS": "5"}, {}, (0,), nowhere, {"5"}),
        ({"SLURM_JOB_GPUS": "GPU-604ac76c"}, {0: 3}, (0,), nowhere, {"3"}),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, {0: 6, 1: 7}, (0, 1), everywhere, {"6", "7"}),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, {}, (0, 1), everywhere, {"6", "7"}),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, {}, (0, 1, 2), everywhere, {"6", "7"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-604ac76c"}, {}, (0,), everywhere, set()),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, (0,), everywhere, set()),
        ({}, {}, (0, 1), everywhere, {"0", "1"}),
        ({}, {}, (0, 1), lambda number: number == 0, {"0"}),
        ({}, {}, (0, 1), nowhere, set()),
        ({}, {}, (), everywhere, set()),
    ],
)
def test_which_gpus_the_job_has(environ, known, local_ranks, present, gpus):
    assert gpus_of(environ, known, local_ranks, present) == gpus


@pytest.mark.parametrize(
    ("before", "listed", "after"),
    [
        (b"", True, b"j\n"),
        (b"17\n", True, b"17\nj\n"),
        (b"17", True, b"17\nj\n"),
        (b"17\nj\n", True, b"17\nj\n"),
        (b"17\nj\n18\n", False, b"17\n18\n"),
        (b"jj\n", False, b"jj\n"),
        (b"\n\xff\nj\n", False, b"\xff\n"),
        (b"j\n", False, b""),
    ],
)
def test_only_our_line_is_touched(before, listed, after):
    assert edited(before, b"j", listed) == after


def files(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_the_job_is_listed_while_it_runs_and_files_of_ours_go(tmp_path):
    old = os.umask(0o077)
    try:
        mapping = JobMapping(str(tmp_path), "991")
        mapping.set(("0", "3"))
        assert files(tmp_path) == {"0": "991\n", "3": "991\n"}
        assert stat.S_IMODE((tmp_path / "0").stat().st_mode) == 0o644
        mapping.set(("0", "1"))
        assert files(tmp_path) == {"0": "991\n", "1": "991\n"}
        mapping.set(())
        assert files(tmp_path) == {}
    finally:
        os.umask(old)


def test_a_file_of_the_prolog_keeps_its_owner_its_mode_and_stays(tmp_path):
    (tmp_path / "0").write_text("17\n")
    (tmp_path / "1").write_text("")
    (tmp_path / "0").chmod(0o666)
    inode = (tmp_path / "0").stat().st_ino
    mapping = JobMapping(str(tmp_path), "991")
    mapping.set(("0", "1"))
    assert files(tmp_path) == {"0": "17\n991\n", "1": "991\n"}
    mapping.set(())
    assert files(tmp_path) == {"0": "17\n", "1": ""}
    assert (tmp_path / "0").stat().st_ino == inode
    assert stat.S_IMODE((tmp_path / "0").stat().st_mode) == 0o666


def test_two_jobs_share_a_gpu(tmp_path):
    first, second = JobMapping(str(tmp_path), "1"), JobMapping(str(tmp_path), "2")
    first.set(("0",))
    second.set(("0",))
    first.set(())
    assert files(tmp_path) == {"0": "2\n"}
    second.set(())
    assert files(tmp_path) == {"0": ""}, "the file was the first one's: whoever did not make it leaves it"


def test_a_launcher_of_the_same_job_that_ends_takes_the_line_for_a_moment_only(tmp_path):
    first, second = JobMapping(str(tmp_path), "991"), JobMapping(str(tmp_path), "991")
    first.set(("0", "1"))
    second.set(("0", "1"))
    first.set(())
    second.set(("0", "1"))
    assert files(tmp_path) == {"0": "991\n", "1": "991\n"}
    second.set(())
    assert files(tmp_path) == {}


@pytest.mark.parametrize("anew", ["17\n", "", None])
def test_a_prolog_that_writes_the_file_anew_does_not_take_the_job_off(tmp_path, anew):
    mapping = JobMapping(str(tmp_path), "991")
    mapping.set(("0",))
    (tmp_path / "0").unlink()
    if anew is not None:
        (tmp_path / "0").write_text(anew)
    mapping.set(("0",))
    assert files(tmp_path) == {"0": f"{anew or ''}991\n"}


def test_a_file_that_has_the_line_is_neither_locked_nor_written_again(tmp_path, monkeypatch):
    mapping = JobMapping(str(tmp_path), "991")
    mapping.set(("0",))
    monkeypatch.delattr(dcgm_jobs, "_lock")
    mapping.set(("0",))


def test_a_pipe_is_named_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "0")
    mapping = JobMapping(str(tmp_path), "991")
    with pytest.raises(OSError, match="0: it is no regular file"):
        mapping.set(("0", "1"))
    assert (tmp_path / "1").read_text() == "991\n"
    with pytest.raises(OSError, match="0: it is no regular file"):
        mapping.set(("0", "1"))


def test_a_requeued_job_finds_its_line_and_is_listed_once(tmp_path):
    JobMapping(str(tmp_path), "991").set(("0",))
    again = JobMapping(str(tmp_path), "991")
    again.set(("0",))
    assert files(tmp_path) == {"0": "991\n"}


def test_what_cannot_be_written_does_not_keep_the_others_from_it(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").symlink_to(tmp_path / "elsewhere")
    mapping = JobMapping(str(tmp_path), "991")
    with pytest.raises(OSError, match=r"directory|symbolic"):
        mapping.set(("0", "1", "2"))
    assert (tmp_path / "2").read_text() == "991\n"
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "0").rmdir()
    (tmp_path / "1").unlink()
    mapping.set(("0", "1", "2"))
    assert files(tmp_path) == {"0": "991\n", "1": "991\n", "2": "991\n"}


def test_a_full_disk_leaves_the_others_lines(tmp_path, monkeypatch):
    (tmp_path / "0").write_text("17\n")
    real = os.pwrite
    monkeypatch.setattr(dcgm_jobs.os, "pwrite", lambda fd, data, at: real(fd, data[:4], at))
    with pytest.raises(OSError, match="No space"):
        JobMapping(str(tmp_path), "991").set(("0",))
    assert files(tmp_path) == {"0": "17\n"}


def test_a_lock_that_is_never_given_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(dcgm_jobs, "LOCK_WAIT_S", 0.0)
    (tmp_path / "0").write_text("")
    with (tmp_path / "0").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another program has locked it"):
            JobMapping(str(tmp_path), "991").set(("0",))


def test_a_file_that_the_other_job_removes_while_we_wait_is_made_anew(tmp_path, monkeypatch):
    (tmp_path / "0").write_text("")
    real = dcgm_jobs._lock
    removed = []

    def lock(fd, path):
        real(fd, path)
        if not removed:
            removed.append(os.unlink(path))

    monkeypatch.setattr(dcgm_jobs, "_lock", lock)
    JobMapping(str(tmp_path), "991").set(("0",))
    assert files(tmp_path) == {"0": "991\n"}
