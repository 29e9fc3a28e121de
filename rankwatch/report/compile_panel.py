"""What the status page says of torch.compile as a whole: the regime, who compiles what beside its peers, where ranks differ, DDP's splits. Pure.

Reads the compile document of monitor/compiles; a part that is missing or of a wrong type is an empty part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwatch import shown
from rankwatch.report.compile_parts import finite, listed, number, rows, table

MAX_ROWS = 8
_DIFFERENCES = {
    "lone_recompile": "recompiled alone",
    "different_graph": "different graphs",
    "different_guard": "different guards failed",
    "different_split": "split differently",
    "split_mode": "different DDP modes",
    "cache": "cache hit and miss",
    "failed_alone": "failed alone",
}


def panel(doc: Mapping[str, Any]) -> dict[str, Any]:
    """{} where nothing is known; else regime, words, advice, now, differences, splits: texts only."""
    if not doc:
        return {}
    regime = table(doc, "regime")
    return {
        "regime": str(regime.get("name") or "").replace("_", " "),
        "words": shown.public_line(regime.get("words") or ""),
        "advice": [shown.public_line(one.get("words") or "") + _setting(one) for one in rows(doc, "advice")[:3]],
        "now": [_now(row) for row in rows(doc, "now")[:MAX_ROWS]],
        "now_left": max(0, len(rows(doc, "now")) - MAX_ROWS),
        "differences": [
            (_DIFFERENCES.get(str(one.get("kind")), str(one.get("kind"))), shown.cut(shown.public_line(one.get("words") or ""), 300))
            for one in rows(doc, "divergence")[:MAX_ROWS]
        ],
        "splits": [_split(row) for row in rows(table(doc, "ddp"), "groups")[:4]],
    }


def _setting(advice: Mapping[str, Any]) -> str:
    return f" ({shown.public_line(advice['setting'])})" if advice.get("setting") else ""


def _now(row: Mapping[str, Any]) -> dict[str, str]:
    peers = ""
    if took_s := number(row, "peers_took_s"):
        peers = f"ranks {shown.one_line(row.get('peers') or '?')} took {shown.duration(took_s)}"
        left_s = finite(row.get("eta_s"))
        peers += f", about {shown.duration(left_s)} left" if left_s else ", longer than they took"
    return {
        "rank": str(row.get("rank", "?")),
        "frame": shown.one_line(row.get("frame") or "?"),
        "phase": shown.one_line(row.get("phase") or "?"),
        "elapsed": shown.duration(number(row, "elapsed_s")),
        "detail": shown.one_line(row.get("detail") or ""),
        "peers": peers,
        "reason": shown.cut(shown.public_line(row.get("reason") or ""), 200),
    }


def _split(row: Mapping[str, Any]) -> str:
    buckets = [size for bucket in listed(row, "buckets") if isinstance(bucket, Mapping) and (size := finite(bucket.get("bytes"))) is not None]
    sizes = f" of {shown.megabytes(buckets)}" if buckets else ""
    told = shown.public_line(row.get("error") or row.get("reason") or "")
    splits = f"{int(number(row, 'splits'))} splits{sizes}" if number(row, "splits") else shown.one_line(row.get("status") or "")
    return f"ranks {shown.one_line(row.get('ranks') or '?')}: {splits}{f' ({told})' if told else ''}"
