"""Every option of rankwatch: one frozen dataclass, and where each value comes from.

Later wins: default, /etc/rankwatch/config.toml, ~/.config/rankwatch/config.toml, ./rankwatch.toml, the file named by $RANKWATCH_CONFIG,
RANKWATCH_<NAME> in the environment, the command line. Lists are replaced as a whole; `label` and `limit` are merged name by name.
OPTIONS is the one table of names, accepted values and help; cli.py makes the flags from it, `rankwatch config` the listing.

A mistake on the command line is an error. One in a file or a variable is a warning and its value is ignored: a file of the platform must not
stop every job.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from rankwatch.wire.env import ABLATE_PLAN, RANK_VARIABLES

PREFIX = "RANKWATCH_"
CONFIG_VARIABLE = "RANKWATCH_CONFIG"
PROBES = ("compile", "ddp", "cudagraph", "steps", "collectives")
MORE_PROBES = ("numerics",)
DEFAULT = "default"
COMMAND_LINE = "command line"

_INTERNAL = frozenset((*RANK_VARIABLES, ABLATE_PLAN, CONFIG_VARIABLE))
_MAX_FILE_BYTES = 1 << 20
_LONGEST_S = 1e12  # 30,000 years; what is longer is a slip, or no float any more
_SHOWN_CHARS = 200
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class ConfigError(ValueError):
    """A value that no option accepts. The text names the file, variable or flag, the key, the value and what is accepted."""


class LimitTable(Protocol):
    """The policy's table, rankwatch.monitor.policy.Limits: whether a limit of this name and size exists, and whether they fit together."""

    def check(self, name: str, value: float, /) -> None: ...
    def from_options(self, stuck_after_s: float | None, overrides: Mapping[str, float], /) -> object: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose. `origins` holds a text for each field, and for each `labels.<name>` and `limits.<name>`."""

    run_dir: str | None = None
    run_dir_mode: int = 0o700
    listen: str = "127.0.0.1:27435"
    external_url: str = ""
    token_file: str = ""
    stuck_after_s: float | None = None
    on_stuck: str = "observe"
    limits: Mapping[str, float] = field(default_factory=dict)
    no_probe: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    torch_trace: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    metrics_level: str = "auto"
    log_format: str = "logfmt"
    on_incident: str = ""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)


# -- what each option accepts: a reader of one raw value (a string, or what TOML gives), raising ValueError with what is accepted --------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a path")
    return value


def _run_dir(value: Any) -> str:
    path = _path(value)
    if path.startswith("~") and os.path.expanduser(path) == path:
        user = path[1:].partition("/")[0]
        why = f"there is no user {user!r} here" if user else "this user has no home directory"
        raise ValueError(f"a path, and {why}; a folder of that very name is ./{path}")
    return path


def _mode(value: Any) -> int:
    accepted = "octal permissions that keep the owner's rwx, such as 0700 or 0750"
    if isinstance(value, str) and re.fullmatch(r"(0o|0)?[0-7]{3}", value):
        value = int(value.removeprefix("0o"), 8)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0o777 or value & 0o700 != 0o700:
        raise ValueError(accepted)
    return value


def _listen(value: Any) -> str:
    accepted = "HOST:PORT such as 127.0.0.1:27435 or [::1]:27435, or off"
    if not isinstance(value, str):
        raise ValueError(accepted)
    if value == "off":
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(accepted)
    bracketed = host.startswith("[") and host.endswith("]")
    if any(c.isspace() or c in "/@" for c in host) or (":" in host and not bracketed):
        raise ValueError(accepted)
    return value


def _url(value: Any) -> str:
    if not isinstance(value, str) or (value and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value)):
        raise ValueError("an address that starts with http:// or https://")
    return value


def seconds(value: Any) -> float:
    """A duration: a number of seconds, or a text such as 90, 90s, 1.5m, 2h. ValueError says what is accepted."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)", value.strip())
        if match and (found := float(match[1]) * _UNIT_S[match[2]]) <= _LONGEST_S:
            return found
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LONGEST_S:
        return float(value)
    raise ValueError("seconds, or a number with s, m or h, such as 90, 90s, 1.5m")


def _duration(value: Any) -> float:
    result = seconds(value)
    if result <= 0:
        raise ValueError("a duration above 0, such as 90, 90s, 1.5m")
    return result


def _limit(value: Any) -> float:
    """A number or a duration; what is negative is read too, for the table's own words on it."""
    if isinstance(value, str) and value.strip().startswith("-"):
        return -seconds(value.strip()[1:])
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return -seconds(-value)
    return value if isinstance(value, float) else seconds(value)


def _choice(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(allowed) if len(allowed) == 2 else ", ".join(allowed[:-1]) + f" or {allowed[-1]}")
        return str(value)

    return read


def _probe(value: Any) -> str:
    return _choice(*PROBES)(value)


def _more_probe(value: Any) -> str:
    name, equals, number = str(value).partition("=")
    if name not in MORE_PROBES or (equals and not (number.isascii() and number.isdigit() and 0 < int(number) <= 1_000_000)):
        raise ValueError(f"{' or '.join(MORE_PROBES)}, also as NAME=STEPS: look at every STEPS-th step")
    return str(value)


def _switch(value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in known:
        raise ValueError("true or false")
    return known[value.lower()]


def _label_name(name: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
        raise ValueError("K=V with K of letters, digits and _ that does not begin with a digit or __")
    return name


def _limit_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError("NAME=VALUE with a name of the policy table, such as notice_s=10")
    return name


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `shape`: one value, a list of values, a table of names to values (`read_name` checks the names), or a switch: no value as a flag."""

    name: str  # as in the flag and in files: "run-dir"
    field: str
    metavar: str
    help: str
    read: Callable[[Any], Any]
    shape: str = "one"  # one | list | table | switch
    read_name: Callable[[str], str] = _label_name

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace("-", "_")


OPTIONS = (
    Option("run-dir", "run_dir", "DIR", "where the run's files go (default: ./rankwatch-runs/<utc>-<job>)", _run_dir),
    Option("run-dir-mode", "run_dir_mode", "MODE", "permissions of a run directory that rankwatch creates, octal, such as 0750 (default: 0700)", _mode),
    Option("listen", "listen", "HOST:PORT", "status page and /metrics (default: 127.0.0.1:27435, the next free port if it is taken); off: no server", _listen),
    Option("external-url", "external_url", "URL", "address under which people reach the status page, for links", _url),
    Option("token-file", "token_file", "FILE", "file with the token that the status page asks for", _path),
    Option(
        "stuck-after",
        "stuck_after_s",
        "TIME",
        "call an absent rank stuck after this long: seconds, or a number with s, m or h, such as 90, 90s, 1.5m (default: 20 % of the group's timeout, 5-120 s)",
        _duration,
    ),
    Option(
        "on-stuck",
        "on_stuck",
        "ACTION",
        "observe (the default), or exit: end the workers of a job that cannot heal (certain mismatch, deadlock, a rank gone or stopped for good) once the"
        " evidence is on disk, so that --max-restarts or the scheduler starts them anew",
        _choice("observe", "exit"),
    ),
    Option("limit", "limits", "NAME=VALUE", "set a number of the policy (rankwatch config --limits): notice_s=10; repeatable", _limit, "table", _limit_name),
    Option("no-probe", "no_probe", "NAME", "switch a probe in the ranks off: " + ", ".join(PROBES) + "; may be repeated", _probe, "list"),
    Option(
        "probe",
        "probe",
        "NAME",
        "switch on a probe that is off by default: numerics (non-finite losses and gradients; parameters that differ between DDP replicas;"
        " costs some 0.4 % of a small model's CPU step, and on a GPU looks less often where it would take more than 0.5 % of the host's time);"
        " numerics=STEPS looks every STEPS-th step (50)",
        _more_probe,
        "list",
    ),
    Option(
        "torch-trace",
        "torch_trace",
        "",
        "let every rank write torch's structured trace (TORCH_TRACE) into RUN_DIR/torch_trace, for rankwatch compile --tlparse; no measurable"
        " compile time, 0.1 MB and more a compiled block and rank, beyond the run's 200 MB",
        _switch,
        "switch",
    ),
    Option("label", "labels", "K=V", "label of the run, in files, metrics and notices, such as team=vision; may be repeated", _text, "table"),
    Option("owner", "owner", "NAME", "who to ask about this run", _text),
    Option(
        "metrics-level",
        "metrics_level",
        "LEVEL",
        "how many series: auto (the default: low above 2,048 ranks), low, default or full",
        _choice("auto", "low", "default", "full"),
    ),
    Option("log-format", "log_format", "FORMAT", "lines on stderr: logfmt (the default) or json", _choice("logfmt", "json")),
    Option(
        "on-incident",
        "on_incident",
        "CMD",
        "shell command to run when an incident opens, escalates or closes (RANKWATCH_CHANGE=opened|escalated|closed); its JSON is on stdin;"
        " ended after 30 s, also where the job ends before it",
        _text,
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


def load(
    command_line: Sequence[tuple[str, str]] = (),
    environ: Mapping[str, str] = os.environ,
    files: Sequence[str] | None = None,
    limits: LimitTable | None = None,
) -> Options:
    """All layers joined. command_line: (option name, raw value) in the order given. files: instead of the standard places.

    limits: checks the names and sizes of `--limit`. ConfigError for a value of the command line that is not accepted; what is wrong in a file or
    a variable - a value, an unknown key, a file that cannot be read - is a warning.
    """
    layers = _Layers(limits)
    for path in config_files() if files is None else files:
        _add_file(layers, path, must_exist=False)
    if environ.get(CONFIG_VARIABLE):
        _add_file(layers, environ[CONFIG_VARIABLE], must_exist=True)
    _add_environment(layers, environ)
    _add_command_line(layers, command_line)
    layers.settle_limits()
    return layers.options()


def config_files() -> tuple[str, ...]:
    """The standard places, weakest first."""
    return ("/etc/rankwatch/config.toml", os.path.join(os.path.expanduser("~"), ".config", "rankwatch", "config.toml"), "rankwatch.toml")


def nearest(name: str, known: Sequence[str]) -> str:
    """` (did you mean X?)`, or "" when nothing is near."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {match[0]}?)" if match else ""


def describe(options: Options) -> list[tuple[str, str, str]]:
    """(option name, value as text, origin) in the order of OPTIONS; tables give one row a name."""
    rows = []
    for option in OPTIONS:
        value = getattr(options, option.field)
        if option.shape == "table" and value:
            rows += [(f"{option.name} {name}", _shown(value[name]), options.origins[f"{option.field}.{name}"]) for name in sorted(value)]
        else:
            shown = f"{value:04o}" if option.read is _mode else _shown(value)
            rows.append((option.name, shown, options.origins[option.field]))
    return rows


def _shown(value: Any) -> str:
    if value is None or value == "" or value == () or value == {}:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return re.sub(r"(https?://)[^/@\s]+@", r"\1***@", str(value))


class _Layers:
    """Values seen so far, each with its origin."""

    def __init__(self, limits: LimitTable | None) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self._limits = limits

    def set(self, option: Option, raw: Any, origin: str) -> None:
        """One layer's value for `option`; a table is merged into what is there. Of tables and lists the good items count."""
        if option.shape == "table":
            if not isinstance(raw, Mapping):
                return self.refuse(_refused(option, raw, origin, f"a table of {option.metavar}"), origin)
            table = self.values.setdefault(option.field, {})
            for name, value in raw.items():
                try:
                    table[name] = self._item(option, name, value, origin)
                    self.origins[f"{option.field}.{name}"] = self.origins[option.field] = origin
                except ConfigError as error:
                    self.refuse(error, origin)
            return None
        if option.shape == "list" and (isinstance(raw, str) or not isinstance(raw, Sequence)):
            return self.refuse(_refused(option, raw, origin, f"a list of {option.metavar}"), origin)
        found = []
        for item in raw if option.shape == "list" else (raw,):
            try:
                found.append(option.read(item))
            except ValueError as error:
                self.refuse(_refused(option, item, origin, str(error)), origin)
        if found or (option.shape == "list" and not raw):
            self.values[option.field] = tuple(found) if option.shape == "list" else found[0]
            self.origins[option.field] = origin
        return None

    def refuse(self, error: ConfigError, origin: str) -> None:
        """A mistake: it ends the command where the command line holds it, else it is said and the value that was there before stays."""
        if origin == COMMAND_LINE:
            raise error
        self.warnings.append(f"{error}; it is ignored: correct it there, `rankwatch config` shows what holds instead")

    def settle_limits(self) -> None:
        """Limits that contradict each other: what files and variables say gives way to the command line, and both to the defaults."""
        while self._limits is not None:
            table, stuck_after_s = self.values.get("limits", {}), self.values.get("stuck_after_s")
            try:
                self._limits.from_options(stuck_after_s, table)
                return
            except ValueError as error:
                weak = next((name for name in table if name in str(error) and self.origins[f"limits.{name}"] != COMMAND_LINE), None)
                if weak is not None:
                    del table[weak]
                    origin, what = self.origins.pop(f"limits.{weak}"), f"limit {weak}"
                    if not table:
                        self.origins.pop("limits")
                elif stuck_after_s is not None and self.origins["stuck_after_s"] != COMMAND_LINE:
                    del self.values["stuck_after_s"]
                    origin, what = self.origins.pop("stuck_after_s"), "stuck-after"
                else:
                    raise ConfigError(f"--limit: {error}; give both, or neither") from None
                self.refuse(ConfigError(f"{origin}: {what}: {error}"), origin)

    def options(self) -> Options:
        names = [f.name for f in fields(Options) if f.name not in ("origins", "warnings")]
        origins = {**dict.fromkeys(names, DEFAULT), **self.origins}
        return Options(**self.values, origins=origins, warnings=tuple(self.warnings))

    def _item(self, option: Option, name: str, raw: Any, origin: str) -> Any:
        """The value of one name of a table; a limit also has to be one that the policy knows, within its range."""
        try:
            option.read_name(name)
            value = option.read(raw)
        except ValueError as error:
            raise _refused(option, f"{name}={raw}", origin, str(error)) from None
        try:
            if self._limits is not None and option.field == "limits":
                self._limits.check(name, value)
        except ValueError as error:
            raise ConfigError(f"{place(option.name, origin)}: {f'{name}={raw}'!r} is not accepted; {error}") from None
        return value


def _refused(option: Option, raw: Any, origin: str, accepted: str) -> ConfigError:
    return ConfigError(f"{place(option.name, origin)}: {_as_given(raw)} is not accepted; it takes {accepted}")


def _as_given(raw: Any) -> str:
    """The value as it stands there; its beginning where it is long, its kind where Python will not print it (a number of 5000 digits)."""
    try:
        text = repr(raw)
    except (ValueError, RecursionError):
        return f"a huge {type(raw).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def place(name: str, origin: str) -> str:
    """Where an option's value stands: `--listen`, `RANKWATCH_LISTEN` or `/etc/rankwatch/config.toml: listen`."""
    option = _BY_NAME[name]
    return option.flag if origin == COMMAND_LINE else origin if origin == option.variable else f"{origin}: {option.name}"


def _add_file(layers: _Layers, path: str, must_exist: bool) -> None:
    try:
        raw = _read(path, anybodys=must_exist or os.path.isabs(path))
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            layers.warnings.append(f"{CONFIG_VARIABLE} names {path!r}, which does not exist; correct the path or unset {CONFIG_VARIABLE}")
        return
    except OSError as error:
        layers.warnings.append(f"{path} is not used: it cannot be read ({error.strerror})")
        return
    if raw is None:
        layers.warnings.append(f"./{path} is not used: it belongs to another user or others may write it; chmod go-w, or set {CONFIG_VARIABLE}=./{path}")
        return
    try:
        parsed = _parse_toml(path, raw)
    except ConfigError as error:
        layers.warnings.append(str(error))
        return
    for key, value in parsed.items():
        option = _BY_NAME.get({"labels": "label", "limits": "limit"}.get(key, key.replace("_", "-")))
        if option is None:
            layers.warnings.append(f"{path}: unknown key {key!r} is ignored{nearest(key, tuple(_BY_NAME))}")
        else:
            layers.set(option, value, path)


def _read(path: str, anybodys: bool) -> bytes | None:
    """A regular file's bytes; None for one that is not `anybodys` and that another user owns or may write. Waits for no pipe and no device.

    on-incident is a command: a file that somebody else left in a shared directory must not run as us.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if not anybodys and not _trusted(status):
            return None
        raw = bytearray()
        while chunk := os.read(fd, _MAX_FILE_BYTES + 1 - len(raw)):
            raw += chunk
        if len(raw) > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, "it is larger than 1 MiB")
        return bytes(raw)
    finally:
        os.close(fd)


def _trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _parse_toml(path: str, raw: bytes) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise ConfigError(f"{path} is not used: files need Python 3.11 or newer; use RANKWATCH_<NAME> variables or flags, or move the file away") from None
    try:
        parsed: dict[str, Any] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of a number with 5000 digits, too, and of brackets 5000 deep
        raise ConfigError(f"{path} is not used: it is no TOML file: {error}; correct it, or move it away") from None
    return parsed


def _add_environment(layers: _Layers, environ: Mapping[str, str]) -> None:
    for option in OPTIONS:
        raw = environ.get(option.variable)
        if raw is None or raw == "":
            continue
        if option.shape in ("one", "switch"):
            layers.set(option, raw, option.variable)
        else:
            words = [word.strip() for word in raw.split(",") if word.strip()]
            layers.set(option, words if option.shape == "list" else _pairs(layers, option, words, option.variable), option.variable)
    known = [option.variable for option in OPTIONS]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and name not in _INTERNAL:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
            if near:
                layers.warnings.append(f"{name} is no option of rankwatch and is ignored (did you mean {near[0]}?)")


def _add_command_line(layers: _Layers, command_line: Sequence[tuple[str, str]]) -> None:
    grouped: dict[str, list[str]] = {}
    for name, raw in command_line:
        grouped.setdefault(name, []).append(raw)
    for name, raws in grouped.items():
        option = _BY_NAME[name]
        if option.shape in ("one", "switch"):
            layers.set(option, raws[-1], COMMAND_LINE)
        elif option.shape == "list":
            layers.set(option, [word for raw in raws for word in raw.split(",") if word], COMMAND_LINE)
        else:
            layers.set(option, _pairs(layers, option, raws, COMMAND_LINE), COMMAND_LINE)


def _pairs(layers: _Layers, option: Option, words: Sequence[str], origin: str) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name:
            pairs[name.strip()] = value
        else:
            layers.refuse(_refused(option, word, origin, option.metavar), origin)
    return pairs
