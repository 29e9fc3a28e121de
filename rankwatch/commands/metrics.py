"""`rankwatch metrics`: the catalogue of what /metrics exports, for people, documents and programs."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Sequence

from rankwatch.config import Options
from rankwatch.wire.signals import JOB_STATE_CODES, LEVEL_RANKS, LEVELS, PHASE_CODES, SIGNALS, Signal, exported

SCHEMA = 1
WIDTH = 120
SCOPES = {"R": "rank", "N": "node", "J": "job"}
STABILITIES = ("stable", "experimental")
_AUTO = ", ".join(f"{name} up to {ranks:,} ranks" for name, ranks in LEVEL_RANKS)
EPILOG = f"""\
Every series carries job_id; the labels shown come beside it. per: one series a rank, a node or a job, times the other labels; those of the job
come from the launcher that judges it. level: the smallest --metrics-level that exports it; auto takes {_AUTO},
low above. The names of stable metrics change only with a major version.

examples:
  rankwatch metrics --describe --level low
  rankwatch metrics --describe --format json | jq -r '.metrics[].name'

Exit codes: 0 shown, 2 wrong usage.
"""


def main(argv: Sequence[str], _options: Options) -> int:
    """0: shown; 2: wrong usage."""
    parser = argparse.ArgumentParser(
        prog="rankwatch metrics",
        description="Print the catalogue of metrics: name, type, unit, labels, level, meaning, source, stable or experimental.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--describe", action="store_true", help="print the catalogue, which is what happens without it too")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="how (default: %(default)s)")
    parser.add_argument("--level", choices=LEVELS, default=LEVELS[-1], help="only what this level exports (default: %(default)s)")
    parser.add_argument("--stability", choices=STABILITIES, help="only these")
    arguments = parser.parse_args(argv)
    names = exported(arguments.level)
    chosen = [signal for signal in SIGNALS if signal.name in names and arguments.stability in (None, signal.stability)]
    print({"text": text, "markdown": markdown, "json": as_json}[arguments.format](chosen), end="")
    return 0


def text(signals: Iterable[Signal]) -> str:
    """Two lines or more a metric: what it is, what it means."""
    lines = []
    for signal in signals:
        words = (signal.type, signal.unit, f"per {SCOPES[signal.scope]}", signal.level, signal.stability, f"from {signal.source}")
        lines.append(f"{_series(signal)}  {', '.join(word for word in words if word)}")
        lines += textwrap.wrap(signal.help, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "".join(f"{line}\n" for line in lines)


def markdown(signals: Iterable[Signal]) -> str:
    """A table with a row a metric."""
    rows = ["| metric | per | level | meaning |", "|---|---|---|---|"]
    for signal in signals:
        mark = " (experimental)" if signal.stability == "experimental" else ""
        rows.append(f"| `{_series(signal)}` | {SCOPES[signal.scope]} | {signal.level} | {signal.help.replace('|', chr(92) + '|')}{mark} |")
    return "".join(f"{row}\n" for row in rows)


def as_json(signals: Iterable[Signal]) -> str:
    """{"schema", "labels": those of every series, "phases", "job_states": name -> code, "metrics": [a row as an object]}. Keys are only ever added."""
    document = {
        "schema": SCHEMA,
        "labels": ["job_id"],
        "phases": PHASE_CODES,
        "job_states": JOB_STATE_CODES,
        "metrics": [{**signal._asdict(), "labels": list(signal.labels), "scope": SCOPES[signal.scope]} for signal in signals],
    }
    return json.dumps(document, indent=1) + "\n"


def _series(signal: Signal) -> str:
    return f"{signal.name}{{{','.join(signal.labels)}}}" if signal.labels else signal.name
