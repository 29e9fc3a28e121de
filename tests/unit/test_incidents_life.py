"""Whole lives of incidents: stalls that come again, culprits that change, troubles that turn out to be one, and laws that always hold."""

from dataclasses import replace

from build_jobs import MONO, WALL, Job, coll, group, init, load, nap, stepped
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwatch.model import Change, JobSnapshot, NodeReport, Process, RankState, Verdict
from rankwatch.monitor.incidents import MAX_CLOSED, MAX_HISTORY, MAX_RENAMES, Book, fold, worst
from rankwatch.monitor.policy import Limits

POLL = 0.5


def verdict(key, name="slow", cause="not_entered", culprits=(1,), since=0.0, waiting=(0, 2)):
    return Verdict(key, name, cause, "user_code", culprits, waiting, MONO + since, f"{name} {cause}")


def snap(t, wall=None, gap=POLL, final=False):
    ranks = tuple(RankState(rank=n, node="node05", process=Process(100 + n, True)) for n in range(4))
    return JobSnapshot(MONO + t, WALL + t if wall is None else wall, 4, 0, (NodeReport("node05", ranks),), gap_s=gap, final=final)


class Play:
    def __init__(self):
        self.book, self.t, self.changes = Book(), 0.0, []

    def look(self, *verdicts, gap=POLL, wall=None):
        self.t += gap
        self.book, changes = fold(self.book, verdicts, snap(self.t, wall, gap), MONO + self.t, Limits())
        self.changes += changes
        return changes

    def stall(self, number, looks=4, pause=4, **more):
        """One stall of its own key, then `pause` looks without any."""
        since = self.t
        for _ in range(looks):
            self.look(verdict(f"a0-hang-{number}", since=since, **more))
        for _ in range(pause):
            self.look()

    def loud(self):
        return [change.kind for change in self.changes if not change.quiet and (change.kind != "updated" or change.renamed)]


# -- the same stall again and again ----------------------------------------------------------------------------------------


def test_the_next_stalls_of_a_rank_are_incidents_of_their_own():
    play = Play()
    for number in range(3):
        play.stall(number)
    assert play.loud() == ["opened", "closed"] * 3
    assert len(play.book.closed) == 3


def test_a_hundred_stalls_of_the_same_rank_are_few_incidents_and_few_lines():
    play = Play()
    for number in range(100):
        play.stall(number)
    assert len(play.book.closed) == 3
    assert play.loud() == ["opened", "closed"] * 3
    last = play.book.closed[-1]
    assert last.times == 98
    assert "for the 98th time" in last.verdict.summary
    assert sum(incident.lost_rank_s for incident in play.book.closed) == 100 * 2 * 5 * POLL


def test_other_ranks_and_other_causes_are_other_stalls():
    play = Play()
    for number in range(3):
        play.stall(number, cause="compiling")
    play.stall(3, cause="compiling", culprits=(2,))
    play.stall(4, cause="data_loading")
    assert [incident.times for incident in play.book.closed] == [1] * 5


def test_a_stall_after_a_long_rest_is_news():
    play = Play()
    for number in range(6):
        play.stall(number)
    play.look(gap=600.0)
    play.look()
    (change,) = play.look(verdict("a0-hang-7", since=play.t))
    assert (change.kind, change.quiet, change.incident.times) == ("opened", False, 1)


def test_a_recurring_stall_that_gets_worse_is_said_and_its_end_as_well():
    play = Play()
    for number in range(4):
        play.stall(number)
    del play.changes[:]
    since = play.t
    play.look(verdict("a0-hang-9", since=since))
    play.look(verdict("a0-hang-9", "stuck", since=since))
    play.look()
    play.look()
    assert play.loud() == ["escalated", "closed"]
    assert worst(play.book.closed[-1]) == "stuck"
    play.stall(10)
    assert play.loud()[-2:] == ["opened", "closed"], "what has paged is no everyday stall any more"


def test_a_new_attempt_counts_its_stalls_anew():
    play = Play()
    for number in range(5):
        play.stall(number)
    (change,) = play.look(verdict("a1-hang-1", since=play.t))
    assert not change.quiet


# -- names ---------------------------------------------------------------------------------------------------------------


def test_who_is_blamed_instead_is_said_once_it_is_so_in_two_looks():
    play = Play()
    play.look(verdict("a0-hang-1", "stuck"))
    play.look(verdict("a0-hang-1", "stuck", culprits=(2,), waiting=(0, 1)))
    assert play.loud() == ["opened"]
    (change,) = play.look(verdict("a0-hang-1", "stuck", culprits=(2,), waiting=(0, 1)))
    assert (change.kind, change.renamed, change.incident.was_ranks) == ("updated", True, (1,))
    play.look(verdict("a0-hang-1", "stuck", culprits=(2,), waiting=(0, 1)))
    assert play.loud() == ["opened", "updated"]
    assert [c.culprit_ranks for c in play.book.open[0].history] == [(1,), (2,)]


def test_names_that_alternate_are_said_a_few_times_only():
    play = Play()
    for number in range(200):
        play.look(verdict("a0-hang-1", culprits=(1 + number // 2 % 2,)))
    assert play.loud() == ["opened"] + ["updated"] * MAX_RENAMES


def test_a_verdict_that_comes_and_goes_is_said_once():
    play = Play()
    for _ in range(50):
        play.look(verdict("a0-hang-1"))
        play.look(verdict("a0-hang-1", "stuck"))
    assert play.loud() == ["opened", "escalated"]


def test_history_keeps_the_first_word_of_every_verdict_and_its_times_never_run_backwards():
    play = Play()
    play.look(verdict("a0-hang-1"))
    play.look(verdict("a0-hang-1", "timeout_imminent"), wall=WALL - 5000)
    for number in range(600):
        play.look(verdict("a0-hang-1", "stuck", culprits=(1 + number % 3,)), wall=WALL - 5000 + number)
    history = play.book.open[0].history
    assert len(history) == MAX_HISTORY
    assert [change.verdict for change in history[:3]] == ["slow", "timeout_imminent", "stuck"]
    assert [change.at_wall for change in history] == sorted(change.at_wall for change in history)


# -- two that are one ------------------------------------------------------------------------------------------------------


def test_an_incident_that_turns_out_to_be_part_of_another_one_says_so():
    play = Play()
    first = verdict("a0-hang-1", culprits=(1,), waiting=(0,))
    second = verdict("a0-hang-2", culprits=(3,), waiting=(2,))
    play.look(first, second)
    whole = verdict("a0-hang-1", culprits=(3,), waiting=(0, 1, 2))
    play.look(whole)
    play.look(whole)
    (closed,) = play.book.closed
    assert closed.into == play.book.open[0].id
    assert closed.verdict.summary.startswith(f"is part of incident {play.book.open[0].id} after ")


def test_a_hang_that_ends_while_a_straggler_is_told_has_recovered():
    play = Play()
    straggler = verdict("a0-straggler-2", "straggler", culprits=(2,), waiting=(0, 1, 3))
    play.look(straggler, verdict("a0-hang-1", culprits=(1,), waiting=(0, 2)))
    play.look(straggler)
    play.look(straggler)
    assert play.book.closed[0].into == ""


def test_an_incident_that_just_ends_beside_another_one_has_recovered():
    play = Play()
    play.look(verdict("a0-hang-1", culprits=(1,), waiting=(0,)), verdict("a0-hang-2", culprits=(3,), waiting=(2,)))
    play.look(verdict("a0-hang-2", culprits=(3,), waiting=(2,)))
    play.look(verdict("a0-hang-2", culprits=(3,), waiting=(2,)))
    assert play.book.closed[0].into == ""
    assert play.book.closed[0].verdict.summary.startswith("recovered after ")


# -- in whole jobs ---------------------------------------------------------------------------------------------------------


def steps(count):
    for _ in range(count):
        yield nap(0.1)
        yield coll()
        yield stepped()


def test_two_hangs_in_disjoint_groups_are_two_incidents():
    def script(rank):
        yield init(600)
        yield group("1", (0, 1))
        yield group("2", (2, 3))
        yield from steps(10)
        if rank in (1, 3):
            yield nap(300, f"train.py:3{rank}:load")
        yield coll(group="1" if rank < 2 else "2")

    job = Job(script, 4).play(30)
    assert sorted(incident.verdict.culprit_ranks for incident in job.incidents) == [(1,), (3,)]
    assert sorted(incident.verdict.waiting_ranks for incident in job.incidents) == [(0,), (2,)]


def test_a_cascade_is_one_incident():
    """Rank 3 sleeps; rank 2 waits for it, and one after the other the rest wait for those that wait."""

    def script(rank):
        yield init(600)
        for first in range(3):
            yield group(str(first + 1), (first, first + 1))
        yield from steps(10)
        if rank == 3:
            yield nap(300, "train.py:31:load")
        yield nap(0.1 + 2.5 * (2 - min(rank, 2)))
        if rank < 3:
            yield coll(group=str(rank + 1))
        if rank > 0:
            yield coll(group=str(rank))

    job = Job(script, 4).play(40)
    assert [incident.verdict.culprit_ranks for incident in job.incidents] == [(3,)]
    assert job.incidents[0].verdict.waiting_ranks == (0, 1, 2)


def test_a_rank_that_is_late_at_every_checkpoint_and_batch_opens_few_incidents():
    """Numbers move, the same rank is late by 7 s again and again: forty stalls."""

    def script(rank):
        yield init(600)
        yield from steps(20)
        for _ in range(40):
            if rank == 1:
                yield load(7)
            yield from steps(10)

    job = Job(script, 3).play(40 * 9)
    assert len(job.incidents) <= 6
    loud = [change for _, change in job.changes if change.kind in ("opened", "closed") and not change.quiet]
    assert len(loud) <= 12
    assert {incident.verdict.culprit_ranks for incident in job.incidents} == {(1,)}
    assert max(incident.times for incident in job.incidents) >= 30


def test_a_sharper_cause_and_another_culprit_keep_the_incident():
    def script(rank):
        yield init(600)
        yield group("1", (0, 1))
        yield group("2", (1, 2))
        yield from steps(10)
        if rank == 2:
            yield nap(300, "train.py:22:load")
        if rank == 1:
            yield nap(14, "train.py:11:prepare")
            yield coll(group="2")
        if rank < 2:
            yield coll(group="1")

    job = Job(script, 3).play(40)
    (incident,) = job.incidents
    assert [change.culprit_ranks for change in incident.history] == [(1,), (2,)]
    assert (incident.verdict.culprit_ranks, incident.verdict.waiting_ranks, incident.was_ranks) == ((2,), (0, 1), (1,))


# -- laws ------------------------------------------------------------------------------------------------------------------

_LOOKS = st.lists(
    st.tuples(
        st.lists(
            st.builds(
                verdict, st.sampled_from(["a0-hang-1", "a0-hang-2", "a0-hang-3", "a1-hang-4", "a0-straggler-1"]),
                st.sampled_from(["slow", "slow", "slow", "straggler", "timeout_imminent", "stuck", "failed", "diverged"]),
                st.sampled_from(["not_entered", "compiling"]), st.sampled_from([(1,), (3,), (1, 3)]), st.floats(-20.0, 0.0),
                st.sampled_from([(), (0,), (0, 2)]),
            ),
            max_size=3, unique_by=lambda each: each.key,
        ),
        st.sampled_from([0.1, 0.25, 0.5, 0.5, 0.5, 2.0, 30.0]),  # until this look
        st.sampled_from([0.0, 0.0, 0.0, 3600.0, -3600.0]),  # step of the wall clock
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(_LOOKS)
def test_laws_of_the_fold(looks):
    book, t, wall = Book(), 0.0, WALL
    ids, brute, absent = set(), {}, {}
    before = {}
    for verdicts, gap, step in looks:
        t, wall = t + gap, wall + gap + step
        present = [replace(each, since=min(each.since + t, MONO + t)) for each in verdicts]
        old = book
        book, changes = fold(book, present, snap(t, wall, gap), MONO + t, Limits())
        keys = [incident.verdict.key for incident in book.open]
        assert len(keys) == len(set(keys)), "two open incidents with one key"
        assert {each.key for each in present} <= set(keys), "a verdict without an incident"
        everything = [*book.open, *book.closed]
        assert len({incident.id for incident in everything}) == len(everything)
        assert not {incident.id for incident in book.open} & {incident.id for incident in book.closed}
        for incident in everything:
            history = incident.history
            earlier = before.get(incident.id, ())
            assert history[: len(earlier)] == earlier or len(history) == MAX_HISTORY, "history only grows"
            assert [change.at_wall for change in history] == sorted(change.at_wall for change in history)
            before[incident.id] = history
            assert incident.closed_wall_at is None or incident.closed_wall_at >= incident.opened_wall_at
        for change in changes:
            if change.kind == "opened" and not change.quiet:
                assert change.incident.id not in ids, "an id is given once"
                ids.add(change.incident.id)
        # cost: what waits at a look costs until the next one, at most to the first look without it
        rows = {each.key: each for each in present}
        opened = {incident.id: incident for incident in book.open}
        for incident in old.open:
            was = rows.get(incident.verdict.key)
            gone = absent.get(incident.id, 0)
            if gone == 0 and gap <= Limits().max_gap_s:
                brute[incident.id] += gap * len(incident.verdict.waiting_ranks)
            elif gone and was is not None and incident.id in opened and was.since <= MONO + absent_at[incident.id] and gap <= Limits().max_gap_s:
                brute[incident.id] += (t - absent_at[incident.id]) * len(incident.verdict.waiting_ranks)
            if was is None:
                absent[incident.id] = gone + 1
                if gone == 0:
                    absent_at[incident.id] = t
                assert (incident.id in opened) == (absent[incident.id] < 2), "it closes after two looks without its verdict"
            else:
                absent[incident.id] = 0
        for change in changes:
            if change.kind == "opened":
                mine = change.incident
                if not change.quiet:
                    brute[mine.id] = (MONO + t - mine.verdict.since) * len(mine.verdict.waiting_ranks)
                else:
                    brute[mine.id] = mine.lost_rank_s
                absent[mine.id] = 0
        for incident in book.open:
            assert abs(incident.lost_rank_s - brute[incident.id]) < 1e-6
    assert len(book.closed) <= MAX_CLOSED
    counted = sum(book.forgotten.values()) + len(book.closed) + len(book.open)
    assert counted == book.opened


absent_at: dict[str, float] = {}


def test_what_is_forgotten_is_still_counted_and_pages_are_kept_longest():
    play = Play()
    since = play.t
    play.look(verdict("a0-hang-0", "stuck", culprits=(0,), since=since))
    play.look()
    play.look()
    for number in range(1, 80):
        play.stall(number, culprits=(1000 + number,))
    assert len(play.book.closed) == MAX_CLOSED
    assert play.book.closed[0].verdict.culprit_ranks == (0,)
    assert play.book.forgotten == {"slow": 30}
    assert play.book.forgotten_lost_rank_s == 30 * 2 * 5 * POLL


def test_a_long_gap_costs_nothing():
    play = Play()
    play.look(verdict("a0-hang-1", since=0.5))
    play.look(verdict("a0-hang-1", since=0.5), gap=900.0)
    play.look(verdict("a0-hang-1", since=0.5))
    assert play.book.open[0].lost_rank_s == 2 * POLL


def test_a_history_of_one_verdict_is_bounded_too():
    history = tuple(Change(float(n), "slow", "not_entered", (n % 2,)) for n in range(MAX_HISTORY))
    play = Play()
    play.look(verdict("a0-hang-1"))
    play.book = replace(play.book, open=(replace(play.book.open[0], history=history),))
    play.look(verdict("a0-hang-1", cause="compiling"), wall=1e9 + WALL)
    assert len(play.book.open[0].history) == MAX_HISTORY
    assert play.book.open[0].history[0] == history[0]
