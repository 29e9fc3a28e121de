"""The token that pages ask for: read from the file that was given, or drawn for the run and kept where only its owner reads it."""

from __future__ import annotations

import os
import secrets
import stat

from rankwatch.serve import regular_file

MAX_BYTES = 4096
DRAWN_BYTES = 32


def read_token(path: str) -> str:
    """The file's text without the white space around it. ValueError says why there is none, and what to do. Waits for no pipe and no device."""
    try:
        token = regular_file.read(os.path.expanduser(path), MAX_BYTES).decode().strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); make it, with a token in it, such as: openssl rand -hex 16") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text; put a token into it, such as: openssl rand -hex 16") from None
    if not token:
        raise ValueError(f"{path} is empty; put a token into it, such as: openssl rand -hex 16")
    return token


def drawn_token(path: str) -> str:
    """The token of a run that was given none: 256 random bits, in a new file 0600. What another launcher of the run has put there is taken over.

    ValueError where the file cannot be made, or is one that somebody else could have written or may read: it is not used, and nothing is overwritten.
    """
    for _ in range(2):
        try:
            _write_new(path, secrets.token_urlsafe(DRAWN_BYTES))
        except FileExistsError:
            pass
        except OSError as error:
            raise ValueError(f"{path} cannot be made ({error.strerror or error})") from None
        try:
            return _own(path)
        except FileNotFoundError:
            continue  # removed since: once more
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None
    raise ValueError(f"{path} comes and goes")


def _write_new(path: str, text: str) -> None:
    """The whole text or no file: a second name for a finished one, so that nobody reads a half. FileExistsError where the name is taken, a link included."""
    temporary = f"{path}.{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, f"{text}\n".encode())
        finally:
            os.close(fd)
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.rename(temporary, path)
    finally:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass


def _own(path: str) -> str:
    """The text of a file that is ours alone. ValueError says why it is not."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file")
        if status.st_uid != os.geteuid():
            raise ValueError(f"{path} belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            raise ValueError(f"{path} may be read by others (mode {stat.S_IMODE(status.st_mode):04o})")
        token = os.read(fd, MAX_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if len(token) < DRAWN_BYTES:
        raise ValueError(f"{path} holds no token of ours")
    return token
