"""--dcgm-job-mapping-dir: which GPUs of this node the job has, as dcgm-exporter's --hpc-job-mapping-dir reads it.

A file a GPU, named by the host's number of it (dcgm-exporter skips other names); each line is a job id and gives every metric of that GPU once more, with
the label hpc_job (its README, "How to include HPC jobs in metric labels"; internal/pkg/transformation/hpc.go: no file or an empty one leaves the metric as
it is). So DCGM_FI_* join rankwatch_* by hpc_job = job_id. Other jobs and the site's prolog may use the same files: only our own line is touched, and it is
looked for again and again, since a prolog may write the file anew and another launcher of the same job take the line out at its end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Mapping

LOCK_WAIT_S = 1.0
MAX_BYTES = 64 << 10
TRIES = 8
_NUMBER = re.compile(r"\d{1,4}\Z")


def gpus_of(environ: Mapping[str, str], known: Mapping[int, int], local_ranks: Collection[int], present: Callable[[int], bool]) -> frozenset[str]:
    """The host's numbers of this node's GPUs that the job has.

    Slurm's list first, since its numbers are the host's also where a cgroup hides the other GPUs; then what the driver says (known: local rank -> number);
    then CUDA_VISIBLE_DEVICES, or the local ranks themselves, where such a GPU is `present`.
    """
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if numbers := _numbers(environ.get(name, "")):
            return frozenset(numbers)
    if known:
        return frozenset(str(number) for number in known.values())
    if "CUDA_VISIBLE_DEVICES" in environ:
        visible = _numbers(environ["CUDA_VISIBLE_DEVICES"])
        chosen = [visible[rank] for rank in local_ranks if rank < len(visible)]
    else:
        chosen = [str(rank) for rank in local_ranks]
    return frozenset(number for number in chosen if present(int(number)))


def has_device(number: int) -> bool:
    """Whether the NVIDIA driver has made a device of that number here."""
    return os.path.exists(f"/dev/nvidia{number}")


def _numbers(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    return words if all(_NUMBER.match(word) for word in words) else []  # UUIDs and MIG slices have no number of a whole GPU


def edited(text: bytes, job_id: bytes, listed: bool) -> bytes:
    """The lines of a file with `job_id` among them or not; the others stay as they are, empty ones go."""
    lines = [line for line in text.split(b"\n") if line.strip()]
    if listed and job_id not in lines:
        lines.append(job_id)
    elif not listed:
        lines = [line for line in lines if line != job_id]
    return b"".join(line + b"\n" for line in lines)


class JobMapping:
    """The job's lines in `directory`. Methods may block as long as the file system does: they belong into a thread of their own."""

    def __init__(self, directory: str, job_id: str) -> None:
        self._directory = os.path.expanduser(directory)
        self._job_id = job_id.encode("utf-8", "replace")
        self._listed: set[str] = set()
        self._made: set[str] = set()

    def set(self, gpus: Collection[str]) -> None:
        """List the job for exactly these GPUs, also where somebody has taken the line out since. OSError that names the first file that cannot be read or
        changed, after the others were."""
        trouble: OSError | None = None
        for gpu in sorted(self._listed.union(gpus)):
            try:
                if gpu not in gpus:
                    self._edit(gpu, False)
                    self._listed.discard(gpu)
                elif gpu not in self._listed or not self._there(gpu):
                    self._edit(gpu, True)
                    self._listed.add(gpu)
            except FileNotFoundError as error:  # the directory itself
                trouble = trouble or error
            except OSError as error:
                trouble = trouble or OSError(error.errno, f"{gpu}: {error.strerror or error}", error.filename)
        if trouble is not None:
            raise trouble

    def _there(self, gpu: str) -> bool:
        """Whether the line stands in the file; without a lock, which a file system over a network would have to give each time."""
        path = os.path.join(self._directory, gpu)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False  # what is wrong with it the edit tells
        try:
            return stat.S_ISREG(os.fstat(fd).st_mode) and self._job_id in os.read(fd, MAX_BYTES).split(b"\n")
        finally:
            os.close(fd)

    def _edit(self, gpu: str, listed: bool) -> None:
        """In place, since the site's prolog may own the file; under a lock, since several jobs may share it. A file that we have made goes once it is empty."""
        path = os.path.join(self._directory, gpu)
        for _ in range(TRIES):
            try:
                fd = self._open(path, gpu, listed)
            except FileNotFoundError:
                if listed:
                    raise
                return
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "it is no regular file", path)
                _lock(fd, path)
                if not _is(fd, path):
                    continue  # another job has removed it between our open and our lock
                before = os.read(fd, MAX_BYTES + 1)
                if len(before) > MAX_BYTES:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
                after = edited(before, self._job_id, listed)
                if not after and gpu in self._made and _removed(path):
                    return
                if after != before:
                    _overwrite(fd, path, before, after)
                return
            finally:
                os.close(fd)
        raise OSError(errno.EBUSY, "other jobs keep replacing it", path)

    def _open(self, path: str, gpu: str, listed: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if not listed:
                raise
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return os.open(path, flags)
        os.fchmod(fd, 0o644)  # dcgm-exporter may be another user
        self._made.add(gpu)
        return fd


def _overwrite(fd: int, path: str, before: bytes, after: bytes) -> None:
    if os.pwrite(fd, after, 0) != len(after):
        os.pwrite(fd, before, 0)
        os.ftruncate(fd, len(before))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    os.ftruncate(fd, len(after))


def _lock(fd: int, path: str) -> None:
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(errno.EAGAIN, f"another program has locked it for {LOCK_WAIT_S:g} s", path) from None
            time.sleep(0.01)


def _is(fd: int, path: str) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino)


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
