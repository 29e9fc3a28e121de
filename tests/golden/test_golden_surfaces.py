"""What people and programs read, word for word. Look at each difference as a user would."""

import dataclasses
import json
import re

import build_status
import pytest
from golden import check

from rankwatch.export.prometheus import Exporter
from rankwatch.model import PhaseLook, Waited
from rankwatch.notify import lines
from rankwatch.report import hidden, incident, markdown, page, run, state, text
from rankwatch.report import status as status_page

CASES = {"stuck": build_status.stuck_status, "compiling": build_status.compiling_status, "crashed": build_status.crashed_status}


LOOKS = (
    PhaseLook(build_status.WALL - 300, (("running", "0-7"),), build_status.WALL - 62),
    PhaseLook(build_status.WALL - 60, (("collective_wait", "0,2-7"), ("culprit", "1")), build_status.WALL),
)


def without_style(page):
    """What the page says; how it looks is for eyes."""
    return re.sub(r"<(style|script)[^>]*>.*?</\1>", r"<\1></\1>", page, flags=re.DOTALL)


def as_text(document):
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


@pytest.mark.parametrize("case", CASES)
class TestIncident:
    def test_json(self, case):
        status = CASES[case]()
        check(f"{case}_incident.json", as_text(incident.to_json(status.open_incidents[0], status)))

    def test_text(self, case):
        status = CASES[case]()
        check(f"{case}_report.txt", text.render(incident.to_json(status.open_incidents[0], status)))

    def test_markdown(self, case):
        status = CASES[case]()
        check(f"{case}.md", markdown.render(incident.to_json(status.open_incidents[0], status)))

    def test_page(self, case):
        status = CASES[case](timeline=LOOKS)
        check(f"{case}_page.html", without_style(page.render(incident.to_json(status.open_incidents[0], status))))

    def test_text_is_the_same_from_the_file_as_from_memory(self, case):
        status = CASES[case]()
        document = incident.to_json(status.open_incidents[0], status)
        assert text.render(json.loads(json.dumps(document))) == text.render(document)


def test_metrics():
    body, content_type = Exporter().render(build_status.stuck_status(), "")
    assert content_type.startswith("text/plain; version=0.0.4")
    check("metrics.txt", body.decode())


def test_run_json():
    check("run.json", as_text(run.to_json(build_status.stuck_status())))


@pytest.mark.parametrize("live", [True, False])
def test_status_page(live):
    check(f"status_{'live' if live else 'kept'}.html", without_style(status_page.render(build_status.stuck_status(), live=live)))


def test_a_report_for_strangers():
    status = build_status.stuck_status()
    check("stuck_redacted.md", markdown.render(hidden.hide(incident.to_json(status.open_incidents[0], status))))


def test_state_json():
    check("state.json", as_text(state.to_json(build_status.stuck_status())))


def every_line(as_json):
    healthy, stuck, compiling, crashed = build_status.healthy_status(), *(build() for build in CASES.values())
    closed = dataclasses.replace(build_status.compiling_incident(), closed_at=build_status.NOW + 10, closed_wall_at=build_status.WALL + 10, lost_rank_s=1860.0)
    over = build_status.healthy_status(closed_incidents=(closed,), state="done", exit_code=0)
    costs = (
        Waited(3, "recompiling block.forward", 1860.0), Waited(0, "checkpointing at train.py:88:save", 540.0), Waited(2, "straggling", 61.0),
        Waited(-1, "all_entered", 20.0), Waited(5, "late", 1.0),
    )  # fmt: skip
    quiet = build_status.healthy_status(waiting=costs, state="done", exit_code=0)
    unclear = dataclasses.replace(
        build_status.stuck_incident(), was_ranks=(4,), times=12,
        verdict=build_status.stuck_verdict(verdict="timeout_imminent", timeout_left_s=None, timeout_known=False),
    )  # fmt: skip
    merged = dataclasses.replace(closed, into="20261130T031211Z-7", times=3)
    return "\n".join(
        (
            lines.watching(healthy, as_json=as_json),
            lines.stepping(healthy, after_s=74, compile_s=61, slowest_rank=3, slowest_by_s=9, as_json=as_json),
            lines.verdict(stuck.open_incidents[0], stuck, as_json=as_json),
            lines.verdict(compiling.open_incidents[0], compiling, as_json=as_json),
            lines.verdict(crashed.open_incidents[0], crashed, as_json=as_json),
            lines.verdict(closed, over, as_json=as_json),
            lines.verdict(unclear, stuck, as_json=as_json),
            lines.verdict(merged, over, as_json=as_json),
            lines.blind(3, "no process claimed its slot within 30 s", as_json=as_json),
            lines.notice("port 27435 is taken", as_json=as_json),
            lines.done(over, as_json=as_json),
            lines.done(quiet, as_json=as_json),
            lines.done(dataclasses.replace(quiet, forgotten={"slow": 7}, restarts=1), as_json=as_json),
            lines.done(build_status.healthy_status(state="done", exit_code=0), as_json=as_json),
            lines.done(crashed, as_json=as_json),
            lines.failed_block(stuck, {}, as_json=as_json),
            lines.failed_block(crashed, {}, as_json=as_json),
        )
    )


def test_lines():
    check("lines.txt", every_line(as_json=False) + "\n")


def test_json_lines():
    check("lines.jsonl", every_line(as_json=True) + "\n")
