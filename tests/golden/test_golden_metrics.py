"""The catalogue of metrics as people read it, and as README.md holds it.

After a change: RANKWATCH_UPDATE_GOLDEN=1, then look at each difference as a user would: a stable name that goes or changes breaks somebody's rule.
"""

import os
import re
from pathlib import Path

from golden import check

from rankwatch import cli
from rankwatch.commands import metrics
from rankwatch.wire.signals import SIGNALS

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- /metrics -->"


def test_the_catalogue_as_text(capsys):
    assert cli.main(["metrics", "--describe"]) == 0
    check("metrics_describe.txt", capsys.readouterr().out)


def block():
    """What stands between the markers: `rankwatch metrics --describe --format markdown`, folded."""
    table = metrics.markdown(SIGNALS)
    return f"<details><summary>All {len(SIGNALS)} metrics (<code>rankwatch metrics --describe</code>)</summary>\n\n{table}\n</details>\n"


def test_the_readme_has_the_catalogue_as_it_is():
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1, "README.md has no place for the table of metrics: a line <!-- metrics -->, a line <!-- /metrics -->"
    now = re.sub(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}{block()}{END}", text)
    if os.environ.get("RANKWATCH_UPDATE_GOLDEN") == "1":
        README.write_text(now, encoding="utf-8")
    assert README.read_text(encoding="utf-8") == now, (
        "the table in README.md is stale: RANKWATCH_UPDATE_GOLDEN=1 python -m pytest tests/golden/test_golden_metrics.py"
    )
