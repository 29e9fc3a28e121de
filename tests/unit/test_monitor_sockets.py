"""Bytes on TCP connections, from messages as sock_diag writes them and descriptors of the test's own."""

import os
import struct

from rankwatch.monitor.sockets import Connection, Sockets, parse


def message(inode, port, *, state=1, acked=0, received=0, info=True):
    """inet_diag_msg, then INET_DIAG_MEMINFO and INET_DIAG_INFO."""
    head = struct.pack("=BBBB", 2, state, 0, 0) + struct.pack(">HH", port, 443) + bytes(44)
    head += struct.pack("=IIIII", 0, 0, 0, 0, inode)
    attributes = struct.pack("=HH", 20, 1) + bytes(16)
    if info:
        attributes += struct.pack("=HH", 4 + 232, 2) + bytes(120) + struct.pack("=QQ", acked, received) + bytes(96)
    return head + attributes


def test_a_connection_is_read_with_what_it_has_moved():
    assert parse(message(77, 40000, acked=1000, received=24)) == Connection(77, 40000, False, 1024)
    assert parse(message(78, 8080, state=10)) == Connection(78, 8080, True, 0)
    assert parse(message(79, 8080, info=False)) == Connection(79, 8080, False, 0)
    assert parse(b"short") is None


def put(proc, pid, **links):
    (proc / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
    for number, target in links.items():
        os.symlink(target, proc / str(pid) / "fd" / number.strip("_"))


def test_what_a_tree_moves_is_counted_over_connections_that_come_and_go(tmp_path):
    clock, seen = [0.0], []
    sockets = Sockets(str(tmp_path), clock=lambda: clock[0], dump=lambda: list(seen))
    put(tmp_path, 7, _3="socket:[70]", _4="/data/a.bin", _5="socket:[71]")
    put(tmp_path, 8, _3="socket:[80]")

    def look(at, *connections):
        clock[0], seen[:] = at, connections
        return sockets.moved((7, 100), (7, 8))

    assert look(0.0, Connection(70, 4000, False, 500)) == 0  # what came before the suspicion
    assert look(2.0, Connection(70, 4000, False, 800)) == 300
    assert look(4.0, Connection(71, 4001, False, 50), Connection(80, 4002, False, 7)) == 357
    assert look(6.0) == 357
    assert look(8.0, Connection(99, 4009, False, 10**9)) == 357  # another process's


def test_connections_that_the_rank_has_accepted_do_not_count(tmp_path):
    """A scraper reads the metrics of a rank that stands still."""
    clock, count = [0.0], [0]
    dump = lambda: [Connection(1, 9100, True, 0), Connection(70, 9100, False, count[0])]  # noqa: E731
    sockets = Sockets(str(tmp_path), clock=lambda: clock[0], dump=dump)
    put(tmp_path, 7, _3="socket:[70]")
    for clock[0], count[0] in ((0.0, 0), (2.0, 10**6)):
        assert sockets.moved((7, 100), (7,)) == 0


def test_the_kernel_is_asked_once_a_second_however_many_ranks_are_suspects(tmp_path):
    asked = []
    sockets = Sockets(str(tmp_path), clock=lambda: 5.0, dump=lambda: asked.append(1) or [])
    for pid in range(8):
        sockets.moved((pid, 1), (pid,))
    assert asked == [1]
