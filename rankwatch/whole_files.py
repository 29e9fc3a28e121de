"""Files that others read while they change: a reader sees the old or the new whole, or all of what was added."""

from __future__ import annotations

import errno
import os
import stat

PREFIX, SUFFIX = ".rankwatch-", ".tmp"
"""Of the name that a file has until it is whole: node_exporter takes *.prom, dcgm-exporter numbers. The rest is drawn, so that nobody lays a pipe there."""


def replace_file(path: str, data: bytes, mode: int = 0o600, dir_fd: int | None = None, despite_umask: bool = False) -> None:
    """Write `path` (in the folder dir_fd, if given) anew. OSError as the file system gives it; no remains.

    despite_umask: `mode` holds whatever the umask; some mounts of object stores refuse that.
    """
    beside = os.path.join(os.path.dirname(path), f"{PREFIX}{os.urandom(4).hex()}{SUFFIX}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600 if despite_umask else mode, dir_fd=dir_fd)
    try:
        try:
            _write_all(fd, data)
            if despite_umask:
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.replace(beside, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        try:
            os.unlink(beside, dir_fd=dir_fd)
        except OSError:
            pass
        raise


def write_in_place(path: str, data: bytes, mode: int = 0o600, dir_fd: int | None = None) -> None:
    """For mounts that do not rename. OSError as the file system gives it, and for a link or anything else that is no file of one name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, mode, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.EINVAL, "it is no regular file of one name")
        os.ftruncate(fd, 0)
        _write_all(fd, data)
    finally:
        os.close(fd)


def append_whole(path: str, data: bytes, mode: int = 0o600) -> None:
    """Add all of `data` or nothing: what a full disk took of it is cut off again. OSError as the file system gives it, or for what is no file."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        before = status.st_size
        try:
            _write_all(fd, data)
        except OSError:
            os.ftruncate(fd, before)
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
