"""Where Kubernetes reads why a container ended (`terminationMessagePath`): written once, at the end, within a deadline, and never if it is no file."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Mapping

from rankwatch.model import Status
from rankwatch.monitor.pool import Job
from rankwatch.notify.termination import termination_message

DEFAULT = "/dev/termination-log"
OFF = "off"
WRITE_WAIT_S = 0.2


def place(given: str, environ: Mapping[str, str], default: str = DEFAULT) -> str:
    """The file to write: --termination-log, else Kubernetes' default in a pod that has it; "" for none."""
    if given:
        return "" if given == OFF else os.path.expanduser(given)
    return default if "KUBERNETES_SERVICE_HOST" in environ and os.path.isfile(default) else ""


def tell(given: str, status: Status, speaks: bool, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
    """Write there how the job ended, where there is anything to say; what stands in the way is said as a line."""
    path = place(given, environ)
    text = termination_message(status, speaks) if path else ""
    why_not = write(path, text) if text else ""
    if why_not:
        say(f"--termination-log {path}: the verdict could not be written there ({why_not})")


def write(path: str, text: str, wait_s: float = WRITE_WAIT_S) -> str:
    """Replace what the file says. Why it could not be written, within wait_s; "" where it was. Raises nothing."""
    writing = Job(lambda: _write(path, text.encode()))
    try:
        threading.Thread(target=writing.run, name="rankwatch-termination", daemon=True).start()
    except RuntimeError as error:
        return str(error)
    if not writing.wait(wait_s):
        return f"it has not answered within {wait_s:g} s"
    return "" if writing.error is None else str(getattr(writing.error, "strerror", None) or writing.error)


def _write(path: str, data: bytes) -> None:
    """In place: the kubelet has mounted the very file, a renamed one would be another."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        os.ftruncate(fd, 0)
        os.write(fd, data)
    finally:
        os.close(fd)
