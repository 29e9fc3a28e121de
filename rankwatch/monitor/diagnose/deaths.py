"""Ranks that ended badly: which one was first, and which ones only followed.

A death by SIGTERM, SIGINT or SIGHUP is a planned end unless torchrun's own report says otherwise. A rank whose exception speaks of a
lost peer or a timeout, or whose own collective had timed out, is a victim. A rank that ended with exit code 0 while such victims
were in a group with it is the first cause: its closing sockets are what they died of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rankwatch.model import JobSnapshot, RankState, Verdict
from rankwatch.monitor.diagnose import aborts, causes, ends, words
from rankwatch.monitor.diagnose.ends import signal_name
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death, State
from rankwatch.monitor.diagnose.views import alive
from rankwatch.monitor.policy import Limits
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (remote )?peer|broken pipe|socket (is )?closed|unexpected end of (file|stream)|"
    r"application timeout caused pair closure|read error|write error|writev|readv|timed out (waiting|after)|timeout waiting|wait timeout|"
    r"watchdog caught collective|collective operation timeout|nccl communicator was aborted|remote process exited|ncclremoteerror|"
    r"distnetworkerror|diststoreerror|connectfullmesh|failed to (recv|send)|heartbeat.*(timeout|stuck)|monitoredbarrier|"
    r"ranks? .* failed to (pass|reach) monitored",
    re.IGNORECASE,
)
_TORCH_COMM = re.compile(r"gloo|nccl|c10d|torch[/.]distributed|dist(backend|network|store)error|tcpstore|processgroup|pair\.cc|socket", re.IGNORECASE)
_TIMED_OUT = re.compile(r"time[d -]*out", re.IGNORECASE)
_PLANNED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_AFTER_FAILURE = re.compile(r"fail|after rank|died", re.IGNORECASE)
_SETTLED_S = 3.0  # victims alone: who they lost may be seen only now
_HEAR_PEERS_S = 1.2  # torchrun is held back for 1.5 s while evidence is taken
_SAME_DEATH_S = 1.0  # ranks that end alike within this time ended of the same cause
_ORDER = {"SIGKILL": 0, "SIGSEGV": 0, "SIGBUS": 0, "SIGILL": 0, "SIGFPE": 0, "": 1, "SIGABRT": 2}


@dataclass(frozen=True, slots=True)
class Judged:
    """verdict: None while nobody is to be named. weak: named for want of a better candidate, may be replaced.

    held: a rank is dead, and who is to be named depends on what its peers are about to say.
    """

    verdict: Verdict | None
    weak: bool = False
    held: bool = False


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


def planned_end(snapshot: JobSnapshot, deaths: Mapping[int, Death]) -> bool:
    """Whether the end that begins now was asked for by somebody, and not torchrun's answer to a failure."""
    if any(death.code != 0 and not death.after_ending and signal_name(death.code) not in _PLANNED for death in deaths.values()):
        return False
    return not _AFTER_FAILURE.search(snapshot.ending)


def is_victim(rank: RankState, death: Death) -> bool:
    """Whether it only followed: it lost a peer, or its own collective timed out."""
    crash = rank.crash
    if crash is not None:
        text = f"{crash.type}: {crash.message}"
        if _LOST_PEER.search(text):
            # a plain ConnectionResetError in the job's own download code is no lost peer
            return bool(_TORCH_COMM.search(text) or _TORCH_COMM.search(crash.traceback)) or crash.type in ("RuntimeError", "torch.AcceleratorError")
    return death.overdue and signal_name(death.code) in ("SIGABRT", "SIGTERM", "")


def judge(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], deaths: Mapping[int, Death], key: str) -> Judged:
    """The first cause among the deaths. Once named for sure it stays; called on every look, also while the job is being ended."""
    if state.failure is not None and not state.failure_weak:
        return Judged(state.failure)
    if state.ending_planned:
        return Judged(state.failure, state.failure_weak)
    bad = {rank: death for rank, death in deaths.items() if death.code != 0 and rank in ranks}
    if not bad and any(death.code == 0 for death in deaths.values()):
        bad = _about_to_end(snapshot, ranks)  # of the loss of a peer that ended well: it need not be waited for
    if not bad:
        return Judged(None)
    victims, firsts, planned = _sorted(ranks, bad)
    if firsts:
        ordered = _in_order(firsts)
        if aborts.suspected(ranks[ordered[0].rank], ordered[0]):
            return _of_abort(state, snapshot, ranks, ordered, bad, key)
        return _first(state, snapshot, ranks, ordered, bad, key)
    if victims:
        return _of_victims(state, snapshot, ranks, deaths, victims, bad, key)
    return _terminated(state, snapshot, ranks, planned, bad, key)


def grown(failure: Verdict, state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> Verdict:
    """The verdict that was given, with those ranks that died alike within the same moment and are seen only now."""
    bad = {rank: death for rank, death in state.deaths.items() if death.code != 0 and rank in ranks}
    if state.ending_planned or bad.keys() <= set(failure.culprit_ranks):
        return failure
    firsts = _sorted(ranks, bad)[1]
    if not firsts.keys() >= set(failure.culprit_ranks) or not failure.culprit_ranks:
        return failure
    newer = _first(state, snapshot, ranks, _in_order(firsts), bad, failure.key).verdict
    more = newer is not None and newer.cause == failure.cause and set(newer.culprit_ranks) > set(failure.culprit_ranks)
    return newer if newer is not None and more else failure


def _sorted(ranks: Mapping[int, RankState], bad: Mapping[int, Death]) -> tuple[dict[int, Death], dict[int, Death], dict[int, Death]]:
    """The bad ends: victims, those that are nobody's consequence, and those that were asked for."""
    victims, firsts, planned = {}, {}, {}
    seen_early = any(not death.after_ending for death in bad.values())
    killed_at = min((death.at for death in bad.values() if not death.after_ending and signal_name(death.code) == "SIGKILL"), default=None)
    for rank, death in bad.items():
        name, crash = signal_name(death.code), ranks[rank].crash
        together = killed_at is not None and death.at - killed_at <= _SAME_DEATH_S  # torchrun sends SIGTERM long before SIGKILL
        forced = name == "SIGKILL" and not together
        stopped = death.after_ending and seen_early and (forced or (not name and (crash is None or crash.type in ("KeyboardInterrupt", "SystemExit"))))
        if name in _PLANNED or stopped:
            planned[rank] = death  # asked for, or torchrun's own stop of the workers
        elif is_victim(ranks[rank], death):
            victims[rank] = death
        else:
            firsts[rank] = death
    return victims, firsts, planned


def _in_order(firsts: Mapping[int, Death]) -> list[Death]:
    return sorted(firsts.values(), key=lambda death: (round(death.at, 1), _ORDER.get(signal_name(death.code), 1), death.rank))


def _about_to_end(snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> dict[int, Death]:
    """Ranks that end by the loss of a peer, as they say themselves, while their process still takes down torch."""
    ends = (Death(rank.rank, 1, rank.stage_since or snapshot.now, snapshot.now, bool(snapshot.ending)) for rank in ranks.values() if rank.stage == "exiting")
    return {death.rank: death for death in ends if ranks[death.rank].crash is not None and is_victim(ranks[death.rank], death)}


def _first(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], ordered: Sequence[Death], bad: Mapping[int, Death], key: str) -> Judged:
    """The first of the deaths that are nobody's consequence, with those that died alike at the same time."""
    first = ordered[0]
    finding = causes.of(ranks[first.rank], first.at, state, snapshot.now, _NO_LIMITS)
    same = [first.rank]
    for other in ordered[1:]:
        theirs = causes.of(ranks[other.rank], other.at, state, snapshot.now, _NO_LIMITS)
        if other.at - first.at <= _SAME_DEATH_S and theirs.cause == finding.cause and theirs.says == finding.says:
            same.append(other.rank)
    return Judged(_verdict(finding, tuple(sorted(same)), first.at, snapshot, ranks, bad, key))


def _of_abort(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], ordered: Sequence[Death], bad: Mapping[int, Death], key: str) -> Judged:
    """gloo aborts innocent ranks: wait until their peers have said what they called, then name who called something else."""
    dead = {death.rank: death for death in ordered if aborts.suspected(ranks[death.rank], death) and death.at - ordered[0].at <= _SAME_DEATH_S}
    first = ordered[0]
    if not (snapshot.final or aborts.told(dead, ranks) or snapshot.now - first.seen_at >= _HEAR_PEERS_S):
        return Judged(None, held=True)
    found = aborts.blame(dead, ranks)
    if found is None:
        return _first(state, snapshot, ranks, ordered, bad, key)
    at = next((crash.where for rank in found.still_there if (crash := ranks[rank].crash) is not None), "")
    finding = Finding(found.culprits[0], "mismatch", "user_code", at=at, limit="at_once", evidence=found.evidence, confidence=found.confidence)
    verdict = _verdict(finding, found.culprits, first.at, snapshot, ranks, bad, key)
    return Judged(replace(verdict, summary=found.says + words.seen(ranks, snapshot), group=found.group))


def _of_victims(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], deaths: Mapping[int, Death], victims: Mapping[int, Death],
    bad: Mapping[int, Death], key: str,
) -> Judged:  # fmt: skip
    hung = [verdict for trouble in state.troubles if (verdict := trouble.verdict) is not None and verdict.verdict in ("stuck", "timeout_imminent")]
    unjoined = {rank: death for rank, death in victims.items() if ends.failed_join(ranks[rank], state) is not None}
    told = [each for each in hung if not each.culprit_ranks or not unjoined.keys() >= set(each.culprit_ranks)]
    if state.frozen or any({*each.culprit_ranks, *each.waiting_ranks} & set(victims) for each in told):
        return Judged(None)  # they died of a hang that has its own verdict
    start = min(death.at for death in victims.values())
    mates = {mate for rank in victims for group in ranks[rank].groups for mate in group.ranks}
    gone = [death for rank, death in deaths.items() if death.code == 0 and (rank in mates or not mates) and death.at <= start + 0.5]
    if gone:
        last = max(death.at for death in gone)
        named = tuple(sorted(death.rank for death in gone if death.at >= last - _SAME_DEATH_S))
        finding = causes.of(ranks[named[0]], last, state, snapshot.now, _NO_LIMITS)
        finding = replace(
            finding, cause="exited", domain="user_code", says="it ended with exit code 0 while its peers were still in their collectives", limit="at_once"
        )
        return Judged(_verdict(finding, named, last, snapshot, ranks, bad, key))
    if any(death.overdue for death in victims.values()):
        return Judged(None)
    if unjoined and (judged := _of_joins(state, snapshot, ranks, unjoined, bad, key)) is not None:
        return judged
    unseen = snapshot.world_size - len(ranks)
    if not snapshot.final and snapshot.now - start < _SETTLED_S:
        return Judged(None, held=True)
    if unseen > 0:
        finding = Finding(
            -1,
            "unknown",
            "unknown",
            confidence="partial",
            evidence=(f"only {len(ranks)} of {snapshot.world_size} ranks seen; the first to end is not among them",),
        )
        return Judged(_verdict(finding, (), start, snapshot, ranks, bad, key), weak=True)
    first = min(victims.values(), key=lambda death: (round(death.at, 1), death.rank))
    finding = causes.of(ranks[first.rank], first.at, state, snapshot.now, _NO_LIMITS)
    finding = replace(
        finding, domain="network", confidence="partial", evidence=(*finding.evidence, "every rank that ended speaks of a lost peer, and no peer was lost first")
    )
    return Judged(_verdict(finding, (first.rank,), start, snapshot, ranks, bad, key), weak=True)


def _of_joins(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], unjoined: Mapping[int, Death], bad: Mapping[int, Death], key: str
) -> Judged | None:
    """Ranks whose own init_process_group raised something about connections. A timeout there is the fault of who had not come."""
    ordered = _in_order(unjoined)
    if not snapshot.final and snapshot.now - min(death.seen_at for death in ordered) < _SAME_DEATH_S:
        return Judged(None, held=True)
    partial = len(ranks) < snapshot.world_size
    raised = ends.failed_join(ranks[ordered[0].rank], state)
    if raised is not None and _TIMED_OUT.search(f"{raised.type}: {raised.message}"):
        if partial:
            return None
        late = tuple(sorted(other.rank for other in ranks.values() if _had_not_come(other, state)))
        if late:
            finding = Finding(late[0], "store_wait", "user_code", limit="at_once", evidence=(ends.said(raised),), confidence="likely")
            verdict = _verdict(finding, late, ordered[0].at, snapshot, ranks, bad, key)
            text = f"{words.ranks_text(late)} had not called init_process_group when that of {words.ranks_text(unjoined)} timed out"
            return Judged(replace(verdict, summary=text))
    judged = _first(state, snapshot, ranks, ordered, bad, key)
    return judged if judged.verdict is None else Judged(replace(judged.verdict, confidence="partial" if partial else "likely"))


def _had_not_come(rank: RankState, state: State) -> bool:
    death = state.deaths.get(rank.rank)
    return rank.stage in ("starting", "armed") and rank.agent not in ("off", "silent") and (death is None or death.after_ending)


def _terminated(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], planned: Mapping[int, Death], bad: Mapping[int, Death], key: str
) -> Judged:
    """One rank alone that got a SIGTERM from outside, which torchrun then calls a failure."""
    early = [death for death in planned.values() if not death.after_ending]
    ends = snapshot.ending and _AFTER_FAILURE.search(snapshot.ending)
    if len(early) != 1 or len(ranks) < 2 or not ends or state.ending_at is None:
        return Judged(None)
    finding = causes.of(ranks[early[0].rank], early[0].at, state, snapshot.now, _NO_LIMITS)
    finding = replace(finding, confidence="likely", evidence=(*finding.evidence, "no other rank and not the launcher got this signal first"))
    return Judged(_verdict(finding, (early[0].rank,), early[0].at, snapshot, ranks, bad, key))


def _verdict(
    finding: Finding, culprits: tuple[int, ...], at: float, snapshot: JobSnapshot, ranks: Mapping[int, RankState], bad: Mapping[int, Death], key: str
) -> Verdict:
    waiting = tuple(
        sorted(
            rank for rank, other in ranks.items()
            if rank not in culprits
            and (
                rank in bad
                or (other.stage == "joining" and alive(other))
                or any(other.enqueued.get(group.name, 0) > other.completed.get(group.name, 0) for group in other.groups)
            )
        )
    )  # fmt: skip
    victims = sorted(rank for rank in bad if rank not in culprits)
    where = f" at {finding.at}" if finding.at else ""
    who = words.ranks_text(culprits)
    said = finding.says.removeprefix("it ") or "is gone"
    summary = f"{who} failed first: {said}{where}" if culprits else "ranks failed of a lost peer that is not among the ranks seen"
    if victims:
        summary += f"; {words.ranks_text(victims)} ended after it"
    evidence = list(finding.evidence)
    for rank in victims[:4]:
        crash = ranks[rank].crash
        evidence.append(
            f"rank {rank} is a consequence: " + (f"{crash.type}: {ends.first_line(crash.message, 120)}" if crash else f"exit code {bad[rank].code}")
        )
    if len(victims) > 4:
        evidence.append(f"and so are ranks {compress(victims[4:])}")
    partial = len(ranks) < snapshot.world_size
    return Verdict(
        key=key, verdict="failed", cause=finding.cause, domain=finding.domain, culprit_ranks=culprits, waiting_ranks=waiting, since=at,
        summary=summary + words.seen(ranks, snapshot), unknown_ranks=words.unknown(ranks, snapshot), at=finding.at,
        confidence="partial" if partial and not culprits else finding.confidence, advice=words.advice(finding.cause, finding), evidence=tuple(evidence),
        missing_evidence=finding.missing_evidence,
    )  # fmt: skip


_NO_LIMITS = Limits()
