"""The environment of the ranks."""

from __future__ import annotations

import os

import pytest

from rankwatch.launcher.inject import Injection, inject, nccl_timing_on, restore

SITE = "/pkg/rankwatch/agent/site"


def injected(environ, **changes):
    arguments = {"package_dir": "/pkg/rankwatch", "launcher_pid": 42, "attempt": 3, "slot_dir": "/dev/shm/s/a3"}
    return inject(environ, **{**arguments, **changes})


def test_a_plain_environment_gets_all_that_the_agent_needs():
    assert injected({"HOME": "/home/me"}) == Injection(
        {
            "RANKWATCH_AGENT_DIR": "/pkg/rankwatch",
            "RANKWATCH_LAUNCHER_PID": "42",
            "RANKWATCH_ATTEMPT": "3",
            "RANKWATCH_SLOT_DIR": "/dev/shm/s/a3",
            "PYTHONPATH": SITE,
            "TORCH_FR_BUFFER_SIZE": "2000",
        }
    )


def test_it_is_pure():
    environ = {"PYTHONPATH": "/mine", "RANKWATCH_CLAIMED": "7"}
    before = dict(environ), dict(os.environ)
    injected(environ)
    assert (environ, dict(os.environ)) == before


def test_the_users_path_follows_ours_and_keeps_its_empty_parts():
    assert injected({"PYTHONPATH": f"/a::{SITE}:/b"}).set["PYTHONPATH"] == f"{SITE}:/a::/b"


def test_a_users_recorder_setting_under_either_name_speaks_for_both():
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        changed = injected({name: "20000"}).set
        assert "TORCH_FR_BUFFER_SIZE" not in changed
        assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in changed


@pytest.mark.parametrize("name", ["TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"])
@pytest.mark.parametrize("value", ["0", "1", ""])
def test_a_users_timing_setting_under_either_name_is_left_alone(name, value):
    for wish in ("auto", "on", "off"):
        injection = injected({name: value}, nccl_timing=wish)
        assert "TORCH_NCCL_ENABLE_TIMING" not in injection.set
        assert name not in injection.unset


def test_timing_is_switched_by_the_option():
    assert injected({}, nccl_timing="on").set["TORCH_NCCL_ENABLE_TIMING"] == "1"
    assert "TORCH_NCCL_ENABLE_TIMING" not in injected({}, nccl_timing="off").set


def test_timing_in_force_is_read_as_torch_reads_it():
    assert [nccl_timing_on({"TORCH_NCCL_ENABLE_TIMING": text}) for text in ("1", "Y", "true", "0", "no", "")] == [True, True, True, False, False, False]
    assert nccl_timing_on({"NCCL_ENABLE_TIMING": "1"}) is True
    assert nccl_timing_on({"TORCH_NCCL_ENABLE_TIMING": "0", "NCCL_ENABLE_TIMING": "1"}) is False  # the first name goes before the old one
    assert nccl_timing_on({}) is False


def test_the_marks_of_an_outer_rankwatch_are_removed():
    outer = {
        "RANKWATCH_CLAIMED": "7",
        "RANKWATCH_NO_PROBES": "ddp",
        "RANKWATCH_PTRACE_OPT_IN": "1",
        "RANKWATCH_SLOT_DIR": "/outer",
        "RANKWATCH_AGENT_DIR": "/other/rankwatch",
        "RANKWATCH_OWNER": "ada",
        "PYTHONPATH": "/other/rankwatch/agent/site:/mine",
    }
    injection = injected(outer, slot_dir=None)
    assert set(injection.unset) == {"RANKWATCH_CLAIMED", "RANKWATCH_NO_PROBES", "RANKWATCH_PTRACE_OPT_IN", "RANKWATCH_SLOT_DIR"}
    assert injection.set["RANKWATCH_AGENT_DIR"] == "/pkg/rankwatch"
    assert injection.set["PYTHONPATH"] == f"{SITE}:/mine"


def test_tracing_is_granted_only_where_yama_asks_for_it():
    assert injected({}, ptrace_scope=1).set["RANKWATCH_PTRACE_OPT_IN"] == "1"
    for scope in (None, 0, 2, 3):
        assert "RANKWATCH_PTRACE_OPT_IN" not in injected({}, ptrace_scope=scope).set


def test_switched_off_probes_are_handed_on():
    assert injected({}, no_probes=("ddp", "steps")).set["RANKWATCH_NO_PROBES"] == "ddp,steps"


def test_restore_undoes_apply():
    environ = {"PYTHONPATH": "/mine", "RANKWATCH_CLAIMED": "7"}
    before = injected(environ).apply(environ)
    assert environ["PYTHONPATH"] == f"{SITE}:/mine"
    assert "RANKWATCH_CLAIMED" not in environ
    restore(environ, before)
    assert environ == {"PYTHONPATH": "/mine", "RANKWATCH_CLAIMED": "7"}


def test_more_probes_and_the_place_of_traces_are_handed_on():
    changed = injected({}, more_probes=("numerics=10",), trace_dir="/run/torch_trace/attempt_0").set
    assert changed["RANKWATCH_MORE_PROBES"] == "numerics=10"
    assert changed["RANKWATCH_TRACE_DIR"] == "/run/torch_trace/attempt_0"
    assert "TORCH_TRACE" not in changed  # each rank has a folder of its own


def test_the_trace_of_an_outer_rank_is_not_ours_and_a_users_own_stays():
    outer = {"RANKWATCH_TRACE_DIR": "/outer/attempt_0", "TORCH_TRACE": "/outer/attempt_0/rank_3"}
    assert "TORCH_TRACE" in injected(outer).unset
    assert "TORCH_TRACE" not in injected({"TORCH_TRACE": "/mine"}).unset
