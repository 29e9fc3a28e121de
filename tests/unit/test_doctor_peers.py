"""`rankwatch doctor --peers` without a network: who takes part, what a node's answer may hold, what the views of all nodes mean, and the table."""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from golden import check

from rankwatch.commands.peers import own, reach, table
from rankwatch.commands.peers.faults import FULL, NONE, PARTLY, Picture, exit_code, faults, own_code
from rankwatch.commands.peers.nodelist import DEFAULT_PORT, ListError, Node, expand, names, parse, slurm
from rankwatch.commands.peers.reach import Hello, Reach, SchemaError, decode, encode, of_error, secret, token_cause

NODES = parse("node0,node1,node2")


class TestNodelist:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("node01", "node01"),
            ("node[01-03,07],gpu1", "node01 node02 node03 node07 gpu1"),
            ("node[8-11]", "node8 node9 node10 node11"),
            ("node[098-101]", "node098 node099 node100 node101"),
            ("rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"),
            ("r[1,3]c[0-1]-ib", "r1c0-ib r1c1-ib r3c0-ib r3c1-ib"),
            ("a,b[2]", "a b2"),
            ("10.0.0.[1-3]", "10.0.0.1 10.0.0.2 10.0.0.3"),
        ],
    )
    def test_slurms_forms_are_expanded_in_their_order_with_their_zeros(self, text: str, hosts: str) -> None:
        assert expand(text) == tuple(hosts.split())

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("node[1-3", "not closed"),
            ("node[3-1]", "no range"),
            ("node[a-c]", "no number"),
            ("bgl[123x456]", "no number"),
            ("node[]", "no number"),
            ("node[0-99999999]", "no range"),
            ("n[0-999]x[0-999]", "more than"),
            ("no de!", "no host name"),
        ],
    )
    def test_what_is_no_list_is_refused_before_it_is_built(self, text: str, why: str) -> None:
        with pytest.raises(ListError, match=why):
            expand(text)

    def test_hosts_take_ports_and_ipv6_addresses_brackets(self) -> None:
        assert parse("node01:5000, node[02-03],[fd00::1]:5001 [fd00:0::2] fd00::3 gpu[1]:7") == (
            Node("node01", 5000),
            Node("node02", DEFAULT_PORT),
            Node("node03", DEFAULT_PORT),
            Node("fd00::1", 5001),
            Node("fd00::2", DEFAULT_PORT),
            Node("fd00::3", DEFAULT_PORT),
            Node("gpu1", 7),
        )
        assert str(Node("fd00::1", 5001)) == "[fd00::1]:5001"

    def test_a_file_has_a_node_on_each_line_and_comments(self) -> None:
        assert parse("# the rack\nnode01 slots=8\n\nnode02:5000  # spare\n", 1234) == (Node("node01", 1234), Node("node02", 5000))

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("[fd00::1", "such as 10.0.0.5:27480"),
            ("[fd00::1]x", "such as"),
            ("[fd00::zz]", "fd00::zz"),
            ("fd00::1:x", "such as"),
            ("a:0", "1 to 65535"),
            ("a:port", "1 to 65535"),
            ("n[1-2]:x", "'n1:x' is not accepted"),
            ("a:1,b,a:1", "a:1 stands in the list twice"),
            (" ,\n#a", "names no node"),
            ("-/f", "not accepted"),
        ],
    )
    def test_a_slip_in_a_list_is_named(self, text: str, why: str) -> None:
        with pytest.raises(ListError, match=why):
            parse(text)

    def test_nodes_of_one_host_are_called_by_their_ports(self) -> None:
        assert names(parse("a,b:7")) == ("a", "b")
        assert names(parse("a:1,a:2")) == ("a:1", "a:2")


class TestSlurm:
    def test_the_steps_list_goes_before_the_jobs_and_the_nodes_own_name_before_its_number(self) -> None:
        environ = {"SLURM_JOB_NODELIST": "n[1-8]", "SLURM_STEP_NODELIST": "n[5-8]", "SLURMD_NODENAME": "n7", "SLURM_NODEID": "0", "SLURM_JOB_ID": "42"}
        found = slurm(environ)
        assert found is not None
        assert (found.hosts, found.index, found.job, found.in_step) == (("n5", "n6", "n7", "n8"), 2, "42", True)

    @pytest.mark.parametrize("number", ["SLURM_NODEID", "SLURM_PROCID"])
    def test_without_a_name_the_number_tells_the_place(self, number: str) -> None:
        found = slurm({"SLURM_JOB_NODELIST": "n[1-8]", number: "3"})
        assert found is not None
        assert (found.index, found.in_step) == (3, False)

    def test_a_number_beyond_the_list_tells_nothing(self) -> None:
        found = slurm({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"})
        assert found is not None
        assert (found.index, found.local) == (None, 1)

    def test_outside_of_slurm_there_is_none_and_a_list_that_cannot_be_read_says_what_to_do(self) -> None:
        assert slurm({}) is None
        with pytest.raises(ListError, match="give the nodes yourself"):
            slurm({"SLURM_JOB_NODELIST": "bgl[000x133]"})


class TestOwnPlace:
    @staticmethod
    def find(text: str, host: str, local: Sequence[int] = ()) -> int:
        return own.index_of(parse(text), host, lambda nodes: local, lambda: ("10.0.0.2",))

    def test_the_host_name_tells_it_short_or_long_without_a_name_server(self) -> None:
        def never(nodes: Sequence[Node]) -> Sequence[int]:
            raise AssertionError("asked")

        assert own.index_of(parse("a,b.example.org,c"), "b.example.org", never, never) == 1
        assert own.index_of(parse("a,b,c"), "c.example.org", never, never) == 2

    def test_else_the_address_that_is_this_machines(self) -> None:
        assert self.find("10.0.0.1,10.0.0.2", "b", [1]) == 1

    def test_an_address_that_is_given_to_rankwatch_goes_first(self) -> None:
        def never(nodes: Sequence[Node]) -> Sequence[int]:
            raise AssertionError("asked")

        assert own.index_of(parse("a:1,a:2,b"), "b", never, never, "a:2") == 1
        assert own.index_of(parse("a:1,a:2,b"), "x", never, never, "b") == 2

    def test_two_places_of_one_machine_need_an_index(self) -> None:
        with pytest.raises(ListError, match=r"2 nodes of the list are this machine: .* --peer-index N \(0 is h:1, 1 is h:2\)"):
            self.find("h:1,h:2", "h", [0, 1])

    def test_a_machine_that_is_not_in_the_list_is_told_with_its_addresses(self) -> None:
        with pytest.raises(ListError, match=r"none of the 2 nodes of the list is this machine \(b, 10.0.0.2\)"):
            self.find("10.0.0.8,10.0.0.9", "b")


class TestHello:
    HELLO = Hello("0.1.0", 1, "node1", "abc", 1000.5, 40000, True, 0, (Reach("ok", address="10.0.0.1", round_trip_s=0.001), Reach("ok")), {0: "o-"})

    def test_what_is_sent_comes_back(self) -> None:
        assert decode(encode(self.HELLO, 2).encode(), 2) == self.HELLO

    def test_another_schema_is_told_with_its_version(self) -> None:
        document = json.loads(encode(self.HELLO, 2)) | {"schema": 9, "version": "3.0"}
        with pytest.raises(SchemaError, match=r"version 9 of this check \(rankwatch 3\.0\), this one 1"):
            decode(json.dumps(document).encode(), 2)

    @pytest.mark.parametrize(
        "change",
        [
            {"index": -1},
            {"index": True},
            {"wall": "now"},
            {"wall": 1e300},
            {"row": [{}]},
            {"row": [{"kind": "fine"}, {"kind": "ok"}]},
            {"row": [{"kind": "ok"}] * 3},
            {"row": {"a": 1}},
            {"free_port": 70000},
            {"nonce": None},
            {"heard": []},
            {"heard": {str(at): "oo" for at in range(33)}},
        ],
    )
    def test_rubbish_is_a_value_error(self, change: dict[str, object]) -> None:
        with pytest.raises(ValueError):
            decode(json.dumps(json.loads(encode(self.HELLO, 2)) | change).encode(), 2)

    def test_rows_at_second_hand_that_are_none_are_left_out(self) -> None:
        document = json.loads(encode(self.HELLO, 2)) | {"heard": {"0": "oo", "1": "o", "5": "oo", "x": "oo", "99999999999": "oo", "00": 7}}
        assert decode(json.dumps(document).encode(), 2).heard == {0: "oo"}

    def test_a_row_fits_into_a_letter_a_node(self) -> None:
        row = tuple(Reach(kind) for kind in reach.KINDS)
        assert reach.from_letters(reach.letters(row), len(row)) == row
        assert reach.from_letters("oX", 2) is None
        assert reach.from_letters("o", 2) is None

    def test_control_characters_of_the_network_do_not_reach_a_terminal(self) -> None:
        assert "\x1b" not in decode(encode(replace(self.HELLO, node="\x1b[2Jnode"), 2).encode(), 2).node


class TestOutcomes:
    @pytest.mark.parametrize(
        ("error", "connected", "kind"),
        [
            (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False, "unresolved"),
            (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), False, "looking_up"),
            (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False, "refused"),
            (TimeoutError("timed out"), False, "timed_out"),
            (TimeoutError("timed out"), True, "silent"),
            (OSError(errno.EHOSTUNREACH, "No route to host"), False, "unreachable"),
            (OSError(errno.EINVAL, "Invalid argument"), False, "unreachable"),
            (ConnectionResetError(errno.ECONNRESET, "reset"), True, "cut"),
            (ValueError("no HTTP"), True, "foreign"),
        ],
    )
    def test_an_exception_means_one_outcome(self, error: BaseException, connected: bool, kind: str) -> None:
        assert of_error(error, connected).kind == kind


class TestToken:
    def test_the_files_text_never_travels(self) -> None:
        made = secret("correct horse", "", NODES)
        assert "correct" not in made.token
        assert made.token == secret("correct horse", "7", NODES[:2]).token

    def test_without_a_file_two_jobs_and_two_lists_are_kept_apart(self) -> None:
        made = {secret("", job, nodes).token for job in ("", "7", "8") for nodes in (NODES, NODES[:2])}
        assert len(made) == 6

    @pytest.mark.parametrize(
        ("ours", "theirs", "why"),
        [
            (secret("a", "", NODES), secret("", "", NODES), "node0 was started with --token-file, node1 was not"),
            (secret("", "", NODES), secret("a", "", NODES), "node1 was started with --token-file, node0 was not"),
            (secret("", "", NODES), secret("", "", NODES[:2]), "node1 was started with another list of nodes than node0"),
            (secret("", "7", NODES), secret("", "8", NODES), "node1 belongs to another job, or was started with another list of nodes than node0"),
            (secret("a", "", NODES), secret("b", "", NODES), "the text in the token file of node1 is not that of node0"),
        ],
    )
    def test_the_cause_of_a_wrong_token_is_checked(self, ours: reach.Secret, theirs: reach.Secret, why: str) -> None:
        assert token_cause(ours, {"token": theirs.source, "list": theirs.public}, "node0", "node1") == why

    def test_another_program_that_wants_a_token_is_no_check(self) -> None:
        assert "no check of this kind" in token_cause(secret("", "", NODES), {}, "node0", "node1")


OK = Reach("ok", address="10.0.0.9", round_trip_s=0.0003, offset_s=0.0, version="0.1.0")
TIMED_OUT = Reach("timed_out", address="10.0.0.9")
REFUSED = Reach("refused", address="10.0.0.9")


KIND_OF = {letter: Reach(kind) for kind, (letter, _) in reach.KINDS.items()} | {"o": OK, "t": TIMED_OUT, "r": REFUSED}


def picture(text: str, own: int = 0, **changes: Reach) -> Picture:
    """From a line a node: letters as in requests, "?" for a node of which nothing is known; changes: `_0_2=` the outcome of 0 -> 2."""
    rows = {a: [KIND_OF[letter] for letter in line] for a, line in enumerate(text.split()) if line != "?"}
    for name, outcome in changes.items():
        a, b = map(int, name.strip("_").split("_"))
        rows[a][b] = outcome
    return Picture(parse(f"node[0-{len(text.split()) - 1}]"), own, {a: tuple(row) for a, row in rows.items()})


def told(pic: Picture) -> list[str]:
    return [fault.what for fault in faults(pic)]


class TestFaults:
    def test_nothing_is_said_where_all_reach_each_other(self) -> None:
        assert told(picture("ooo ooo ooo")) == []

    def test_a_node_that_nobody_reaches_is_told_once(self) -> None:
        assert told(picture("ooot ooot ooot ?")) == ["node0, node1, node2 -> node3: timed out (10.0.0.9:27480)"]

    def test_nodes_that_were_not_started_are_told_together(self) -> None:
        assert told(picture("orrro rrrro rrrro rrrro orrro".replace("rrrro", "?"))) == ["node0, node4 -> node1, node2, node3: refused"]

    def test_a_node_that_reaches_nobody_is_told_once(self) -> None:
        assert told(picture("oooo oooo oooo ttto")) == ["node3 -> node0, node1, node2: timed out"]

    def test_a_cut_between_two_is_told_as_one(self) -> None:
        found = faults(picture("oto too ooo"))
        assert [fault.what for fault in found] == ["node0 <-> node1: timed out, both ways"]
        assert found[0].cause.startswith("other nodes connect to it, packets from node0 to it vanish")

    def test_one_way_is_told_as_such(self) -> None:
        found = faults(picture("oto ooo ooo"))
        assert [fault.what for fault in found] == ["node0 -> node1: timed out (10.0.0.9:27480)"]
        assert found[0].cause.startswith("one way only: node1 can connect to node0")

    def test_different_outcomes_stay_apart(self) -> None:
        assert told(picture("oot oor ?")) == ["node0 -> node2: timed out (10.0.0.9:27480)", "node1 -> node2: refused (10.0.0.9:27480)"]

    def test_a_machine_that_reacts_on_another_port_has_a_firewall(self) -> None:
        assert "a firewall drops what comes to it" in faults(picture("oot oot ?", _0_2=replace(TIMED_OUT, host_up=True)))[0].cause
        assert "the machine is down" in faults(picture("oot oot ?", _0_2=replace(TIMED_OUT, host_up=False)))[0].cause

    @pytest.mark.parametrize("kind", [kind for kind in reach.KINDS if kind not in ("ok", "unasked")])
    def test_every_outcome_has_a_cause_and_a_next_step(self, kind: str) -> None:
        (fault,) = faults(picture("oo ?", _0_1=Reach(kind, "the detail", "10.0.0.9")))
        assert fault.what.startswith("node0 -> node1: ")
        assert fault.cause
        assert fault.do

    def test_a_clock_that_differs_from_the_others_is_told(self) -> None:
        assert told(picture("ooo ooo ooo", _0_2=replace(OK, offset_s=-4.2))) == ["the clock of node2 is 4.2 s behind the others"]

    def test_the_asking_nodes_own_clock_may_be_the_wrong_one(self) -> None:
        wrong = replace(OK, offset_s=90.0)
        assert told(picture("ooo ooo ooo", _0_1=wrong, _0_2=wrong)) == ["the clock of node0 is 90.0 s behind the others"]

    def test_of_two_clocks_nobody_knows_which_is_right(self) -> None:
        assert told(picture("oo oo", _0_1=replace(OK, offset_s=-7300.0))) == ["the clock of node0 is 2 h ahead of that of node1"]

    def test_a_clock_within_a_second_is_no_news(self) -> None:
        assert told(picture("ooo ooo ooo", _0_2=replace(OK, offset_s=0.9))) == []

    def test_another_version_is_told(self) -> None:
        found = told(picture("ooo ooo ooo", _0_2=replace(OK, version="0.2.0")))
        assert found == ["node2: rankwatch 0.2.0, 0.1.0 on 2 nodes"]


class TestExitCode:
    @pytest.mark.parametrize(
        ("text", "code"),
        [("oo oo", FULL), ("o", FULL), ("ooo ooo ?", PARTLY), ("oor ooo ooo", PARTLY), ("orr ? ?", NONE), ("ooo oo- ooo", PARTLY)],
        ids=["all", "alone", "a row is not known", "one connection fails", "nobody is reached", "one is not known"],
    )
    def test_of_the_whole(self, text: str, code: int) -> None:
        assert exit_code(picture(text)) == code

    def test_a_clock_is_no_full_success(self) -> None:
        assert exit_code(picture("oo oo", _0_1=replace(OK, offset_s=5.0))) == PARTLY

    def test_of_one_node_alone(self) -> None:
        assert own_code([OK, OK], 0) == FULL
        assert own_code([OK, OK, REFUSED], 0) == PARTLY
        assert own_code([OK, REFUSED], 0) == NONE


class TestTable:
    def test_the_table_word_for_word(self) -> None:
        """node3 was not started, node1 takes no connection from node0, node2's clock is off."""
        seen = picture("otor ooor ooor ?", _0_2=replace(OK, offset_s=3.25, round_trip_s=0.0121), _1_0=replace(OK, round_trip_s=0.00004))
        check("doctor_peers.txt", table.as_text(seen, quiet=False))

    def test_quiet_prints_nothing_when_all_is_well_and_no_matrix_otherwise(self) -> None:
        assert table.as_text(picture("oo oo"), quiet=True) == ""
        assert table.as_text(picture("or ?"), quiet=True).startswith("node0 -> node1: refused")

    def test_many_nodes_have_no_matrix(self) -> None:
        assert table.as_text(picture(" ".join(["o" * 17] * 17)), quiet=False) == "all 17 nodes reach each other; round trip 0.3 ms, at most 0.3 ms\n"

    def test_another_nodes_line_has_the_cause_only_if_the_table_has_not(self) -> None:
        seen = picture("? roo ?", own=1)
        assert table.own_line(seen, told=True) == "node1 -> node0: refused (10.0.0.9:27480)"
        assert "; do: start the check" in table.own_line(seen, told=False)
        assert table.own_line(picture("? ooo ?", own=1), told=False) == ""

    def test_json_has_the_same(self) -> None:
        document = json.loads(json.dumps(table.as_json(picture("oor ooo ?"))))
        assert document["supervision"] == "degraded"
        assert document["rows"]["0"]["2"]["kind"] == "refused"
        assert [(fault["kind"], fault["from"], fault["to"]) for fault in document["faults"]] == [("refused", [0], [2])]
        assert re.fullmatch(r"node2", document["nodes"][2]["name"])
