"""The token that pages ask for, from its file."""

from __future__ import annotations

import errno
import os
import stat

MAX_BYTES = 4096


def read_token(path: str) -> str:
    """The file's text without the white space around it. ValueError says why there is none, and what to do. Waits for no pipe and no device."""
    try:
        token = _read(os.path.expanduser(path)).decode().strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); make it, with a token in it, such as: openssl rand -hex 16") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text; put a token into it, such as: openssl rand -hex 16") from None
    if not token:
        raise ValueError(f"{path} is empty; put a token into it, such as: openssl rand -hex 16")
    return token


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.read(fd, MAX_BYTES)
    finally:
        os.close(fd)
