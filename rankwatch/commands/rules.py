"""`rankwatch rules export`: the alert rules, with a site's labels, severities and links, on stdout."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

from rankwatch.cli import fail
from rankwatch.commands.alerts import document, yaml_text
from rankwatch.commands.alerts.table import SEVERITIES
from rankwatch.config import Options, accepted

FLAGS = ("--label",)
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
_METADATA = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DURATION = re.compile(r"[1-9][0-9]*[smhd]")
EPILOG = f"""\
severities:
{chr(10).join(f"  {name:8}  {meaning}" for name, meaning in SEVERITIES.items())}

examples:
  rankwatch rules export > /etc/prometheus/rules/rankwatch.yaml
  rankwatch rules export --severity-map critical=page,warning=chat --runbook-base https://wiki.example/rankwatch
  rankwatch rules export --format k8s --metadata-label release=prometheus | kubectl apply -n monitoring -f -

Prometheus 2.42 or newer. promtool check rules FILE checks what comes out.
Exit codes: 0 written, 2 wrong usage.
"""


def main(argv: Sequence[str], _options: Options) -> int:
    """0: written; 2: wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        severities = _pairs("--severity-map", arguments.severity_map.split(",") if arguments.severity_map else (), _severity)
        labels = _pairs("--label", arguments.label, _label)
        metadata = _pairs("--metadata-label", arguments.metadata_label, _metadata)
        links = {flag: _address(flag, given) for flag, given in (("--runbook-base", arguments.runbook_base), ("--grafana-url", arguments.grafana_url))}
        if not _DURATION.fullmatch(arguments.hold):
            raise ValueError(f"--hold {arguments.hold!r} is no duration of Prometheus such as 90s, 10m or 1h")
        if metadata and arguments.format != "k8s":
            raise ValueError("--metadata-label belongs to --format k8s")
    except ValueError as error:
        return fail(str(error))
    settings = document.Settings(labels, severities, links["--runbook-base"], links["--grafana-url"], arguments.hold)
    what = document.prometheus_rule(settings, metadata) if arguments.format == "k8s" else document.rule_file(settings)
    print(yaml_text.dump(what), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankwatch rules",
        usage="rankwatch rules export [options]",
        description="Print alert rules that say what rankwatch has judged: who is stuck, why, how long is left.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=("export",), metavar="export", help="write the rules on stdout")
    parser.add_argument("--format", choices=("prometheus", "k8s"), default="prometheus", help="a rule file (the default), or a PrometheusRule manifest")
    parser.add_argument("--label", metavar="K=V", action="append", default=[], help="a label on every alert, as cluster=a or team=infra; may be repeated")
    parser.add_argument("--metadata-label", metavar="K=V", action="append", default=[], help="k8s: a label of the manifest, for the operator's ruleSelector")
    parser.add_argument("--severity-map", metavar="OURS=YOURS,...", default="", help="other names for severities, as critical=page,warning=chat")
    parser.add_argument("--runbook-base", metavar="URL", default="", help="where dashboards/runbooks/ is published: adds runbook_url to every alert")
    parser.add_argument("--grafana-url", metavar="URL", default="", help="adds dashboard_url: the job's dashboard around that time")
    parser.add_argument(
        "--hold",
        metavar="TIME",
        default=document.DEFAULT_HOLD,
        help="how long a verdict goes on paging when its launcher is gone (default: %(default)s); recovery resolves it at once",
    )
    return parser


def _pairs(flag: str, words: Sequence[str], wrong: Callable[[str, str], str]) -> dict[str, str]:
    """K=V words as a dict. wrong: why a pair is refused, "" where it is not."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{flag} {word!r} is not K=V")
        if any(not char.isprintable() for char in value):
            raise ValueError(f"{flag} {name}: its value has characters that cannot be printed")
        if why := wrong(name, value):
            raise ValueError(f"{flag} {word!r}: {why}")
        found[name] = value
    return found


def _severity(name: str, _value: str) -> str:
    return "" if name in SEVERITIES else f"{name!r} is no severity; there are {', '.join(SEVERITIES)}"


def _label(name: str, _value: str) -> str:
    if not _LABEL.fullmatch(name):
        return f"{name!r} is no label name of Prometheus: letters, digits and _, not starting with a digit or __"
    return f"{name} is set by the rules or by the job" if name in document.OUR_LABELS else ""


def _metadata(name: str, value: str) -> str:
    fits = _METADATA.fullmatch(name) and _METADATA.fullmatch(value) and "/" not in value and len(value) < 64
    return "" if fits else "no label of Kubernetes"


def _address(flag: str, given: str) -> str:
    try:
        return accepted.url(given).rstrip("/")
    except ValueError as error:
        raise ValueError(f"{flag} {given!r} is not {error}") from None
