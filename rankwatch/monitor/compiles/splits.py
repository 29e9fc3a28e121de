"""How DDPOptimizer has split the compiled forwards of each rank. The same model under the same settings is split alike everywhere. Pure, bounded."""

from __future__ import annotations

from typing import Any

from rankwatch import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwatch.monitor.compiles.frame import Key

MAX_SPLITS = 512  # compiles of frames that were split
MAX_WAYS = 16  # in which one of them was
MAX_BUCKETS = 64
SPLIT = ("split", "single_bucket")


class Way:
    """One way in which a forward was split: which ranks, and in words."""

    __slots__ = ("mask", "seen_wall", "words")

    def __init__(self, words: str, seen_wall: float) -> None:
        self.mask, self.words, self.seen_wall = 0, words, seen_wall


class Splits:
    """Of all ranks. newest: each rank's last split, as it tells it."""

    def __init__(self) -> None:
        self.newest: dict[int, dict[str, Any]] = {}
        self.ways: dict[tuple[str, Key], dict[str, Way]] = {}  # (frame, compile) -> fingerprint -> way
        self.counts: dict[tuple[str, Key], int] = {}  # buckets
        self.events: dict[int, int] = {}  # rank -> compiled forwards that went through DDPOptimizer

    def add(self, rank: int, split: Mapping[str, Any], frame: str, key: Key | None, wall_at: float, event: bool) -> None:
        """A rank has split, or tells of its newest split (event false)."""
        self.newest[rank] = row = _row(split)
        if event and row["status"] in SPLIT:
            self.events[rank] = self.events.get(rank, 0) + 1
        if not frame or key is None or not row["fingerprint"]:
            return
        ways = self.ways.get((frame, key))
        if ways is None:
            if len(self.ways) >= MAX_SPLITS:
                return
            ways = self.ways[frame, key] = {}
        way = ways.get(row["fingerprint"])
        if way is None:
            if len(ways) >= MAX_WAYS:
                return
            way = ways[row["fingerprint"]] = Way(words(row), wall_at)
        way.mask |= 1 << rank
        self.counts[frame, key] = max(self.counts.get((frame, key), 0), row["splits"])

    def split_again(self) -> int:
        """Subgraphs that were compiled once more because a forward was: splits of every recompile."""
        return sum(count for (_frame, (_variant, ordinal)), count in self.counts.items() if ordinal > 0 and count > 1)


def words(row: Mapping[str, Any]) -> str:
    """ "4 buckets: 1.05, 2.10, 2.10, 1.05 MB", or why there are none."""
    sizes = [_whole(bucket.get("bytes")) for bucket in row["buckets"]]
    if not sizes:
        return shown.cut(f"{row['status'].replace('_', ' ')}{': ' if row['error'] or row['reason'] else ''}{row['error'] or row['reason']}", 160)
    return f"{shown.plural(row['splits'] or len(sizes), 'bucket')}: {shown.megabytes(sizes, 8)}"


def _row(split: Mapping[str, Any]) -> dict[str, Any]:
    """What the document tells of a split, in known types."""
    buckets = split.get("buckets")
    listed = [
        {
            "bytes": _whole(bucket.get("bytes")),
            "n_params": _whole(bucket.get("n_params")),
            "first_param": shown.one_line(bucket.get("first_param") or "")[:80],
            "last_param": shown.one_line(bucket.get("last_param") or "")[:80],
            "extended_ops": _whole(bucket.get("extended_ops")),
        }
        for bucket in (buckets if isinstance(buckets, list) else ())[:MAX_BUCKETS]
        if isinstance(bucket, dict)
    ]
    return {
        "status": str(split.get("status") or "?")[:20],
        "mode": str(split.get("mode") or "")[:60],
        "frame": shown.one_line(split.get("frame") or "")[:160],
        "splits": _whole(split.get("splits")),
        "bytes": _whole(split.get("bytes")),
        "cap_bytes": _whole(split.get("cap_bytes")),
        "first_cap_bytes": _whole(split.get("first_cap_bytes")),
        "buckets": listed,
        "fingerprint": str(split.get("fingerprint") or "")[:16],
        "error": shown.public_line(split.get("error") or "")[:300],
        "reason": shown.public_line(split.get("reason") or "")[:300],
        "calls": _whole(split.get("calls")),
        "failures": _whole(split.get("failures")),
        "not_applied": _whole(split.get("not_applied")),
    }


def _whole(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 2**63 else 0
