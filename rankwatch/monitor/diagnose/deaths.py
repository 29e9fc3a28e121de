"""Ranks that ended badly: which one was first, and which ones only followed.

A death by SIGTERM, SIGINT or SIGHUP is a planned end unless torchrun's own report says otherwise. A rank whose exception speaks of a
lost peer or a timeout, or whose own collective had timed out, is a victim. A rank that ended with exit code 0 while such victims
were in a group with it is the first cause: its closing sockets are what they died of.

A planned end explains every death that follows. That of one other node does so until the job is seen to have gone on without it.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from rankwatch.model import Confidence, JobSnapshot, RankState, Verdict
from rankwatch.monitor.diagnose import aborts, blame, causes, ends, gave_up, leavers, lost_nodes, repeats, torchs_words, unjoined, unspoken, words
from rankwatch.monitor.diagnose import victims as followed
from rankwatch.monitor.diagnose.blame import Judged
from rankwatch.monitor.diagnose.ends import signal_name
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death, State, changed
from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PLANNED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_AFTER_FAILURE = re.compile(r"fail|after rank|died", re.IGNORECASE)
_SETTLED_S = 3.0  # victims alone: who they lost may be seen only now
_HEAR_PEERS_S = 1.2  # torchrun is held back for 1.5 s while evidence is taken
_GONE_ON_S = 30.0  # the job still moves so long after another node's planned end has ceased to explain what happens, and after the last death
_HANGS_AT_END_S = 3.0  # a process that still lives so long after its exception: its end hangs, or takes long


def observe(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> dict[int, Death]:
    """Every death seen in this attempt. The first sight fixes its time, unless the process record tells it better."""
    deaths = dict(state.deaths)
    overdue = {rank for (rank, _, _), wait in state.opens.items() if wait.deadline is not None and snapshot.now >= wait.deadline - 1.0}
    for rank in ranks.values():
        process = rank.process
        if rank.rank in deaths or process is None or process.exit_code is None:
            continue
        at = process.exited_at if process.exited_at is not None else snapshot.now
        before = state.ending_at is not None and process.exited_at is not None and process.exited_at < state.ending_at - 0.1
        deaths[rank.rank] = Death(rank.rank, process.exit_code, at, snapshot.now, bool(snapshot.ending) and not before, rank.rank in overdue)
    return deaths


def planned_end(snapshot: JobSnapshot, deaths: Mapping[int, Death], excused: frozenset[int]) -> bool:
    """Whether the end that begins now was asked for by somebody, and not torchrun's answer to a failure."""
    early = (death for rank, death in deaths.items() if rank not in excused and not death.after_ending)
    if any(death.code != 0 and signal_name(death.code) not in _PLANNED for death in early):
        return False
    return not _AFTER_FAILURE.search(snapshot.ending)


def excuse(state: State, snapshot: JobSnapshot) -> State:
    """Once the job has gone on without a node that was ended as planned, that end explains only the deaths until then, and those of that node's ranks."""
    if snapshot.ending:
        return changed(state, ending_seen=snapshot.now)
    if not state.ending_planned or state.ending_seen is None:
        return state
    last = max((death.seen_at for death in state.deaths.values()), default=state.ending_seen)
    if state.moved_at - max(last, state.ending_seen) < _GONE_ON_S:
        return state
    return changed(state, ending_at=None, ending_planned=False, excused=state.excused | state.deaths.keys() | snapshot.leaving)


def judge(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], deaths: Mapping[int, Death], key: str) -> Judged:
    """The first cause among the deaths. Once named for sure it stays; called on every look, also while the job is being ended."""
    if state.failure is not None and not state.failure_weak:
        return Judged(state.failure)
    if state.ending_planned:
        return Judged(state.failure, state.failure_weak)
    bad = {rank: death for rank, death in deaths.items() if death.code != 0 and rank in ranks and rank not in state.excused}
    if not bad and (any(death.code == 0 for death in deaths.values()) or any(leavers.left(rank, None) for rank in ranks.values())):
        bad = _about_to_end(snapshot, ranks)  # of the loss of a peer that ended well, or has left: it need not be waited for
    bad |= {rank: death for rank, death in _raising(snapshot, ranks, bad).items() if rank not in state.excused}
    if not bad:
        return Judged(None)
    victims, firsts, planned = _sorted(ranks, bad)
    if given_up := gave_up.on(state, ranks, firsts):
        firsts = {rank: death for rank, death in firsts.items() if rank not in given_up}
        if not firsts:
            return gave_up.judge(snapshot, ranks, given_up, bad, key)
    if (named := torchs_words.mismatch(snapshot, ranks, firsts, bad, key)) is not None:
        return named
    if firsts:
        ordered = blame.in_order(firsts, ranks, snapshot)
        if aborts.suspected(ranks[ordered[0].rank], ordered[0]):
            return _of_abort(state, snapshot, ranks, ordered, bad, key)
        return blame.first(state, snapshot, ranks, ordered, bad, key)
    if victims and state.excused:
        return Judged(None)  # of the loss of those ranks, as far as can be told
    if victims:
        return _of_victims(state, snapshot, ranks, deaths, victims, bad, key)
    return _terminated(state, snapshot, ranks, planned, bad, key)


def grown(failure: Verdict, state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> Verdict:
    """The verdict that was given, with those ranks that died alike within the same moment and are seen only now."""
    bad = {rank: death for rank, death in state.deaths.items() if death.code != 0 and rank in ranks and rank not in state.excused}
    if state.ending_planned or bad.keys() <= set(failure.culprit_ranks):
        return failure
    firsts = _sorted(ranks, bad)[1]
    if not firsts.keys() >= set(failure.culprit_ranks) or not failure.culprit_ranks:
        return failure
    newer = blame.first(state, snapshot, ranks, blame.in_order(firsts, ranks, snapshot), bad, failure.key).verdict
    more = newer is not None and newer.cause == failure.cause and set(newer.culprit_ranks) > set(failure.culprit_ranks)
    return repeats.told(newer, state) if newer is not None and more else failure


def _sorted(ranks: Mapping[int, RankState], bad: Mapping[int, Death]) -> tuple[dict[int, Death], dict[int, Death], dict[int, Death]]:
    """The bad ends: victims, those that are nobody's consequence, and those that were asked for."""
    victims, firsts, planned = {}, {}, {}
    seen_early = any(not death.after_ending for death in bad.values())
    killed_at = min((death.at for death in bad.values() if not death.after_ending and signal_name(death.code) == "SIGKILL"), default=None)
    for rank, death in bad.items():
        name, crash = signal_name(death.code), ranks[rank].crash
        together = killed_at is not None and death.at - killed_at <= blame.SAME_DEATH_S  # torchrun sends SIGTERM long before SIGKILL
        forced = name == "SIGKILL" and not together
        stopped = death.after_ending and seen_early and (forced or (not name and (crash is None or crash.type in ("KeyboardInterrupt", "SystemExit"))))
        if name in _PLANNED or stopped:
            planned[rank] = death  # asked for, or torchrun's own stop of the workers
        elif followed.is_victim(ranks[rank], death):
            victims[rank] = death
        else:
            firsts[rank] = death
    return victims, firsts, planned


def _raising(snapshot: JobSnapshot, ranks: Mapping[int, RankState], bad: Mapping[int, Death]) -> dict[int, Death]:
    """Ranks that an exception of their own ends while their process still lives: beside other ends, or after a while, where somebody waits."""
    found = {}
    for rank in ranks.values():
        crash = rank.crash
        if rank.rank in bad or crash is None or rank.stage != "exiting" or not alive(rank) or crash.type in ("KeyboardInterrupt", "SystemExit"):
            continue
        death = Death(rank.rank, 1, rank.stage_since or snapshot.now, snapshot.now, bool(snapshot.ending))
        if not followed.is_victim(rank, death) and (bad or (snapshot.now - death.at >= _HANGS_AT_END_S and _waited_for(ranks, rank.rank))):
            found[rank.rank] = death
    return found


def _waited_for(ranks: Mapping[int, RankState], rank: int) -> bool:
    return any(other.rank != rank and alive(other) and blame.waits(other) for other in ranks.values())


def _about_to_end(snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> dict[int, Death]:
    """Ranks that end by the loss of a peer, as they say themselves, while their process still takes down torch."""
    leaving = [rank for rank in ranks.values() if rank.stage == "exiting" and rank.crash is not None and not _ended_well(rank)]
    found = {rank.rank: Death(rank.rank, 1, rank.stage_since or snapshot.now, snapshot.now, bool(snapshot.ending)) for rank in leaving}
    return {rank: death for rank, death in found.items() if followed.is_victim(ranks[rank], death)}


def _ended_well(rank: RankState) -> bool:
    return rank.process is not None and rank.process.exit_code == 0


def _of_abort(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], ordered: Sequence[Death], bad: Mapping[int, Death], key: str) -> Judged:
    """gloo aborts innocent ranks: wait until their peers have said what they called, then name who called something else."""
    dead = {death.rank: death for death in ordered if aborts.suspected(ranks[death.rank], death) and death.at - ordered[0].at <= blame.SAME_DEATH_S}
    first = ordered[0]
    if not (snapshot.final or aborts.told(dead, ranks) or snapshot.now - first.seen_at >= _HEAR_PEERS_S):
        return Judged(None, held=True)
    found = aborts.blame(dead, ranks, snapshot)
    if found is None:
        judged = blame.first(state, snapshot, ranks, ordered, bad, key)  # of gloo's abort or another: no one can tell
        sure: Confidence = "likely" if judged.verdict is None or judged.verdict.confidence == "certain" else judged.verdict.confidence
        return judged if judged.verdict is None else replace(judged, verdict=replace(judged.verdict, confidence=sure))
    at = next((crash.where for rank in found.still_there if (crash := ranks[rank].crash) is not None), "")
    finding = Finding(found.culprits[0], "mismatch", "user_code", at=at, limit="at_once", evidence=found.evidence, confidence=found.confidence)
    verdict = blame.verdict(finding, found.culprits, first.at, snapshot, ranks, bad, key)
    return Judged(replace(verdict, summary=found.says + words.seen(ranks, snapshot), group=found.group))


def _of_victims(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], deaths: Mapping[int, Death], victims: Mapping[int, Death],
    bad: Mapping[int, Death], key: str,
) -> Judged:  # fmt: skip
    hung = [verdict for trouble in state.troubles if (verdict := trouble.verdict) is not None and verdict.verdict in ("stuck", "timeout_imminent")]
    failed_joins = {rank: death for rank, death in victims.items() if ends.failed_join(ranks[rank], state) is not None}
    told = [each for each in hung if not each.culprit_ranks or not failed_joins.keys() >= set(each.culprit_ranks)]
    start = min(death.at for death in victims.values())
    mates = {mate for rank in victims for group in ranks[rank].groups for mate in group.ranks}
    gone = [death for rank, death in deaths.items() if death.code == 0 and rank in ranks and (rank in mates or not mates) and death.at <= start + 0.5]
    missed = {death.rank for death in gone}
    told = [each for each in (*told, *state.frozen) if not (each.culprit_ranks and missed.issuperset(each.culprit_ranks))]
    if any({*each.culprit_ranks, *each.waiting_ranks} & set(victims) for each in told) or (state.frozen and not gone):
        return Judged(None)  # they died of a hang that has its own verdict
    if gone:
        last = max(death.at for death in gone)
        named = tuple(sorted(death.rank for death in gone if death.at >= last - blame.SAME_DEATH_S))
        finding = causes.of(ranks[named[0]], last, state, snapshot.now, blame.NO_LIMITS)
        finding = replace(
            finding, cause="exited", domain="user_code", says="it ended with exit code 0 while its peers were still in their collectives", limit="at_once"
        )
        return Judged(blame.verdict(finding, named, last, snapshot, ranks, bad, key))
    if (late := torchs_words.missed(snapshot, ranks, victims, bad, key)) is not None:
        return late
    if any(death.overdue for death in victims.values()):
        return Judged(None)
    began = min(death.at for death in blame.in_order(victims, ranks, snapshot))
    if (leaver := leavers.first(ranks, deaths, victims.keys() | failed_joins.keys(), began, followed.handles_a_loss)) is not None:
        return _of_leaver(leaver, snapshot, ranks, victims, bad, key)
    if failed_joins and (judged := unjoined.judge(state, snapshot, ranks, failed_joins, bad, key)) is not None:
        return judged
    if (lost := lost_nodes.judge(state, snapshot, ranks, victims, bad, key)) is not None:
        return lost
    return _alone(snapshot, ranks, victims, state, bad, start, key)


def _alone(
    snapshot: JobSnapshot, ranks: Mapping[int, RankState], victims: Mapping[int, Death], state: State, bad: Mapping[int, Death], start: float, key: str
) -> Judged:
    """Every rank that ended, the first at `start`, speaks of a lost peer, and none that could be meant is known."""
    unseen = snapshot.world_size - len(ranks)
    if not snapshot.final and snapshot.now - start < _SETTLED_S:
        return Judged(None, held=True)
    if unseen > 0 and (snapshot.restarting or not snapshot.final):
        return Judged(None)  # what happened elsewhere may be a planned end there, which the restart is the answer to
    if unseen > 0:
        finding = Finding(
            -1,
            "unknown",
            "unknown",
            confidence="partial",
            evidence=(f"only {len(ranks)} of {snapshot.world_size} ranks seen; the first to end is not among them",),
        )
        return Judged(blame.verdict(finding, (), start, snapshot, ranks, bad, key), weak=True)
    if (silent := unspoken.first(ranks, victims, start)) is not None:
        return unspoken.judge(silent, snapshot, ranks, victims, bad, key)
    first = min(victims.values(), key=lambda death: (round(death.at, 1), death.rank))
    crash = ranks[first.rank].crash
    own = crash is None or not followed.torchs_words(crash)
    said = causes.of(ranks[first.rank], first.at, state, snapshot.now, blame.NO_LIMITS)
    lines = (*said.evidence, "every rank that ended speaks of a lost peer, and no peer was lost first", f"rank {first.rank} was the first to end")
    heard = all(node.report_age_s <= max(0.0, snapshot.now - start - blame.SAME_DEATH_S) for node in snapshot.nodes)
    if len(victims) == 1 and own and heard and all(alive(other) for rank, other in ranks.items() if rank not in victims):
        finding = replace(said, domain="network", confidence="partial", evidence=lines)  # not torch's own words, and its peers are all there
        return Judged(blame.verdict(finding, (first.rank,), start, snapshot, ranks, bad, key), weak=True)
    known = all(rank.agent == "claimed" for rank in ranks.values())  # who is not watched may have left
    finding = Finding(-1, "unknown", "network" if known else "unknown", at=said.at, confidence="partial", evidence=lines)
    return Judged(blame.verdict(finding, (), start, snapshot, ranks, bad, key), weak=True)  # who says it first has lost a peer, and is not to blame


def _of_leaver(
    leaver: RankState, snapshot: JobSnapshot, ranks: Mapping[int, RankState], victims: Mapping[int, Death], bad: Mapping[int, Death], key: str
) -> Judged:
    """Its stack is on its way while the others die: the name stays, the place may still come."""
    finding = leavers.finding(leaver)
    others = {rank: death for rank, death in bad.items() if rank != leaver.rank}
    found = blame.verdict(finding, (leaver.rank,), leaver.stage_since, snapshot, ranks, others, key)
    entry = max((each for rank in victims for each in ranks[rank].collectives if not each.is_p2p), key=lambda each: each.seq, default=None)
    where = f" while {words.ranks_text(sorted(victims))} {words.verb(tuple(victims), 'was', 'were')} in " + (
        f"{entry.op} #{entry.seq}" if entry else "its collectives"
    )
    still = f"; it {'is' if alive(leaver) else 'was'} still running" + (f" in {finding.at}" if finding.at else "")
    summary = f"{words.ranks_text((leaver.rank,))} {finding.says.removeprefix('it ')}{where}{still}"
    return Judged(replace(found, summary=summary + words.seen(ranks, snapshot)), weak=not finding.at)


def _terminated(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], planned: Mapping[int, Death], bad: Mapping[int, Death], key: str
) -> Judged:
    """One rank alone that got a SIGTERM from outside, which torchrun then calls a failure."""
    early = [death for death in planned.values() if not death.after_ending]
    ends = snapshot.ending and _AFTER_FAILURE.search(snapshot.ending)
    if len(early) != 1 or len(ranks) < 2 or not ends or state.ending_at is None:
        return Judged(None)
    name = signal_name(early[0].code)
    if name != "SIGTERM":  # by which torchrun ends the others; of any other signal it is known who got it
        if not snapshot.final and snapshot.now - state.ending_at < blame.SAME_DEATH_S:
            return Judged(None)  # some may not have ended yet
        others = [rank for rank in ranks.values() if rank.rank != early[0].rank]
        interrupted = any(rank.crash is not None and rank.crash.type == "KeyboardInterrupt" for rank in others)
        if (name == "SIGINT" and interrupted) or any(signal_name(planned[rank.rank].code) == name for rank in others if rank.rank in planned):
            return Judged(None)
    if early[0].code == 128 + signal.SIGTERM:  # a handler has chosen this code, after work of its own: others may be in theirs
        if not snapshot.final:
            return Judged(None)
        rest = [rank for rank in ranks.values() if rank.rank != early[0].rank]
        if all(rank.rank in planned and planned[rank.rank].code == early[0].code for rank in rest) and not any(followed.followers(state, ranks)):
            return Judged(None)  # all have ended by their handlers, and nobody has missed a peer before that
    finding = causes.of(ranks[early[0].rank], early[0].at, state, snapshot.now, blame.NO_LIMITS)
    line = "when torchrun began to stop the others, none of them had ended by this signal"
    finding = replace(finding, confidence="likely", evidence=(*finding.evidence, line))
    return Judged(blame.verdict(finding, (early[0].rank,), early[0].at, snapshot, ranks, bad, key))
