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
    archive_dir: str = ""
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
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
    job_id: str = ""
    textfile_dir: str = ""
    dcgm_job_mapping_dir: str = ""
    log_format: str = "logfmt"
    on_incident: str = ""
    alertmanager: tuple[str, ...] = ()
    alertmanager_credentials: str = ""
    webhook: tuple[str, ...] = ()
    sd_dir: str = ""
    termination_log: str = ""
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
    secret: bool = False  # its value is shown by hidden.py only

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
    Option(
        "archive-dir",
        "archive_dir",
        "DIR",
        "copy the pages of the run and its incidents to DIR/<job>-<run> as well, a folder that is there and shared; with --external-url links lead there, so"
        " that they work after the launcher is gone",
        accepted.run_dir,
    ),
    Option(
        "token-file",
        "token_file",
        "FILE",
        "file with the token that the status page asks for (default: none on loopback; beyond it one is drawn for the run, in RUN_DIR/token)",
        accepted.path,
    ),
    Option("tls-cert", "tls_cert", "FILE", "serve the status page and /metrics by https, with this PEM certificate and its chain", accepted.path),
    Option("tls-key", "tls_key", "FILE", "the certificate's private key, PEM without a passphrase (default: in the file of --tls-cert)", accepted.path),
    Option(
        "tls-client-ca",
        "tls_client_ca",
        "FILE",
        "nobody without a certificate of this CA (PEM) gets any answer, /metrics included; no token is needed then, unless one is given",
        accepted.path,
    ),
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
        "TORCH_NCCL_ENABLE_TIMING for the ranks, unless the job sets it itself: auto (the default: off), on or off; it alone tells which rank's GPU has not"
        " started a collective, how long collectives take and at what bandwidth, for some 15-20 us a collective",
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
    Option(
        "job-id",
        "job_id",
        "ID",
        "what the job is called in metrics and files, the same on every node (default: Slurm's job id, else the rendezvous id, else what Kubernetes or Ray"
        " call it, else drawn at random)",
        accepted.job_id,
    ),
    Option(
        "textfile-dir",
        "textfile_dir",
        "DIR",
        "write the metrics into DIR/rankwatch_<job>_<node>.prom too, every 15 s and at the end, for node_exporter's textfile collector; off: not",
        accepted.folder_or_off,
    ),
    Option(
        "dcgm-job-mapping-dir",
        "dcgm_job_mapping_dir",
        "DIR",
        "dcgm-exporter's --hpc-job-mapping-dir: list the job there for its GPUs while it runs, so that DCGM_FI_* carry hpc_job=<job_id>",
        accepted.run_dir,
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
    Option(
        "alertmanager",
        "alertmanager",
        "URL",
        "Alertmanager that is told at once, with or without Prometheus, when a verdict pages: under the labels of the rules, so that both are one alert;"
        " may be repeated, all get it",
        accepted.address,
        "list",
    ),
    Option(
        "alertmanager-credentials", "alertmanager_credentials", "FILE", "file with user:password or a bearer token for it, readable by you alone", accepted.path
    ),
    Option(
        "webhook",
        "webhook",
        "URL",
        "address that gets a JSON object with text and fields (Slack: text alone) when an incident that pages opens, gets worse or ends; may be repeated;"
        " such an address is a secret: put it into RANKWATCH_WEBHOOK or a file rather than on the command line",
        accepted.address,
        "list",
        secret=True,
    ),
    Option(
        "sd-dir",
        "sd_dir",
        "DIR",
        "tell Prometheus of this launcher's /metrics: a file_sd file in DIR, renewed every 30 s and removed at the end; rankwatch targets serves the folder",
        accepted.run_dir,
    ),
    Option(
        "termination-log",
        "termination_log",
        "FILE",
        "write the verdict on a failed job there, at most 4096 bytes (default: /dev/termination-log in a Kubernetes pod; off: nowhere)",
        accepted.path,
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}
