"""Every option of rankwatch: one frozen dataclass of values, and one table of names, accepted values and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwatch.config import accepted

PREFIX = "RANKWATCH_"
RUNS = "rankwatch-runs"
"""The folder below the working directory that holds runs whose directory was not given."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose. `origins` holds a text for each field, and for each `labels.<name>` and `limits.<name>`."""

    run_dir: str | None = None
    run_dir_mode: int = 0o700
    listen: str = "127.0.0.1:27435"
    external_url: str = ""
    token_file: str = ""
    peers: str = ""
    peer_address: str = ""
    stuck_after_s: float | None = None
    on_stuck: str = "observe"
    limits: Mapping[str, float] = field(default_factory=dict)
    no_probe: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    torch_trace: bool = False
    nccl_timing: str = "auto"
    collective_history: str = "auto"
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    metrics_level: str = "auto"
    log_format: str = "logfmt"
    on_incident: str = ""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `shape`: one value, a list of values, a table of names to values (`read_name` checks the names), or a switch: no value as a flag."""

    name: str  # as in the flag and in files: "run-dir"
    field: str
    metavar: str
    help: str
    read: Callable[[Any], Any]
    shape: str = "one"  # one | list | table | switch
    read_name: Callable[[str], str] = accepted.label_name

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace("-", "_")


OPTIONS = (
    Option("run-dir", "run_dir", "DIR", "where the run's files go (default: ./rankwatch-runs/<utc>-<job>)", accepted.run_dir),
    Option("run-dir-mode", "run_dir_mode", "MODE", "permissions of a run directory that rankwatch creates, octal, such as 0750 (default: 0700)", accepted.mode),
    Option(
        "listen",
        "listen",
        "HOST:PORT",
        "status page and /metrics (default: 127.0.0.1:27435, the next free port if it is taken); off: no server",
        accepted.listen,
    ),
    Option("external-url", "external_url", "URL", "address under which people reach the status page, for links", accepted.url),
    Option("token-file", "token_file", "FILE", "file with the token that the status page asks for", accepted.path),
    Option(
        "peers",
        "peers",
        "FILE|LIST",
        "where the launchers of a job of many nodes listen, when they cannot find each other through torchrun's store: HOST:PORT,HOST:PORT,... in the order of"
        " --node-rank, or a file with one a line; the same on every node, with --token-file",
        accepted.path,
    ),
    Option(
        "peer-address",
        "peer_address",
        "HOST[:PORT]",
        "address under which the other nodes reach this launcher, and the port that it listens on (default: torchrun's --local-addr, else the address that"
        " leads to node 0; any free port)",
        accepted.peer_address,
    ),
    Option(
        "stuck-after",
        "stuck_after_s",
        "TIME",
        "call an absent rank stuck after this long: seconds, or a number with s, m or h, such as 90, 90s, 1.5m (default: 20 % of the group's timeout, 5-120 s)",
        accepted.duration,
    ),
    Option(
        "on-stuck",
        "on_stuck",
        "ACTION",
        "observe (the default), or exit: end the workers of a job that cannot heal (certain mismatch, deadlock, a rank gone or stopped for good) once the"
        " evidence is on disk, so that --max-restarts or the scheduler starts them anew",
        accepted.choice("observe", "exit"),
    ),
    Option(
        "limit",
        "limits",
        "NAME=VALUE",
        "set a number of the policy (rankwatch config --limits): notice_s=10; repeatable",
        accepted.limit,
        "table",
        accepted.limit_name,
    ),
    Option("no-probe", "no_probe", "NAME", "switch a probe off: " + ", ".join(accepted.PROBES) + "; may be repeated", accepted.probe, "list"),
    Option(
        "probe",
        "probe",
        "NAME",
        "switch on a probe that is off by default: numerics (non-finite losses and gradients; parameters that differ between DDP replicas;"
        " costs some 0.4 % of a small model's CPU step, and on a GPU looks less often where it would take more than 0.5 % of the host's time);"
        " numerics=STEPS looks every STEPS-th step (50)",
        accepted.more_probe,
        "list",
    ),
    Option(
        "torch-trace",
        "torch_trace",
        "",
        "let every rank write torch's structured trace (TORCH_TRACE) into RUN_DIR/torch_trace, for rankwatch compile --tlparse; no measurable"
        " compile time, 0.1 MB and more a compiled block and rank, beyond the run's 200 MB",
        accepted.switch,
        "switch",
    ),
    Option(
        "nccl-timing",
        "nccl_timing",
        "WHEN",
        "TORCH_NCCL_ENABLE_TIMING for the ranks, unless the job sets it itself: auto (the default: on), on or off; it alone tells which rank's GPU has not"
        " started a collective, how long collectives take and at what bandwidth, for some 15 us a collective issued back to back",
        accepted.choice("auto", "on", "off"),
    ),
    Option(
        "collective-history",
        "collective_history",
        "WHEN",
        "read what torch's recorder holds regularly and not only when ranks wait: auto (the default: gloo, and NCCL from torch 2.14 on, before which a read"
        " may meet an operation that is being freed), on or off; it shows calls that do not match, stragglers and bandwidth",
        accepted.choice("auto", "on", "off"),
    ),
    Option("label", "labels", "K=V", "label of the run, in files, metrics and notices, such as team=vision; may be repeated", accepted.text, "table"),
    Option("owner", "owner", "NAME", "who to ask about this run", accepted.text),
    Option(
        "metrics-level",
        "metrics_level",
        "LEVEL",
        "how many series: auto (the default: low above 2,048 ranks), low, default or full",
        accepted.choice("auto", "low", "default", "full"),
    ),
    Option("log-format", "log_format", "FORMAT", "lines on stderr: logfmt (the default) or json", accepted.choice("logfmt", "json")),
    Option(
        "on-incident",
        "on_incident",
        "CMD",
        "shell command to run when an incident opens, escalates or closes (RANKWATCH_CHANGE=opened|escalated|closed); its JSON is on stdin;"
        " ended after 30 s, also where the job ends before it",
        accepted.text,
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}
