"""What happens around one launcher's workers: slots before they start, the monitor after. Knows no torch; called by launcher/torchrun.py.

All work runs aside (launcher/aside.py); the methods here wait for a bounded time and raise nothing but what a signal handler raises in them.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import rankwatch
from rankwatch.config import Options
from rankwatch.launcher import rundir, torch_trace
from rankwatch.launcher.aside import Aside
from rankwatch.launcher.end_processes import KILL_AFTER_S, end_processes
from rankwatch.launcher.inject import OLD_NAME_UNTIL, Injection, inject, nccl_timing_on, recorder_off, two_numbers
from rankwatch.launcher.job_id import job_id
from rankwatch.launcher.meeting import Meeting
from rankwatch.launcher.slots import SlotDirectory, SlotPlace, sweep
from rankwatch.model import JobInfo
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.workers import WATCHDOG_SETTINGS, Worker, Workers
from rankwatch.wire.env import TORCH_TRACE, TRACE_DIR

if TYPE_CHECKING:
    from rankwatch.monitor.action import ExitRequest
    from rankwatch.monitor.nodes.together import Directory

EVIDENCE_S = 1.5  # how long torchrun's own end of the surviving workers may wait for stacks
RUN_DIR_WAIT_S = rundir.DEADLINE_S + 2.0  # with --torch-trace the ranks need it from the start
SLOTS_WAIT_S = 3.0  # a stuck /dev/shm is unheard of; /tmp may be anything
FINISH_WAIT_S = {True: 1.0, False: 4.0}  # after success, after failure: past what Monitor.stop promises, only for one that hangs; end_wait_s comes on top
RUN_NAME_WAIT_S = 4.0  # for the name of the first launcher's run directory
SHORT_JOB_S, SHORT_JOB_WAIT_S = 10.0, 12.0  # after one that took less, the monitor may have to start first: run directory, imports
PACKAGE_DIR = os.path.dirname(os.path.abspath(rankwatch.__file__))


class Monitor(Protocol):
    """What this module asks of rankwatch.monitor.loop.Monitor."""

    def start(self) -> None: ...
    def workers_started(self, workers: Workers, directory: Directory | None = None) -> None: ...
    def workers_failing(self, exits: Mapping[int, int], deadline_s: float) -> None: ...
    def ending(self, reason: str) -> None: ...
    def workers_stopped(self, reason: str) -> None: ...
    def restarting(self, attempt: int) -> None: ...
    def stop(self, exit_code: int | None) -> None: ...
    @property
    def exit_request(self) -> ExitRequest | None: ...


def make_monitor(options: Options, job: JobInfo, limits: Limits) -> Monitor:
    """The monitor of this launcher. Its import takes a third of a second: `preload` has begun it."""
    from rankwatch.monitor.loop import Monitor

    return Monitor(options, job, limits)


def find_others(start: Start, options: Options) -> Directory:
    """The launchers of the other nodes: listed by --peers, or found through torchrun's store."""
    from rankwatch.launcher import discovery

    return discovery.directory(start, options)


def beyond_s(options: Options) -> float:
    """How much longer than FINISH_WAIT_S the end may take, for what these options ask for."""
    from rankwatch.monitor.end_waits import end_wait_s  # with the words of shown, which the monitor has loaded by then

    return end_wait_s(options)


def preload() -> None:
    """Import the monitor while torchrun waits in its rendezvous, so that it takes no processor from the ranks' start."""
    try:
        import rankwatch.monitor.loop  # noqa: F401
    except Exception:
        pass  # make_monitor meets it again and says it


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the workers, as the rendezvous has settled it. ranks: local rank -> global rank. rendezvous_id: torchrun's run id.

    store: torchrun's own, through which its agents meet. local_addr: what --local-addr says. identity: the same on all nodes of this job, and of no other.
    script_problem: why Python cannot start the job's script; "" where it can.
    """

    group_rank: int
    world_size: int
    nnodes: int
    ranks: Mapping[int, int]
    rendezvous_id: str
    script_problem: str = ""
    store: Any = None
    local_addr: str = ""
    identity: str = ""


class Supervision:
    """One launcher's supervision from the first start of the workers to the exit. Methods are called from the launcher's main thread."""

    def __init__(
        self,
        options: Options,
        limits: Limits,
        command: tuple[str, ...],
        versions: Mapping[str, str],
        say: Callable[[str], None],
        factory: Callable[[Options, JobInfo, Limits], Monitor] | None = None,
        find: Callable[[Start, Options], Directory] | None = None,
    ) -> None:
        self._options = options
        self._limits = limits
        self._command = command
        self._versions = dict(versions)
        self._say = say
        self._factory = factory or make_monitor
        self._find = find or find_others
        self._aside = Aside("rankwatch-launch")
        self._slots = SlotDirectory()
        self._monitor: Monitor | None = None
        self._run_place: rundir.RunDir | None = None
        self._job_id = ""
        self._attempt = -1
        self._place = SlotPlace(None, "no attempt yet")
        self._injection = Injection({})
        self._pids: dict[int, int] = {}  # rank -> pid of the attempt that runs
        self._started_at = 0.0  # the first attempt
        self._failed_rank: int | None = None
        self._exit_why = ""  # of the attempt that rankwatch ends
        self._meeting = Meeting(say)
        self._nnodes = 1

    # -- a start of the workers

    def prepare(self, start: Start) -> Injection:
        """Slots for a new attempt; what its workers' environment needs. Without slots the ranks run unwatched and a line says so."""
        self._meeting.end()
        self._attempt += 1
        self._pids, self._failed_rank, self._exit_why = {}, None, ""
        attempt, ranks = self._attempt, tuple(start.ranks.values())
        making = self._aside.call(lambda: self._slots.make(attempt, ranks), SLOTS_WAIT_S)
        self._place = making.value or SlotPlace(None, str(making.error or f"no answer within {SLOTS_WAIT_S:g} s"))
        if self._place.path is None:
            self._say(f"no place for the ranks' slots ({self._place.reason}): ranks are watched from outside only; free space in /dev/shm or /tmp")
        self._injection = inject(
            os.environ,
            package_dir=PACKAGE_DIR,
            launcher_pid=os.getpid(),
            attempt=attempt,
            slot_dir=self._place.path,
            ptrace_scope=_ptrace_scope(),
            no_probes=self._options.no_probe,
            more_probes=self._options.probe,
            trace_dir=self._trace_dir(start) if self._options.torch_trace else None,
            torch_version=two_numbers(self._versions.get("torch", "")) or OLD_NAME_UNTIL,
            nccl_timing=self._options.nccl_timing,
        )
        return self._injection

    def started(self, start: Start, workers: tuple[Worker, ...]) -> None:
        """The workers run. Returns at once: run directory, monitor and the removal of old slots follow aside."""
        self._pids, self._nnodes = {worker.rank: worker.pid for worker in workers}, start.nnodes
        self._started_at = self._started_at or time.monotonic()
        group = Workers(
            attempt=self._attempt,
            group_rank=start.group_rank,
            world_size=start.world_size,
            nnodes=start.nnodes,
            node=socket.gethostname(),
            slot_dir=self._place.path,
            slot_reason=self._place.reason,
            workers=workers,
            script_problem=start.script_problem,
            environment={name: text for name in WATCHDOG_SETTINGS if (text := self._injection.set.get(name, os.environ.get(name))) is not None},
            history=self._options.collective_history,
            nccl_timing=nccl_timing_on({**os.environ, **self._injection.set}),
        )
        self._aside.submit(lambda: self._slots.record_workers([worker.pid for worker in workers]))
        directory = self._look_for_others(start)
        if self._attempt == 0:
            self._aside.submit(lambda: self._start_monitor(start, self._injection, directory))
        self._tell(lambda monitor: monitor.workers_started(group, directory))
        if self._attempt == 0:
            self._aside.submit(sweep)

    # -- while they run, and at their end

    def look(self) -> None:
        """Called before every poll of torchrun's: a worker that has just failed is the last moment at which its peers still live."""
        if self._failed_rank is not None or self._exit_why:
            return
        exits = failed_exits(self._pids)
        if exits:
            self.failing(exits, EVIDENCE_S)

    def failing(self, exits: Mapping[int, int], deadline_s: float) -> None:
        """Once per attempt: hand the exit codes over, wait for the evidence, announce that torchrun now ends the others."""
        if self._failed_rank is not None or self._exit_why or not exits:
            return
        self._failed_rank = min(exits)
        self._tell(lambda monitor: monitor.workers_failing(exits, deadline_s), wait_s=deadline_s + 0.2)
        self.ending(self._stop_reason())

    def exit_request(self) -> ExitRequest | None:
        """Once per attempt: what the monitor asks for under `--on-stuck exit`, unless the workers end by themselves. They must be ended now."""
        request = self._monitor.exit_request if self._monitor is not None else None
        if request is None or request.attempt != self._attempt or self._exit_why or self._failed_rank is not None or not self._pids:
            return None
        self._exit_why = request.why
        self.ending(self._stop_reason())
        return request

    def kill_workers(self) -> None:
        """End the workers without torch's help: SIGTERM now, SIGKILL for those that live KILL_AFTER_S later. Returns at once."""
        pids = tuple(self._pids.values())
        threading.Thread(target=end_processes, args=(pids, KILL_AFTER_S), name="rankwatch-kill", daemon=True).start()

    def ending(self, reason: str) -> None:
        """A planned end, or torchrun's stop of the workers, begins now."""
        self._tell(lambda monitor: monitor.ending(reason), wait_s=0.1)

    def stopping(self) -> None:
        """torchrun stops this node's workers."""
        if self._failed_rank is None:
            self.ending(self._stop_reason())

    def stopped(self) -> None:
        """torchrun has stopped this node's workers."""
        reason = self._stop_reason()
        self._pids = {}
        self._tell(lambda monitor: monitor.workers_stopped(reason))

    def waits(self, what: Callable[[], str]) -> None:
        """No rank runs, and torchrun waits for `what()`; said when it takes long."""
        self._meeting.begin(what)

    def rendezvous(self, what: Callable[[], str]) -> None:
        """A rendezvous for `what()` begins; after the first one it is a restart."""
        self.waits(what)
        if self._attempt < 0:
            threading.Thread(target=preload, name="rankwatch-preload", daemon=True).start()
        else:
            attempt = self._attempt + 1
            self._tell(lambda monitor: monitor.restarting(attempt))

    def all_ended(self, limit_s: float | None) -> None:
        """This node's workers have ended well, and torchrun waits for the other nodes' agents, for limit_s at most."""
        if self._nnodes <= 1:
            return
        at_most = f", for {limit_s:.0f} s at most" if limit_s is not None else ""
        self._meeting.begin(lambda: f"the launchers of the other nodes (its exit barrier{at_most})", "the ranks of this node have ended")

    def finish(self, exit_code: int | None) -> None:
        """The last look, then nothing of ours is left. A second signal ends the waiting, not the clean-up; nothing is raised."""
        self._meeting.end()
        try:
            self._tell(lambda monitor: monitor.stop(exit_code))
            if self._attempt >= 0:
                short = time.monotonic() - self._started_at < SHORT_JOB_S
                self._aside.call(self._slots.remove, (SHORT_JOB_WAIT_S if short else FINISH_WAIT_S[exit_code == 0]) + beyond_s(self._options))
            if self._options.torch_trace and self._run_place is not None:
                path = self._run_place.path
                self._aside.call(lambda: torch_trace.finish(path), FINISH_WAIT_S[exit_code == 0])
        except (Exception, KeyboardInterrupt):
            pass
        try:
            self._slots.remove()
        except (Exception, KeyboardInterrupt):
            pass  # the next start sweeps it

    def _stop_reason(self) -> str:
        if self._exit_why:
            return "rankwatch ends the workers (--on-stuck exit)"
        if self._failed_rank is None:
            return "torchrun stops the workers for a new rendezvous"
        return f"torchrun stops the workers after rank {self._failed_rank} failed"

    def _look_for_others(self, start: Start) -> Directory | None:
        """Where the launchers of the other nodes are found from now on; None in a job of one node, or where that cannot be begun."""
        if start.nnodes <= 1:
            return None
        try:
            directory = self._find(start, self._options)
            directory.start()
        except Exception as error:
            self._say(f"other nodes' launchers cannot be looked for ({type(error).__name__}: {error}): this one judges its own ranks")
            return None
        return directory

    def _start_monitor(self, start: Start, injection: Injection, directory: Directory | None) -> None:
        try:
            job = self._job(start, injection, directory)
            monitor = self._factory(self._options, job, self._limits)
            monitor.start()
            self._monitor = monitor
        except Exception as error:
            self._say(f"supervision off: {type(error).__name__}: {error}; the job runs on; `rankwatch doctor` tells more")

    def _trace_dir(self, start: Start) -> str | None:
        """Where this attempt's ranks write their traces; None, said once, where they cannot."""
        if TORCH_TRACE in os.environ and not os.environ.get(TRACE_DIR):
            reason = f"TORCH_TRACE={os.environ[TORCH_TRACE]} is set and stays"
        else:
            making = self._aside.call(lambda: torch_trace.make_attempt(self._place_run(start).path, self._attempt), RUN_DIR_WAIT_S)
            if making.value is not None:
                return making.value
            reason = str(making.error or f"no answer within {RUN_DIR_WAIT_S:g} s")
        if self._attempt == 0:
            self._say(f"--torch-trace does nothing: {reason}")
        return None

    def _place_run(self, start: Start, directory: Directory | None = None) -> rundir.RunDir:
        """The run's directory, made once. directory: tells what the first launcher has called its own."""
        if self._run_place is None:
            first = start.group_rank == 0
            name = directory.run_name(RUN_NAME_WAIT_S) if directory is not None and not first and self._options.run_dir is None else ""
            found = job_id(self._options.job_id, os.environ, start.rendezvous_id, socket.gethostname())
            self._job_id = rundir.job_in(name) if found.drawn and rundir.job_in(name) else found.text
            self._run_place = rundir.make(self._options.run_dir, self._job_id, self._options.run_dir_mode, first_node=first, name=name)
            for note in self._run_place.notes:
                self._say(note)
        return self._run_place

    def _job(self, start: Start, injection: Injection, directory: Directory | None) -> JobInfo:
        place = self._place_run(start, directory)
        labels = dict(self._options.labels)
        if self._options.owner:
            labels.setdefault("owner", self._options.owner)
        return JobInfo(
            job_id=self._job_id,
            run_dir=place.path,
            command=self._command,
            node=socket.gethostname(),
            world_size=start.world_size,
            nnodes=start.nnodes,
            attempt=0,
            versions={"rankwatch": rankwatch.__version__, "python": sys.version.split()[0], **self._versions},
            set_environment=dict(injection.set),
            capabilities={"collectives": reason} if (reason := recorder_off(os.environ)) else {},
            started_wall_at=time.time(),
            labels=labels,
        )

    def _tell(self, what: Callable[[Monitor], None], wait_s: float = 0.0) -> None:
        """Queue one call of the monitor behind those before it, and wait for it up to wait_s."""

        def call() -> None:
            if self._monitor is not None:
                what(self._monitor)

        queued = self._aside.submit(call)
        if wait_s > 0:
            queued.wait(wait_s)


def failed_exits(pids: Mapping[int, int]) -> dict[int, int]:
    """rank -> exit code of the children that have ended badly and are not collected yet (negative: the signal). Collects none of them."""
    exits = {}
    for rank, pid in pids.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            continue  # collected by torchrun's poll: it ended well, or torchrun knows
        if ended is not None and ended.si_status != 0:
            exits[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return exits


def _ptrace_scope() -> int | None:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
