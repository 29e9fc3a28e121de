"""Stacks and tracebacks as people read them: whose code a frame is, what may be folded, what a cut must never lose. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

FRAME = re.compile(r"^(?P<name>.*) \((?P<file>.*):(?P<line>\d+)\)$", re.DOTALL)
"""One frame of `stack_groups`: "load_batch (/home/alice/train.py:31)"."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen|^<string>|/torchinductor_|\.so(?:\.[\d.]+)?$")
_OWN = re.compile(r"/rankwatch/(?:(?:agent|wire)/|__init__\.py$)")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib(?:64)?/(?=python\d)")
_TRACEBACK_FRAME = re.compile(r'^[\s|]*File "(?P<file>.+?)", line \d+')
_BODY = re.compile(r"^(?:\s|\|)")
_PYTHON_PLACE = re.compile(r"\((?P<file>[^()]*\.py):\d+\)$|File \"(?P<other>[^\"]*\.py)\", line \d+")


def is_own(file: str) -> bool:
    """Whether a file belongs to the part of rankwatch that runs inside ranks."""
    return bool(_OWN.search(file))


def is_library(file: str) -> bool:
    """Whether a file is not the user's: installed packages, the standard library, generated and native code, rankwatch itself."""
    return bool(_LIBRARY.search(file)) or is_own(file)


def short_file(file: str) -> str:
    """A path without the folder that packages are installed in: "torch/_tensor.py"."""
    return _PACKAGES.sub("", file)


def folded(frames: Sequence[str]) -> list[str]:
    """A stack, innermost frame first, with two and more library frames in a row as one line; the innermost frame always shows."""
    rows: list[str] = []
    hidden: list[str] = []
    for index, frame in enumerate(frames):
        match = FRAME.match(frame)
        short = f"{match['name']} ({short_file(match['file'])}:{match['line']})" if match else frame
        if index and match and is_library(match["file"]):
            hidden.append(short)
            continue
        rows += _hidden(hidden)
        hidden = []
        rows.append(short)
    return rows + _hidden(hidden)


def _hidden(frames: list[str]) -> list[str]:
    return frames if len(frames) < 2 else [f"... {len(frames)} library frames"]


def without_own_threads(text: str) -> str:
    """A dump's text without the threads all of whose Python frames are rankwatch's."""
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(block for block in blocks if not _own_thread(block))


def _own_thread(block: str) -> bool:
    lines = block.strip("\n").splitlines()
    if not lines or not lines[0].lstrip().startswith(("Thread ", "Current thread ")):
        return False
    files = [match["file"] or match["other"] for line in lines[1:] if (match := _PYTHON_PLACE.search(line))]
    return bool(files) and all(map(is_own, files))


# -- tracebacks --------------------------------------------------------------------------------------------------------


def traceback_rows(text: str, limit: int) -> list[str]:
    """A traceback in about `limit` lines: library frames folded but for the innermost, then head, the user's own innermost frame, and tail."""
    entries = _entries(text)
    rows: list[str] = []
    must: set[int] = set()
    own = max((index for index, (file, _) in enumerate(entries) if file is not None and not is_library(file)), default=-1)
    index = 0
    while index < len(entries):
        lines = entries[index][1]
        end = index
        while end < len(entries) and (found := entries[end][0]) is not None and is_library(found):
            end += 1
        innermost = end >= len(entries) or entries[end][0] is None  # what raised stays in sight
        if end - index - innermost >= 2:
            rows.append(f"  ... {end - index - innermost} library frames")
            index = end - innermost
            continue
        if index == own:
            must.update(range(len(rows), len(rows) + len(lines)))
        rows += lines
        index += 1
    return clip(rows, limit, must=must)


def clip_traceback(text: str, max_chars: int) -> str:
    """A traceback of at most about `max_chars` characters: whole lines of its head and tail, and the user's own innermost frame."""
    if len(text) <= max_chars:
        return text
    rows: list[str] = []
    must: set[int] = set()
    for file, lines in _entries(text):
        if file is not None and not is_library(file):
            must = set(range(len(rows), len(rows) + len(lines)))
        rows += [line if len(line) <= 2000 else f"{line[:2000]} ..." for line in lines]
    return "\n".join(clip(rows, max_chars, cost=lambda line: len(line) + 1, must=must)) + "\n"


def clip(rows: Sequence[str], limit: int, cost: Callable[[str], int] = lambda _row: 1, must: Iterable[int] = ()) -> list[str]:
    """Head (a third) and tail of `rows` within `limit`, what was left out as one line, the rows of `must` always kept."""
    if sum(map(cost, rows)) <= limit:
        return list(rows)
    keep = set(must)
    left = max(0, limit - sum(cost(rows[index]) for index in keep))
    for order, share in ((range(len(rows)), left / 3), (range(len(rows) - 1, -1, -1), left * 2 / 3)):
        for index in order:
            share -= cost(rows[index])
            if share < 0:
                break
            keep.add(index)
    shown: list[str] = []
    before = -1
    for index in sorted(keep):
        if index > before + 1:
            shown.append(f"  ... {index - before - 1} lines left out")
        shown.append(rows[index])
        before = index
    if before < len(rows) - 1:
        shown.append(f"  ... {len(rows) - 1 - before} lines left out")
    return shown


def _entries(text: str) -> list[tuple[str | None, list[str]]]:
    """(file, lines) for each frame, (None, [line]) for every other line."""
    entries: list[tuple[str | None, list[str]]] = []
    for line in text.strip("\n").splitlines():
        found = _TRACEBACK_FRAME.match(line)
        if found:
            entries.append((found["file"], [line]))
        elif entries and entries[-1][0] is not None and _BODY.match(line):
            entries[-1][1].append(line)
        else:
            entries.append((None, [line]))
    return entries
