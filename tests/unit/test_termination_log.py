"""What a pod says about its end, and where: bounded, culprit first, never where it could do harm."""

import dataclasses
import os
import threading

import pytest
from build_status import compiling_status, crashed_status, healthy_status, stuck_incident, stuck_status

from rankwatch.monitor import termination_log
from rankwatch.notify.termination import MAX_BYTES, termination_message

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def told(path, status):
    """What a person is told while the message is written."""
    said = []
    termination_log.tell(str(path), status, True, said.append, {})
    return said


def with_verdict(**changes):
    incident = stuck_incident()
    return stuck_status(exit_code=1, open_incidents=(dataclasses.replace(incident, verdict=dataclasses.replace(incident.verdict, **changes)),))


def test_the_verdict_comes_first_then_who_what_to_do_and_the_report():
    lines = termination_message(crashed_status()).splitlines()
    assert lines[0].startswith("FAILED: rank 2 crashed: ValueError: bad shard 17")
    assert lines[1].startswith("Culprit: rank 2")
    assert "cause crashed, domain user_code, certain." in lines[1]
    assert any(line.startswith("To do: ") for line in lines)
    assert lines[-1].startswith("Job 48213, exit code 1. Report: ")
    assert lines[-1].endswith("/report.txt")


def test_of_a_job_that_was_killed_while_it_hung_the_hang_is_told():
    lines = termination_message(stuck_status(exit_code=137)).splitlines()
    assert lines[0].startswith("STUCK: rank 1")
    assert any(line.startswith("Waited: ") and line.endswith("(victims).") for line in lines)
    assert "exit code 137" in lines[-1]
    assert "exit code unknown" in termination_message(stuck_status(exit_code=None))


@pytest.mark.parametrize("status", [crashed_status(exit_code=0), healthy_status(exit_code=0), healthy_status(exit_code=1), compiling_status(exit_code=1)])
def test_where_there_is_no_verdict_the_log_may_speak(status):
    assert termination_message(status) == ""


def test_a_pod_that_does_not_judge_names_the_one_that_does():
    text = termination_message(stuck_status(exit_code=1, judge="http://node0:27435"), speaks=False)
    assert text == "Exit code 1. What held the job up or ended it is told by the pod of group rank 0 (http://node0:27435).\n"


@pytest.mark.parametrize("letter", ["x", "\u20ac", "\U0001f525"])
def test_it_never_takes_more_than_kubernetes_keeps(letter):
    text = termination_message(with_verdict(advice=(letter * 5000,) * 3))
    assert len(text.encode()) <= MAX_BYTES
    assert text.endswith("...\n")
    assert text.startswith("STUCK: rank 1")


def test_secrets_and_control_characters_stay_out():
    text = termination_message(with_verdict(summary="rank 1 is at \x1b[2Jpassword=hunter2\n\nnext"))
    assert "hunter2" not in text
    assert "\x1b" not in text
    assert len(text.splitlines()[0]) > 10


@pytest.mark.parametrize(
    ("given", "environ", "there", "place"),
    [
        ("", POD, True, "{default}"),
        ("", POD, False, ""),
        ("", {}, True, ""),
        ("off", POD, True, ""),
        ("/var/log/end", {}, False, "/var/log/end"),
    ],
)
def test_by_default_only_a_pod_writes_and_only_where_kubernetes_reads(tmp_path, given, environ, there, place):
    default = tmp_path / "termination-log"
    if there:
        default.write_text("")
    assert termination_log.place(given, environ, str(default)) == place.format(default=default)


def test_the_file_is_replaced_in_place(tmp_path):
    path = tmp_path / "termination-log"
    path.write_text("an earlier and much longer message of this container, which is over")
    before = path.stat().st_ino
    assert told(path, crashed_status()) == []
    assert path.read_text() == termination_message(crashed_status())
    assert path.stat().st_ino == before


def test_a_job_that_ends_well_leaves_it_as_it_was(tmp_path):
    path = tmp_path / "termination-log"
    assert told(path, healthy_status(exit_code=0)) == []
    assert not path.exists()


def test_what_is_no_file_is_not_written_and_not_waited_for(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere")
    for path in (pipe, link, tmp_path, tmp_path / "no" / "such" / "folder"):
        (why_not,) = told(path, crashed_status())
        assert why_not.startswith(f"--termination-log {path}: the verdict could not be written there (")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_that_hangs_is_left_alone(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(termination_log, "_write", lambda _path, _data: over.wait(10))
    assert termination_log.write("/dev/termination-log", "x", wait_s=0.01) == "it has not answered within 0.01 s"
    over.set()
