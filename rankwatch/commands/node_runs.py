"""A run directory of a node other than the first, on a disk of its own: all that its launcher keeps lies in DIR/nodes/<host>-<nonce>/."""

from __future__ import annotations

import os

from rankwatch.report import moved

MAX_NAMED = 8


class Several(ValueError):
    """More than one launcher has written there; the text names the folders."""


def within(path: str) -> list[str]:
    """The folders below `path`/nodes that hold a run, the newest first; none where `path` is a run itself."""
    if os.path.isfile(moved.newest(path, "run.json")):
        return []
    found = []
    try:
        with os.scandir(os.path.join(path, "nodes")) as entries:
            for entry in entries:
                file = moved.newest(entry.path, "run.json")
                if os.path.isfile(file):
                    found.append((os.path.getmtime(file), entry.path))
    except OSError:  # there is no such folder, or it is being removed
        pass
    return [place for _written_at, place in sorted(found, reverse=True)]


def meant(path: str) -> str:
    """`path`, or the one folder in it where its node's run is; `words` tells people so. Several where there is a choice."""
    found = within(path)
    if len(found) > 1:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise Several(f"{path} holds what {len(found)} launchers have seen, and no run of the whole job; name one: {', '.join(found[:MAX_NAMED])}{more}")
    return found[0] if found else path


def words(place: str) -> str:
    """The line that goes with what is shown of a folder that `meant` has found."""
    return f"shown is {place}: what this node saw; the whole job is in the run directory of its first node"
