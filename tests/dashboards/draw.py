"""Pictures of the dashboards: their JSON, answers of a real Prometheus, Chromium. Grafana itself is in no registry that the tests may use.

    python tests/dashboards/draw.py URL JOB_ID END RANGE_S OUT.png BOARD [RANK] [ROWS]

draws dashboards/rankwatch-BOARD.json of JOB_ID, the RANGE_S seconds before END (unix seconds, or `now`); ROWS: only the first so many grid rows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from dashboards.build.names import SMALL_RANKS  # noqa: E402
from dashboards.build.queries import POINTS, filled  # noqa: E402

WIDTH = 1500
GRID_PX = 38
Ask = Any
"""Calls with (what, arguments) and gives Prometheus' `data.result`."""


def ask(url: str) -> Ask:
    """Asks the Prometheus at url."""

    def answer(what: str, **arguments: object) -> Any:
        body = urllib.parse.urlencode({key: str(value) for key, value in arguments.items()}).encode()
        with urllib.request.urlopen(f"{url}/api/v1/{what}", data=body, timeout=120) as response:
            return json.load(response)["data"]["result"]

    return answer


def answered(board: dict[str, Any], prometheus: Ask, variables: Mapping[str, str], begin: float, end: float, scrape_s: float) -> None:
    """Puts the answers of each panel's queries beside them, as Grafana would ask them; folded rows stay folded."""
    for panel in board["panels"]:
        panel["answers"] = []
        for target in panel.get("targets", ()):
            step_s = max(scrape_s, round((end - begin) / panel.get("maxDataPoints", POINTS)))
            expression = filled(target["expr"], variables, end - begin, step_s, scrape_s)
            if target.get("instant"):
                result = prometheus("query", query=expression, time=end)
            else:
                result = prometheus("query_range", query=expression, start=begin, end=end, step=step_s)
            panel["answers"].append({"ref": target["refId"], "legend": target.get("legendFormat", ""), "step": step_s, "result": result})


def scraped_every(prometheus: Ask, job_id: str, begin: float, end: float) -> float:
    """Seconds between two scrapes of the job."""
    found = prometheus("query_range", query=f'max(timestamp(rankwatch_world_size{{job_id="{job_id}"}}))', start=begin, end=end, step=1)
    times = sorted({round(float(value)) for series in found for _, value in series["values"]})
    return float(min((after - before for before, after in pairwise(times)), default=15))


def document(board: Mapping[str, Any], begin: float, end: float, note: str) -> str:
    """A page that draws itself, with everything in it."""
    data = json.dumps({"board": board, "begin": begin, "end": end, "note": note}).replace("</", "<\\/")
    style = "body{background:#111217;color:#ccccdc;font-family:Inter,Arial,sans-serif;margin:0}"
    script = (Path(__file__).parent / "draw.js").read_text(encoding="utf-8")
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><body><script>const DATA={data};\n{script}</script>"


def photograph(html: str, picture: Path, height: int) -> None:
    """The page as a PNG. OSError if Chromium made none."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html, encoding="utf-8")
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking --disable-component-update"
        size = [f"--window-size={WIDTH},{height}", f"--user-data-dir={folder}/profile", f"--screenshot={picture.absolute()}"]
        done = subprocess.run(["chromium", *flags.split(), *size, page.as_uri()], capture_output=True, text=True, timeout=120)
    if not picture.exists():
        raise OSError(f"Chromium made no picture: {done.stderr[-500:]}")


def main(url: str, job_id: str, end: str, range_s: str, picture: str, name: str, rank: str = "0", rows: str = "") -> int:
    prometheus, until = ask(url), time.time() if end == "now" else float(end)
    begin = until - float(range_s)
    board = json.loads((ROOT / "dashboards" / f"rankwatch-{name}.json").read_text(encoding="utf-8"))
    size = prometheus("query", query=f'max(last_over_time(rankwatch_world_size{{job_id="{job_id}"}}[{range_s}s]))', time=until)
    ranks = int(float(size[0]["value"][1])) if size else 0
    variables = {"cluster": ".*", "job_id": job_id, "small_job": job_id if ranks <= SMALL_RANKS else "", "rank": rank}
    if rows:
        board["panels"] = [panel for panel in board["panels"] if panel["gridPos"]["y"] < int(rows)]
    answered(board, prometheus, variables, begin, until, scraped_every(prometheus, job_id, begin, until))
    said = json.loads(re.sub(r"\$(rank)\b", rank, json.dumps(board)))
    shown = f"job {job_id}, {ranks} ranks" if name != "fleet" else "all jobs"
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in said["panels"])
    photograph(document(said, begin, until, f"{shown}; drawn from the JSON by tests/dashboards/draw.py, not by Grafana"), Path(picture), bottom * GRID_PX + 50)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
