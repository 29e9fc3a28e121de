"""What the probes of one process share: the rank's slot, its lifecycle, the health of each probe, and the ends of the process.

Made when torch is imported. A process without a slot of its own rank stays without any hook.
"""

from __future__ import annotations

import atexit
import os
import sys

from rankwatch.agent import orphan, ownership
from rankwatch.agent.boot import probes
from rankwatch.agent.clock import clock
from rankwatch.agent.crash import ending_exception
from rankwatch.agent.guard import Probe, getpid, here
from rankwatch.agent.slot import RankSlot
from rankwatch.agent.threads import LiveThreads
from rankwatch.wire import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


class Rank:
    """This process as a rank. `on_claim`, `on_exit`, `on_beat`, `on_step`, `on_compiled` and `on_skipped` are lists of callables that probes add to.

    on_claim: after another owner's records were emptied, write yours again. on_exit: in atexit, in this process only.
    on_beat: with each heartbeat, on its thread, once the process group is joined. on_step(now_ns): after each step, on the thread that steps.
    on_compiled(compile_id, frame): after each forward compile that gave a graph, on the compiling thread; on_skipped(compile_id, frame): after one
    that gave none, because the frame of the user's is left to Python.
    """

    def __init__(self, slot: RankSlot, environ: Mapping[str, str]) -> None:
        self.slot = slot
        self.threads = LiveThreads(slot)
        self.environ = {name: environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environ}
        self.slot_dir = environ[env.SLOT_DIR]
        self.claimed = False
        self.stage = "armed"
        self.stage_since_ns = clock.now_ns()
        self.barrier: dict[str, Any] | None = None  # the newest monitored_barrier
        self.join: dict[str, Any] | None = None  # the call of init_process_group that is under way
        self.failed = False  # an exception ends this process
        self.socket = ""
        self.torch_version = "?"
        self.steps_done: Callable[[], int] = lambda: 0
        self.last_graph_break = ""  # `model.py:31: reason`
        self.on_claim: list[Callable[[], None]] = []
        self.on_exit: list[Callable[[], None]] = []
        self.on_beat: list[Callable[[], None]] = []
        self.on_step: list[Callable[[int], None]] = []
        self.on_compiled: list[Callable[[str, str], None]] = []
        self.on_skipped: list[Callable[[str, str], None]] = []
        self._attempt = int(environ.get(env.ATTEMPT, "0") or 0)
        self._launcher = orphan.Launcher(int(environ.get(env.LAUNCHER_PID, "0") or 0))
        self.asked = env.more_probes(environ)  # probe -> its number, of those that run only if asked for
        self.probes = {name: Probe(name, self._show_probes) for name, _modules in probes(environ)}
        for name, modules in probes(environ):
            self.probes[name].detail = f"waits for the import of {modules[0]}"
        off = {name.strip() for name in environ.get(env.NO_PROBES, "").split(",")}
        for name in off & set(self.probes):
            self.probes[name].report("off", "switched off by --no-probe")

    @property
    def rank(self) -> int:
        return self.slot.rank

    def take_provisionally(self) -> bool:
        """Own the slot until somebody claims it, if nobody better does."""
        owner = self.slot.owner()
        if not ownership.may_arm(owner, getpid(), ownership.is_multiprocessing_child()):
            return False
        self.slot.take(self._owner_record("armed"), clear=bool(owner))
        self.enter("armed")
        self._show_probes()
        return True

    def claim(self) -> bool:
        """Own the slot for good: this process joins the job's process group. Its descendants find RANKWATCH_CLAIMED and stay inert."""
        if not (self.claimed and self.slot.owned):
            if not ownership.may_claim(self.slot.owner(), getpid()):
                return False
            was_ours = self.slot.owned
            self.slot.take(self._owner_record("claimed"), clear=not was_ours)
            self.claimed = True
            os.environ[env.CLAIMED] = str(getpid())
            if not was_ours:
                self._show_probes()
                for write_again in self.on_claim:
                    write_again()
        return True

    def show_socket(self, name: str) -> None:
        """Put the worker server's socket name into the owner record ("": there is none)."""
        self.socket = name
        if self.slot.owned:
            self.slot.rewrite_owner(self._owner_record("claimed" if self.claimed else "armed"))

    def enter(self, stage: str, exception: dict[str, Any] | None = None) -> None:
        """Write the lifecycle record: armed, joining, join_failed, joined, left or exiting. exception: of join_failed and exiting."""
        self.stage, self.stage_since_ns = stage, clock.now_ns()
        self.show_stage(exception)

    def show_stage(self, exception: dict[str, Any] | None = None) -> None:
        """Write the lifecycle record as it is now."""
        record = {"stage": self.stage, "since_mono_ns": self.stage_since_ns, "exception": exception, "barrier": self.barrier, "join": self.join}
        self.slot.write_json("lifecycle", record)

    def exits(self) -> None:
        """atexit: say how the process ends, stop what runs, and leave no file behind when the launcher cannot remove them any more."""
        if getpid() != here.pid:
            return
        try:
            if self.slot.owned:
                exception = ending_exception()
                self.failed = exception is not None
                self.enter("exiting", exception)
        finally:
            for stop in self.on_exit:
                try:
                    stop()
                except Exception:
                    pass
            if self.slot.owned and self._launcher.gone():
                orphan.remove(self.slot_dir, self.rank)

    def forked(self) -> None:
        """In a fork child: a child of a rank is no rank; a child of a process that has not joined may still become one."""
        self.slot.disown()
        self.threads.forget()
        here.pid = 0 if self.claimed else getpid()

    def _owner_record(self, state: str) -> dict[str, Any]:
        pid = getpid()
        return {
            "pid": pid,
            "start_ticks": ownership.start_ticks(pid),
            "state": state,
            "rank": self.slot.rank,
            "local_rank": _int(self.environ.get("LOCAL_RANK")),
            "world_size": _int(self.environ.get("WORLD_SIZE")),
            "attempt": self._attempt,
            "ppid": os.getppid(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": self.torch_version,
            "socket": self.socket,
            "wall_ns": clock.wall_ns(),
        }

    def _show_probes(self) -> None:
        if hasattr(self, "probes"):
            self.slot.write_json("probes", {p.name: {"status": p.status, "detail": p.detail[:300], "errors": p.errors} for p in self.probes.values()})


_rank: Rank | None = None
_tried = False


def arm(probe_name: str, torch_module: Any) -> None:
    """A torch module that `probe_name` waits for has been imported."""
    rank = _this_rank()
    if rank is None:
        return
    probe = rank.probes[probe_name]
    try:
        module = __import__(f"rankwatch.agent.probes.{probe_name}", fromlist=["arm"])
        module.arm(rank, probe, torch_module)
    except Exception as error:
        probe.report("failed", f"{type(error).__name__} while arming: {error}")


def _this_rank() -> Rank | None:
    global _rank, _tried
    if not _tried:
        _tried = True
        number = int(os.environ["RANK"])
        try:
            slot = RankSlot(os.path.join(os.environ[env.SLOT_DIR], env.slot_name(number)))
        except (OSError, ValueError):
            return None  # the launcher made no slot for this rank, or knows another layout, and reports that nobody claimed it
        if slot.rank != number:
            return None
        rank = Rank(slot, os.environ)
        torch = sys.modules.get("torch")
        rank.torch_version = str(getattr(sys.modules.get("torch.version"), "__version__", getattr(torch, "__version__", "?")))
        here.pid = getpid()
        rank.take_provisionally()
        atexit.register(rank.exits)
        os.register_at_fork(after_in_child=rank.forked)
        _rank = rank
    return _rank


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
