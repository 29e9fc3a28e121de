"""What the ranks' numbers say: who saw the first loss or gradient norm that is not finite, and whose parameters differ from their replicas'.

Pure: fed with the ranks' `numerics` records (agent/probes/numerics.py) and the time, it gives each finding once. Never a page: numbers can be
wrong by intention. A rank whose record does not decode is left out of what it does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwatch.model import RankState
from rankwatch.wire.ranks import compress, expand

WAIT_S = 3.0  # for the records of the other ranks, before one is judged without them
MAX_CHECKS = 64
MAX_GROUPS = 64
MAX_NAMED = 8
_MOST = 1e300  # beyond it an int is no float any more
LAST_BITS = 1e-5


def records_of(states: Mapping[int, RankState]) -> dict[int, Mapping[str, Any]]:
    """The `numerics` record of each rank; where it leaves the ranks of its group to the groups record, with these."""
    return {rank: _with_ranks(state) if state.numerics else {} for rank, state in states.items()}


def _with_ranks(state: RankState) -> Mapping[str, Any]:
    replicas = _table(state.numerics, "replicas")
    if not replicas or replicas.get("ranks"):
        return state.numerics
    ranks = next((compress(group.ranks) for group in state.groups if group.name == replicas.get("group")), "")
    return {**state.numerics, "replicas": {**replicas, "ranks": ranks}}


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece of news. kind: loss | gradient | replicas; step: the first at which it was seen; words: one sentence."""

    kind: str
    ranks: tuple[int, ...]
    step: int
    words: str


@dataclass(frozen=True, slots=True)
class _Check:
    """One rank's look at a few parameters after `step` steps: bit sums and norms (None: not finite), by the parameter's number."""

    step: int
    issued: int
    first: int
    sums: tuple[str, ...]
    norms: tuple[float | None, ...]


@dataclass(slots=True)
class _Group:
    """The replicas of one DDP module. checks: (step, issued, first) -> rank -> check, those not judged yet; equal: parameter -> last equal step."""

    ranks: str
    model: int
    total: int = 0
    unsynced: str = ""
    names: dict[int, str] = field(default_factory=dict)
    checks: dict[tuple[int, int, int], dict[int, _Check]] = field(default_factory=dict)
    seen_at: dict[tuple[int, int, int], float] = field(default_factory=dict)
    judged: dict[tuple[int, int, int], None] = field(default_factory=dict)
    equal: dict[int, int] = field(default_factory=dict)
    differ: dict[int, int] = field(default_factory=dict)  # parameter -> step at which it was first seen to differ
    odd: tuple[int, ...] = ()
    majority: bool = False
    since: int = 0
    apart: str = ""  # by how much, when it began
    compared: int = 0  # checks
    step: int = 0  # of the newest comparison
    told: bool = False


class Numerics:
    """Follows one attempt of a job."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], _Group] = {}
        self._bad_since: dict[str, float] = {}
        self._told: dict[str, Finding] = {}
        self._records: dict[int, Mapping[str, Any]] = {}
        self._ranks: frozenset[int] = frozenset()  # all that are seen

    def look(self, records: Mapping[int, Mapping[str, Any]], now: float, final: bool = False) -> tuple[Finding, ...]:
        """What is new in the records (by rank; {} for a rank without). final: nothing more will come, judge what there is."""
        self._records = {rank: record for rank, record in records.items() if record}
        self._ranks = frozenset(records)
        if not self._records:
            return ()
        found = [self._first_bad(kind, now, final) for kind in ("loss", "gradient")]
        for rank, record in self._records.items():
            self._take(rank, record, now)
        for group in self._groups.values():
            self._judge(group, now, final)
            found.append(self._differ(group))
        return tuple(finding for finding in found if finding is not None)

    def document(self) -> dict[str, Any]:
        """The `numerics` part of what is shown of the job; {} while no rank has the probe on."""
        if not self._records:
            return {}
        return {
            "ranks": compress(self._records),
            "every": max((_int(record.get("every")) for record in self._records.values()), default=0),
            "loss": self._series("loss"),
            "gradient": self._series("gradient"),
            "replicas": [
                {
                    "ranks": group.ranks,
                    "model": group.model,
                    "parameters": group.total,
                    "compared": group.compared,
                    "step": group.step,
                    "not_compared": group.unsynced,
                    "differ": compress(group.odd),
                    "majority": group.majority,
                    "since_step": group.since,
                    "where": [group.names.get(number, f"#{number}") for number in sorted(group.differ)[:MAX_NAMED]],
                }
                for group in self._groups.values()
            ],
            "words": [finding.words for finding in self._told.values()],
        }

    # -- losses and gradients --------------------------------------------------------------------------------------------------

    def _series(self, kind: str) -> dict[str, Any]:
        series = {rank: _table(record, kind) for rank, record in self._records.items()}
        told = self._told.get(kind)
        return {
            "checks": max(_int(one.get("checks")) for one in series.values()),
            "step": max(_int(one.get("step")) for one in series.values()),
            "bad": {str(rank): _int(one.get("bad")) for rank, one in series.items() if _int(one.get("bad"))},
            "first_step": told.step if told else None,
            "first_ranks": compress(told.ranks) if told else "",
        }

    def _first_bad(self, kind: str, now: float, final: bool) -> Finding | None:
        series = {rank: _table(record, kind) for rank, record in self._records.items()}
        series = {rank: one for rank, one in series.items() if _int(one.get("checks"))}
        bad = {rank: _int(one.get("bad_step")) for rank, one in series.items() if _int(one.get("bad"))}
        if not bad or kind in self._told:
            return None
        first = min(bad.values())
        since = self._bad_since.setdefault(kind, now)
        if any(rank not in bad and _int(one.get("step")) < first for rank, one in series.items()) and now - since < WAIT_S and not final:
            return None
        # Ranks that look at every 50th step meet it later: only one that was finite at or after that step is known to have been so.
        later = {rank: step for rank, step in bad.items() if _int(series[rank].get("good_step")) >= first}
        ranks = tuple(sorted(rank for rank in bad if rank not in later))
        one = series[next(rank for rank in ranks if bad[rank] == first)]
        finding = Finding(kind, ranks, first, self._bad_words(kind, ranks, first, one, series))
        self._told[kind] = finding
        return finding

    def _bad_words(self, kind: str, ranks: tuple[int, ...], step: int, one: Mapping[str, Any], series: Mapping[int, Mapping[str, Any]]) -> str:
        what = "gradient norm" if kind == "gradient" else "loss"
        good = _int(one.get("good_step"))
        words = f"first non-finite {what} at step {step} ({one.get('bad_value') or 'nan'}"
        words += f"; {_short(one.get('value'))} at step {good})" if good else "; no finite one before it)"
        finite = tuple(rank for rank, one in series.items() if rank not in ranks and max(_int(one.get("good_step")), _int(one.get("step"))) >= step)
        if finite:
            return f"{words}; rank {compress(finite)} {'was' if len(finite) == 1 else 'were'} finite then"
        if kind == "loss" or len(ranks) < 2 or any(_int(series[rank].get("bad_step")) != step for rank in ranks):
            return words
        lost = self._told.get("loss")
        if lost is not None and lost.step <= step:
            return f"{words} on all of them at once, after the non-finite loss of rank {compress(lost.ranks)} at step {lost.step}"
        return f"{words} on all of them at once: gradients are reduced before they are seen; rankwatch.log_loss(loss) tells whose loss was first"

    # -- replicas ----------------------------------------------------------------------------------------------------------------

    def _take(self, rank: int, record: Mapping[str, Any], now: float) -> None:
        replicas = _table(record, "replicas")
        ranks, names = str(replicas.get("ranks") or ""), _table(replicas, "names")
        if rank not in _expanded(ranks):
            return
        for entry in replicas.get("checks") or ():
            model, check = _check(entry)
            if check is None:
                continue
            group = self._group(ranks, model)
            if group is None:
                continue
            key = (check.step, check.issued, check.first)
            if key not in group.judged:
                group.checks.setdefault(key, {})[rank] = check
                group.seen_at.setdefault(key, now)
        group = self._group(ranks, _int(replicas.get("model")))
        if group is not None:
            group.total = _int(replicas.get("total"))
            group.unsynced = str(replicas.get("unsynced") or group.unsynced)
            group.names.update({int(number): str(name) for number, name in names.items() if str(number).isdigit() and len(group.names) < 4096})

    def _group(self, ranks: str, model: int) -> _Group | None:
        key = (ranks, model)
        if key not in self._groups and len(self._groups) >= MAX_GROUPS:
            return None
        return self._groups.setdefault(key, _Group(ranks, model))

    def _judge(self, group: _Group, now: float, final: bool) -> None:
        """Compare every look that all seen ranks of the group have shown, or that has waited long enough for them."""
        there = [rank for rank in _expanded(group.ranks) if rank in self._ranks]
        for key in sorted(group.checks):
            checks = group.checks[key]
            due = final or len(checks) == len(there) or now - group.seen_at[key] >= WAIT_S
            if due:
                del group.checks[key], group.seen_at[key]
                group.judged[key] = None
                if len(checks) > 1 and not group.unsynced:
                    _compare(group, checks)
        while len(group.judged) > MAX_CHECKS:
            del group.judged[next(iter(group.judged))]

    def _differ(self, group: _Group) -> Finding | None:
        if not group.differ or group.told or group.unsynced:
            return None
        group.told = True
        number = min(group.differ, key=lambda number: (group.differ[number], number))
        more = len(group.differ) - 1
        what = group.names.get(number, f"#{number}") + (f" and {more} more" if more else "")
        equal = group.equal.get(number)
        every = max((_int(record.get("every")) for record in self._records.values()), default=0)
        if equal is not None and every and group.since - equal > every:  # a look takes a few parameters only, and may be missed
            words = f"parameters differ between replicas since between step {equal} and {group.since} (not compared in between): {what}"
        else:
            words = f"parameters differ between replicas since step {group.since}: {what}"
            words += f", equal at step {equal}" if equal is not None else ", never seen equal"
        if group.majority:
            words += f"; rank {compress(group.odd)} differs from the other {len(_expanded(group.ranks)) - len(group.odd)}"
        else:
            words += f"; no majority among ranks {compress(group.odd)}"
        finding = Finding("replicas", group.odd, group.since, f"{words}; {group.apart}")
        self._told[f"replicas {group.ranks} {group.model}"] = finding
        return finding


def _compare(group: _Group, checks: Mapping[int, _Check]) -> None:
    """One look: which parameters differ, and on which ranks."""
    some = next(iter(checks.values()))
    odd: set[int] = set()
    group.compared += 1
    group.step = max(group.step, some.step)
    for position in range(min(len(check.sums) for check in checks.values())):
        number = some.first + position
        classes: dict[str, list[int]] = {}
        for rank, check in checks.items():
            # what is not finite has many patterns of bits
            classes.setdefault(check.sums[position] if check.norms[position] is not None else "", []).append(rank)
        if len(classes) == 1:
            group.equal[number] = some.step
            group.differ.pop(number, None)
            continue
        if not group.differ:
            group.since, group.apart = some.step, _apart([check.norms[position] for check in checks.values()])
        group.differ.setdefault(number, some.step)
        largest = max(classes.values(), key=len)
        group.majority = 2 * len(largest) > len(checks)
        odd.update(rank for ranks in classes.values() if not group.majority or ranks is not largest for rank in ranks)
    if odd or not group.differ:
        group.odd = tuple(sorted(odd))


def _apart(norms: list[float | None]) -> str:
    """By how much a parameter differs, as far as its norms tell."""
    known = [norm for norm in norms if norm is not None]
    if len(known) < len(norms):
        return "not finite on some of them"
    low, high = min(known), max(known)
    if high - low > LAST_BITS * high:
        return f"norms from {low:.6g} to {high:.6g}"
    return "norms agree to 5 digits, as after a flipped bit, or with different GPUs or kernels"


def _check(entry: object) -> tuple[int, _Check | None]:
    """(number of the DDP module, the check) of one entry of a record; None for anything else."""
    if not isinstance(entry, list) or len(entry) != 6 or not isinstance(entry[4], str) or not isinstance(entry[5], list):
        return 0, None
    step, issued, model, first = (_int(value) for value in entry[:4])
    sums, norms = tuple(entry[4].split()), tuple(_finite(value) for value in entry[5])
    if not sums or len(sums) != len(norms) or any(len(one) != 16 for one in sums):
        return 0, None
    return model, _Check(step, issued, first, sums, norms)


def _table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get("grad" if name == "gradient" else name)
    return value if isinstance(value, Mapping) else {}


def _int(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and -_MOST <= value <= _MOST else 0


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and -_MOST <= value <= _MOST else None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "?"


def _expanded(ranks: str) -> tuple[int, ...]:
    try:
        return expand(ranks)
    except ValueError:
        return ()
