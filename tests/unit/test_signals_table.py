"""The catalogue of metrics keeps Prometheus' rules and the budget."""

import math
import re

import pytest

from rankwatch.config.accepted import MORE_PROBES, PROBES
from rankwatch.wire import signals
from rankwatch.wire.signals import SIGNALS


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_every_row_keeps_the_rules(signal):
    assert re.fullmatch(r"rankwatch_[a-z0-9_]+", signal.name)
    assert signal.type in ("gauge", "counter")
    assert (signal.type == "counter") == signal.name.endswith("_total")
    assert signal.level in signals.LEVELS
    assert signal.scope in ("R", "N", "J")
    assert signal.help.endswith(".")
    assert "\n" not in signal.help
    assert signal.source
    assert signal.stability in ("stable", "experimental")
    assert not {"type", "region", "zone", "cluster", "env", "job_id", "step", "shape", "guard", "stack"} & set(signal.labels)
    assert ("rank" in signal.labels) == (signal.scope == "R") or signal.name == "rankwatch_incident_info"
    if signal.unit:
        assert f"_{signal.unit}" in signal.name


def test_names_are_unique():
    assert len(signals.BY_NAME) == len(SIGNALS)


def test_a_level_contains_the_lower_ones():
    assert signals.exported("low") < signals.exported("default") <= signals.exported("full")


@pytest.mark.parametrize(("level", "budget"), [("low", 12), ("default", 60), ("full", 120)])
def test_a_rank_with_every_probe_on_and_every_metric_filled_keeps_the_budget(level, budget):
    values = {"stage": len(signals.COMPILE_STAGES), "probe": len(PROBES) + len(MORE_PROBES), "what": 2}
    of_a_rank = [signal for signal in SIGNALS if signal.scope == "R" and signal.name in signals.exported(level)]
    assert {label for signal in of_a_rank for label in signal.labels} <= {"local_rank", "node", "pid", "restart", "rank", "gpu", "uuid", *values}
    assert sum(math.prod(values.get(label, 1) for label in signal.labels) for signal in of_a_rank) <= budget


def test_the_low_level_keeps_twelve_metrics_of_one_series_a_rank():
    low = [signal for signal in SIGNALS if signal.level == "low" and signal.scope == "R"]
    assert all(signal.labels == ("rank",) for signal in low)
    assert len(low) <= 12


@pytest.mark.parametrize(("world_size", "level"), [(1, "full"), (64, "full"), (65, "default"), (2048, "default"), (2049, "low"), (16384, "low")])
def test_auto_follows_the_size_of_the_job(world_size, level):
    assert signals.level_for("auto", world_size) == level


def test_a_named_level_is_kept_at_any_size():
    assert signals.level_for("full", 16384) == "full"


def test_an_unknown_level_is_named():
    with pytest.raises(ValueError, match="'high' is none of auto, low, default, full"):
        signals.level_for("high", 8)
