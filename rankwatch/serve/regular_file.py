"""Reads a small file that somebody named: a token, a certificate. Waits for no pipe and no device."""

from __future__ import annotations

import errno
import os
import stat


def read(path: str, limit_bytes: int) -> bytes:
    """The first limit_bytes of a regular file. OSError where it is none, or cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.read(fd, limit_bytes)
    finally:
        os.close(fd)
