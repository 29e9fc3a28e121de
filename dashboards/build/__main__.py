"""Writes the dashboards, or with --check says which files are stale."""

from __future__ import annotations

import sys
from pathlib import Path

from . import compile, fleet, job, rank

ROOT = Path(__file__).parents[2]
BOARDS = {"job": job.build, "rank": rank.build, "fleet": fleet.build, "compile": compile.build}
FOLDERS = (ROOT / "dashboards", ROOT / "rankwatch" / "dashboards")
"""Where people look for them, and what the wheel ships."""


def files() -> dict[Path, str]:
    """path -> text, of every file that should be there."""
    return {folder / f"rankwatch-{name}.json": text for name, build in BOARDS.items() for text in [build()] for folder in FOLDERS}


def stale() -> list[Path]:
    """The files that are not what the code makes."""
    return [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    if "--check" in sys.argv[1:]:
        for path in stale():
            print(f"{path.relative_to(ROOT)} is stale; run: python -m dashboards.build")
        return bool(stale())
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
