"""The environment that turns the children of one start of the workers into watched ranks. Pure: environment in, changes out."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from rankwatch.monitor.workers import switched_on
from rankwatch.wire import env as names

RECORDER_ENTRIES = "2000"
RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Two names of one setting: whichever the user set speaks for both. torch 2.9 and 2.10 record nothing on gloo unless it is set."""
TIMING_VARIABLES = ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING")
"""Two names of one setting, as above (torch 2.9-2.14, ProcessGroupNCCL.hpp)."""
TIMING_BY_DEFAULT = False
"""Without it nothing tells whose GPU is blocked, but the bar of 0.5 % was not shown to hold with it. H200, torch 2.11 (tests/gpu/results/overhead-*.md): a step
of 21 ms with 20 collectives took x 1.044 (0.981-1.100) with it and x 1.014 (0.995-1.027) without; a 1 MiB all_reduce in a loop 46 us instead of 31."""
OLD_NAME_UNTIL = (2, 11)
"""From this torch on the second name earns the user a deprecation warning in every rank (seen on 2.13)."""


@dataclass(frozen=True, slots=True)
class Injection:
    """What to change in os.environ for the children: `set` holds final values, `unset` names to remove."""

    set: Mapping[str, str]
    unset: tuple[str, ...] = ()

    def apply(self, environ: MutableMapping[str, str]) -> Mapping[str, str | None]:
        """Change `environ`; returns what `restore` needs to undo it."""
        before = {name: environ.get(name) for name in (*self.set, *self.unset)}
        environ.update(self.set)
        for name in self.unset:
            environ.pop(name, None)
        return before


def restore(environ: MutableMapping[str, str], before: Mapping[str, str | None]) -> None:
    """Undo `Injection.apply`."""
    for name, value in before.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def inject(
    environ: Mapping[str, str],
    *,
    package_dir: str,
    launcher_pid: int,
    attempt: int,
    slot_dir: str | None,
    ptrace_scope: int | None = None,
    no_probes: tuple[str, ...] = (),
    more_probes: tuple[str, ...] = (),
    trace_dir: str | None = None,
    torch_version: tuple[int, int] = OLD_NAME_UNTIL,
    nccl_timing: str = "auto",
) -> Injection:
    """The changes for one attempt. package_dir: folder of the package `rankwatch`. slot_dir None: the ranks run unwatched.

    nccl_timing: "auto" goes by TIMING_BY_DEFAULT.
    trace_dir: where each rank's agent sets TORCH_TRACE to a folder of its own, unless the user has set TORCH_TRACE.

    A launcher may itself run inside a rank of another rankwatch: that one's variables (a claim above all) must not reach our ranks.
    A user's TORCH_* and NCCL_* values are never changed.
    """
    wanted = {
        names.AGENT_DIR: package_dir,
        names.LAUNCHER_PID: str(launcher_pid),
        names.ATTEMPT: str(attempt),
        "PYTHONPATH": _python_path(environ, package_dir),
    }
    if slot_dir is not None:
        wanted[names.SLOT_DIR] = slot_dir
    if ptrace_scope == 1:
        wanted[names.PTRACE_OPT_IN] = "1"
    if no_probes:
        wanted[names.NO_PROBES] = ",".join(no_probes)
    if more_probes:
        wanted[names.MORE_PROBES] = ",".join(more_probes)
    if trace_dir is not None:
        wanted[names.TRACE_DIR] = trace_dir
    if not any(name in environ for name in RECORDER_VARIABLES):
        names_known = RECORDER_VARIABLES if torch_version < OLD_NAME_UNTIL else RECORDER_VARIABLES[:1]
        wanted.update(dict.fromkeys(names_known, RECORDER_ENTRIES))
    if (nccl_timing == "on" or (nccl_timing == "auto" and TIMING_BY_DEFAULT)) and not any(name in environ for name in TIMING_VARIABLES):
        wanted[TIMING_VARIABLES[0]] = "1"
    unset = [name for name in names.RANK_VARIABLES if name in environ and name not in wanted]
    outer = environ.get(names.TRACE_DIR)
    if outer and environ.get(names.TORCH_TRACE, "").startswith(outer):
        unset.append(names.TORCH_TRACE)  # of the rank that this launcher runs in, not the user's
    return Injection(wanted, tuple(unset))


def recorder_off(environ: Mapping[str, str]) -> str:
    """`off (TORCH_FR_BUFFER_SIZE=0 is set in the job's environment)`, "" where torch's recorder works. torch goes by the first name that is set."""
    name = next((name for name in RECORDER_VARIABLES if name in environ), "")
    try:
        off = bool(name) and int(environ[name]) <= 0
    except ValueError:
        return ""  # torch says what it thinks of it
    return f"off ({name}={environ[name].strip()} is set in the job's environment)" if off else ""


def nccl_timing_on(environ: Mapping[str, str]) -> bool:
    """Whether NCCL's recorder tells starts and durations in ranks with this environment; torch goes by the first name that is set."""
    return switched_on(next((environ[name] for name in TIMING_VARIABLES if name in environ), ""))


def site_dir(package_dir: str) -> str:
    """The only folder of ours that enters PYTHONPATH: it holds sitecustomize.py and nothing else."""
    return os.path.join(package_dir, "agent", "site")


def _python_path(environ: Mapping[str, str], package_dir: str) -> str:
    ours = site_dir(package_dir)
    outer = environ.get(names.AGENT_DIR)
    drop = {ours, site_dir(outer)} if outer else {ours}
    old = environ.get("PYTHONPATH")
    if not old:
        return ours
    # an empty part means the working directory: the user's, to keep
    return os.pathsep.join([ours, *(part for part in old.split(os.pathsep) if part not in drop)])


def two_numbers(version: str) -> tuple[int, int] | None:
    """(2, 13) of "2.13.0+cpu"; None for a version that does not begin so."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return None
