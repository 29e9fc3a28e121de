"""What holds for the judge whatever the job does: properties over generated jobs, damaged snapshots and random wait graphs.

RANKWATCH_HYPOTHESIS=long tries many more and new examples each time; else they are few and always the same.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from random import Random

from generate import KINDS, make
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scoring import play

from rankwatch.model import PAGING, Crash, Group, JobSnapshot, NodeReport, Process, Stack
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.diagnose.graph import hangs
from rankwatch.monitor.diagnose.mismatch import Mismatch
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits

LONG = os.environ.get("RANKWATCH_HYPOTHESIS") == "long"
LIMITS = Limits()
SEEDS = st.integers(0, 10**6).map(str)
FAULTS = st.sampled_from([kind for kind in KINDS if not kind.startswith("healthy") and kind not in ("diverged", "straggler")])
HANGS = st.sampled_from(["not_entered", "data_loading", "mismatch", "deadlock", "stopped", "exited_0", "all_entered", "checkpointing", "gil_held"])


def examples(count: int, shrink: bool = False) -> settings:
    """shrink: whether a smaller example says more; a seed does not."""
    return settings(
        max_examples=count * 40 if LONG else count, derandomize=not LONG, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
    )  # fmt: skip


# -- over jobs -----------------------------------------------------------------------------------------------------------------


@examples(30)
@given(st.sampled_from(KINDS), SEEDS)
def test_no_prefix_of_a_job_pages_a_wrong_name(kind, seed):
    """Every look is the end of a prefix: at none of them has a page named a rank that was not planted, or a healthy job been paged."""
    outcome = play(make(kind, seed, size=None if LONG else 1 + len(seed)))
    assert outcome.wrong == set(), outcome.line()
    assert not outcome.false_page, outcome.line()


@examples(12)
@given(st.sampled_from(KINDS), SEEDS)
def test_no_page_about_a_hang_names_a_rank_that_has_moved_since_the_look_before(kind, seed):
    case, state, before = make(kind, seed, size=2 + len(seed)), State(), {}
    for snapshot in case.snapshots:
        state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, LIMITS)
        moved = {rank.rank: (rank.steps, sum(rank.completed.values()), len(rank.groups)) for rank in snapshot.ranks().values()}
        for verdict in verdicts:
            if verdict.verdict in ("stuck", "timeout_imminent") and not snapshot.ending:
                assert [rank for rank in verdict.culprit_ranks if rank in before and moved.get(rank) != before[rank]] == [], (case.name, verdict)
        case.want(wanted, state.failure_held)
        before = moved


@examples(12)
@given(HANGS, SEEDS, st.randoms(use_true_random=False))
def test_a_rank_without_a_report_is_never_named_and_nothing_is_certain_without_it(kind, seed, random):
    """Some nodes or ranks never report: what is said of a hang is partial, and of the ranks that are seen."""
    case, state = make(kind, seed, size=4 + len(seed) % 5), State()
    hidden = set(random.sample(range(case.plan.size), random.randint(1, case.plan.size - 1)))
    for snapshot in case.snapshots:
        nodes = tuple(replace(node, ranks=tuple(rank for rank in node.ranks if rank.rank not in hidden)) for node in snapshot.nodes)
        state, verdicts, wanted = diagnose(state, replace(snapshot, nodes=nodes), snapshot.now, LIMITS)
        for verdict in verdicts:
            assert hidden.isdisjoint(verdict.culprit_ranks), (case.name, verdict)
            assert hidden.isdisjoint(verdict.waiting_ranks), (case.name, verdict)
            assert verdict.cause != "all_entered", (case.name, verdict)
            if verdict.verdict in ("slow", "stuck", "timeout_imminent"):
                assert verdict.confidence == "partial", (case.name, verdict)
        case.want([replace(want, ranks=tuple(rank for rank in want.ranks if rank not in hidden)) for want in wanted], state.failure_held)


def renamed(snapshot: JobSnapshot, names: Mapping[int, int]) -> JobSnapshot:
    """The same job with its ranks numbered otherwise."""

    def group(old: Group) -> Group:
        return replace(old, ranks=tuple(sorted(names[rank] for rank in old.ranks)))

    nodes = tuple(
        replace(
            node,
            ranks=tuple(
                replace(
                    rank,
                    rank=names[rank.rank],
                    groups=tuple(map(group, rank.groups)),
                    creation_ranks=tuple(sorted(names[each] for each in rank.creation_ranks)),
                )
                for rank in node.ranks
            ),
        )
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=nodes)


@examples(10)
@given(FAULTS, SEEDS, st.randoms(use_true_random=False))
def test_other_numbers_of_the_ranks_give_the_same_pages_with_these_numbers(kind, seed, random):
    case, state, other = make(kind, seed, size=3 + len(seed) % 6), State(), State()
    numbers = list(range(case.plan.size))
    random.shuffle(numbers)
    names = dict(enumerate(numbers))
    for snapshot in case.snapshots:
        state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, LIMITS)
        other, renamed_verdicts, _ = diagnose(other, renamed(snapshot, names), snapshot.now, LIMITS)
        told = {(v.verdict, v.cause, frozenset(names[rank] for rank in v.culprit_ranks)) for v in verdicts if v.verdict in PAGING}
        assert told == {(v.verdict, v.cause, frozenset(v.culprit_ranks)) for v in renamed_verdicts if v.verdict in PAGING}, case.name
        case.want(wanted, state.failure_held)


@examples(8)
@given(FAULTS, SEEDS)
def test_twice_as_many_looks_or_other_clocks_find_the_same(kind, seed):
    size = 2 + len(seed)
    usual = play(make(kind, seed, size=size))
    for how in ({"poll_s": 0.25}, {"clock_shift_s": 12_345.678}):
        outcome = play(make(kind, seed, size=size, **how))
        assert (outcome.named, outcome.found, outcome.false_page) == (usual.named, usual.found, usual.false_page), (usual.line(), outcome.line())
        if usual.paged_s is not None and outcome.paged_s is not None:
            assert abs(outcome.paged_s - usual.paged_s) <= 3.0, (usual.line(), usual.paged_s, outcome.paged_s)


# -- damage --------------------------------------------------------------------------------------------------------------------

ODD = {
    "process": (None, Process(0, False), Process(7, True, "Z"), Process(7, False, "", exit_code=-99), Process(7, False, exit_code=300, exited_at=-5.0)),
    "stage": ("starting", "armed", "joining", "join_failed", "left", "exiting"),
    "stage_since": (0.0, -1e9, 1e12),
    "heartbeat_at": (None, -1.0, 1e12),
    "ping_ok": (None, False, True),
    "groups": ((), (Group("0", "", "gloo", (), None),), (Group("", "", "", (5, 5), -1.0, -3, 1e12),), (Group("0", "default_pg", "nccl", (1, 0), 0.0, 9),)),
    "group_in_creation": ("1", "", None),
    "creation_ranks": ((), (99,)),
    "collectives": ((),),
    "collectives_at": (None, -1.0, 1e12),
    "enqueued": ({}, {"0": -4}, {"other": 3}, {"0": 10**12}),
    "completed": ({}, {"0": -4}, {"0": 10**12}),
    "compile_witness": (None, True),
    "steps": (0, -1, 10**9),
    "last_step_at": (None, -1.0),
    "step_s": (None, 0.0, -1.0),
    "stack": (None, Stack(0, -1.0), Stack(7, 1e12, error="no permission")),
    "earlier_stack": (None, Stack(0, 1e12)),
    "crash": (None, Crash("", ""), Crash("RuntimeError", "Connection closed by peer", "", "", "log x")),
    "agent": ("off", "silent", "loaded", "armed"),
}


def damaged(snapshot: JobSnapshot, random: Random) -> JobSnapshot:
    nodes = list(snapshot.nodes)
    for number, node in enumerate(nodes):
        ranks = list(node.ranks)
        for at, rank in enumerate(ranks):
            if random.random() < 0.3:
                chosen = random.sample(sorted(ODD), random.randint(1, 4))
                rank = replace(rank, **{name: random.choice(ODD[name]) for name in chosen})
            if rank.collectives and random.random() < 0.2:
                entry = random.choice(rank.collectives)
                odd = replace(
                    entry, seq=random.choice((0, -1, entry.seq, 10**9)), generation=random.choice((0, -1, 5)),
                    input_sizes=random.choice(((), ((),), ((-1, 0),))),
                    created_wall_at=random.choice((0.0, -1e9, 1e12)), timeout_s=random.choice((None, 0.0, -1.0)), done=random.random() < 0.5,
                )  # fmt: skip
                rank = replace(rank, collectives=(*rank.collectives, odd))
            ranks[at] = rank
        if ranks and random.random() < 0.1:
            ranks.append(random.choice(ranks))
        if random.random() < 0.1:
            random.shuffle(ranks)
        if random.random() < 0.05:
            ranks = ranks[:-1]
        nodes[number] = replace(
            node, ranks=tuple(ranks), report_age_s=random.choice((0.0, 0.0, -3.0, 1e9)), clock_offset_s=random.choice((0.0, 0.0, -1e6, 1e6))
        )
    if random.random() < 0.05:
        nodes.append(NodeReport("", ()))
    return replace(
        snapshot, nodes=tuple(nodes) if random.random() > 0.02 else (), world_size=random.choice((snapshot.world_size,) * 5 + (0, 1, 10**4)),
        gap_s=random.choice((snapshot.gap_s,) * 9 + (-1.0, 1e6)), attempt=random.choice((snapshot.attempt,) * 30 + (3,)),
        ending=random.choice(("",) * 20 + ("torchrun stops the workers after rank 1 failed", "SIGTERM")), final=random.random() < 0.02,
    )  # fmt: skip


@examples(15)
@given(st.sampled_from(KINDS), SEEDS, st.randoms(use_true_random=False))
def test_the_judge_and_the_fold_never_raise_whatever_the_snapshots_hold(kind, seed, random):
    case, state, book = make(kind, seed, size=2 + len(seed) % 5), State(), Book()
    for count, snapshot in enumerate(case.snapshots):
        odd = damaged(snapshot, random)
        state, verdicts, wanted = diagnose(state, odd, odd.now, LIMITS)
        book, _ = fold(book, verdicts, odd, odd.now, LIMITS)
        case.want([want for want in wanted if all(0 <= rank < case.plan.size for rank in want.ranks)])
        if count > 120:
            break


# -- attribution ---------------------------------------------------------------------------------------------------------------


@st.composite
def wait_graphs(draw):
    """Up to 6 ranks and 5 waits in any relation, each wait with somebody in it."""
    ranks = st.integers(0, draw(st.integers(1, 5)))
    waits = []
    for number in range(draw(st.integers(1, 5))):
        waiters = draw(st.sets(ranks, min_size=1, max_size=4))
        missing = draw(st.sets(ranks, max_size=3)) - waiters
        odd = Mismatch((), (), False, "operation") if draw(st.integers(0, 6)) == 0 else None
        waits.append(Wait(("w", number), "collective", f"w{number}", (), dict.fromkeys(sorted(waiters), 0.0), tuple(sorted(missing)), (), 0.0, mismatch=odd))
    loose = draw(st.sets(ranks, max_size=2))
    return waits, loose


@examples(300, shrink=True)
@given(wait_graphs())
def test_the_roots_of_a_wait_graph_are_those_that_a_brute_force_search_finds(given_):
    """A root is what can reach nothing but itself and what can reach it back; everything that can reach it waits for it."""
    waits, loose = given_
    edges: dict[object, set[object]] = {}
    for number, wait in enumerate(waits):
        edges[f"w{number}"] = set() if wait.mismatch else set(wait.missing)
        for rank in wait.missing:
            edges.setdefault(rank, set())
        for rank in wait.waiters:
            edges.setdefault(rank, set())
            if rank not in loose:
                edges[rank].add(f"w{number}")
    reach = {node: {node} for node in edges}
    for _ in edges:
        for node in edges:
            reach[node] |= {far for near in edges[node] for far in reach[near]}
    ends = {node for node in edges if all(node in reach[far] for far in reach[node])}
    ends -= {node for node in ends if isinstance(node, int) and not edges[node] and not any(node in edges[f"w{n}"] for n in range(len(waits)))}
    found = hangs(waits, lambda rank, wait: rank not in loose)
    assert {rank for hang in found for rank in hang.roots} == {node for node in ends if isinstance(node, int) and reach[node] == {node}}
    assert {rank for hang in found for rank in hang.cycle} == {node for node in ends if isinstance(node, int) and reach[node] != {node}}
    assert {index for hang in found for index in hang.hung} == {int(node[1:]) for node in ends if isinstance(node, str) and reach[node] == {node}}
    for hang in found:
        own = {*hang.roots, *hang.cycle, *(f"w{index}" for index in hang.hung)}
        behind = {int(node[1:]) for node in edges if isinstance(node, str) and reach[node] & own}
        assert set(hang.waits) == behind
        assert set(hang.waiting) == {rank for index in behind for rank in waits[index].waiters} - set(hang.roots)


# -- memory --------------------------------------------------------------------------------------------------------------------


def size(value: object) -> int:
    """How many values hang on this one."""
    if is_dataclass(value):
        return 1 + sum(size(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return 1 + sum(size(key) + size(each) for key, each in value.items())
    if isinstance(value, (tuple, list, set, frozenset)):
        return 1 + sum(map(size, value))
    return 1


@examples(3)
@given(st.sampled_from(["healthy plain", "healthy churn", "healthy skewed", "healthy hiccups"]), SEEDS)
def test_what_the_judge_remembers_does_not_grow_with_the_length_of_a_job(kind, seed):
    case, state = make(kind, seed, size=4, ends_s=400.0), State()
    early = late = 0
    for snapshot in case.snapshots:
        state, _, wanted = diagnose(state, snapshot, snapshot.now, LIMITS)
        case.want(wanted)
        if 100.0 < snapshot.now - snapshot.started_at < 200.0:
            early = max(early, size(state))
        elif snapshot.now - snapshot.started_at > 300.0:
            late = max(late, size(state))
    assert late <= 1.25 * early + 200, (case.name, early, late)
