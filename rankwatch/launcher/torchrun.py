"""Stock torchrun with one name rebound: torch's launcher builds our subclass of its LocalElasticAgent. The only supervisor file that imports torch.

Of the agent four methods are overridden (`_start_workers`, `_monitor_workers`, `_stop_workers`, `_rendezvous`: the same from torch 2.9 to 2.14),
`_shutdown`, which torch calls when a signal or an error of its own ends it, and `_exit_barrier`. Each does what torch does and tells
launcher/supervision.py. None of ours is around torch's own loop: the traceback that torchrun prints at a signal is torch's.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from rankwatch.launcher import supervision as sv
from rankwatch.launcher.inject import restore, two_numbers
from rankwatch.launcher.meeting import describe
from rankwatch.monitor.workers import Worker

if TYPE_CHECKING:
    from rankwatch.config import Options
    from rankwatch.monitor.action import ExitRequest
    from rankwatch.monitor.policy import Limits

T = TypeVar("T")

METHODS = ("_start_workers", "_monitor_workers", "_stop_workers", "_rendezvous")
EXIT_NO_TORCH = 127
OLDEST_TORCH = (2, 9)


def run(args: list[str], options: Options, limits: Limits, command: tuple[str, ...], say: Callable[[str], None]) -> int:
    """torchrun with `args`, supervised where this torch allows it. Returns or raises what leads to torchrun's own exit code.

    An exception that would end torchrun is printed here, as the interpreter would, so that our last lines come below torchrun's summary.
    """
    if find_spec("torch") is None:
        say(f"error: no torch in {sys.executable}: install torch there, or run the rankwatch of the environment that has it")
        return EXIT_NO_TORCH
    argv, sys.argv = sys.argv, ["torchrun", *args]  # torch's parser names itself after argv[0]
    try:
        return _run(args, options, limits, command, say)
    finally:
        sys.argv = argv


def _run(args: list[str], options: Options, limits: Limits, command: tuple[str, ...], say: Callable[[str], None]) -> int:
    import torch
    import torch.distributed.run as stock

    reason = why_unsupported()
    if reason:
        say(f"supervision off: {reason}")
        stock.main(args)
        return 0
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher import api

    if (two_numbers(torch.__version__) or OLDEST_TORCH) < OLDEST_TORCH:
        say(f"torch {torch.__version__} is older than 2.9: exits, stacks and steps are followed, compiles and collectives perhaps not; update torch for all")
    supervision = sv.Supervision(options, limits, command, {"torch": torch.__version__}, say)
    original = api.LocalElasticAgent
    api.LocalElasticAgent = supervised(original, supervision, SignalException, say)
    exit_code = 1
    try:
        supervision.waits(lambda: "the endpoint of its rendezvous (see --rdzv-endpoint, --master-addr)")
        stock.main(args)
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        api.LocalElasticAgent = original
        supervision.finish(exit_code)
    return exit_code


def why_unsupported() -> str:
    """Why this torch, or this system, cannot be supervised; "" when it can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}; torchrun runs as it is"
    import torch

    here = f"torch {torch.__version__}"
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.launcher import api
    except ImportError as error:
        return f"{here}: {error}; torchrun runs as it is"
    agent = getattr(api, "LocalElasticAgent", None)
    if not inspect.isclass(agent) or not inspect.isclass(SignalException):
        return f"{here} has no torch.distributed.launcher.api.LocalElasticAgent; torchrun runs as it is; look for a newer rankwatch"
    for name in METHODS:
        method = getattr(agent, name, None)
        if not callable(method) or list(inspect.signature(method).parameters) != ["self", "worker_group"]:
            return f"{here}: LocalElasticAgent.{name} is not the method that rankwatch knows; torchrun runs as it is; look for a newer rankwatch"
    return ""


def supervised(base: type[Any], supervision: sv.Supervision, signal_exception: type[Exception], say: Callable[[str], None]) -> type[Any]:
    """A subclass of `base` (torch's LocalElasticAgent) that reports to `supervision`.

    Whatever of ours fails is said once and changes nothing. signal_exception is what torch's signal handlers raise, anywhere: it always passes.
    """
    complaints: list[str] = []

    def guarded(function: Callable[[], T]) -> T | None:
        try:
            return function()
        except signal_exception:
            raise
        except Exception as error:
            if not complaints:
                complaints.append(repr(error))
                say(f"supervision impaired: {type(error).__name__}: {error}; the job runs on")
            return None

    class SupervisedAgent(base):  # type: ignore[misc]
        def _rendezvous(self, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(lambda: supervision.rendezvous(lambda: describe(worker_group.spec.rdzv_handler)))
            return super()._rendezvous(worker_group, *args, **kwargs)

        def _start_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
            start = guarded(lambda: _start(worker_group))
            injection = guarded(lambda: supervision.prepare(start)) if start else None
            before: Any = {}
            try:
                if injection:
                    before = injection.apply(os.environ)
                ids = super()._start_workers(worker_group, *args, **kwargs)
            finally:
                restore(os.environ, before)
            if start and injection:
                guarded(lambda: supervision.started(start, _workers(self, start, ids)))
            return ids

        def _monitor_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(supervision.look)
            result = super()._monitor_workers(worker_group, *args, **kwargs)
            request = guarded(supervision.exit_request) if _run_on(result) else None
            if request is not None:
                failed = guarded(lambda: _failed(worker_group, request))
                if failed is not None:
                    return failed
                guarded(supervision.kill_workers)
            guarded(lambda: supervision.failing(_first_failure(result), 0.0))
            return result

        def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(supervision.stopping)
            result = super()._stop_workers(worker_group, *args, **kwargs)
            guarded(supervision.stopped)
            return result

        def _shutdown(self, *args: Any, **kwargs: Any) -> Any:
            cause = sys.exc_info()[1]  # torch calls this while it handles the signal; should another one come meanwhile, once more
            if isinstance(cause, signal_exception):
                name = getattr(getattr(cause, "sigval", None), "name", "a signal")
                guarded(lambda: supervision.ending(f"{name} to the launcher"))
            elif isinstance(cause, Exception):  # its rendezvous store is gone, say
                guarded(lambda: supervision.ending(f"torchrun itself fails with {type(cause).__name__}"))
            return super()._shutdown(*args, **kwargs)

        def _exit_barrier(self, *args: Any, **kwargs: Any) -> Any:
            guarded(lambda: supervision.all_ended(getattr(self, "_exit_barrier_timeout", None)))
            return super()._exit_barrier(*args, **kwargs)

    SupervisedAgent.__name__ = SupervisedAgent.__qualname__ = base.__name__  # torch names it in logs and metrics
    return SupervisedAgent


def _run_on(result: Any) -> bool:
    """Whether torchrun would go on watching."""
    return getattr(getattr(result, "state", None), "name", "") == "HEALTHY"


def _failed(worker_group: Any, request: ExitRequest) -> Any:
    """What torch's own poll gives when a worker has failed: torchrun then restarts the workers, or with no restart left ends them and itself.

    The culprits stand for the failure, also where none is of this node; the message says who ended them. ImportError in an unknown torch.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    workers = {worker.global_rank: worker for worker in worker_group.workers}
    failures = {}
    for rank in [rank for rank in request.culprit_ranks if rank in workers] or list(workers):
        failure = ProcessFailure(local_rank=workers[rank].local_rank, pid=workers[rank].id, exitcode=-signal.SIGTERM, error_file="")
        failure.message = request.why
        failures[rank] = failure
    return RunResult(state=WorkerState.FAILED, failures=failures)


def _start(worker_group: Any) -> sv.Start:
    workers = worker_group.workers
    return sv.Start(
        group_rank=worker_group.group_rank,
        world_size=workers[0].world_size,
        nnodes=worker_group.group_world_size,
        ranks={worker.local_rank: worker.global_rank for worker in workers},
        rendezvous_id=worker_group.spec.rdzv_handler.get_run_id(),
        script_problem=script_problem(worker_group.spec.entrypoint, worker_group.spec.args),
        store=worker_group.store,
        local_addr=worker_group.spec.local_addr or "",
        identity=_identity(worker_group),
    )


def _identity(worker_group: Any) -> str:
    """What this job's launchers share and those of no other job that runs: run id, where its ranks meet (a port that is theirs), the round.

    The round is the rendezvous' own: launchers count restarts differently where nodes come late. The static one has none.
    """
    handler = worker_group.spec.rdzv_handler
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    where = f"{getattr(worker_group, 'master_addr', '')}:{getattr(worker_group, 'master_port', '')}"
    return f"{handler.get_run_id()} {where} {getattr(state, 'round', '')}"


def script_problem(entrypoint: object, args: Sequence[object]) -> str:
    """ "train.py does not exist", for the script that torchrun gives to Python; "" where it is there, or where there is no script but a module."""
    if not isinstance(entrypoint, str) or "python" not in os.path.basename(entrypoint):
        return ""
    words = list(map(str, args))
    script = next((word for word in words if not word.startswith("-")), "")
    flags = words[: words.index(script)] if script else words
    if not script or {"-m", "-c"} & set(flags) or os.path.exists(script):
        return ""
    return f"{script} does not exist" + ("" if os.path.isabs(script) else f" in {os.getcwd()}")


def _workers(agent: Any, start: sv.Start, ids: dict[int, Any]) -> tuple[Worker, ...]:
    context = agent._pcontext
    return tuple(
        Worker(
            rank=start.ranks[local_rank],
            local_rank=local_rank,
            pid=pid,
            stdout=str(context.stdouts.get(local_rank) or ""),
            stderr=str(context.stderrs.get(local_rank) or ""),
            error_file=str(context.error_files.get(local_rank) or ""),
        )
        for local_rank, pid in sorted(ids.items())
    )


def _first_failure(result: Any) -> dict[int, int]:
    """The earliest failure of a poll that `look` came too early for: the later ones are torchrun's own victims."""
    failures = result.failures
    if not failures:
        return {}
    rank = min(failures, key=lambda rank: failures[rank].timestamp)
    return {rank: failures[rank].exitcode}
