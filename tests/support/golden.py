"""Comparison with a stored text; RANKWATCH_UPDATE_GOLDEN=1 stores what is there now."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(__file__).parents[1] / "golden" / "data"


def check(name: str, text: str) -> None:
    """`text` is what tests/golden/data/NAME holds."""
    path = DATA / name
    if os.environ.get("RANKWATCH_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; look at the change, then store it with RANKWATCH_UPDATE_GOLDEN=1"
