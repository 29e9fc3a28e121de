"""Files that other programs read while they change: replaced as a whole, readable for all."""

from __future__ import annotations

import os
import secrets

PREFIX, SUFFIX = ".rankwatch-", ".tmp"
"""Of the name that a file has until it is whole: node_exporter takes only *.prom, dcgm-exporter only numbers."""


def replace_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Write `path` so that a reader sees the old or the new whole, whatever the umask. OSError as the file system gives it; no remains."""
    beside = os.path.join(os.path.dirname(path), f"{PREFIX}{secrets.token_hex(4)}{SUFFIX}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.replace(beside, path)
    except OSError:
        try:
            os.unlink(beside)
        except OSError:
            pass
        raise
