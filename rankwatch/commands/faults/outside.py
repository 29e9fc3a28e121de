"""What a fault needs from outside its ranks: a held thread, a memory cgroup, an opened FIFO. Each says in words why it cannot be done here.

ptrace belongs to the thread that began it, so everything here is called from the demo's main thread. What the tracer holds goes on when it ends.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_OOM_ROOM_BYTES = 2 << 30  # for launcher and two ranks with room to grow


class CannotEnact(Exception):
    """This machine does not allow the fault; the text says what is missing."""


class HeldThread:
    """A thread that stands still until `release`. CannotEnact where tracing is not allowed."""

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long
        for request in (_SEIZE, _INTERRUPT):
            if self._ptrace(request, tid, None, None) != 0:
                raise CannotEnact(
                    f"thread {tid} cannot be traced ({os.strerror(ctypes.get_errno())}); it takes root, CAP_SYS_PTRACE, or kernel.yama.ptrace_scope 0 or 1"
                )
        os.waitpid(tid, _WALL)

    def release(self) -> None:
        self._ptrace(_DETACH, self._tid, None, None)  # a rank that has ended meanwhile is released as well


def thread_of(pid: int, name: str) -> int:
    """The thread of that process whose name begins so. CannotEnact when it has none."""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        try:
            if (task / "comm").read_text().startswith(name):
                return int(task.name)
        except OSError:
            continue
    raise CannotEnact(f"process {pid} has no thread {name}*: this torch names gloo's threads otherwise")


class MemoryCgroup:
    """A memory cgroup with little room, for the job to be started in. CannotEnact where none can be made."""

    def __init__(self) -> None:
        why = "no memory cgroup is mounted"
        for parent, limit, swap in _memory_cgroups():
            self.folder = parent / f"rankwatch-demo-{os.getpid()}"
            try:
                self.folder.mkdir()
                (self.folder / limit).write_text(str(_OOM_ROOM_BYTES))
                self._without_swap(swap)
                return
            except OSError as error:
                why = f"{parent}: {error.strerror}"
                self.remove()
        raise CannotEnact(f"the kernel's out-of-memory killer needs a memory cgroup that can be written ({why}); run it as root, outside a container")

    def _without_swap(self, swap: str) -> None:
        try:
            (self.folder / swap).write_text("0" if swap.endswith(".max") else str(_OOM_ROOM_BYTES))
        except OSError:
            pass  # a kernel without swap accounting

    def command(self, command: list[str]) -> list[str]:
        """The same command, in the cgroup from its start."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def remove(self) -> None:
        for _ in range(20):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)  # its last process is being collected


def _memory_cgroups() -> list[tuple[Path, str, str]]:
    """(where a cgroup may be made, file of its limit, file of its swap limit): below our own in v1, beside it in v2, whose inner nodes hold no process."""
    found = []
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            found.append((Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))
        elif controllers == "":
            own = Path(f"/sys/fs/cgroup{path}")
            parent = own if path == "/" else own.parent
            if (parent / "cgroup.subtree_control").exists() and "memory" in (parent / "cgroup.subtree_control").read_text().split():
                found.append((parent, "memory.max", "memory.swap.max"))
    return found


def open_fifo(path: Path) -> None:
    """Lets the process go that opens the other end, if it still does."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        pass  # nobody is there any more
    path.unlink(missing_ok=True)


def unsupported() -> str:
    """Why no fault at all can be enacted here, else ""."""
    return "" if platform.system() == "Linux" else "the demo needs Linux"
