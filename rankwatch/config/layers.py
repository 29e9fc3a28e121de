"""The layers of options joined, each value with its origin; a mistake says file, variable or flag, the key, the value and what is accepted."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from rankwatch.config import accepted, hidden
from rankwatch.config.accepted import ConfigError
from rankwatch.config.files import config_files, parse_toml, read_file
from rankwatch.config.options import BY_NAME, OPTIONS, PREFIX, Option, Options
from rankwatch.redact import HIDDEN
from rankwatch.wire.env import ABLATE_PLAN, RANK_VARIABLES

CONFIG_VARIABLE = "RANKWATCH_CONFIG"
DEFAULT = "default"
COMMAND_LINE = "command line"

_INTERNAL = frozenset((*RANK_VARIABLES, ABLATE_PLAN, CONFIG_VARIABLE))
_SHOWN_CHARS = 200


class LimitTable(Protocol):
    """The policy's table, rankwatch.monitor.policy.Limits: whether a limit of this name and size exists, and whether they fit together."""

    def check(self, name: str, value: float, /) -> None: ...
    def from_options(self, stuck_after_s: float | None, overrides: Mapping[str, float], /) -> object: ...


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
        elif option.secret:
            rows.append((option.name, hidden.listed(_shown(value)) if value else "-", options.origins[option.field]))
        else:
            shown = f"{value:04o}" if option.read is accepted.mode else _shown(value)
            rows.append((option.name, shown, options.origins[option.field]))
    return rows


def _shown(value: Any) -> str:
    if value is None or value == "" or value == () or value == {}:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return hidden.without_password(",".join(value))
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
    given = HIDDEN if option.secret else hidden.without_password(_as_given(raw))
    return ConfigError(f"{place(option.name, origin)}: {given} is not accepted; it takes {accepted}")


def _as_given(raw: Any) -> str:
    """The value as it stands there; its beginning where it is long, its kind where Python will not print it (a number of 5000 digits)."""
    try:
        text = repr(raw)
    except (ValueError, RecursionError):
        return f"a huge {type(raw).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def place(name: str, origin: str) -> str:
    """Where an option's value stands: `--listen`, `RANKWATCH_LISTEN` or `/etc/rankwatch/config.toml: listen`."""
    option = BY_NAME[name]
    return option.flag if origin == COMMAND_LINE else origin if origin == option.variable else f"{origin}: {option.name}"


def _add_file(layers: _Layers, path: str, must_exist: bool) -> None:
    try:
        raw = read_file(path, anybodys=must_exist or os.path.isabs(path))
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
        parsed = parse_toml(path, raw)
    except ConfigError as error:
        layers.warnings.append(str(error))
        return
    for key, value in parsed.items():
        option = BY_NAME.get({"labels": "label", "limits": "limit"}.get(key, key.replace("_", "-")))
        if option is None:
            layers.warnings.append(f"{path}: unknown key {key!r} is ignored{nearest(key, tuple(BY_NAME))}")
        else:
            layers.set(option, _listed(value) if option.shape == "list" and isinstance(value, str) else value, path)


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _add_environment(layers: _Layers, environ: Mapping[str, str]) -> None:
    for option in OPTIONS:
        raw = environ.get(option.variable)
        if raw is None or raw == "":
            continue
        if option.shape in ("one", "switch"):
            layers.set(option, raw, option.variable)
        else:
            words = _listed(raw)
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
        option = BY_NAME[name]
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
