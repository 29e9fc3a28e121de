"""Healthy jobs that look stuck, and planned ends of every kind: none of them is paged."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_table import How, read_table
from enacting import enact

pytestmark = pytest.mark.ranks
CONTROLS = Path(__file__).with_name("controls")
TABLE = read_table(CONTROLS)
IN_CI = ("end_ctrl_c",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow_ranks) for name in TABLE])
def test_a_healthy_job_is_not_paged(tmp_path: Path, name: str) -> None:
    """Only the notices that its entry allows, the expected exit code, and an end in time."""
    result = enact(name, TABLE[name], CONTROLS, tmp_path / name, 0, How(strict=True))
    assert result.right, (result.problems, result.verdicts(), (tmp_path / name / "output.log").read_text(errors="replace")[-3000:])
