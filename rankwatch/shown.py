"""What every surface shares: words for what a rank does, durations, rank lists, and text that cannot hurt a terminal, a file or a page.

Pure. Export, report and notify do not import each other; what two of them need lives here.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import gmtime, strftime
from typing import Any

from rankwatch import redact, traces
from rankwatch.model import PAGING, Collective, Frame, Group, Incident, JobInfo, JobSnapshot, NodeReport, RankState, Stack, Status, Verdict, Waited
from rankwatch.wire.ranks import compress

TAG = "[rankwatch]"
"""What every line on stderr starts with."""
HEARTBEAT_STALE_S = 10.0
IN_FLIGHT_SHOWN_S = 0.5
"""A healthy rank always has a collective in flight for moments; a younger one is `running`."""
RECORDER_FRESH_S = 10.0
SHORT_LINE = 200
VERDICT_ORDER = ("recovered", "straggler", "slow", "timeout_imminent", "stuck", "diverged", "failed")
"""From harmless to grave."""

# C0 and C1 controls except tab and newline, line separators, bidirectional overrides, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object) -> str:
    """`text` with control characters, line separators, direction overrides and lone surrogates written as escapes: it encodes as UTF-8 and moves no cursor."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), str(text))


def one_line(text: object) -> str:
    """`text` cleaned, every run of white space one blank."""
    words = text if type(text) is str else str(text)
    return _short_line(words) if len(words) <= SHORT_LINE else clean(" ".join(words.split()))


@lru_cache(maxsize=4096)
def _short_line(text: str) -> str:
    """Thousands of ranks say the same few things at every look."""
    return clean(" ".join(text.split()))


def cut(text: str, limit: int) -> str:
    """`text` within `limit` characters, cut at a blank where one is near: never in the middle of a word without need."""
    if len(text) <= limit:
        return text
    head = text[:limit]
    blank = head.rfind(" ")
    return f"{head[:blank] if blank > limit * 2 // 3 else head}..."


def job_words(command: Iterable[object], limit: int = 60) -> str:
    """What was run, from the word torchrun on: rankwatch's own options tell nothing apart."""
    words = list(map(str, command))
    if "torchrun" in words:
        words = words[words.index("torchrun") :]
    return cut(one_line(" ".join(word.rsplit("/", 1)[-1] if word.endswith(".py") else word for word in words)), limit)


def public_line(text: object) -> str:
    """One clean line without secrets."""
    return redact.text(one_line(text))


def duration(seconds: float) -> str:
    """Time as people say it: "0.4 s", "74 s", "12m05s", "3h12m", "2d03h"."""
    if seconds < 0 or seconds != seconds or seconds == float("inf"):
        return "?"
    if seconds < 1 and seconds > 0:
        return f"{max(seconds, 0.1):.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def utc(wall_at: float | None, date: bool = True) -> str:
    """Unix seconds as "2026-11-30 03:12:44Z", or "03:12:44Z" without the date; "?" for a time that cannot be shown."""
    try:
        return strftime("%Y-%m-%d %H:%M:%SZ" if date else "%H:%M:%SZ", gmtime(wall_at)) if wall_at else "?"
    except (OverflowError, ValueError, OSError):
        return "?"


def plural(count: int, noun: str) -> str:
    """ "1 rank", "4 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def megabytes(sizes: Iterable[float], limit: int = 16) -> str:
    """Bytes as "0.0041, 4.21, 1.05 MB", at most `limit` of them."""
    shown = [f"{mb:.2f}" if (mb := size / 1e6) >= 0.05 or not mb else f"{mb:.2g}" for size in sizes]
    return f"{', '.join(shown[:limit])}{', ...' if len(shown) > limit else ''} MB"


def short_ranks(ranks: Iterable[int], limit: int = 80) -> str:
    """Compressed ranks, cut at a comma with the number of all of them: "0,2,4,...(8191)". "" for none."""
    numbers = set(ranks)
    text = compress(numbers)
    if len(text) <= limit:
        return text
    return f"{text[:limit].rsplit(',', 1)[0]},...({len(numbers)})"


def rank_words(ranks: Iterable[int], limit: int = 80) -> str:
    """ "rank 1", "ranks 0,2-3"; "no rank" for none."""
    numbers = set(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {short_ranks(numbers, limit)}" if numbers else "no rank"


# -- the judgement ---------------------------------------------------------------------------------------------------


def current_verdicts(status: Status) -> tuple[Verdict, ...]:
    """Verdicts in force: those of the open incidents, and fresh ones that have no incident yet."""
    keys = {incident.verdict.key for incident in status.open_incidents}
    return (*(incident.verdict for incident in status.open_incidents), *(verdict for verdict in status.verdicts if verdict.key not in keys))


def worst(incident: Incident) -> str:
    """The gravest verdict that an incident ever had."""
    return max((*(change.verdict for change in incident.history), incident.verdict.verdict), key=VERDICT_ORDER.index)


def worst_in(doc: Mapping[str, Any]) -> str:
    """The same of an incident.json document."""
    told = (doc.get("verdict"), *(change.get("verdict") for change in doc.get("history") or () if isinstance(change, Mapping)))
    known = [str(verdict) for verdict in told if verdict in VERDICT_ORDER]
    return max(known, key=VERDICT_ORDER.index, default=str(doc.get("verdict", "?")))


def lost_words(rank_s: float, whole_s: float | None = None) -> str:
    """What waiting cost: "90 rank-s", "1.5 rank-min" from 100 s on, "12 rank-h" from 10 h on. whole_s: the sum that this is a part of gives the unit."""
    whole_s = rank_s if whole_s is None else whole_s
    unit, per = ("rank-s", 1) if whole_s < 100 else ("rank-min", 60) if whole_s < 36_000 else ("rank-h", 3600)
    value = rank_s / per
    return f"{f'{value:.1f}'.removesuffix('.0') if per > 1 and value < 9.95 else f'{value:.0f}'} {unit}"


def waited_for(row: Waited) -> str:
    """ "rank 3 recompiling forward@model.py:31"; the reason alone where no single rank is waited for."""
    reason = public_line(row.reason)
    return f"rank {row.rank} {reason}" if row.rank >= 0 else reason


def waited_rank_s(status: Status) -> float:
    """Rank-seconds that waiting has cost: all that was seen of it, or the sum over the incidents where nothing was sampled."""
    if status.waiting:
        return sum(row.rank_s for row in status.waiting)
    everything = (*status.closed_incidents, *status.open_incidents)
    return sum(incident.lost_rank_s for incident in everything) + status.forgotten_lost_rank_s


_COUNTDOWN = re.compile(r"\b(?:timeout|watchdog)\b.*\b(?:in|left)\b.*\d|^\d[\w .]* (?:is|are) left$")


def without_countdown(summary: str) -> str:
    """A summary without the clause that counts down to the timeout: it is not true for long, and not at all once it is over."""
    return "; ".join(clause for clause in summary.split("; ") if not _COUNTDOWN.search(clause))


_AGE = re.compile(r"(?:^|\s)for \d+ s(?=(?: \(\d+ of \d+ ranks seen\))?$)")


_COMPILES = re.compile(r" has run for \d+ s, phase (\S+(?: \([^)]*\))?) for \d+ s")
_JUST_NOW = (("it has just compiled ", "it had just compiled "), ("it is in torch.compile", "it was in torch.compile"))
_HAS_NOT = re.compile(r"\b(?:has|have) not (?=entered|come|joined|called)")
_WAITS = re.compile(r"^(ranks? [\d,. ()-]+?) waits?(?=$| \()")


def past(summary: str) -> str:
    """A summary of something that is over, without the countdown and without "for 12 s": how long it took stands beside it, to the end."""
    clauses = [_AGE.sub("", clause).strip() for clause in without_countdown(past_compile(summary)).split("; ")]
    return "; ".join(_WAITS.sub(r"\1 waited", _HAS_NOT.sub("had not ", clause)) for clause in clauses if clause)


def past_compile(text: str) -> str:
    """A line that tells of a compile under way, or one that had just ended, once that is over."""
    for now, then in _JUST_NOW:
        text = text.replace(now, then)
    return _COMPILES.sub(r" ran, seen last in phase \1", text)


def ended_by_signal(ending: str) -> str:
    """ "SIGINT" where the launcher was told to stop, else ""."""
    found = re.match(r"(SIG[A-Z0-9]+) to the launcher", ending)
    return found[1] if found else ""


def at(verdict: Verdict, stacks: Mapping[int, Stack]) -> str:
    """Where the culprit is: `train.py:31:load_batch`, "rank 0 a.py:1:f, rank 1 b.py:2:g" where several are in different places.

    A frame of rankwatch's own that the verdict names is replaced by the user's below it.
    """
    if verdict.places:
        return ", ".join(f"rank {rank} {place}" for rank, place in verdict.places)
    place = verdict.at
    for rank in verdict.culprit_ranks:
        frames: Sequence[Frame] = stacks[rank].main if rank in stacks else ()
        if place and any(frame.short == place and traces.is_own(frame.file) for frame in frames):
            return next((frame.short for frame in frames if not traces.is_library(frame.file)), "")
    return place


def at_of(verdict: Verdict, rank: int) -> str:
    """Where this culprit is, as far as the verdict tells."""
    return dict(verdict.places).get(rank, "") if verdict.places else verdict.at


def since(incident: Incident) -> float:
    """Monotonic start of the trouble, the same for every verdict that it ever had; of one that comes again and again, of this time."""
    if not incident.since_wall_at or incident.times > 1:
        return incident.verdict.since
    return incident.opened_at - max(0.0, incident.opened_wall_at - incident.since_wall_at)


def group_call(op: str, seq: object, label: str, *, repeated: bool = False) -> str:
    """ "all_reduce seq 26 of default_pg"; "every collective of default_pg" of a straggler (repeated), "a collective of ..." where it is not known which."""
    if repeated:
        return f"every collective of {label}"
    return f"{op} seq {seq} of {label}" if op else f"a collective of {label}"


def archived(job: JobInfo) -> bool:
    """Whether links lead to the archive: it has an address, and takes the pages."""
    return bool(job.archive_url) and not job.archive_failed


def page_url(job: JobInfo, incident_id: str) -> str:
    """Link to an incident's page: in the archive, which outlives the launcher, else at the status server; "" where neither is."""
    if archived(job):
        return f"{job.archive_url}incidents/{incident_id}/index.html"
    return f"{job.status_url.rstrip('/')}/incidents/{incident_id}/" if job.status_url else ""


def now_wall(status: Status) -> float:
    """Unix seconds of the picture."""
    return status.snapshot.wall_at if status.snapshot else status.job.started_wall_at


def wall(snapshot: JobSnapshot, at: float) -> float:
    """Monotonic seconds of the judging node as unix seconds."""
    return snapshot.wall_at - (snapshot.now - at)


# -- one rank --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank does now. `phase` is a key of wire.signals.PHASE_CODES; `since` is monotonic seconds; `detail` is one line.

    label: what people read: the phase, or "culprit: not_entered" and "waiting" while an incident is open. kind: its colour, a phase or `culprit`.
    """

    rank: int
    phase: str
    since: float | None
    detail: str
    culprit: bool
    stuck: bool
    waiting: bool
    seq: int | None
    lag: int | None
    inflight_s: float
    timeout_s: float | None
    label: str = ""
    kind: str = ""


_TELLING_PHASES = ("compiling", "cudagraph_capture", "data_wait", "checkpoint", "dead", "shutdown")


def default_group(groups: Iterable[Group]) -> Group | None:
    """The default process group: the one that torch describes so, else the largest."""
    groups = tuple(groups)
    return next((group for group in groups if group.desc == "default_pg"), max(groups, key=lambda group: len(group.ranks), default=None))


def group_label(group: Group | None, name: str = "") -> str:
    """How a group is called in front of people, the same as in verdicts: its description where torch has one ("undefined" is none), else "group 1"."""
    if group is not None and group.desc and group.desc != "undefined":
        return group.desc
    name = (group.name if group is not None else "") or name
    return f"group {name}" if name else "?"


def open_collective(state: RankState, now: float) -> Collective | None:
    """The oldest collective that has not finished, as far as the last reads can tell."""
    if state.collectives_at is not None and now - state.collectives_at > RECORDER_FRESH_S:
        return None
    generations = {group.name: group.generation for group in state.groups}
    unfinished = (
        entry
        for entry in state.collectives
        if not entry.done
        and generations.get(entry.group, entry.generation) == entry.generation
        and (entry.is_p2p or state.completed.get(entry.group, -1) < entry.seq)
    )
    return min(unfinished, key=lambda entry: entry.created_wall_at, default=None)


def enqueued(state: RankState) -> int | None:
    """Last sequence number that the rank has enqueued in its default group; None where nothing tells."""
    group = default_group(state.groups)
    if group is None:
        return None
    seqs = [entry.seq for entry in state.collectives if entry.group == group.name and entry.generation == group.generation and not entry.is_p2p]
    known = state.enqueued.get(group.name)
    return known if known is not None else max(seqs, default=None)


_views: tuple[JobSnapshot | None, tuple[Incident, ...], tuple[Verdict, ...], dict[int, RankView]] = (None, (), (), {})


def rank_views(status: Status) -> dict[int, RankView]:
    """What every reported rank does, by rank. Those of the newest picture are kept: pages, API and metrics share them. Do not change what this returns."""
    global _views
    kept = _views
    if status.snapshot is None or kept[0] is not status.snapshot or kept[1] is not status.open_incidents or kept[2] is not status.verdicts:
        kept = _views = (status.snapshot, status.open_incidents, status.verdicts, _rank_views(status))
    return kept[3]


def _rank_views(status: Status) -> dict[int, RankView]:
    snapshot = status.snapshot
    if snapshot is None:
        return {}
    culprits: dict[int, Verdict] = {}
    waiters: dict[int, Verdict] = {}
    for verdict in sorted(current_verdicts(status), key=lambda verdict: verdict.verdict in PAGING):
        culprits.update(dict.fromkeys(verdict.culprit_ranks, verdict))
        waiters.update(dict.fromkeys(verdict.waiting_ranks, verdict))
    seqs = {state.rank: enqueued(state) for node in snapshot.nodes for state in node.ranks}
    highest = max((seq for seq in seqs.values() if seq is not None), default=None)
    return {
        state.rank: _view(state, node, snapshot, culprits.get(state.rank), waiters.get(state.rank), seqs[state.rank], highest)
        for node in snapshot.nodes
        for state in node.ranks
    }


def _view(
    state: RankState, node: NodeReport, snapshot: JobSnapshot, culprit: Verdict | None, waiting: Verdict | None, seq: int | None, highest: int | None
) -> RankView:
    entry = open_collective(state, snapshot.now)
    inflight_s = max(0.0, snapshot.wall_at - entry.created_wall_at - node.clock_offset_s) if entry and entry.created_wall_at else 0.0
    timeout_s = entry.timeout_s if entry else None
    if waiting and not inflight_s:
        inflight_s = max(0.0, snapshot.now - waiting.since)
    if timeout_s is None and waiting:
        timeout_s = waiting.timeout_s
    phase, since, detail = _phase(state, snapshot, culprit, waiting, entry, inflight_s)
    ended_well = phase == "dead" and culprit is None and state.process is not None and state.process.exit_code == 0
    return RankView(
        rank=state.rank,
        phase=phase,
        since=since,
        detail=one_line(detail),
        culprit=culprit is not None,
        stuck=culprit is not None and culprit.verdict in PAGING,
        waiting=waiting is not None,
        seq=seq,
        lag=highest - seq if seq is not None and highest is not None else None,
        inflight_s=inflight_s,
        timeout_s=timeout_s,
        label=_label(phase, culprit, waiting is not None, ended_well),
        kind="culprit" if culprit and phase not in _TELLING_PHASES else "shutdown" if ended_well else phase,
    )


def _label(phase: str, culprit: Verdict | None, waiting: bool, ended_well: bool) -> str:
    if culprit:
        return f"culprit: {culprit.cause}"
    if waiting and phase == "collective_wait":
        return "waiting"
    return "ended" if ended_well else phase.replace("_", " ")


def _phase(
    state: RankState, snapshot: JobSnapshot, culprit: Verdict | None, waiting: Verdict | None, entry: Collective | None, inflight_s: float
) -> tuple[str, float | None, str]:
    process = state.process
    if process is not None and not process.alive:
        return "dead", process.exited_at, exit_words(process.exit_code)
    if state.stage in ("left", "exiting"):
        return "shutdown", state.stage_since or None, f"stage {state.stage}"
    if culprit and culprit.cause in ("data_loading", "checkpointing"):
        return "data_wait" if culprit.cause == "data_loading" else "checkpoint", culprit.since, at_of(culprit, state.rank)
    compiling = min(state.compiling, key=lambda activity: activity.started_at, default=None)
    if compiling and compiling.phase != "cross_rank_wait" and not (waiting and not culprit):
        phase = "cudagraph_capture" if compiling.phase == "cudagraph_record" else "compiling"
        split = f", split {compiling.split} of {compiling.splits}" if compiling.splits else ""
        return phase, compiling.started_at, f"{compiling.frame}: {compiling.phase}{split}"
    if waiting or inflight_s >= IN_FLIGHT_SHOWN_S:
        return "collective_wait", snapshot.now - inflight_s, _wait_words(state, waiting, entry)
    if state.stage in ("starting", "armed", "joining"):
        return "starting", state.stage_since or None, f"stage {state.stage}"
    if state.agent in ("off", "silent"):
        return "unknown", None, state.agent_detail or "the agent did not load"
    if state.heartbeat_at is not None and snapshot.now - state.heartbeat_at > HEARTBEAT_STALE_S:
        return "unknown", state.heartbeat_at, f"no heartbeat for {duration(snapshot.now - state.heartbeat_at)}"
    place = at_of(culprit, state.rank) if culprit else ""
    detail = place or (f"step {state.steps}" if state.steps else "")
    return "running", state.last_step_at or state.stage_since or None, detail


def _wait_words(state: RankState, waiting: Verdict | None, entry: Collective | None) -> str:
    if entry:
        group = next((group for group in state.groups if group.name == entry.group), None)
        return f"{entry.op} {'' if entry.is_p2p else f'seq {entry.seq} '}of {group_label(group, entry.group)}"
    if waiting and waiting.group:
        return group_call(waiting.group.op, waiting.group.seq, waiting.group.desc or waiting.group.name, repeated=waiting.straggling is not None)
    return ""


_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}


def exit_words(code: int | None) -> str:
    """ "exit code 1", "killed by SIGKILL"; "gone" where the code is not known."""
    if code is None:
        return "gone, exit code unknown"
    if code < 0:
        return f"killed by {_SIGNALS.get(-code, f'signal {-code}')}"
    return f"exit code {code}"


def compile_seconds(seconds: Mapping[Any, Any]) -> float:
    """The whole of `RankState.compile_totals["seconds"]`: its stages exclude each other."""
    return sum(float(value) for value in seconds.values() if isinstance(value, (int, float)) and 0 <= value < 1e12)


def phase_sets(views: Mapping[int, RankView], world_size: int) -> dict[str, tuple[int, ...]]:
    """Ranks by phase; `no_report` holds the ranks of the world that nobody reports."""
    sets: dict[str, list[int]] = {}
    for rank, view in sorted(views.items()):
        sets.setdefault(view.phase, []).append(rank)
    silent = [rank for rank in range(world_size) if rank not in views]
    if silent:
        sets["no_report"] = silent
    return {phase: tuple(ranks) for phase, ranks in sets.items()}


def median_step_s(snapshot: JobSnapshot | None) -> float | None:
    """Median over ranks of the last step's duration; None before any step."""
    times = [state.step_s for node in snapshot.nodes for state in node.ranks if state.step_s is not None] if snapshot else []
    return statistics.median(times) if times else None


def smallest_timeout_s(snapshot: JobSnapshot | None) -> float | None:
    """Smallest timeout of any process group; None while no group tells."""
    if snapshot is None:
        return None
    return min((group.timeout_s for node in snapshot.nodes for state in node.ranks for group in state.groups if group.timeout_s), default=None)
