"""What is being watched and what is not, and why: the second half of the first line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwatch.model import RankState
from rankwatch.monitor.stacks import SelfTest
from rankwatch.wire.ranks import compress

PROBES = ("compile", "ddp", "collectives", "steps", "cudagraph", "memory")
ASKED_FOR = ("numerics",)
OK = "ok"
OFF_BY_JOB = "off (TORCH_"
ENDED = "the ranks ended before they reported"


def capabilities(ranks: Sequence[RankState], self_test: SelfTest | None, base: Mapping[str, str]) -> dict[str, str]:
    """{"compile": "ok", "stacks": "<why not>", ...}: each probe over all local ranks, then stacks, then what `base` says of others.

    What the job's own environment has switched off (`base` says it from the start) stays off, whatever its probe says.
    """
    off = {name for name, reason in base.items() if reason.startswith(OFF_BY_JOB)}
    names = (*PROBES, *(name for name in ASKED_FOR if any(name in rank.probes for rank in ranks)))
    found = {name: reason for name in names if name not in off and (reason := _probe(name, ranks))}
    if self_test is not None:
        found["stacks"] = OK if self_test.ok else self_test.reason
    return {**base, **found}


def settled(ranks: Sequence[RankState]) -> bool:
    """Every rank that lives has said what its probes do, or has nothing to say it with."""
    return all(_settled(rank) for rank in ranks)


def _settled(rank: RankState) -> bool:
    gone = rank.process is not None and not rank.process.alive
    return gone or rank.agent == "off" or rank.stage in ("joined", "left", "exiting")


def _probe(name: str, ranks: Sequence[RankState]) -> str:
    """ "ok", or the commonest trouble with the ranks that have it; "" while no rank has said anything."""
    reports = {rank.rank: rank.probes[name] for rank in ranks if name in rank.probes}
    if not reports:
        watched = [rank for rank in ranks if rank.agent in ("armed", "claimed")]
        if watched or not ranks:
            return ""
        gone = all(rank.process is not None and not rank.process.alive for rank in ranks)
        return ENDED if gone else f"agent is not in the ranks: {ranks[0].agent_detail}"
    troubles: dict[str, list[int]] = {}
    for rank, report in reports.items():
        status = str(report.get("status", ""))
        if status != "armed":
            troubles.setdefault(f"{status}: {detail}" if (detail := str(report.get("detail") or "")) else status, []).append(rank)
    if not troubles:
        return OK
    worst = max(troubles, key=lambda text: len(troubles[text]))
    return worst if len(troubles[worst]) == len(ranks) else f"{worst} (rank {compress(troubles[worst])})"
