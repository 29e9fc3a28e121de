"""What the settings of the job say about the time between a timeout and the end."""

import pytest
from recordings import Recording, first

from rankwatch.monitor.diagnose.watchdog import value, window
from rankwatch.monitor.workers import DUMP, HANDLING, HEARTBEAT, MONITORING

STOPPED = "nccl_10c_cudagraph_stop_abort_log"


def played(until, **environment):
    job = Recording(STOPPED, cudagraph={"recorded": 1})
    job.data["env"] = environment
    del job.data["log"]
    return job.play(-5, until)


def returns_not(told):
    return next((t for t, verdicts in told.items() if verdicts and "abort does not return" in verdicts[0].summary), None)


def test_torch_waits_four_times_for_dumps():
    assert window({}) == (60.0, "4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 15000 ms by default")
    assert window({DUMP: "2500"}) == (10.0, "4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 2500 ms as the job's environment has it")
    assert window({DUMP: "soon"})[0] == 60.0


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("true", 1), ("0", 0), ("no", 0), ("", 1)])
def test_the_monitor_is_switched_as_torch_switches_it(text, expected):
    assert value({MONITORING: text}, MONITORING) == expected


def test_by_default_a_minute_passes_before_an_abort_is_said_not_to_return():
    told = played(110)
    verdict = told[60.0][0]
    assert any("torch ends the process up to 60 s later" in line for line in verdict.evidence)
    assert returns_not(told) == 98.5  # 18 s of timeout, 60 s for dumps, 20 s more


def test_a_watchdog_that_is_switched_off_is_never_said_to_end_the_job():
    told = played(60, **{HANDLING: "0"})
    verdict = told[60.0][0]
    assert returns_not(told) is None
    assert "no watchdog ends these processes: TORCH_NCCL_ASYNC_ERROR_HANDLING=0 is set in the job's environment" in verdict.evidence
    assert verdict.advice[0].startswith("End rank 0 by hand: `kill -KILL 4000`")


def test_the_heartbeat_monitor_is_named_with_its_value():
    for environment, words in (
        ({HEARTBEAT: "600"}, "may end it after 600 s"),
        ({MONITORING: "0"}, "Nothing else will: torch's heartbeat monitor is off"),
    ):
        told = played(50, **{DUMP: "2500", **environment})
        assert words in told[50.0][0].advice[1]


def test_evidence_is_asked_for_at_the_first_sign_of_the_timeout():
    job = Recording(STOPPED, cudagraph={"recorded": 1})
    asked = []
    fetch = job.fetch
    job.fetch = lambda kind, rank, t: (asked.append((kind, rank, t)), fetch(kind, rank, t))
    told = job.play(-5, 20)
    assert {(kind, rank) for kind, rank, t in asked if t == 18.5} >= {("stacks", 0), ("stacks", 1), ("recorder", 0), ("recorder", 1)}
    assert first(told, "slow")[0] == 5.0  # the incident has long been written
