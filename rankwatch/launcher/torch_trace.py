"""torch's structured traces of a run: RUN_DIR/torch_trace/attempt_<N>/dedicated_log_torch_trace_rank_<R>_<random>.log.

torch names the rank only where the process group exists at the first record, so each rank writes into a folder rank_<R> of its own; its files
get the rank into their names here, at the end of the run or when they are read. Renaming a file that is being written loses nothing.
"""

from __future__ import annotations

import os
import re

ROOT = "torch_trace"
PREFIX = "dedicated_log_torch_trace_"
_RANKED = re.compile(rf"{PREFIX}rank_(\d+)_.+\.log\Z")
_ATTEMPT = re.compile(r"attempt_(\d+)\Z")
_FOLDER = re.compile(r"rank_(\d+)\Z")


def make_attempt(run_dir: str, attempt: int) -> str:
    """The folder of one attempt's traces, made. OSError as the file system gives it."""
    path = os.path.join(run_dir, ROOT, f"attempt_{attempt}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def attempts(run_dir: str) -> dict[int, str]:
    """attempt -> its folder, oldest first; {} for a run without traces."""
    root = os.path.join(run_dir, ROOT)
    try:
        names = os.listdir(root)
    except OSError:
        return {}
    found = {int(match[1]): os.path.join(root, name) for name in names if (match := _ATTEMPT.match(name))}
    return dict(sorted(found.items()))


def name_by_rank(folder: str, over: bool = False, since: float = 0.0) -> dict[int, list[str]]:
    """Move what ranks have written up into `folder`, with the rank in the name. rank -> paths, longest file first.

    over: no rank runs any more, empty folders go too (a rank that is about to open its first file needs its folder). What cannot be moved stays.
    since: files that were last written before this unix time are an earlier run's, and left out.
    """
    for name in sorted(os.listdir(folder)):
        match = _FOLDER.match(name)
        own = os.path.join(folder, name)
        if match is None or not os.path.isdir(own):
            continue
        for file in sorted(os.listdir(own)):
            rest = file.removeprefix(PREFIX).removeprefix(f"rank_{match[1]}_")
            if file.startswith(PREFIX) and file.endswith(".log"):
                try:
                    os.rename(os.path.join(own, file), os.path.join(folder, f"{PREFIX}rank_{match[1]}_{rest}"))
                except OSError:
                    continue
        if over:
            try:
                os.rmdir(own)
            except OSError:
                pass  # something else is in it
    ranks: dict[int, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        if (match := _RANKED.match(name)) and os.path.getmtime(os.path.join(folder, name)) >= since:
            ranks.setdefault(int(match[1]), []).append(os.path.join(folder, name))
    return {rank: sorted(paths, key=lambda path: -os.path.getsize(path)) for rank, paths in sorted(ranks.items())}


def finish(run_dir: str) -> None:
    """The run is over: every file gets its name. OSError as the file system gives it."""
    for folder in attempts(run_dir).values():
        name_by_rank(folder, over=True)
