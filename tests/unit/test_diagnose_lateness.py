"""Stragglers over generated jobs: a fixed one is named and nobody else ever, a rotating one never, whatever the nodes' clocks say."""

import random
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest

from rankwatch.model import (
    Collective,
    CompileActivity,
    Frame,
    Group,
    JobInfo,
    JobSnapshot,
    NodeReport,
    Process,
    RankState,
    Stack,
    Status,
    Straggling,
    Thread,
    Verdict,
)
from rankwatch.monitor.diagnose import State, diagnose, found_waiting
from rankwatch.monitor.diagnose.arrivals import read_durations, read_stamps, standing
from rankwatch.monitor.diagnose.state import Looks, Pool
from rankwatch.monitor.diagnose.views import Member, View
from rankwatch.monitor.incidents import Book, fold, paged
from rankwatch.monitor.policy import Limits
from rankwatch.notify import lines

WALL = 1_796_000_000.0
MONO = 5_000.0
POLL_S = 0.75
READ_S = 10.0
HELD = 40  # entries of each group that a read gives


class Training:
    """Ranks that compute and meet: `work(rank, step)` gives the seconds of one step, of which every part ends in a collective.

    groups: name -> members, met in this order in every step. offsets: seconds that a rank's wall clock is ahead. buckets: collectives that
    are enqueued one after the other, 5 ms apart, and waited for together. read: whether the recorders' entries are read every 10 s.
    """

    def __init__(self, world, work, *, groups=None, offsets=None, node=lambda rank: "a", buckets=1, read=True, backend="gloo", timed=False, optimizer=True):
        self.world, self.work, self.node, self.buckets, self.read = world, work, node, buckets, read
        self.groups = groups or {"0": tuple(range(world))}
        self.offsets = offsets or {}
        self.backend, self.timed, self.optimizer = backend, timed, optimizer
        self.free = dict.fromkeys(range(world), 5.0)  # job time at which each rank goes on
        self.seqs = dict.fromkeys((*self.groups, *([f"{name}/{n}" for name in self.groups for n in range(9)])), 0)
        self.history = {rank: [] for rank in range(world)}  # (group, seq, entered, left, duration)
        self.stepped = {rank: [] for rank in range(world)}
        self.entries = {}
        self.step = 0

    def advance(self, until):
        while min(self.free.values()) < until:
            for rank in range(self.world):
                self.free[rank] += self.work(rank, self.step)
            for name, members in self.groups.items():
                self.meet(name, members)
            for rank in range(self.world):
                self.stepped[rank].append(self.free[rank])
            self.step += 1

    def meet(self, name, members):
        ranks = [members] if isinstance(members[0], int) else members
        for number, some in enumerate(ranks):
            key = f"{name}/{number}"
            for bucket in range(self.buckets):
                self.seqs[key] += 1
                arrive = {rank: self.free[rank] + 0.005 * bucket for rank in some}
                leave = max(arrive.values()) + 0.0005
                for rank in some:
                    self.history[rank].append((name, self.seqs[key], arrive[rank], leave, leave - arrive[rank]))
            end = max(self.free[rank] for rank in some) + 0.005 * (self.buckets - 1) + 0.0005
            for rank in some:
                self.free[rank] = end

    def state(self, rank, now, read_at, compiling=()):
        enqueued, completed = {}, {}
        for name, seq, entered, left, _ in reversed(self.history[rank]):
            if entered <= now:
                enqueued.setdefault(name, seq)
            if left <= now:
                completed.setdefault(name, seq)
                if len(completed) == len(self.groups):
                    break
        if (rank, read_at) not in self.entries:
            self.entries[rank, read_at] = tuple(self.read_entries(rank, read_at))
        groups = []
        for name, members in self.groups.items():
            ranks = [members] if isinstance(members[0], int) else members
            groups += [Group(name, f"pg{name}", self.backend, some, 600.0) for some in ranks if rank in some]
        return RankState(
            rank, rank, self.node(rank), process=Process(100 + rank, True, "S", 1.0, 1.0), heartbeat_at=MONO + now, groups=tuple(groups),
            collectives=self.entries[rank, read_at], collectives_at=MONO + read_at if read_at is not None else None,
            enqueued={group.name: enqueued.get(group.name, 0) for group in groups}, completed={group.name: completed.get(group.name, 0) for group in groups},
            compiling=compiling, steps=bisect_right(self.stepped[rank], now) if self.optimizer else 0, stack=self.stack(rank, now),
        )  # fmt: skip

    def stack(self, rank, now):
        return None

    def read_entries(self, rank, read_at):
        for name in self.groups:
            seen = [each for each in self.history[rank] if each[0] == name and read_at is not None and each[2] <= read_at]
            for _, seq, entered, left, duration in seen[-HELD:]:
                done = left <= read_at
                created = WALL + entered + self.offsets.get(rank, 0.0)
                timed = duration if self.timed and done else None
                yield Collective(name, 0, seq, "all_reduce", ((8,),), ((8,),), ("Float",), created, 600.0, done, duration_s=timed)

    def told(self, seconds, *, compiling=lambda rank, now: (), gap_at=None):
        """(time, culprits) of each look that shows a straggler."""
        state, found, now, read_at = State(), [], 0.0, None
        while now < seconds:
            self.advance(now + POLL_S)
            if self.read and now >= 6.0 and (read_at is None or now - read_at >= READ_S):
                read_at = now
            nodes = {}
            for rank in range(self.world):
                nodes.setdefault(self.node(rank), []).append(self.state(rank, now, read_at, compiling(rank, now)))
            gap_s = 30.0 if gap_at is not None and gap_at <= now < gap_at + POLL_S else POLL_S
            reports = tuple(NodeReport(name, tuple(ranks)) for name, ranks in nodes.items())
            snapshot = JobSnapshot(MONO + now, WALL + now, self.world, 0, reports, gap_s=gap_s, started_at=MONO)
            state, verdicts, _ = diagnose(state, snapshot, MONO + now, Limits())
            for verdict in verdicts:
                if verdict.verdict == "straggler":
                    found.append((now, verdict))
            for rank in self.history:
                self.history[rank] = self.history[rank][-2 * HELD * len(self.groups) - 8 * self.buckets :]
            now += POLL_S
        return found


def noisy(random_, step_s, extra, noise):
    """Work of one step: `extra` maps ranks to their share more."""
    return lambda rank, step: step_s * (1.0 + extra.get(rank, 0.0)) * max(0.2, random_.gauss(1.0, noise))


def culprits(found):
    return {verdict.culprit_ranks for _, verdict in found}


@pytest.mark.parametrize("extra", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_fixed_straggler_is_named_and_nobody_else(seed, extra):
    rng = random.Random(seed)
    world, step_s, buckets = rng.choice([2, 3, 5, 8]), rng.choice([0.05, 0.3, 0.8]), rng.choice([1, 6])
    late = rng.randrange(world)
    found = Training(world, noisy(rng, step_s, {late: extra}, 0.02), buckets=buckets).told(85)
    assert culprits(found) == {(late,)}
    assert found[0][0] < 75
    told = found[-1][1].straggling
    assert told.measured
    assert told.late_by_s == pytest.approx(extra * step_s, rel=0.5)
    assert told.rank_s_per_min == pytest.approx(60 * (world - 1) * told.cost_ratio)
    assert found[-1][1].confidence == "certain"


@pytest.mark.parametrize("read", [True, False], ids=["entries read", "status numbers only"])
@pytest.mark.parametrize(("world", "seed"), [(2, 0), (3, 1), (5, 1)])
def test_a_rotating_straggler_is_never_named(world, seed, read):
    rng = random.Random(100 * seed + world)
    step_s = rng.choice([0.1, 0.4])
    chosen = [rng.randrange(world) for _ in range(5000)] if seed else [step % world for step in range(5000)]
    work = lambda rank, step: step_s * (1.5 if chosen[step] == rank else 1.0) * rng.gauss(1.0, 0.02)  # noqa: E731
    assert Training(world, work, read=read).told(80) == []


@pytest.mark.parametrize("seed", range(2))
def test_lengths_that_depend_on_the_data_make_no_straggler(seed):
    rng = random.Random(seed)
    assert Training(3, lambda rank, step: 0.2 * rng.lognormvariate(0.0, 0.5)).told(100) == []


@pytest.mark.parametrize(("seed", "offset"), [(0, -40.0), (1, -2.0), (1, 3600.0)])
def test_clocks_that_differ_between_nodes_change_no_name(seed, offset):
    def train():
        rng = random.Random(seed)
        offsets = dict.fromkeys((2, 3), offset)
        return Training(4, noisy(rng, 0.5, {3: 0.3}, 0.02), offsets=offsets, node=lambda rank: "ab"[rank // 2]).told(80)

    found = train()
    assert culprits(found) == {(3,)}
    assert found[0][1].confidence == "likely"
    assert found[-1][1].straggling.measured
    assert found[-1][1].straggling.late_by_s == pytest.approx(0.15, rel=0.2)


@pytest.mark.parametrize("offset", [0.0, 0.3, 5.0])
def test_a_constant_offset_between_clocks_makes_no_straggler(offset):
    rng = random.Random(7)
    assert Training(2, noisy(rng, 0.4, {}, 0.02), offsets={1: offset}, node=lambda rank: "ab"[rank]).told(80) == []


def test_a_late_node_makes_none_of_its_neighbours_late():
    """Node b is late as a whole; rank 1 is a little later than rank 0 and costs nobody anything."""
    found = Training(4, noisy(random.Random(3), 0.5, {1: 0.1, 2: 0.4, 3: 0.4}, 0.005), node=lambda rank: "ab"[rank // 2]).told(80)
    assert (0,) not in culprits(found)
    assert (1,) not in culprits(found)


def test_a_straggler_is_named_by_status_numbers_alone():
    found = Training(3, noisy(random.Random(1), 0.5, {1: 0.3}, 0.01), read=False).told(100)
    assert culprits(found) == {(1,)}
    assert found[-1][1].confidence == "likely"
    assert found[-1][1].straggling.measured is False
    assert found[-1][1].straggling.rank_s_per_min == pytest.approx(60 * 2 * 0.23, rel=0.3)
    assert found[-1][1].missing_evidence != ()


def test_arrival_times_overrule_status_numbers():
    """Looks that happen to fall badly name nobody once the entries tell that lateness rotates."""
    rng = random.Random(5)
    assert Training(2, lambda rank, step: 0.5 * (1.4 if step % 2 == rank else 1.0) * rng.gauss(1.0, 0.01)).told(80) == []


@pytest.mark.parametrize("every", [3, 5, 20])
@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_every_few_steps_makes_no_straggler(every, optimizer):
    rng = random.Random(every)
    work = lambda rank, step: 0.3 * rng.gauss(1.0, 0.01) + (0.9 if rank == 0 and step % every == 0 else 0.0)  # noqa: E731
    assert Training(3, work, optimizer=optimizer).told(80) == []


def test_a_little_logging_on_rank_0_makes_no_straggler():
    assert Training(4, noisy(random.Random(2), 0.3, {0: 0.02}, 0.005)).told(80) == []


def test_lateness_at_the_threshold_is_told_once():
    """Hysteresis: between the two ratios an open verdict stays, and no new one opens."""
    rng = random.Random(11)
    drift = lambda step: 0.10 if step < 200 else 0.04  # noqa: E731
    found = Training(3, lambda rank, step: 0.2 * (1.0 + (drift(step) if rank == 1 else 0.0)) * rng.gauss(1.0, 0.005)).told(120)
    assert found[-1][0] == pytest.approx(119.25)
    assert [later[0] - sooner[0] for sooner, later in pairwise(found)] == [POLL_S] * (len(found) - 1)
    rng = random.Random(11)
    assert Training(3, noisy(rng, 0.2, {1: 0.04}, 0.005)).told(80) == []


def test_a_straggler_that_mends_is_over():
    rng = random.Random(4)
    found = Training(3, lambda rank, step: 0.2 * (1.4 if rank == 1 and step < 250 else 1.0) * rng.gauss(1.0, 0.01)).told(180)
    assert culprits(found) == {(1,)}
    assert found[-1][0] < 140


def test_compiling_and_a_paused_clock_are_not_lateness():
    activity = CompileActivity("0/0", "forward", "f@train.py:1", "inductor", "inductor", MONO, MONO)
    busy = noisy(random.Random(6), 0.3, {1: 0.5}, 0.01)
    assert Training(3, busy).told(60, compiling=lambda rank, now: (activity,) if rank == 1 else ()) == []
    assert culprits(Training(3, noisy(random.Random(6), 0.3, {1: 0.5}, 0.01)).told(100, gap_at=25.0)) == {(1,)}


def test_a_rank_that_waits_elsewhere_for_the_straggler_is_a_consequence():
    """Tensor parallel pairs, then data parallel pairs: rank 1 makes rank 0 late for rank 2; only rank 1 is named."""
    groups = {"1": ((0, 1), (2, 3)), "2": ((0, 2), (1, 3))}
    found = Training(4, noisy(random.Random(8), 0.4, {1: 0.3}, 0.01), groups=groups).told(80)
    assert culprits(found) == {(1,)}


def test_several_that_are_late_at_once_by_as_much_are_not_named():
    """Two pairs, each with a late rank; the late ones share a group in which nothing shows who waits for whom."""
    groups = {"0": (0, 1, 2, 3), "1": ((0, 2), (1, 3))}
    training = Training(4, noisy(random.Random(12), 0.4, {2: 0.3, 3: 0.3}, 0.01), groups=groups)
    whole = training.meet
    training.meet = lambda name, members: whole(name, members) if name == "1" else None
    assert training.told(80) == []


def test_a_rank_that_waits_for_a_message_is_not_named():
    """A pipeline's last stage comes last to every collective: its stack shows what no recorder does."""
    receiving = (Frame("recv", "/venv/torch/distributed/distributed_c10d.py", 2600), Frame("step", "/job/train.py", 52))
    working = (Frame("forward", "/job/model.py", 31),)

    def play(share):
        training = Training(3, noisy(random.Random(13), 0.4, {2: 0.3}, 0.01))
        training.stack = lambda rank, now: Stack(100 + rank, MONO + now, (Thread("MainThread", 1, receiving if now % 3.0 < 3.0 * share else working),))
        return training.told(60)

    assert play(0.5) == []
    found = play(0.0)
    assert culprits(found) == {(2,)}
    assert found[0][0] < 45


def test_a_straggler_is_told_with_the_line_that_its_stack_shows_most():
    slow = (Frame("augment_on_a_slow_cpu", "/job/elsewhere.py", 108), Frame("step", "/job/train.py", 52))
    other = (Frame("forward", "/job/model.py", 31),)
    reduces = (Frame("all_reduce", "/venv/lib/python3/site-packages/torch/distributed/distributed_c10d.py", 3252), Frame("step", "/job/train.py", 53))

    def play(*stacks):
        training = Training(3, noisy(random.Random(13), 0.4, {2: 0.3}, 0.01))
        training.stack = lambda rank, now: Stack(100 + rank, MONO + now, (Thread("MainThread", 1, stacks[int(now / 1.5) % len(stacks)]),))
        return training.told(60)[0][1]

    told = play(slow, slow, other)
    assert told.at == "elsewhere.py:108:augment_on_a_slow_cpu"
    assert told.advice[0] == "Start at elsewhere.py:108:augment_on_a_slow_cpu on rank 2."
    assert any(line.endswith("samples of its stack were in elsewhere.py:108:augment_on_a_slow_cpu") for line in told.evidence)
    waiting = play(reduces, reduces, other)
    assert (waiting.at, len(waiting.advice)) == ("", 1)


def test_on_nccl_the_shortest_duration_names_the_late_rank_whatever_the_clocks_say():
    found = Training(2, noisy(random.Random(9), 0.3, {1: 0.3}, 0.01), backend="nccl", timed=True, offsets={0: 9.0}, node=lambda rank: "ab"[rank]).told(80)
    assert culprits(found) == {(1,)}
    assert found[-1][1].confidence == "certain"


def test_on_nccl_without_timing_arrival_times_alone_name_nobody():
    """When the host enqueued says little of when the device got there: looks must agree."""
    training = Training(3, noisy(random.Random(10), 0.3, {1: 0.3}, 0.01), backend="nccl")
    plain = training.state
    training.state = lambda rank, now, *rest: replace(plain(rank, now, *rest), enqueued={"0": plain(rank, now + 1.0, None).enqueued["0"] + 40})
    assert training.told(80) == []


def view_of(*ranks):
    group = Group("0", "default_pg", "nccl", ranks, 600.0)
    return View(("0", len(ranks), ranks[0], ranks[-1], 0), group, {rank: Member(rank, group, 400, 400) for rank in ranks})


@pytest.mark.parametrize(
    ("windows", "own", "others", "backs"),
    [
        (7, 9, 35, True),  # single windows of these found it waiting twice in 21 looks, which breaks a streak
        (7, 9, 20, False),  # not three times as often
        (7, 15, 60, False),  # it waits as well: it has something to wait for
        (2, 0, 20, False),  # two windows prove nothing
        (7, 2, 9, False),  # rarer than chance
    ],
)
def test_windows_together_back_what_arrival_times_show(windows, own, others, backs):
    """On NCCL without timing: rank 4 comes last by its host's clock, 147 looks in seven windows found it and the others waiting so often."""
    looks = Looks(MONO, pool=Pool(4, windows, 21 * windows, {0: others, 1: others + 2, 4: own}))
    found = found_waiting.backed(looks, view_of(0, 1, 4), Limits())
    assert found == ((4, own, others, 21 * windows) if backs else None)


def test_windows_count_for_one_suspect_only_and_old_ones_less():
    view, limits = view_of(0, 1, 4), Limits()
    looks = Looks(MONO, looks=20, waiting={0: 5, 1: 6, 4: 1}, pool=Pool(4, 2, 42, {0: 10, 1: 12}))
    after, ended = found_waiting.add(looks, view, MONO + 10.0, limits, 4)
    assert ended
    assert after.pool == Pool(4, 3, 63, {0: 15, 1: 18, 4: 1})
    assert found_waiting.add(looks, view, MONO + 10.0, limits, 1)[0].pool == Pool(1, 1, 21, {0: 5, 1: 6, 4: 1})
    assert found_waiting.add(looks, view, MONO + 10.0, limits)[0].pool == looks.pool
    long = replace(looks, pool=Pool(4, 12, 252, {0: 61, 1: 60, 4: 5}))
    assert found_waiting.add(long, view, MONO + 10.0, limits, 4)[0].pool == Pool(4, 7, 147, {0: 35, 1: 36, 4: 3})


def test_on_nccl_who_waits_elsewhere_for_one_that_only_clocks_show_late_is_not_named():
    """Rank 1 makes rank 0 late for rank 2. Looks never find ranks 1 and 3 waiting for each other: what they show of rank 0 must not decide."""
    groups = {"1": ((0, 1), (2, 3)), "2": ((0, 2), (1, 3))}
    training = Training(4, noisy(random.Random(8), 0.4, {1: 0.5}, 0.01), groups=groups, backend="nccl")
    plain = training.state

    def state(rank, now, *rest):
        found = plain(rank, now, *rest)
        return replace(found, completed={name: found.enqueued[name] if name == "1" else done for name, done in found.completed.items()})

    training.state = state
    assert culprits(training.told(120)) <= {(1,)}


def test_margins_follow_from_a_table_written_out():
    """Rounds: 10 alone; 11 and 12 in flight together, ended by 12; 13 starts none that has ended. The first only starts the clock."""
    stamps = {
        10: {0: 1.0, 1: 1.0},
        11: {0: 2.0, 1: 2.4},
        12: {0: 2.1, 1: 2.5},
        13: {0: 3.5, 1: 3.2},
        14: {0: 4.5, 1: 4.5},
    }
    reading, seq = read_stamps(stamps, {0: "a", 1: "a"}, 9.0, 1.0)
    assert seq == 13
    assert (reading.rounds, reading.covered_s, reading.steps, reading.exact) == (2, 2.5, 2.5, True)
    assert [(rank, round(by_s, 6)) for rank, by_s in reading.lates] == [(1, 0.4), (0, 0.3)]
    result = standing((reading,))
    assert (result.rank, result.late, result.clear, result.sure) == (1, 1, 2, False)
    assert result.cost_ratio == pytest.approx(0.4 / 2.5)


def test_nobody_is_late_to_a_collective_that_the_others_have_left():
    """What ranks 0 and 1 call next they call before rank 2 comes: they do not wait for it, whatever wait() they reach later."""
    stamps = {seq: {0: float(seq), 1: seq + 0.01, 2: seq + 0.4} for seq in range(8)}
    left = {seq: {0: (seq + 0.2, "next"), 1: (seq + 0.3, "next"), 2: (seq + 0.6, "next")} for seq in range(8)}
    stayed = {seq: {**row, 0: (seq + 0.5, "next"), 1: (seq + 0.5, "next")} for seq, row in left.items()}
    nodes = dict.fromkeys(range(3), "a")
    assert read_stamps(stamps, nodes, 9.0, 1.0, left)[0].lates == ()
    assert [rank for rank, _ in read_stamps(stamps, nodes, 9.0, 1.0, stayed)[0].lates] == [2] * 6
    assert read_stamps(stamps, nodes, 9.0, 1.0, stayed)[0].lates == read_stamps(stamps, nodes, 9.0, 1.0)[0].lates


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_lag_that_slack_hides_makes_no_straggler(seed, waits):
    """After one long pause rank 1 is behind by what the overlap allows, for ever: rank 0 goes on as it would without it, or else it waits."""
    rng = random.Random(seed)
    stamps, nexts, free = {}, {}, {0: 0.0, 1: 0.15}
    for seq in range(120):
        stamps[seq] = {rank: free[rank] + rng.gauss(0.3, 0.01) + (0.1 if waits and rank else 0.0) for rank in (0, 1)}
        met = max(stamps[seq].values())
        nexts[seq] = {rank: ((met if waits else at) + rng.gauss(0.2, 0.01), "next") for rank, at in stamps[seq].items()}
        free = {rank: at for rank, (at, _) in nexts[seq].items()}
        if not waits:  # rank 1 stays behind by some 0.1 to 0.2 s
            free[1] = min(max(free[1], free[0] + 0.1), free[0] + 0.2)
    reading, _ = read_stamps(stamps, {0: "a", 1: "a"}, 60.0, 2.0, nexts)
    result = standing((reading,))
    assert (result.rank, result.late, result.clear) == (1, 16, 16)
    assert result.sure is waits


def test_durations_are_read_the_other_way_round():
    durations = {5: {0: 0.1, 1: 0.1}, 6: {0: 0.54, 1: 0.08, 2: 0.55}, 7: {0: 0.5, 1: 0.02, 2: 0.6}}
    reading, seq = read_durations(durations, {5: 0.0, 6: 1.0, 7: 2.0}, 9.0, None)
    assert seq == 7
    assert [(rank, round(by_s, 6)) for rank, by_s in reading.lates] == [(1, 0.46), (1, 0.48)]


@pytest.mark.parametrize("seed", range(8))
def test_the_cost_is_what_the_others_would_have_gained(seed):
    """Against a brute-force model: play the same steps with the late rank as fast as the next one, and compare the length."""
    rng = random.Random(seed)
    world = rng.randint(2, 6)
    work = [[rng.uniform(0.9, 1.1) + (0.5 if rank == 1 else 0.0) for rank in range(world)] for _ in range(40)]
    now, stamps = 0.0, {}
    for seq, times in enumerate(work):
        stamps[seq] = {rank: now + took for rank, took in enumerate(times)}
        now += max(times)
    reading, _ = read_stamps(stamps, dict.fromkeys(range(world), "a"), 0.0, None)
    reading = replace(reading, lates=tuple((1, sorted(times)[-1] - sorted(times)[-2]) for times in work[1:-1]), clear=38)
    without = sum(max(took for rank, took in enumerate(times) if rank != 1) for times in work[1:-1])
    assert standing((reading,)).cost_ratio * reading.covered_s == pytest.approx(reading.covered_s - without)


def test_the_ranks_behind_a_straggler_are_charged_for_their_share_only():
    """23 % of two ranks' time over 60 s, and the line says what it costs; no page."""
    told = Verdict(
        key="a0-straggler-1", verdict="straggler", cause="not_entered", domain="unknown", culprit_ranks=(1,), waiting_ranks=(0, 2), since=MONO,
        summary="rank 1 is the last", straggling=Straggling(0.15, 0.98, 0.23, 27.6),
    )  # fmt: skip
    book = Book()
    for now in range(61):
        snapshot = JobSnapshot(MONO + now, WALL + now, 3, 0, ())
        book, _ = fold(book, (told,), snapshot, snapshot.now, Limits())
    assert book.open[0].lost_rank_s == pytest.approx(0.23 * 2 * 60)
    assert not paged(book.open[0])
    line = lines.verdict(book.open[0], Status(JobInfo("job", "", (), "host", 3, 1, 0, {}, {}, WALL), snapshot))
    assert " STRAGGLER rank=1 " in line
    assert " late_by=150ms last_at=98% costs_rank_s_per_min=27.6" in line
    assert "~" in lines.verdict(
        replace(book.open[0], verdict=replace(told, straggling=Straggling(1.5, 0.98, 0.23, 27.6, measured=False))),
        Status(JobInfo("job", "", (), "host", 3, 1, 0, {}, {}, WALL), snapshot),
    )
