"""How a node's clocks differ from the judge's, from the times of questions and answers. Pure.

An answer is written between the moment of the question and that of its arrival, so every pair bounds the offset: half of the round trip to either side
of the middle. The shortest of the last SAMPLES round trips is the sharpest; older pairs that contradict the newest one are let go, since then a
clock was set, or a machine was suspended.
"""

from __future__ import annotations

from collections import deque
from math import inf, isfinite

from rankwatch.monitor.nodes.values import Shift

SAMPLES = 16
SLACK_S = 0.001
DRIFT = 0.0002  # two clocks each off by 100 parts per million


class Offset:
    """Of one node. All times in seconds; mono: CLOCK_MONOTONIC, wall: unix time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Shift, float]] = deque(maxlen=SAMPLES)  # half of the round trip, offsets, when

    def add(self, sent: float, received: float, sent_wall: float, node_mono: float, node_wall: float) -> None:
        """One question: sent and received on the judge's monotonic clock, sent_wall on its wall clock, and the two clocks of the node in its answer.

        Times that are no numbers, or run backwards, are let go.
        """
        half_s = (received - sent) / 2
        shift = Shift(sent + half_s - node_mono, sent_wall + half_s - node_wall)
        if not (half_s >= 0 and isfinite(half_s) and isfinite(shift.mono_s) and isfinite(shift.wall_s)):
            return
        while self._samples and any(self._contradicts(old, half_s, shift, received) for old in self._samples):
            self._samples.popleft()
        self._samples.append((half_s, shift, received))

    @property
    def shift(self) -> Shift | None:
        """What to add to the node's times; None while nothing is known."""
        return min(self._samples, key=lambda sample: sample[0])[1] if self._samples else None

    @property
    def error_s(self) -> float:
        """How far off `shift` may be: half of the round trip that it comes from. Infinite while nothing is known."""
        return min((half_s for half_s, _, _ in self._samples), default=inf)

    @staticmethod
    def _contradicts(old: tuple[float, Shift, float], half_s: float, shift: Shift, now: float) -> bool:
        slack_s = old[0] + half_s + SLACK_S + DRIFT * max(0.0, now - old[2])
        return abs(shift.mono_s - old[1].mono_s) > slack_s or abs(shift.wall_s - old[1].wall_s) > slack_s
