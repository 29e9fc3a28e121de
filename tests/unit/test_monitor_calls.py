"""The history of calls that is cut out of the recorders' answers: what it holds, what it costs to doubt, and what it refuses to guess."""

import json
import struct
from dataclasses import replace

from build_calls import WALL, answer, entry

from rankwatch.model import Group
from rankwatch.monitor import calls
from rankwatch.monitor.calls import CallLog, Kinds
from rankwatch.monitor.worker_server import GENERIC, NCCL

DEFAULT = Group("0", "default_pg", "gloo", (0, 1), 600.0)
REDUCE, GATHER = ("all_reduce", ((4,),)), ("all_gather", ((4,),))


def read(log, entries, groups=(DEFAULT,), recorder=GENERIC):
    log.learn(recorder, log.scan(recorder, answer(entries)), groups)
    return log.calls(groups)


def ops(found, name="0"):
    """{number: operation}, of the numbers that are known."""
    line = found[name]
    numbers = struct.unpack(f"<{len(line.kinds) // 4}I", line.kinds)
    return {line.first + at: line.known[number].op for at, number in enumerate(numbers) if number}


def test_numbers_and_operations_are_kept_beyond_the_recorders_ring():
    log = CallLog(Kinds())
    read(log, [entry(n, REDUCE if n % 2 else GATHER) for n in range(1, 7)])
    found = read(log, [entry(n, REDUCE if n % 2 else GATHER) for n in range(5, 11)])
    assert ops(found) == {n: "all_reduce" if n % 2 else "all_gather" for n in range(1, 11)}
    assert (found["0"].first, found["0"].last) == (1, 10)


def test_only_what_is_new_since_the_scan_before_is_looked_at():
    log = CallLog(Kinds())
    assert [len(group.calls) for group in log.scan(GENERIC, answer([entry(n, REDUCE) for n in range(1, 7)])).groups] == [6]
    again = log.scan(GENERIC, answer([entry(n, REDUCE) for n in range(4, 9)]))
    assert [group.calls[0][0] for group in again.groups] == [7]
    assert (again.first, again.last) == (6, 7)
    assert log.scan(GENERIC, answer([entry(n, REDUCE) for n in range(4, 9)])).groups == []


def test_cutting_and_parsing_give_the_same():
    entries = [entry(1, ("all_reduce", ((4, 8),), "Half")), entry(2, ("barrier", ())), entry(3, ("reduce", ((3,), (4,)), "Int"))]
    entries += [entry(4, REDUCE, p2p=True), entry(1, GATHER, name="1", pg_id=3, record_id=4), entry(5, REDUCE, record_id=5, duration_ms=0.25)]
    one, two = CallLog(Kinds()), CallLog(Kinds())
    assert b'": ' not in answer(entries)
    spaced = json.dumps({"entries": entries}).encode()
    assert one._cut(answer(entries)) is not None
    assert two._cut(spaced) is None
    assert one.scan(GENERIC, answer(entries)) == two.scan(GENERIC, spaced)
    assert one._kinds.known == two._kinds.known
    more = [*entries, entry(6, GATHER, record_id=6)]
    assert one.scan(GENERIC, answer(more)).groups[0].calls[0][0] == 6
    assert two.scan(GENERIC, json.dumps({"entries": more}).encode()).groups[0].calls[-1][0] == 6


def test_sizes_that_ranks_need_not_share_make_no_kinds_of_their_own():
    kinds = Kinds()
    log = CallLog(kinds)
    read(log, [entry(n, ("alltoall", ((n,),))) for n in range(1, 50)])
    assert [call.op for call in kinds.known.values()] == ["alltoall"]


def test_equal_calls_have_equal_numbers_on_every_rank():
    one, two = CallLog(Kinds()), CallLog(Kinds())
    first = read(one, [entry(1, GATHER), entry(2, REDUCE)])["0"]
    second = read(two, [entry(1, REDUCE), entry(2, REDUCE)])["0"]
    assert first.kinds[4:] == second.kinds[4:]
    assert first.kinds[:4] != second.kinds[:4]


def test_what_was_dropped_unseen_is_unknown():
    log = CallLog(Kinds())
    read(log, [entry(1, REDUCE)])
    assert ops(read(log, [entry(5, REDUCE)])) == {1: "all_reduce", 5: "all_reduce"}


def test_two_entries_of_one_number_say_nothing():
    found = read(CallLog(Kinds()), [entry(1, REDUCE), entry(2, REDUCE), entry(2, GATHER, record_id=2)])
    assert ops(found) == {1: "all_reduce"}


def test_a_group_that_was_made_anew_starts_anew():
    log = CallLog(Kinds())
    old = [entry(n, REDUCE) for n in range(1, 9)]
    read(log, old)
    again = replace(DEFAULT, generation=1, created_wall_at=WALL + 10)
    new = [entry(n, GATHER, pg_id=1, at=11, record_id=7 + n) for n in range(1, 4)]
    assert ops(read(log, [*old, *new], (again,))) == {1: "all_gather", 2: "all_gather", 3: "all_gather"}


def test_entries_of_a_group_that_the_slot_does_not_name_yet_are_left_out_until_it_does():
    """The answer is newer than the list of groups: two groups of one name are in it, and which is which is not certain."""
    log = CallLog(Kinds())
    old = [entry(n, REDUCE) for n in range(1, 4)]
    new = [entry(n, GATHER, pg_id=1, at=11, record_id=2 + n) for n in range(1, 3)]
    assert read(log, [*old, *new]) == {}
    log = CallLog(Kinds())
    read(log, old)
    assert ops(read(log, [*old, *new])) == {1: "all_reduce", 2: "all_reduce", 3: "all_reduce"}


def test_a_history_is_not_shown_for_another_generation_than_its_own():
    log = CallLog(Kinds())
    read(log, [entry(1, REDUCE)])
    assert log.calls((replace(DEFAULT, generation=1, created_wall_at=WALL + 10),)) == {}


def test_gloo_beside_nccl_in_one_group_is_told_apart():
    both = Group("0", "default_pg", "cpu:gloo,cuda:nccl", (0, 1), 600.0)
    log = CallLog(Kinds())
    read(log, [entry(1, GATHER)], (both,))
    log.learn(NCCL, log.scan(NCCL, answer([entry(1, REDUCE, backend="nccl")])), (both,))
    found = log.calls((both, replace(both, name="0:gloo", backend="gloo")))
    assert (ops(found), ops(found, "0:gloo")) == ({1: "all_reduce"}, {1: "all_gather"})


def test_the_history_is_bounded():
    log = CallLog(Kinds())
    for start in range(1, 40_000, 2000):
        found = read(log, [entry(n, REDUCE) for n in range(start, start + 2000)])
    assert len(found["0"].kinds) <= 4 * (calls.KEEP + calls.KEEP // 4)
    assert found["0"].last == 40_000
    for number in range(200):
        groups = tuple(Group(str(n), "g", "gloo", (0, 1), 600.0) for n in range(max(0, number - 100), number + 1))
        read(log, [entry(1, REDUCE, name=str(number), pg_id=number, record_id=number)], groups)
    assert len(log._lines) <= calls.MAX_GROUPS


def test_kinds_that_no_history_holds_make_room():
    kinds = Kinds()
    log = CallLog(kinds)
    for number in range(1, calls.MAX_KINDS + 50):
        read(log, [entry(number, ("all_reduce", ((number,),)))])
    assert len(kinds.known) == calls.MAX_KINDS
    other = CallLog(kinds)
    assert ops(read(other, [entry(1, GATHER), entry(2, REDUCE)])) == {2: "all_reduce"}  # no room for a new one
    kinds.prune(other.used())
    assert ops(read(other, [entry(3, GATHER)])) == {2: "all_reduce", 3: "all_gather"}


def test_odd_answers_raise_nothing():
    log = CallLog(Kinds())
    for text in (b"", b"{}", b"[1]", b"junk", b'{"entries":null}', b'{"entries":[7,null,{}]}', answer([entry(1, REDUCE)])[:-60], b'{"collective_seq_id":x'):
        log.learn(GENERIC, log.scan(GENERIC, text), (DEFAULT,))
        log.calls((DEFAULT,))
