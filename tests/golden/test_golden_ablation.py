"""The report of `rankwatch ablate` and ablate.json, word for word."""

from __future__ import annotations

import json
import math

from build_ablation import FRAMES, graphs, rank_run, run
from golden import check

from rankwatch.commands.ablation import compare, text
from rankwatch.commands.ablation.advice import next_steps
from rankwatch.commands.ablation.bisect import Bisection
from rankwatch.commands.ablation.judge import Conclusion, asked_of, conclude, outcome

COMMAND = ("torchrun", "--nproc-per-node", "2", "train.py")


def shown(*runs, repeats=(), bisection=None):
    lowest = runs[0]
    floor = compare.floor_of(lowest.ranks, runs[1].ranks, 1e-3)
    pairs = [(one, outcome(one, lowest if number else None, floor if number else None)) for number, one in enumerate(runs)]
    asked = asked_of(runs)
    conclusion = conclude([pair for number, pair in enumerate(pairs) if number not in repeats], floor, asked)
    blamed = next((found for one, found in pairs if one.rung == conclusion.rung), None)
    lines = next_steps(conclusion, blamed, bisection.culprits if bisection else (), bisection is not None)
    folders = ["/runs/ablate/bisect/01", "/runs/ablate/bisect/02"] if bisection else []
    return text.Shown(COMMAND, 5, None, "/runs/ablate", pairs, frozenset(repeats), floor, asked, conclusion, bisection, folders, lines)


def wrong():
    ranks = {
        0: rank_run(0, graphs=graphs("inductor"), losses=(4.0, 3.0, 2.9, 2.8, 2.7), seconds=0.006),
        1: rank_run(1, graphs=graphs("inductor"), losses=(4.0, 3.0, 2.5, math.nan, math.nan), seconds=0.006),
    }
    return run("inductor", ranks=ranks)


def everything():
    bisection = Bisection((FRAMES[1],), "", [((FRAMES[0], FRAMES[1]), False), ((FRAMES[0],), True)])
    runs = [run(rung) for rung in ("off", "off", "eager", "aot_eager", "aot_eager_decomp_partition")]
    return shown(*runs, wrong(), wrong(), repeats=(1, 6), bisection=bisection)


def test_a_layer_and_a_frame_that_were_found():
    check("ablate_report.txt", text.render(everything()))


def test_the_same_as_json():
    check("ablate.json", json.dumps(text.to_json(everything()), indent=1, allow_nan=False) + "\n")


def test_a_healthy_job():
    fast = run("inductor", seconds=0.006)
    check("ablate_healthy.txt", text.render(shown(run("off"), run("off"), run("eager"), fast, repeats=(1,))))


def test_an_unseeded_job():
    runs = [run("off"), run("off", losses=(5.0, 3.0, 2.5, 2.25, 2.0)), run("inductor", losses=(6.0, 5.0, 4.0, 3.0, 2.0))]
    assert isinstance(shown(*runs, repeats=(1,)).conclusion, Conclusion)
    check("ablate_unseeded.txt", text.render(shown(*runs, repeats=(1,))))
