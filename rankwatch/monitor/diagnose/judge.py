"""The pure judge: one look at the job in, verdicts and wanted evidence out. No clock, no I/O, no torch."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import JobSnapshot, RankState, Verdict, Want
from rankwatch.monitor.diagnose import (
    ahead,
    captured,
    causes,
    checked,
    clocks,
    deaths,
    ends,
    gave_up,
    graph,
    hangs,
    idle,
    lateness,
    ledger,
    messages,
    pairing,
    progress,
    repeats,
    silence,
    starts,
    suspended,
    timeouts,
    unhealed,
    unseen,
    victims,
    waits,
    wants,
    watchdog,
    words,
)
from rankwatch.monitor.diagnose import frames as stack_frames
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.state import NodeKey, State, Trouble, WaitKey, Watch, age, changed
from rankwatch.monitor.diagnose.views import alive, build, fresh_ranks, sort_entries
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ALL_INSIDE = ("mismatch", "group_order_deadlock")  # the culprit is in an operation itself, and ends of its timeout like those that wait for it
_FORGET_S = 2.0  # a hang that is not seen for this long is over


def diagnose(state: State, snapshot: JobSnapshot, now: float, limits: Limits) -> tuple[State, tuple[Verdict, ...], tuple[Want, ...]]:
    """What is wrong with the job at this look.

    state: what the look before returned, `State()` at first. now: monotonic seconds, normally snapshot.now.
    Verdicts come on every look while they hold; equal keys are the same incident. The wanted evidence goes into a later snapshot.
    """
    if snapshot.now != now:
        snapshot = replace(snapshot, now=now, wall_at=snapshot.wall_at + now - snapshot.now)
    if state.attempt != snapshot.attempt:
        past = repeats.ended(state)
        state = State(attempt=snapshot.attempt, minted=state.minted, past=past, ledger=ledger.ended(state.ledger) if state.ledger is not None else None)
    ranks, offsets = fresh_ranks(snapshot, limits.report_stale_s)
    ranks = ends.believed(ranks)
    state = clocks.look(state, snapshot, limits)
    state = changed(state, seen=silence.seen(state.seen, snapshot, ranks))
    reports = silence.reported(state.reported, snapshot)
    state = changed(state, letters=_letters(state, ranks, now, _heard(state, snapshot, reports)), reported=reports)
    state = suspended.observe(state, ranks, now, limits)
    state = changed(state, joins_failed=ends.joins_failed(state, ranks))
    running, frame_times = causes.frame_times(state, ranks, now)
    known_deaths = deaths.observe(state, snapshot, ranks)
    if snapshot.ending and state.ending_at is None:
        planned = state.failure is None and deaths.planned_end(snapshot, known_deaths, state.excused)
        state = changed(state, ending_at=now, ending_planned=planned)
    state = changed(state, deaths=known_deaths, compiles=running, frame_times=frame_times)
    state = deaths.excuse(state, snapshot)

    state = _failure(state, snapshot, ranks)
    if snapshot.ending or (state.failure is not None and not state.failure_weak):
        return _ended(changed(state, entries={}), snapshot, ranks)
    if state.failure_held:
        living = tuple(sorted(rank.rank for rank in ranks.values() if alive(rank)))
        return state, state.last, (Want("recorder", living, "what the peers of an aborted rank called"),) if living else ()
    if state.suspended_at is not None:
        state, verdicts = suspended.judge(state, snapshot, ranks, limits)
        return state, verdicts, ()
    if state.quiet > 0:
        return changed(state, quiet=state.quiet - 1), state.last, ()
    return _running(state, snapshot, ranks, offsets, limits)


def _running(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], offsets: Mapping[int, float], limits: Limits
) -> tuple[State, tuple[Verdict, ...], tuple[Want, ...]]:
    now = snapshot.now
    state = changed(state, entries=sort_entries(state.entries, ranks))
    views = build(snapshot, ranks, state.entries)
    state = changed(state, extensions=timeouts.spent(state.extensions, views, ranks, now))
    opens = waits.track_opens(state, views, offsets, snapshot)
    state = changed(state, opens=opens)
    starting, sights = starts.startup_waits(ranks, snapshot, state, limits)
    entered, all_in = waits.collective_waits(views, opens, state, now, limits)
    in_checks = checked.look(views, ranks, state, now, limits)
    found = [*entered, *starting, *waits.barrier_waits(ranks, snapshot, state, limits), *in_checks.waits]
    silence.mark(found, snapshot, state, limits)
    troubles_found, in_cycles = _resolve(found, ranks, state)
    if silence.refuted(troubles_found, found):
        troubles_found, in_cycles = _resolve(found, ranks, state)
    lags = {node.node: node.report_age_s for node in snapshot.nodes}
    notes = {rank.rank: (place, node.gpu_note) for place, node in enumerate(snapshot.nodes) if node.gpu_note for rank in node.ranks}
    scene = Scene(state, snapshot, ranks, limits, lags, words.unknown(ranks, snapshot), notes)
    state = changed(state, startups={**sights, **all_in, **in_checks.seen}, watches=_watches(troubles_found, in_cycles, found, scene))
    state = changed(state, ahead=ahead.observe(state.ahead, troubles_found, found, scene))
    scene = replace(scene, state=state)
    state, cases = _rule(state, troubles_found, found, scene)
    scene = replace(scene, state=state)
    asked = wants.Asked(state.asked, now, 10 * limits.restack_s)
    wanted, native = wants.wants(cases, found, scene, asked)
    for named, every_s in ((in_checks.again, limits.stack_s), (in_checks.ask, limits.restack_s)):
        if named and (chosen := asked.due("stacks", named, every_s, limits.max_stacks)):
            wanted.append(Want("stacks", chosen, "no recorder shows whether they wait in torch's checks"))
    verdicts = [trouble.verdict for _, _, trouble in cases if trouble.verdict is not None]
    costs = ledger.observe(state.ledger or ledger.Ledger(), cases, found, views.values(), scene)

    leads, paired, diverged, more = pairing.look(views.values(), found, scene, asked)
    paired_alike = [view for view in views.values() if (*view.key, view.group.generation) not in diverged]  # arrivals at different calls tell nothing
    late, stragglers, stacks = lateness.look(paired_alike, scene, asked, bool(verdicts))
    wanted += [*more, *stacks]
    verdicts += [replace(verdict, key=f"a{snapshot.attempt}-straggler-{verdict.culprit_ranks[0]}") for verdict in stragglers]
    verdicts += pairing.told(diverged, snapshot.attempt)
    moves = idle.mark(ranks)
    behind = [wait for wait in found if captured.symptom(wait, ranks)]
    since = state.idle_since if state.idle_since is not None and state.idle_mark == moves and len(behind) == len(found) else now
    if len(behind) == len(found) and idle.due(scene, since):
        silent, more = idle.look(scene, since, asked, behind)
        if behind and any(verdict.culprit_ranks for verdict in silent):
            verdicts = [verdict for verdict in verdicts if verdict.cause != "all_entered"]
        verdicts += [replace(verdict, key=f"a{snapshot.attempt}-idle") for verdict in silent]
        wanted += more
    if len(behind) == len(found) and state.idle_mark == moves:
        keys = {verdict.key for verdict in verdicts}
        verdicts += [each for each in state.last if each.key == f"a{snapshot.attempt}-idle" and each.key not in keys and unseen.idle_lasts(each, scene)]
    state = changed(
        state, leads=leads, paired=paired, diverged=diverged, lateness=late, asked=asked.times, idle_since=since, idle_mark=moves, ledger=costs,
        moved_at=state.moved_at if state.idle_mark == moves else now,
        troubles=tuple(replace(trouble, native_asked=True) if trouble.key in native else trouble for trouble in state.troubles),
    )  # fmt: skip
    verdicts += unhealed.of(state.last, verdicts, ranks)
    verdicts += unseen.of(state.last, verdicts, scene)
    state, verdicts = _post_mortem(state, verdicts, found, scene)
    if state.frozen_at == now:
        ranks_told = tuple(sorted({rank for verdict in state.frozen for rank in (*verdict.culprit_ranks, *verdict.waiting_ranks)}))[: limits.max_stacks]
        wanted += [Want("stacks", ranks_told, "the watchdog has fired"), Want("recorder", ranks_told, "the watchdog has fired")] if ranks_told else []
    if state.failure is not None:
        verdicts = [state.failure, *(verdict for verdict in verdicts if verdict.key != state.failure.key)]
    return changed(state, last=tuple(verdicts)), tuple(verdicts), tuple(wanted)


# -- processes -----------------------------------------------------------------------------------------------------------------


def _heard(state: State, snapshot: JobSnapshot, reports: Mapping[NodeKey, float]) -> frozenset[int]:
    """Ranks that were reported anew since the look before."""
    nodes = (node for node in snapshot.nodes if reports.get(silence.key(node), 0.0) > state.reported.get(silence.key(node), float("-inf")) + 1e-3)
    return frozenset(rank.rank for node in nodes for rank in node.ranks)


def _letters(state: State, ranks: Mapping[int, RankState], now: float, heard: frozenset[int]) -> dict[int, tuple[str, float, int]]:
    """Only the letters that mean something when they last. heard: the ranks that this is a look at, and no old report of."""
    found = {}
    for rank in ranks.values():
        if rank.process is not None and rank.process.alive and rank.process.state in ("T", "t", "D"):
            old = state.letters.get(rank.rank)
            same = old is not None and old[0] == rank.process.state
            found[rank.rank] = (rank.process.state, old[1], old[2] + (rank.rank in heard)) if old is not None and same else (rank.process.state, now, 1)
    return found


# -- hangs -----------------------------------------------------------------------------------------------------------------


def _resolve(found: Sequence[Wait], ranks: Mapping[int, RankState], state: State) -> tuple[list[Hang], frozenset[int]]:
    """The hangs behind the waits, and the ranks to watch for it: a cycle counts only as far as its ranks really sit in their waits."""
    result = graph.hangs(found, lambda rank, _wait: alive(ranks[rank]))
    in_cycles = frozenset(rank for hang in result for rank in hang.cycle)
    loose = {rank for hang in result for rank in _not_blocked(hang, found, ranks, state)}
    if loose:
        result = graph.hangs(found, lambda rank, _wait: alive(ranks[rank]) and rank not in loose)
    return _behind_others(result, found, ranks), in_cycles


def _behind_others(result: Sequence[Hang], found: Sequence[Wait], ranks: Mapping[int, RankState]) -> list[Hang]:
    """A hang whose absent ranks all wait in point-to-point calls themselves is a part of one that has another root: gloo's recorder shows no such wait."""
    talking = {
        rank for hang in result if not hang.cycle for rank in hang.roots
        if messages.talking(ranks[rank], min(found[index].since for index in hang.waits))
    }  # fmt: skip
    parts = [hang for hang in result if hang.roots and talking.issuperset(hang.roots)]
    others = [hang for hang in result if hang not in parts and not hang.hung]
    if not parts or not others:
        return list(result)
    first = min(others, key=lambda hang: min(found[index].since for index in hang.waits))
    waiting = {rank for hang in (first, *parts) for rank in (*hang.waiting, *(hang.roots if hang is not first else ()))}
    whole = replace(first, waits=tuple(sorted({index for hang in (first, *parts) for index in hang.waits})), waiting=tuple(sorted(waiting - set(first.roots))))
    return [whole, *(hang for hang in others if hang is not first), *(hang for hang in result if hang.hung and hang not in parts)]


def _not_blocked(hang: Hang, found: Sequence[Wait], ranks: Mapping[int, RankState], state: State) -> list[int]:
    """Ranks of a cycle that only hold an un-waited handle: their stack is elsewhere (gloo), or they idle while their peers spin (NCCL)."""
    if not hang.cycle:
        return []
    since = min(found[index].since for index in hang.waits)
    nccl = any("nccl" in found[index].backend for index in hang.waits)
    sits = {rank: stack_frames.blocked(fresh_stack(ranks[rank], since)) for rank in hang.cycle}
    if any(sits.values()) and not nccl:  # an NCCL waiter sits in a stream wait that Python frames do not show
        loose = [rank for rank, blocked in sits.items() if blocked is False]
        return loose if len(loose) < len(hang.cycle) else []
    busy = {rank: watch.busy_ratio for rank in hang.cycle if (watch := state.watches.get(rank)) is not None and watch.busy_ratio is not None}
    if len(busy) == len(hang.cycle) and max(busy.values()) >= 0.5:
        return [rank for rank, ratio in busy.items() if ratio < 0.05]
    return []


def _watches(troubles: Sequence[Hang], in_cycles: frozenset[int], found: Sequence[Wait], scene: Scene) -> dict[int, Watch]:
    """Suspects, ranks of a cycle and compiling ranks are watched, and only as long as they are that. A look at a rank is as old as its node's report."""
    state, ranks, now, limits = scene.state, scene.ranks, scene.now, scene.limits
    due: dict[int, tuple[float, float]] = {}  # rank -> start of the wait, length of a look
    for state_ in ranks.values():
        if state_.compiling or state_.compile_witness:
            due[state_.rank] = (0.0, limits.look_s)
    for hang in troubles:
        wait = hangs.primary(hang, found)
        look = min(limits.look_s, limits.stuck_after_s(wait.timeout_s, first=wait.first) / 2.5)
        for rank in (*hang.roots, *hang.cycle, *messages.others(hang.roots, wait.since, ranks)):
            old = due.get(rank)
            due[rank] = (0.0 if old else wait.since, min(look, old[1]) if old else look)
    for rank in in_cycles:  # spinning or idle is all that is asked of a cycle
        old = due.get(rank)
        due[rank] = (old[0] if old else min((wait.since for wait in found if rank in wait.waiters), default=0.0), 2.0)
    quiet = all(captured.symptom(wait, ranks) for wait in found)
    if quiet and state.idle_since is not None and now - state.idle_since > min(limits.idle_min_s / 2, idle.look_after_s(ranks, limits)):
        watched, look = idle.to_watch(ranks, limits)
        for rank in watched:
            due.setdefault(rank, (0.0, look))
    watches = {}
    for rank, (since, look) in due.items():
        old_watch = state.watches.get(rank)
        if old_watch is not None and old_watch.look_at < since:
            old_watch = None  # a look that began before the wait would count the work before it
        watches[rank] = progress.observe(old_watch, ranks[rank], scene.seen_at(rank), look, limits)
    watches = progress.with_lock_holders(watches, ranks)
    return progress.with_absent_peers(watches, [hang.roots for hang in troubles if len(hang.roots) > 1], ranks, now, limits.look_s)


def _rule(state: State, troubles: Sequence[Hang], found: Sequence[Wait], scene: Scene) -> tuple[State, list[wants.Case]]:
    now, minted = scene.now, state.minted
    before = dict(enumerate(state.troubles))
    places: dict[WaitKey, list[int]] = {}  # of each wait the troubles that it was a part of
    for place, trouble in before.items():
        for wait_key in trouble.waits:
            places.setdefault(wait_key, []).append(place)
    cases: list[wants.Case] = []
    kept: list[Trouble] = []
    for hang in troubles:
        keys = frozenset(found[index].key for index in hang.waits)
        place = min((place for wait_key in keys for place in places.get(wait_key, ()) if place in before), default=-1)
        old = before.pop(place, None)
        ruling = hangs.rule(hang, found, old, scene)
        if old is None:
            minted += 1
            old = Trouble(f"a{scene.snapshot.attempt}-hang-{minted}", keys, frozenset(), ruling.since, now)
        verdict = ruling.verdict
        if verdict is not None:
            verdict = repeats.told(verdict if verdict.key == old.key else replace(verdict, key=old.key), state)
        trouble = replace(
            old, waits=keys, culprits=frozenset(ruling.culprits), since=ruling.since, seen=now, agree=ruling.agree, finding=ruling.mark,
            witness=ruling.witness, deadline=ruling.deadline, verdict=verdict,
        )  # fmt: skip
        kept.append(trouble)
        cases.append((hang, ruling, trouble))
    kept += [trouble for trouble in before.values() if age(state.pauses, trouble.seen, now) < _FORGET_S]
    return changed(state, troubles=tuple(kept), minted=minted), cases


# -- ends ------------------------------------------------------------------------------------------------------------------


def _failure(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> State:
    if state.failure is not None and not state.failure_weak:
        return changed(state, failure=deaths.grown(state.failure, state, snapshot, ranks))
    judged = deaths.judge(state, snapshot, ranks, state.deaths, f"a{snapshot.attempt}-death")
    state = changed(state, failure_held=judged.held)
    if judged.verdict is None:
        return state
    culprits = set(judged.verdict.culprit_ranks)
    if state.failure is not None and state.failure.culprit_ranks and not culprits:
        return state  # named before that evidence was gone
    told = next((trouble.key for trouble in state.troubles if trouble.verdict is not None and culprits & trouble.culprits), None)
    held = (each for each in state.last if each.verdict in unhealed.OF_WAITS and each.waiting_ranks)
    told = told or next((each.key for each in held if culprits & {*each.culprit_ranks}), None)
    verdict = replace(judged.verdict, key=told) if told is not None else judged.verdict
    verdict = repeats.told(verdict, state)
    costs = ledger.explained(state.ledger, verdict) if state.ledger is not None else None
    return changed(state, failure=verdict, failure_weak=judged.weak, ledger=costs)


def _ended(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> tuple[State, tuple[Verdict, ...], tuple[Want, ...]]:
    """While the job ends nothing new is judged: what was open stays as it was, and the first death is named once."""
    verdicts = list(state.frozen or state.last)
    if state.failure is not None:
        failure = state.failure
        others = (verdict for verdict in verdicts if verdict.key != failure.key)
        verdicts = [failure, *(each for each in others if each.verdict in ("stuck", "diverged", "failed") or unhealed.died_waiting(each, ranks))]
    elif snapshot.final and all(rank.process is not None and rank.process.exit_code == 0 for rank in ranks.values()):
        verdicts = [verdict for verdict in verdicts if verdict.verdict in ("failed", "diverged")]
    wanted: tuple[Want, ...] = ()
    if state.failure is not None and not snapshot.final and state.deaths and snapshot.now - min(death.seen_at for death in state.deaths.values()) < 0.2:
        living = tuple(sorted(rank.rank for rank in ranks.values() if alive(rank)))[:8]
        if living and not snapshot.ending:
            wanted = (Want("stacks", living, "peers of the rank that failed, while they live"), Want("recorder", living, "last operations before the end"))
    return changed(state, last=tuple(verdicts)), tuple(verdicts), wanted


def _post_mortem(state: State, verdicts: list[Verdict], found: Sequence[Wait], scene: Scene) -> tuple[State, list[Verdict]]:
    """Once a watchdog has fired, what moves is no recovery: verdicts stay as they were at that moment."""
    now, limits = scene.now, scene.limits
    if state.frozen_at is not None:
        quiet = not any(age(state.pauses, wait.since, now) >= wait.notice_s for wait in found)
        held = not quiet or watchdog.holds(state.frozen, state, scene)
        if now - state.frozen_at < limits.post_mortem_s or held or any(death.code for death in state.deaths.values()):
            return state, watchdog.told(state.frozen, state, scene)
        state = changed(state, frozen=(), frozen_at=None, troubles=())
        return state, verdicts
    last = {verdict.key: verdict for verdict in state.last}
    followers = victims.followers(state, scene.ranks) | gave_up.on(state, scene.ranks, state.deaths).keys()
    told = last.keys() | {verdict.key for verdict in verdicts}
    fired = [
        trouble for trouble in state.troubles
        if trouble.verdict is not None and trouble.key in told
        and (_has_ended(trouble, now) or watchdog.fired(trouble, scene.ranks) or _followed(last.get(trouble.key), followers))
    ]  # fmt: skip
    if not fired:
        return state, verdicts
    # who ends of it is seen before it has left its wait, and would be blamed for it
    before = [last.get(verdict.key, verdict) for verdict in verdicts]
    frozen = [verdict for verdict in before if verdict.cause in _ALL_INSIDE or not verdict.culprit_ranks or not followers.issuperset(verdict.culprit_ranks)]
    keys = {verdict.key for verdict in verdicts}
    frozen += [last.get(trouble.key, trouble.verdict) for trouble in fired if trouble.verdict is not None and trouble.key not in keys]
    state = changed(state, frozen=tuple(frozen), frozen_at=now)
    return state, watchdog.told(frozen, state, scene)


def _has_ended(trouble: Trouble, now: float) -> bool:
    """Whether its watchdog has fired."""
    return trouble.deadline is not None and (now >= trouble.deadline if trouble.seen == now else now >= trouble.deadline - 1.0)


def _followed(told: Verdict | None, followers: frozenset[int]) -> bool:
    """Whether ranks that waited in a trouble that was told have ended of it."""
    return told is not None and told.verdict in ("stuck", "timeout_imminent") and not followers.isdisjoint(told.waiting_ranks)
