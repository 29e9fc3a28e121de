"""What the views of all nodes mean together: which connections fail, the checked cause, and what to do next. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rankwatch.commands.peers.nodelist import Node, names
from rankwatch.commands.peers.reach import Reach
from rankwatch.shown import plural

CLOCK_S = 1.0
FULL, PARTLY, NONE = 0, 3, 4
_NAMED = 4
_OF_THE_WAY = ("refused", "timed_out", "unreachable", "silent", "cut")

Rows = Mapping[int, Sequence[Reach]]
"""Node -> its view of every node, in the list's order. A node without a row has told nothing; `unasked` in a row tells nothing either."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What one node has collected: its own view, and those of the others as far as they came."""

    nodes: tuple[Node, ...]
    own: int
    rows: Rows
    lasted_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """How the nodes are called in front of people."""
        return names(self.nodes)

    def known(self) -> dict[tuple[int, int], Reach]:
        """(from, to) -> outcome, of all pairs of which something is known."""
        return {(a, b): reach for a, row in sorted(self.rows.items()) for b, reach in enumerate(row) if a != b and reach.kind != "unasked"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One trouble. sources and targets: nodes by number, both empty for one that is no connection's."""

    what: str
    cause: str
    do: str
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    kind: str = ""
    words: str = ""


def faults(picture: Picture) -> list[Fault]:
    """Connections that fail, then clocks, then versions. Equal ones are told as one: of a node that reaches nobody, of one that nobody reaches, of a pair."""
    known = picture.known()
    failing = {pair: reach for pair, reach in known.items() if not reach.ok}
    found = [_fault(picture, known, sources, targets) for sources, targets in _grouped(failing, known)]
    return [*_both_ways(picture, found), *_clocks(picture), *_versions(picture)]


def exit_code(picture: Picture) -> int:
    """FULL: every pair is known to work and nothing else is wrong; NONE: this node reaches nobody; PARTLY: anything between."""
    count = len(picture.nodes)
    if count > 1 and not any(reach.answers for at, reach in enumerate(picture.rows.get(picture.own, ())) if at != picture.own):
        return NONE
    return PARTLY if faults(picture) or len(picture.known()) < count * (count - 1) else FULL


def own_code(row: Sequence[Reach], own: int) -> int:
    """The same of one node's view alone."""
    others = [reach for at, reach in enumerate(row) if at != own]
    return FULL if all(reach.ok for reach in others) else PARTLY if any(reach.answers for reach in others) else NONE


def _grouped(failing: Mapping[tuple[int, int], Reach], known: Mapping[tuple[int, int], Reach]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(sources, targets) whose connections all fail in the same way."""
    left = dict(failing)
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    to_all: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for a in sorted({a for a, _ in left}):
        targets = tuple(b for from_, b in known if from_ == a)
        kinds = {left[a, b].kind if (a, b) in left else "ok" for b in targets}
        if len(targets) > 1 and len(kinds) == 1:
            to_all.setdefault((kinds.pop(), targets), []).append(a)
    for (_, targets), found in to_all.items():
        groups.append((tuple(found), targets))
        left = {pair: reach for pair, reach in left.items() if pair[0] not in found}
    by_target: dict[tuple[str, int], list[int]] = {}
    for (a, b), reach in left.items():
        by_target.setdefault((reach.kind, b), []).append(a)
    by_sources: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (kind, b), sources in sorted(by_target.items(), key=lambda item: item[0][1]):
        by_sources.setdefault((kind, tuple(sources)), []).append(b)
    return [*groups, *((sources, tuple(targets)) for (_, sources), targets in by_sources.items())]


def _both_ways(picture: Picture, found: Sequence[Fault]) -> list[Fault]:
    """Two faults of the same kind in opposite directions are told as one."""
    told: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Fault] = {}
    for fault in found:
        back = told.pop((fault.kind, fault.targets, fault.sources), None)
        if back is not None:
            known, other = (fault, back) if fault.sources < back.sources else (back, fault)  # the first node's own view has the details
            what = f"{_list(picture.names, known.sources)} <-> {_list(picture.names, known.targets)}: {known.words}, both ways"
            fault = replace(known, what=what, sources=known.sources + other.sources, targets=known.targets + other.targets)
        told[fault.kind, fault.sources, fault.targets] = fault
    return list(told.values())


def _fault(picture: Picture, known: Mapping[tuple[int, int], Reach], sources: tuple[int, ...], targets: tuple[int, ...]) -> Fault:
    reach = known[sources[0], targets[0]]
    details = {known[a, b].detail for a in sources for b in targets} - {""}
    reach_detail = sorted(details)[0] if details else ""
    others_reach = tuple(a for a, row in picture.rows.items() if a not in sources and all(row[b].ok for b in targets if b != a))
    back = [known[b, a].answers for a in sources for b in targets if (b, a) in known]
    view = _View(
        to=str(picture.nodes[targets[0]]),
        host=picture.nodes[targets[0]].host,
        port=picture.nodes[targets[0]].port,
        address=reach.address,
        detail=reach_detail,
        source=picture.names[sources[0]],
        target=picture.names[targets[0]],
        many=len(targets) > 1,
        others_reach=bool(others_reach),
        one_way=bool(back) and all(back),
        host_up=any(known[a, b].host_up for a in sources for b in targets),
    )
    words, cause, do = _TELL[reach.kind](view)
    if view.one_way and reach.kind in _OF_THE_WAY:
        cause = f"one way only: {view.target if not view.many else 'they'} can connect to {view.source}; {cause}"
    arrow = f"{_list(picture.names, sources)} -> {_list(picture.names, targets)}"
    place = f" ({Node(view.address, view.port)})" if not view.many and view.address and view.address != view.host else ""
    return Fault(f"{arrow}: {words}{place}", cause, do, sources, targets, reach.kind, words)


@dataclass(frozen=True, slots=True)
class _View:
    """What a cause is told from. source and target: the first ones; others_reach: some other node reaches the targets."""

    to: str
    host: str
    port: int
    address: str
    detail: str
    source: str
    target: str
    many: bool
    others_reach: bool
    one_way: bool
    host_up: bool


_Told = tuple[str, str, str]


def _refused(view: _View) -> _Told:
    if view.others_reach:
        cause = f"other nodes do connect, so it listens: a firewall on the way from {view.source} rejects"
        return "refused", cause, f"allow TCP between all nodes of the job; on {view.target}: nft list ruleset, or iptables -S INPUT"
    cause = f"the machine is up and nothing listens on port {view.port}: the check was not started there or has ended; a firewall that rejects looks the same"
    return "refused", cause, f"start the check on every node within the time of --wait (srun --ntasks-per-node=1 does); see what it said on {view.target}"


def _timed_out(view: _View) -> _Told:
    trace = f"on {view.source}: ip route get {view.address or view.host}; ping -c 3 {view.host}"
    if view.others_reach or view.one_way:
        who = "other nodes connect to it" if view.others_reach else "it is up"
        return "timed out", f"{who}, packets from {view.source} to it vanish: a firewall that drops, or a route", f"{trace}; on {view.target}: nft list ruleset"
    if view.host_up:
        cause = f"port 22 of the machine reacts and port {view.port} does not: a firewall drops what comes to it"
        return "timed out", cause, f"allow TCP between all nodes of the job; on {view.target}: nft list ruleset, or iptables -S INPUT"
    cause = "nothing comes back, nor from port 22: the machine is down, the address is not in the job's network, or a firewall drops everything"
    return "timed out", cause, f"{trace}; is {view.address or view.host} its address in the network that the job uses?"


def _unreachable(view: _View) -> _Told:
    system = f'the system says "{view.detail}"' if view.detail else "there is no way to it"
    cause = f"{system}: no machine has that address in this network, no route leads there, or a firewall rejects"
    if view.others_reach:
        cause = f"{system}, though other nodes reach it: routes or cabling of {view.source}, or a firewall that rejects"
    return "unreachable", cause, f"on {view.source}: ip route get {view.address or view.host}; ip neigh show {view.address or view.host}"


def _unresolved(view: _View) -> _Told:
    cause = f"{view.source} finds no address for {'these names' if view.many else view.host} ({view.detail})"
    return "name not found", cause, f"on {view.source}: getent hosts {view.host}; or give addresses: --peers 10.0.0.1,10.0.0.2,..."


def _looking_up(view: _View) -> _Told:
    return (
        "name not found yet",
        f"the name server of {view.source} has not answered for {view.host}" + (f" ({view.detail})" if view.detail else ""),
        f"on {view.source}: getent hosts {view.host}; cat /etc/resolv.conf; or give addresses: --peers 10.0.0.1,10.0.0.2,...",
    )


def _silent(view: _View) -> _Told:
    return (
        "connects, then no answer",
        "something takes the connection and says nothing: the check there is stopped, a proxy stands between, or full-sized packets are lost (MTU)",
        f"on {view.source}: ping -c 3 -M do -s 1472 {view.host}; on {view.target}: ss -ltnp 'sport = :{view.port}'",
    )


def _cut(view: _View) -> _Told:
    return (
        "connection cut",
        view.detail or "the other side, or something between, ended the connection before it had answered",
        f"on {view.target}: ss -ltnp 'sport = :{view.port}', and what the check said there",
    )


def _token(view: _View) -> _Told:
    return "wrong token", view.detail, "start all nodes with the same list and the same --token-file, or without one"


def _foreign(view: _View) -> _Told:
    return (
        "another program answers",
        f"on port {view.port} there is {view.detail or 'something that is no check of rankwatch'}",
        f"on {view.target}: ss -ltnp 'sport = :{view.port}'; or give all nodes another port: --peer-port {view.port + 101}",
    )


def _wrong_node(view: _View) -> _Told:
    return "another node answers", f"{view.detail}; {view.host} leads to the wrong machine", f"on {view.source}: getent hosts {view.host}; correct the list"


def _schema(view: _View) -> _Told:
    return "another version", view.detail, "install the same rankwatch on all nodes"


def _one_port(view: _View) -> _Told:
    return (
        f"port {view.port} works, others do not",
        f"{view.detail}: a firewall lets single ports through, while torchrun, gloo, NCCL and rankwatch itself listen on ports that the system chooses",
        "allow TCP between all nodes of the job, at least the ports of `sysctl net.ipv4.ip_local_port_range`",
    )


def _busy(view: _View) -> _Told:
    return "busy", "it has not found the time to answer", f"what keeps the processor of {view.target} busy? give it longer: --wait 120s"


_TELL = {
    "refused": _refused,
    "timed_out": _timed_out,
    "unreachable": _unreachable,
    "unresolved": _unresolved,
    "looking_up": _looking_up,
    "silent": _silent,
    "cut": _cut,
    "token": _token,
    "foreign": _foreign,
    "wrong_node": _wrong_node,
    "schema": _schema,
    "one_port": _one_port,
    "busy": _busy,
}


def _clocks(picture: Picture) -> list[Fault]:
    """Clocks that differ from the median by over CLOCK_S; of two nodes that differ nobody knows which is right, both are told."""
    row = picture.rows.get(picture.own, ())
    offsets = {at: 0.0 if at == picture.own else reach.offset_s for at, reach in enumerate(row) if at == picture.own or reach.offset_s is not None}
    known = {at: offset for at, offset in offsets.items() if offset is not None}
    middle = statistics.median(known.values()) if known else 0.0
    off = {at: offset - middle for at, offset in known.items() if abs(offset - middle) > CLOCK_S}
    if len(known) == 2 and (spread := max(known.values()) - min(known.values())) > CLOCK_S:
        late, early = sorted(known, key=lambda at: known[at])
        off = {}
        return [_clock_fault(f"the clock of {picture.names[early]} is {_by(spread)} ahead of that of {picture.names[late]}", picture.names[late])]
    return [
        _clock_fault(f"the clock of {picture.names[at]} is {_by(abs(by))} {'ahead of' if by > 0 else 'behind'} the others", picture.names[at])
        for at, by in off.items()
    ]


def _clock_fault(what: str, name: str) -> Fault:
    cause = "its time is not kept by a time server; rankwatch corrects for it, the times in other programs' logs do not agree"
    return Fault(what, cause, f"on {name}: chronyc tracking, or timedatectl", kind="clock")


def _by(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _versions(picture: Picture) -> list[Fault]:
    row = picture.rows.get(picture.own, ())
    versions = {at: reach.version for at, reach in enumerate(row) if reach.version}
    if len(set(versions.values())) < 2:
        return []
    usual = Counter(versions.values()).most_common(1)[0][0]
    found: list[Fault] = []
    for version in sorted(set(versions.values()) - {usual}):
        nodes = tuple(at for at, other in versions.items() if other == version)
        what = f"{_list(picture.names, nodes)}: rankwatch {version}, {usual} on {plural(sum(other == usual for other in versions.values()), 'node')}"
        found.append(
            Fault(what, "nodes of different versions may not understand each other's reports", "install the same rankwatch on all nodes", kind="version")
        )
    return found


def _list(every: Sequence[str], numbers: Sequence[int]) -> str:
    shown = ", ".join(every[at] for at in numbers[:_NAMED])
    return shown if len(numbers) <= _NAMED else f"{shown} and {len(numbers) - _NAMED} more"
