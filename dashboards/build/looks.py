"""Colours and words. Grafana's own palette names, so that they fit its light and its dark theme."""

from __future__ import annotations

from rankwatch.wire.signals import JOB_STATE_CODES, PHASE_CODES

from .sdk import common, dashboard, model, values

GOOD, WARN, BAD, INFO, QUIET = "green", "orange", "red", "blue", "text"

PHASE_COLOURS = {
    "starting": "light-blue",
    "running": "green",
    "compiling": "purple",
    "collective_wait": "yellow",
    "data_wait": "orange",
    "checkpoint": "blue",
    "cudagraph_capture": "super-light-purple",
    "shutdown": "light-green",
    "dead": "red",
    "unknown": "dark-red",
}
STATE_COLOURS = {"starting": INFO, "running": GOOD, "stuck": BAD, "restarting": WARN, "finishing": "light-green", "done": "light-green", "failed": "dark-red"}
STAGE_COLOURS = {"dynamo": "blue", "aot": "purple", "inductor": "orange", "triton": "yellow", "autotune": "red"}
VERDICT_COLOURS = {
    "slow": "yellow",
    "stuck": "red",
    "timeout_imminent": "dark-red",
    "failed": "dark-purple",
    "diverged": "dark-orange",
    "straggler": "orange",
    "recovered": "green",
}

REGIME_COLOURS = {
    "compiled": "green",
    "starting": "blue",
    "not_used": "text",
    "compiles_for_ever": "red",
    "fell_back": "orange",
    "compiled_nothing": "yellow",
    "failing": "dark-red",
}


def words(codes: dict[str, int], colours: dict[str, str]) -> list[model.ValueMapping]:
    """Value mappings: the number that stands for it -> the word."""
    return [
        model.ValueMap(
            options={str(code): model.ValueMappingResult(text=name.replace("_", " "), color=colours[name], index=code) for name, code in codes.items()},
        )
    ]


def phases() -> list[model.ValueMapping]:
    """Of rankwatch_rank_phase."""
    return words(PHASE_CODES, PHASE_COLOURS)


def states() -> list[model.ValueMapping]:
    """Of rankwatch_job_state."""
    return words(JOB_STATE_CODES, STATE_COLOURS)


def named(**words_and_colours: tuple[float, str]) -> list[model.ValueMapping]:
    """named(yes=(1, GOOD), no=(0, QUIET)): a few numbers as words; an underscore is a space."""
    results = {str(code): model.ValueMappingResult(text=name.replace("_", " "), color=colour) for name, (code, colour) in words_and_colours.items()}
    return [model.ValueMap(options=results)]


def steps(base: str, *above: tuple[float, str]) -> dashboard.ThresholdsConfig:
    """Thresholds: `base` from minus infinity, then (from, colour)."""
    marks = [model.Threshold(value=None, color=base), *(model.Threshold(value=value, color=colour) for value, colour in above)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(marks)


def by_threshold() -> dashboard.FieldColor:
    """Colour by threshold."""
    return dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)


def palette() -> dashboard.FieldColor:
    """One colour a series."""
    return dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC)


def fixed(colour: str) -> model.DynamicConfigValue:
    """An override's property: this colour."""
    return model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def called(name: str) -> model.DynamicConfigValue:
    """An override's property: this name."""
    return model.DynamicConfigValue(id_val="displayName", value=name)


def last_value() -> common.ReduceDataOptions:
    """The newest value of each series."""
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


BACKGROUND = values.TableColoredBackgroundCellOptions(mode=values.TableCellBackgroundDisplayMode.BASIC)
