"""Every option of rankwatch, and where each value comes from.

Later wins: default, /etc/rankwatch/config.toml, ~/.config/rankwatch/config.toml, ./rankwatch.toml, the file named by $RANKWATCH_CONFIG,
RANKWATCH_<NAME> in the environment, the command line. Lists are replaced as a whole; `label` and `limit` are merged name by name.
OPTIONS is the one table of names, accepted values and help; cli.py makes the flags from it, `rankwatch config` the listing.

A mistake on the command line is an error. One in a file or a variable is a warning and its value is ignored: a file of the platform must not
stop every job.
"""

from __future__ import annotations

from rankwatch.config.accepted import PROBES, ConfigError, seconds
from rankwatch.config.files import config_files
from rankwatch.config.layers import COMMAND_LINE, CONFIG_VARIABLE, DEFAULT, describe, load, nearest, place
from rankwatch.config.options import OPTIONS, RUNS, Options

__all__ = [
    "COMMAND_LINE",
    "CONFIG_VARIABLE",
    "DEFAULT",
    "OPTIONS",
    "PROBES",
    "RUNS",
    "ConfigError",
    "Options",
    "config_files",
    "describe",
    "load",
    "nearest",
    "place",
    "seconds",
]
