"""Files that others read while they change."""

import os
import stat

import pytest

from rankwatch import whole_files
from rankwatch.whole_files import append_whole, replace_file


def test_a_file_that_cannot_be_replaced_stays_and_nothing_else_does(tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(OSError):
        replace_file(str(tmp_path / "d"), b"new")
    assert os.listdir(tmp_path) == ["d"]


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a"
    replace_file(str(path), b"old")

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(str(path), b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["a"])


@pytest.mark.parametrize(("despite_umask", "mode"), [(False, 0o600), (True, 0o644)])
def test_the_umask_counts_unless_others_have_to_read_the_file(tmp_path, despite_umask, mode):
    before = os.umask(0o077)
    try:
        replace_file(str(tmp_path / "a"), b"x", 0o644, despite_umask=despite_umask)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_where_a_file_is_written_first_cannot_be_foreseen_and_is_in_its_folder(tmp_path, monkeypatch):
    """So nobody can lay a pipe there, which would hold the writer up."""
    names, real = [], os.replace

    def seen(source, target, **folders):
        names.append(source)
        real(source, target, **folders)

    monkeypatch.setattr(whole_files.os, "replace", seen)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for text in (b"1", b"2"):
            replace_file("a", text, dir_fd=folder)
    finally:
        os.close(folder)
    assert len(set(names)) == 2
    assert all(name.startswith(whole_files.PREFIX) and name.endswith(whole_files.SUFFIX) for name in names)
    assert ((tmp_path / "a").read_bytes(), os.listdir(tmp_path)) == (b"2", ["a"])


def test_what_is_added_goes_to_the_end(tmp_path):
    append_whole(str(tmp_path / "a"), b"1\n")
    append_whole(str(tmp_path / "a"), b"2\n")
    assert (tmp_path / "a").read_bytes() == b"1\n2\n"
