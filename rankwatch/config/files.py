"""Configuration files: where they stand, and which of them are read."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from rankwatch.config.accepted import ConfigError

_MAX_FILE_BYTES = 1 << 20


def config_files() -> tuple[str, ...]:
    """The standard places, weakest first."""
    return ("/etc/rankwatch/config.toml", os.path.join(os.path.expanduser("~"), ".config", "rankwatch", "config.toml"), "rankwatch.toml")


def read_file(path: str, anybodys: bool) -> bytes | None:
    """A regular file's bytes; None for one that is not `anybodys` and that another user owns or may write. Waits for no pipe and no device.

    on-incident is a command: a file that somebody else left in a shared directory must not run as us.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if not anybodys and not _trusted(status):
            return None
        raw = bytearray()
        while chunk := os.read(fd, _MAX_FILE_BYTES + 1 - len(raw)):
            raw += chunk
        if len(raw) > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, "it is larger than 1 MiB")
        return bytes(raw)
    finally:
        os.close(fd)


def _trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def parse_toml(path: str, raw: bytes) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise ConfigError(f"{path} is not used: files need Python 3.11 or newer; use RANKWATCH_<NAME> variables or flags, or move the file away") from None
    try:
        parsed: dict[str, Any] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of a number with 5000 digits, too, and of brackets 5000 deep
        raise ConfigError(f"{path} is not used: it is no TOML file: {error}; correct it, or move it away") from None
    return parsed
