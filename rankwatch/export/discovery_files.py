"""Scrape targets as files, in the form of Prometheus' file_sd: written by launchers (`--sd-dir`), served as http_sd by `rankwatch targets`.

A launcher renews the time of its file every REFRESH_S, so that one whose launcher was killed goes stale. Ages are differences of times that
the folder's file system has set, never of two machines' clocks: whoever looks renews a file of its own first.
Form and rules: https://prometheus.io/docs/prometheus/latest/http_sd/ (200 with [] for none; on any error Prometheus keeps what it had).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import Any

REFRESH_S = 30.0
"""How often a launcher renews its file."""
STALE_S = 70.0
"""A file that was not renewed for so long has no launcher: two renewals were missed, and a slow file server had 10 s."""
PROMETHEUS_APPLIES_S = 5.0
"""Prometheus passes changed targets on to its scrapers that often (discovery manager's `updatert`)."""
MOST_FILES = 20_000
MAX_BYTES = 16 << 10
META = "__meta_rankwatch_"
"""Labels of this prefix are for relabelling: Prometheus drops them afterwards."""

_FILE = re.compile(r"rankwatch_[A-Za-z0-9._-]{1,200}\.json")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_TARGET = re.compile(r"(?:\[[0-9A-Fa-f:.%]{2,60}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")
_KEPT = (META, "__scheme__")


def gone_within_s(asked_every_s: float, stale_s: float = STALE_S) -> float:
    """The longest time from a launcher's kill -9 to the moment when Prometheus scrapes it no more, its file being looked at every asked_every_s."""
    return stale_s + asked_every_s + PROMETHEUS_APPLIES_S


def file_name(job_id: str, node: str, port: int) -> str:
    """rankwatch_<job>_<node>_<port>.json: the port tells launchers of one job on one node apart, such as those of two steps."""
    plain = (re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.")[:80] or "x" for text in (job_id, node))
    return f"rankwatch_{'_'.join(plain)}_{port}.json"


def document(target: str, scheme: str, job_id: str, node: str, labels: Mapping[str, str]) -> bytes:
    """One target group. target: HOST:PORT. job_id and node become labels of every series; labels are offered as __meta_rankwatch_label_<name>."""
    named: dict[str, str] = {"job_id": job_id, "node": node}
    if scheme != "http":
        named["__scheme__"] = scheme
    named.update({f"{META}label_{name}": str(value)[:200] for name, value in sorted(labels.items()) if _LABEL.fullmatch(name)})
    return (json.dumps([{"targets": [target], "labels": named}], indent=1) + "\n").encode()


def groups(data: bytes) -> list[dict[str, Any]]:
    """The target groups of a file's text. ValueError for anything else: whoever may write there is not trusted with Prometheus' other settings."""
    found = json.loads(data)
    if not isinstance(found, list):
        raise ValueError("no list")
    return [_group(item) for item in found]


def _group(item: Any) -> dict[str, Any]:
    targets, labels = (item.get("targets"), item.get("labels", {})) if isinstance(item, dict) else (None, None)
    if not isinstance(targets, list) or not isinstance(labels, dict):
        raise ValueError("no target group")
    if not all(isinstance(target, str) and _TARGET.fullmatch(target) for target in targets):
        raise ValueError("a target that is not HOST:PORT")
    if not all(isinstance(value, str) and _LABEL.fullmatch(name) for name, value in labels.items()):
        raise ValueError("a label that is none")
    if labels.get("__scheme__", "http") not in ("http", "https"):
        raise ValueError("a scheme that is neither http nor https")
    return {"targets": targets, "labels": {name: value for name, value in labels.items() if not name.startswith("__") or name.startswith(_KEPT)}}


def stale(times: Mapping[str, float], now: float, stale_s: float = STALE_S) -> tuple[str, ...]:
    """The files whose launcher is gone. times: file -> when it was renewed; now: what the same file system would write."""
    return tuple(sorted(name for name, at in times.items() if now - at > stale_s))


# -- the folder


def renew(path: str) -> float:
    """Renew the file's time; that time, which the file system has set. FileNotFoundError where somebody has removed it."""
    os.utime(path, follow_symlinks=False)  # no time given: on NFS the server's clock counts, as for every other file there
    return os.stat(path, follow_symlinks=False).st_mtime


def remove(path: str) -> bool:
    """Whether the file is gone now."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def listing(folder: str) -> dict[str, float]:
    """File -> when it was renewed, of the first MOST_FILES of our names. OSError where the folder cannot be read."""
    found: dict[str, float] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _FILE.fullmatch(entry.name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # it has just gone
            if stat.S_ISREG(status.st_mode):
                found[entry.name] = status.st_mtime
            if len(found) >= MOST_FILES:
                break
    return found


def read(folder: str, names: Iterable[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(target groups of these files, file -> why it is left out). What has gone meanwhile is neither."""
    found: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            found += groups(_content(os.path.join(folder, name)))
        except FileNotFoundError:
            continue
        except OSError as error:
            refused[name] = error.strerror or str(error)
        except (ValueError, RecursionError) as error:
            refused[name] = f"no target file of rankwatch ({error})"
    return found, refused


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        data = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    return data
