"""init_process_group that does not come about though no seen rank is missing: what the calls themselves say of the reason."""

from __future__ import annotations

from rankwatch.model import Domain, Join, VerdictName
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.ends import STALE_ADVICE
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.scene import Picture, Scene
from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

Said = tuple[tuple[int, ...], Domain, str, tuple[str, ...], tuple[str, ...]]  # culprits, domain, summary, evidence, advice

WORLD_ADVICE = ("Take rank and world size from torchrun's environment (RANK, WORLD_SIZE): init_process_group() without these arguments does.",)
_ADDRESS_ADVICE = (
    "Check MASTER_ADDR and MASTER_PORT of these ranks (or init_method), name resolution, and a firewall between the nodes.",
    "torchrun sets both: a script or a container that sets them again must set what torchrun says.",
)
_PEERS_ADVICE = (
    "The store works, the connections between the ranks do not: check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and that host names resolve "
    "to addresses that the other nodes reach.",
)


def another_world(rank: int, join: Join | None, world_size: int) -> str:
    """`as rank 0 of 3, while torchrun has started it as rank 1 of 2`; "" for a call that fits."""
    if join is None or ((join.rank is None or join.rank == rank) and (join.world_size is None or join.world_size == world_size)):
        return ""
    asked = f"rank {rank if join.rank is None else join.rank} of {world_size if join.world_size is None else join.world_size}"
    return f"as {asked}, while torchrun has started it as rank {rank} of {world_size}"


def nobody_missing(wait: Wait, scene: Scene, waited: float) -> Picture:
    """Every seen rank is in init_process_group (or new_group)."""
    joins = {rank: join for rank in sorted(wait.waiters) if rank in scene.ranks and (join := scene.ranks[rank].join) is not None}
    said: Said | None = None
    if wait.kind == "init":
        said = _of_worlds(joins, scene, waited) or _of_store(joins, waited)
        if said is None and stale(joins, scene.snapshot.attempt):
            said = _of_the_past(wait, scene, waited)
    culprits, domain, text, evidence, advice = said or _of_peers(wait, joins, waited)
    missing: tuple[str, ...] = ()
    if wait.unknown:
        if not culprits:
            who = tuple(wait.waiters)
            text = f"{words.ranks_text(who)} {words.verb(who, 'waits', 'wait')} in {wait.label} for {waited:.0f} s"
            domain, evidence, advice = "unknown", (), ()
        text += f"; {words.ranks_text(wait.unknown)} {words.verb(wait.unknown, 'is', 'are')} not seen from here"
        missing = (f"state of {words.ranks_text(wait.unknown)}",)
    limits = scene.limits
    allowed = min(limits.startup_stuck_s, limits.first_stuck_min_s) if advice is STALE_ADVICE else limits.startup_stuck_s
    level: VerdictName | None = "stuck" if waited >= allowed and not wait.unknown else None
    finding = Finding(culprits[0] if culprits else -1, "store_wait", domain, advice=advice)
    return Picture(
        level, "store_wait", domain, culprits, wait, text, evidence=evidence, missing_evidence=missing, confidence="partial" if wait.unknown else "likely",
        finding=finding,
    )  # fmt: skip


def stale(joins: Mapping[int, Join], attempt: int) -> bool:
    """Whether ranks of a later attempt meet in the store of the one before, which they have all reached."""
    return attempt > 0 and bool(joins) and all(join.shared and join.reached is not False for join in joins.values())


def _of_worlds(joins: Mapping[int, Join], scene: Scene, waited: float) -> Said | None:
    """Ranks that ask for a world that torchrun has not started."""
    world = scene.snapshot.world_size
    odd = {rank: text for rank, join in joins.items() if (text := another_world(rank, join, world))}
    if not odd:
        return None
    ranks = tuple(odd)
    sizes = {join.world_size for rank, join in joins.items() if rank in odd}
    if len(sizes) == 1 and (size := next(iter(sizes))) is not None and size > world:
        text = f"{words.ranks_text(ranks)} {words.verb(ranks, 'calls', 'call')} init_process_group for a world of {size} ranks and torchrun has started {world}"
        text += f": {size - world} more {words.verb((1,) * (size - world), 'is', 'are')} waited for, for {waited:.0f} s"
    else:
        text = f"rank {ranks[0]} calls init_process_group {odd[ranks[0]]}" + (f"; so {len(ranks) - 1} more" if len(ranks) > 1 else "") + f"; for {waited:.0f} s"
    lines = tuple(f"rank {rank} calls it {each}" for rank, each in list(odd.items())[:4])
    return ranks, "user_code", text, lines, WORLD_ADVICE


def _of_store(joins: Mapping[int, Join], waited: float) -> Said | None:
    """Ranks that do not reach the store."""
    outside = tuple(rank for rank, join in joins.items() if join.reached is False)
    inside = tuple(rank for rank, join in joins.items() if join.reached)
    if not outside or any(join.reached is None for join in joins.values()):
        return None
    where = {joins[rank].store for rank in outside}
    at = f" at {next(iter(where))}" if len(where) == 1 and where != {""} else ""
    others = {joins[rank].store for rank in inside}
    text = f"{words.ranks_text(outside)} {words.verb(outside, 'does', 'do')} not reach the store{at} for {waited:.0f} s"
    if not inside:
        return (), "network", f"no rank reaches the store{at} for {waited:.0f} s", ("every rank has called init_process_group",), _ADDRESS_ADVICE
    domain: Domain = "network"
    lines = [f"the store has answered {words.ranks_text(inside)}"]
    if where.isdisjoint(others) and len(others) == 1 and "" not in where | others:
        domain = "user_code"
        text += f"; {words.ranks_text(inside)} {words.verb(inside, 'has', 'have')} reached it at {next(iter(others))}"
        lines.append(f"{words.ranks_text(outside)} {words.verb(outside, 'was', 'were')} told another address than {words.ranks_text(inside)}")
    return outside, domain, text, tuple(lines), _ADDRESS_ADVICE


def _of_the_past(wait: Wait, scene: Scene, waited: float) -> Said:
    """All have reached a store that still holds what the attempt before has written."""
    attempt = scene.snapshot.attempt
    text = f"{words.ranks_text(wait.waiters)} have called init_process_group and do not connect for {waited:.0f} s: stale store of the attempt before"
    lines = (
        f"attempt {attempt} of the workers meets in torchrun's own store, which has served attempt {attempt - 1} as well",
        "every rank has reached the store; they wait for each other at addresses that they have read there",
    )
    return (), "scheduler", text, lines, STALE_ADVICE


def _of_peers(wait: Wait, joins: Mapping[int, Join], waited: float) -> Said:
    line = "every rank has called it: the store or the connections between ranks do not come about"
    advice = _PEERS_ADVICE if joins and all(join.reached for join in joins.values()) else ()
    return (), "network", f"no rank is missing in {wait.label}, and it does not complete for {waited:.0f} s", (line,), advice
