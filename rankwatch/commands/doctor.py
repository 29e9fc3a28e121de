"""`rankwatch doctor`: what works on this machine, which verdicts are lost where something does not, and what to do about it.

It starts one real rank (a gloo world of one, a compile, an optimizer step) under the agent and looks at it as the monitor would.
With --peers it looks at the network between the nodes instead: commands/peers/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import rankwatch
from rankwatch.commands.peers.command import add_arguments, run
from rankwatch.config import RUNS, Options, place
from rankwatch.launcher.inject import inject
from rankwatch.launcher.slots import SlotDirectory
from rankwatch.launcher.usable import problems
from rankwatch.monitor.slots import SlotReader, SlotState
from rankwatch.monitor.stacks import StackCapture
from rankwatch.monitor.worker_server import ServerError, WorkerServer
from rankwatch.wire.env import slot_name, socket_name

READY_S = 120.0  # a cold import of torch from a network file system takes its time
OK, DEGRADED, MISSING, NOT_APPLICABLE = "ok", "degraded", "missing", "n/a"
FULL, PARTLY, NONE = 0, 3, 4
FLAGS = ("--peers",)
_RANK = Path(__file__).with_name("doctor_rank.py")

_LOST = {
    "compile": "slow/stuck compiling (a compiling rank shows as not_entered)",
    "ddp": "DDP Optimizer splits in metrics and pages",
    "steps": "the no-step rule, steps in metrics",
    "collectives": "not_entered, mismatch, group_order_deadlock, all_entered, gil_held",
    "cudagraph": "CUDA-graph memory and re-recordings",
    "memory": "memory of the ranks' GPUs, and what held it when an allocation failed",
    "stacks": "the line in at=, data_loading, checkpointing, external_io, debugger",
    "worker server": "gil_held, and every verdict from collectives while a rank holds the GIL",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer. `lost`: verdicts that cannot be given; `remedy`: what to do."""

    name: str
    status: str
    detail: str
    lost: str = ""
    remedy: str = ""


def main(argv: list[str], options: Options) -> int:
    """0: full supervision, 3: degraded (the lost verdicts are listed), 4: none, 2: wrong usage. With --peers: as commands/peers/command.py says."""
    parser = argparse.ArgumentParser(
        prog="rankwatch doctor",
        description="What works here, what does not, and what to do about it; with --peers: whether the nodes of a job reach each other.",
        epilog="Exit codes: 0 full supervision, 2 wrong usage, 3 degraded (the lost verdicts are listed), 4 none."
        " With --peers: 0 all nodes reach each other, 3 not all, or clocks or versions differ, 4 this node reaches none or cannot listen.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="print only what does not work")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.peers is not None:
        return run(arguments, options)
    checks = list(examine(options))
    code = exit_code(checks)
    if arguments.json:
        print(json.dumps({"supervision": {FULL: "full", PARTLY: "degraded", NONE: "none"}[code], "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        print(as_text(checks, code, arguments.quiet), end="")
    return code


def exit_code(checks: list[Check]) -> int:
    """NONE without torch, its launcher hook or a slot; PARTLY with anything else off."""
    if any(check.status == MISSING and check.name in ("platform", "torch", "launcher hook", "slot place", "agent") for check in checks):
        return NONE
    return PARTLY if any(check.status in (MISSING, DEGRADED) for check in checks) else FULL


def as_text(checks: list[Check], code: int, quiet: bool) -> str:
    """A line a check, its consequence and remedy indented below; the judgement last. Quiet: only what is off, nothing when all is well."""
    shown = [check for check in checks if not quiet or check.status in (MISSING, DEGRADED)]
    width = max((len(check.name) for check in shown), default=0)
    lines = []
    for check in shown:
        lines.append(f"{check.name:{width}}  {check.status:8}  {check.detail}")
        lines += [f"{'':{width}}  {label}: {text}" for label, text in (("lost", check.lost), ("do", check.remedy)) if text]
    if not quiet or code != FULL:
        lines.append(
            {
                FULL: "full supervision",
                PARTLY: "degraded: what is listed as lost cannot be given here",
                NONE: "no supervision: jobs run as under torchrun",
            }[code]
        )
    return "".join(f"{line}\n" for line in lines)


def examine(options: Options) -> Iterator[Check]:
    """Every check, in the order in which a reader asks."""
    yield _platform()
    yield from _torch_and_rank(options)
    yield _listen(options)
    for problem in problems(options):
        yield Check(f"--{problem.option}", DEGRADED, problem.text, problem.lost, f"mend it where it stands: {place(problem.option, problem.origin)}")
    yield _run_dir(options)


def _platform() -> Check:
    detail = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Check("platform", MISSING, detail, "everything: ranks run under plain torchrun", "supervise on Linux; report works here")
    if sys.version_info >= (3, 14):
        return Check("platform", DEGRADED, detail, "stacks may be missing: py-spy does not know this Python well", "use Python 3.10-3.13 for the job")
    return Check("platform", OK, detail)


def _torch_and_rank(options: Options) -> Iterator[Check]:
    """torch, the launcher's hook, and everything that one real rank shows."""
    probe = subprocess.run(
        [sys.executable, "-c", "import torch; from rankwatch.launcher.torchrun import why_unsupported; print(torch.__version__); print(why_unsupported())"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        yield Check("torch", MISSING, last, "everything", f"install torch 2.9 or newer for {sys.executable}")
        return
    version, reason = [*probe.stdout.strip().splitlines(), "", ""][:2]
    yield Check("torch", OK, version)
    if reason and reason != "None":
        yield Check("launcher hook", MISSING, reason, "everything: ranks run under plain torchrun", "use torch 2.9-2.14")
        return
    yield Check("launcher hook", OK, "torchrun's agent can be followed")
    slots = SlotDirectory()
    place = slots.make(0, [0])
    try:
        if place.path is None:
            yield Check(
                "slot place",
                MISSING,
                place.reason,
                "everything but exits and stacks",
                "free space in /dev/shm or /tmp, or set XDG_RUNTIME_DIR to a short writable path",
            )
            return
        yield Check("slot place", OK, os.path.dirname(os.path.dirname(place.path)))
        yield from _rank(place.path, options)
    finally:
        slots.remove()


def _rank(slot_dir: str, options: Options) -> Iterator[Check]:
    environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    package = str(Path(rankwatch.__file__).parent)
    inject(
        environ, package_dir=package, launcher_pid=os.getpid(), attempt=0, slot_dir=slot_dir, ptrace_scope=_ptrace_scope(), no_probes=options.no_probe
    ).apply(environ)
    with tempfile.TemporaryDirectory(prefix="rankwatch-doctor-") as scratch, open(os.path.join(scratch, "stderr"), "w+b") as errors:
        rank = subprocess.Popen(
            [sys.executable, str(_RANK), os.path.join(scratch, "store")], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            device = _ready(rank)
            if device is None:
                errors.seek(0)
                tail = (errors.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
                yield Check(
                    "agent",
                    MISSING,
                    f"a trial rank did not get ready within {READY_S:.0f} s: {tail}",
                    "everything",
                    "run the same torch code by hand and mend it first",
                )
                return
            yield from _look(rank.pid, slot_dir, device)
        finally:
            if rank.stdin:
                rank.stdin.close()
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            if rank.stdout:
                rank.stdout.close()


def _ready(rank: subprocess.Popen[bytes]) -> str | None:
    """The rank's "ready" line less that word; None when it ended or was silent for READY_S."""
    assert rank.stdout is not None
    end = time.monotonic() + READY_S
    while (left_s := end - time.monotonic()) > 0 and select.select([rank.stdout], [], [], left_s)[0]:
        line = rank.stdout.readline().decode("utf-8", "replace")
        if not line:
            return None
        if line.startswith("ready"):
            return line.removeprefix("ready").strip()
    return None


def _look(pid: int, slot_dir: str, device: str) -> Iterator[Check]:
    """What the monitor would see of the live trial rank."""
    slot = SlotReader(os.path.join(slot_dir, slot_name(0)))
    state = slot.read()
    if state.pid != pid:
        yield Check(
            "agent",
            MISSING,
            f"it did not load in a rank ({state.problem or 'the slot was not claimed'})",
            "everything but exits and stacks",
            "is PYTHONPATH ignored (python -E or -I), or is a sitecustomize module of your own loaded first? start ranks without -E and -I",
        )
    else:
        yield Check("agent", OK, "loads in ranks, state is read without their help")
        yield from _probes(state)
    yield _worker_server(os.path.join(slot_dir, socket_name(0)))
    capture = StackCapture()
    test = capture.self_test(pid)
    capture.close()
    yield (
        Check("stacks", OK, f"py-spy at {capture.executable}")
        if test.ok
        else Check("stacks", DEGRADED, test.reason, _LOST["stacks"], _stack_remedy(test.reason))
    )
    yield Check("gpu", OK if device and not device.startswith("error") else NOT_APPLICABLE, device or "no GPU on this machine")


def _probes(state: SlotState) -> Iterator[Check]:
    for name in ("compile", "ddp", "steps", "collectives", "cudagraph", "memory"):
        probe = state.probes.get(name, {"status": "missing", "detail": "it never reported"})
        status, detail = str(probe.get("status")), str(probe.get("detail") or "")
        if status == "armed":
            yield Check(f"probe {name}", OK, detail or "armed")
        elif status == "off":
            yield Check(f"probe {name}", DEGRADED, "switched off by --no-probe", _LOST[name], "leave --no-probe away")
        elif name == "cudagraph" and status == "missing":
            yield Check(f"probe {name}", NOT_APPLICABLE, detail or "CUDA graphs are not in use here")
        else:
            yield Check(f"probe {name}", DEGRADED, f"{status}: {detail}", _LOST[name], "use torch 2.9-2.14, or report this torch version")


def _worker_server(path: str) -> Check:
    try:
        server = WorkerServer(path)
        server.ping()
        return Check("worker server", OK, f"answers without the GIL; handlers {', '.join(sorted(server.handlers()))}")
    except ServerError as error:
        return Check(
            "worker server", DEGRADED, str(error), _LOST["worker server"], "use torch 2.10-2.14; is the slot place's file system one that allows sockets?"
        )


def _stack_remedy(reason: str) -> str:
    scope = _ptrace_scope()
    if "install" in reason:
        return f"{sys.executable} -m pip install py-spy"
    if scope is not None and scope >= 2:
        return f"kernel.yama.ptrace_scope is {scope}: run `sysctl kernel.yama.ptrace_scope=1` as root, or give the launcher CAP_SYS_PTRACE"
    return "run the job with the same user as rankwatch; in containers add the SYS_PTRACE capability"


def _ptrace_scope() -> int | None:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return None


def _listen(options: Options) -> Check:
    if options.listen == "off":
        return Check("status port", NOT_APPLICABLE, "--listen off")
    host, _, port = options.listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            return Check("status port", OK, f"{options.listen}: {error.strerror}; a run takes the next free port and says which")
    return Check("status port", OK, f"{options.listen} is free")


def _run_dir(options: Options) -> Check:
    """Whether evidence can be written where the next run would put it."""
    wanted = Path(options.run_dir or RUNS).absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "run dir",
            DEGRADED,
            f"{there} is not writable",
            "nothing: evidence goes to the temporary directory instead",
            "pass --run-dir DIR with a writable directory",
        )
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < 200 << 20:
        return Check(
            "run dir", DEGRADED, f"{there} has {free_bytes >> 20} MB left", "late incidents of a run with many", "free space; a run keeps at most 200 MB"
        )
    return Check("run dir", OK, f"{wanted} ({free_bytes >> 30} GB free)")
