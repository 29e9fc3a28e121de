"""Stacks that were asked for: fetched beside the loop, at most so often, kept with the sample before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rankwatch.model import NodeReport, RankState, Stack
from rankwatch.monitor.pool import Job, wait_all
from rankwatch.monitor.stacks import SelfTest, StackCapture, Target

AGAIN_S = 1.0
AGAIN_LATER_S = 5.0
OFTEN_AT_FIRST = 10
CALM_AFTER_S = 60.0
TESTS = 3
NATIVE_AGAIN_S = 30.0
NATIVE_YOUNG_S = 10.0  # one of just now belongs to the incident that it has led to


@dataclass(slots=True)
class _Samples:
    newest: Stack | None = None
    earlier: Stack | None = None
    native: Stack | None = None
    job: Job[Stack] | None = None
    native_job: Job[Stack] | None = None
    asked_at: float = -1e9
    native_at: float = -1e9
    taken: int = 0


class Evidence:
    """The newest two stacks of each rank. Called from the loop's thread only; the dumps run in the capture's pool."""

    def __init__(self, capture: StackCapture, clock: Callable[[], float] = time.monotonic) -> None:
        self._capture = capture
        self._clock = clock
        self._ranks: dict[int, _Samples] = {}
        self._test: Job[SelfTest] | None = None
        self._tests_left = TESTS

    @property
    def self_test(self) -> SelfTest | None:
        """Whether stacks can be had here, None while that is being found out."""
        if self._test is None or not self._test.done:
            return None
        if self._test.value is None:
            return SelfTest(False, str(self._test.error))
        return None if not self._test.value.ok and self._tests_left else self._test.value

    def test(self, targets: Sequence[Target]) -> None:
        """Try one of these ranks, another one if that fails: a Python that is just starting has no stack yet."""
        if not targets or self.self_test is not None or (self._test is not None and not self._test.done) or not self._tests_left:
            return
        self._tests_left -= 1
        target = targets[self._tests_left % len(targets)]
        self._test = self._capture.start_self_test(target.pid)

    def request(self, targets: Iterable[Target], native: bool = False, at_once: bool = False) -> None:
        """Begin to dump these ranks unless that is under way or was done just now. native: not again within NATIVE_AGAIN_S, see `forget_native`."""
        now = self._clock()
        for target in targets:
            samples = self._ranks.setdefault(target.rank, _Samples())
            if native:
                if samples.native_job is None and (samples.native is None or now - samples.native_at >= NATIVE_AGAIN_S):
                    samples.native_at = now
                    samples.native_job = self._capture.start(target, native=True)
                continue
            if samples.job is not None:
                continue
            if now - samples.asked_at > CALM_AFTER_S:
                samples.taken = 0
            if not at_once and now - samples.asked_at < (AGAIN_S if samples.taken < OFTEN_AT_FIRST else AGAIN_LATER_S):
                continue
            samples.asked_at = now
            samples.taken += 1
            samples.job = self._capture.start(target)

    def collect(self) -> dict[int, Stack]:
        """What has come in since the call before, by rank: as an incident shows it, native frames below the Python ones."""
        fresh: dict[int, Stack] = {}
        for rank, samples in self._ranks.items():
            if samples.job is not None and samples.job.done:
                stack, samples.job = samples.job.value, None
                if stack is not None:
                    samples.newest, samples.earlier = stack, samples.newest
                    fresh[rank] = self._shown(samples)
            if samples.native_job is not None and samples.native_job.done:
                samples.native, samples.native_job = samples.native_job.value, None
                if samples.native is not None and samples.newest is not None:
                    fresh[rank] = self._shown(samples)
        return fresh

    def wait(self, timeout_s: float) -> None:
        """Return when no plain dump is under way, at the latest after timeout_s."""
        wait_all([samples.job for samples in self._ranks.values() if samples.job is not None], timeout_s)

    @property
    def pending(self) -> bool:
        """Whether something is under way."""
        return any(samples.job is not None or samples.native_job is not None for samples in self._ranks.values())

    def latest(self, ranks: Iterable[int], not_before: float) -> dict[int, Stack]:
        """The newest stacks of these ranks that are not older than that moment."""
        found = {}
        for rank in ranks:
            samples = self._ranks.get(rank)
            if samples is not None and samples.newest is not None and samples.newest.at >= not_before:
                found[rank] = self._shown(samples)
        return found

    def forget_native(self, ranks: Iterable[int]) -> None:
        """Another incident may ask for a native dump of these ranks again."""
        now = self._clock()
        for rank in ranks:
            if rank in self._ranks and now - self._ranks[rank].native_at > NATIVE_YOUNG_S:
                self._ranks[rank].native = None

    def forget(self) -> None:
        """Other processes run under these ranks from now on."""
        self._ranks = {}

    def into(self, report: NodeReport) -> NodeReport:
        """The report with the stacks of its ranks filled in."""
        if not self._ranks:
            return report
        ranks = tuple(
            replace(rank, stack=samples.newest, earlier_stack=samples.earlier, native_stack=samples.native)
            if (samples := self._ranks.get(rank.rank)) is not None
            else rank
            for rank in report.ranks
        )
        return replace(report, ranks=ranks)

    def _shown(self, samples: _Samples) -> Stack:
        assert samples.newest is not None
        return _with_native(samples.newest, samples.native)


def reported_stacks(states: Mapping[int, RankState], ranks: Iterable[int], not_before: float) -> dict[int, Stack]:
    """The stacks that came with the reports of these ranks, of this node or another, and are not older than that moment."""
    found = {}
    for rank in ranks:
        stack = states[rank].stack if rank in states else None
        if stack is not None and stack.at >= not_before:
            found[rank] = _with_native(stack, states[rank].native_stack)
    return found


def _with_native(stack: Stack, native: Stack | None) -> Stack:
    """The stack as an incident shows it, native frames below the Python ones."""
    if native is None or not native.threads:
        return stack
    return replace(stack, native=True, text=f"{stack.text}\n-- with native frames\n{native.text}")
