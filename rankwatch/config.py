"""Every option of rankwatch: one frozen dataclass, and where each value comes from.

Later wins: default, /etc/rankwatch/config.toml, ~/.config/rankwatch/config.toml, ./rankwatch.toml, the file named by $RANKWATCH_CONFIG,
RANKWATCH_<NAME> in the environment, the command line. Lists are replaced as a whole; `label` and `limit` are merged name by name.
OPTIONS is the one table of names, accepted values and help; cli.py makes the flags from it, `rankwatch config` the listing.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rankwatch.wire.env import RANK_VARIABLES

PREFIX = "RANKWATCH_"
CONFIG_VARIABLE = "RANKWATCH_CONFIG"
PROBES = ("compile", "ddp", "cudagraph", "steps", "collectives")
DEFAULT = "default"
COMMAND_LINE = "command line"

_INTERNAL = frozenset((*RANK_VARIABLES, CONFIG_VARIABLE))
_MAX_FILE_BYTES = 1 << 20
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class ConfigError(ValueError):
    """A value that no option accepts. The text names the file, variable or flag, the key, the value and what is accepted."""


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
        if match:
            return float(match[1]) * _UNIT_S[match[2]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    raise ValueError("seconds, or a number with s, m or h, such as 90, 90s, 1.5m")


def _duration(value: Any) -> float:
    result = seconds(value)
    if result <= 0:
        raise ValueError("a duration above 0, such as 90, 90s, 1.5m")
    return result


def _choice(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(allowed) if len(allowed) == 2 else ", ".join(allowed[:-1]) + f" or {allowed[-1]}")
        return str(value)

    return read


def _probe(value: Any) -> str:
    return _choice(*PROBES)(value)


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
    """One option. `shape`: one value, a list of values, or a table of names to values (`read_name` checks the names)."""

    name: str  # as in the flag and in files: "run-dir"
    field: str
    metavar: str
    help: str
    read: Callable[[Any], Any]
    shape: str = "one"  # one | list | table
    read_name: Callable[[str], str] = _label_name

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace("-", "_")


OPTIONS = (
    Option("run-dir", "run_dir", "DIR", "where the run's files go (default: ./rankwatch-runs/<utc>-<job>)", _run_dir),
    Option("run-dir-mode", "run_dir_mode", "MODE", "permissions of a run directory that rankwatch creates", _mode),
    Option("listen", "listen", "HOST:PORT", "status page and /metrics; the next free port if it is taken; off: no server", _listen),
    Option("external-url", "external_url", "URL", "address under which people reach the status page, for links", _url),
    Option("token-file", "token_file", "FILE", "file with the token that the status page asks for", _path),
    Option("stuck-after", "stuck_after_s", "TIME", "call an absent rank stuck after this long (default: 20 % of the group's timeout, 5-120 s)", _duration),
    Option(
        "on-stuck",
        "on_stuck",
        "ACTION",
        "observe, or exit: end the workers of a job that cannot heal (certain mismatch, deadlock, a rank gone or stopped for good) once the"
        " evidence is on disk, so that --max-restarts or the scheduler starts them anew",
        _choice("observe", "exit"),
    ),
    Option("limit", "limits", "NAME=VALUE", "set a number of the policy (rankwatch config --limits): notice_s=10; repeatable", seconds, "table", _limit_name),
    Option("no-probe", "no_probe", "NAME", "switch a probe in the ranks off: " + ", ".join(PROBES) + "; may be repeated", _probe, "list"),
    Option("label", "labels", "K=V", "label of the run, in files, metrics and notices; may be repeated", _text, "table"),
    Option("owner", "owner", "NAME", "who to ask about this run", _text),
    Option("metrics-level", "metrics_level", "LEVEL", "how many series: auto, low, default or full", _choice("auto", "low", "default", "full")),
    Option("log-format", "log_format", "FORMAT", "lines on stderr: logfmt or json", _choice("logfmt", "json")),
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
) -> Options:
    """All layers joined. command_line: (option name, raw value) in the order given. files: instead of the standard places.

    ConfigError for a value that is not accepted, and for a $RANKWATCH_CONFIG that cannot be read. An unknown key in a file and an unknown
    RANKWATCH_ name are warnings: a file may be older or newer than this rankwatch, and must not stop a job.
    """
    layers = _Layers()
    for path in config_files() if files is None else files:
        _add_file(layers, path, must_exist=False)
    if environ.get(CONFIG_VARIABLE):
        _add_file(layers, environ[CONFIG_VARIABLE], must_exist=True)
    _add_environment(layers, environ)
    _add_command_line(layers, command_line)
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
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return re.sub(r"(https?://)[^/@\s]+@", r"\1***@", str(value))


class _Layers:
    """Values seen so far, each with its origin."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def set(self, option: Option, raw: Any, origin: str) -> None:
        """One layer's value for `option`; a table is merged into what is there."""
        if option.shape == "table":
            if not isinstance(raw, Mapping):
                raise _refused(option, raw, origin, f"a table of {option.metavar}")
            table = dict(self.values.get(option.field, {}))
            for name, value in raw.items():
                try:
                    table[option.read_name(name)] = option.read(value)
                except ValueError as error:
                    raise _refused(option, f"{name}={value}", origin, str(error)) from None
                self.origins[f"{option.field}.{name}"] = origin
            self.values[option.field] = table
        elif option.shape == "list":
            if isinstance(raw, str) or not isinstance(raw, Sequence):
                raise _refused(option, raw, origin, f"a list of {option.metavar}")
            self.values[option.field] = tuple(self._read(option, item, origin) for item in raw)
        else:
            self.values[option.field] = self._read(option, raw, origin)
        self.origins[option.field] = origin

    def options(self) -> Options:
        names = [f.name for f in fields(Options) if f.name not in ("origins", "warnings")]
        origins = {**dict.fromkeys(names, DEFAULT), **self.origins}
        return Options(**self.values, origins=origins, warnings=tuple(self.warnings))

    def _read(self, option: Option, raw: Any, origin: str) -> Any:
        try:
            return option.read(raw)
        except ValueError as error:
            raise _refused(option, raw, origin, str(error)) from None


def _refused(option: Option, raw: Any, origin: str, accepted: str) -> ConfigError:
    place = option.flag if origin == COMMAND_LINE else origin if origin == option.variable else f"{origin}: {option.name}"
    return ConfigError(f"{place}: {raw!r} is not accepted; it takes {accepted}")


def _add_file(layers: _Layers, path: str, must_exist: bool) -> None:
    try:
        raw = _read(path, anybodys=must_exist or os.path.isabs(path))
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise ConfigError(f"{CONFIG_VARIABLE} names {path!r}, which does not exist; correct the path or unset {CONFIG_VARIABLE}") from None
        return
    except OSError as error:
        if must_exist:
            raise ConfigError(f"{CONFIG_VARIABLE}: {path!r} cannot be read ({error.strerror}); correct it or unset {CONFIG_VARIABLE}") from None
        layers.warnings.append(f"{path} is not used: it cannot be read ({error.strerror})")
        return
    if raw is None:
        layers.warnings.append(f"./{path} is not used: it belongs to another user or others may write it; chmod go-w, or set {CONFIG_VARIABLE}=./{path}")
        return
    for key, value in _parse_toml(path, raw).items():
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
        raise ConfigError(f"{path}: files need Python 3.11 or newer; use RANKWATCH_<NAME> variables or flags, or move the file away") from None
    try:
        parsed: dict[str, Any] = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    return parsed


def _add_environment(layers: _Layers, environ: Mapping[str, str]) -> None:
    for option in OPTIONS:
        raw = environ.get(option.variable)
        if raw is None or raw == "":
            continue
        if option.shape == "one":
            layers.set(option, raw, option.variable)
        else:
            words = [word.strip() for word in raw.split(",") if word.strip()]
            layers.set(option, words if option.shape == "list" else _pairs(option, words, option.variable), option.variable)
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
        if option.shape == "one":
            layers.set(option, raws[-1], COMMAND_LINE)
        elif option.shape == "list":
            layers.set(option, [word for raw in raws for word in raw.split(",") if word], COMMAND_LINE)
        else:
            layers.set(option, _pairs(option, raws, COMMAND_LINE), COMMAND_LINE)


def _pairs(option: Option, words: Sequence[str], origin: str) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise _refused(option, word, origin, option.metavar)
        pairs[name.strip()] = value
    return pairs
