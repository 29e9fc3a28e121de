"""What all scripts here share: arguments, a time limit, one table, one JSON file and one archive in OUT_DIR."""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).with_name("jobs")
OUT_OF_TIME = 3
ARCHIVE_BYTES = 14 << 20
FILE_BYTES = 300_000


class Deadline:
    """Seconds that are left of --limit-s, from the start of the script."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()


def arguments(doc: str, limit_s: float, add: Callable[[argparse.ArgumentParser], None] | None = None, words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="gets one .json and one .tar.gz")
    parser.add_argument("--gpus", type=int, default=2, help="ranks of each job, a GPU each (default %(default)s)")
    parser.add_argument("--limit-s", type=float, default=limit_s, help="what is done by then is printed, exit status 3 (default %(default)s)")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help=argparse.SUPPRESS)  # gloo, a few cases: are the scripts themselves sound?
    if add is not None:
        add(parser)
    return parser.parse_args(words)


def say(text: str) -> None:
    """A line of progress, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Ours for a job. What a machine has set for NCCL stays; NVLink multicast stays off, since shared hosts suffer from it."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
    for name, value in (("OMP_NUM_THREADS", "1"), ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        env.setdefault(name, value)
    return {**env, **(more or {})}


def backend(options: argparse.Namespace) -> list[str]:
    return ["--backend", "gloo" if options.dry_run_on_cpu else "nccl"]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their longest word, the last one free."""
    lines = [[str(word) for word in row] for row in (head, *rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head) - 1)]
    return "\n".join("  ".join([*(word.ljust(width) for word, width in zip(line, widths, strict=False)), line[-1]]).rstrip() for line in lines)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def side_by_side(names: Sequence[str], run: Callable[[str], Any], slots: int, deadline: Deadline, told: Callable[[Any], str]) -> dict[str, Any]:
    """`run` of each name, `slots` at a time; each result is told as it comes. What had not begun when the time was up is not in the answer."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        todo.put(name)
    done: dict[str, Any] = {}

    def worker() -> None:
        while deadline.left_s > 0:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done[name] = run(name)
                say(told(done[name]))
            except Exception as error:  # one broken case must not cost the table
                say(f"{name}: runner failed: {error!r}")

    threads = [threading.Thread(target=worker) for _ in range(slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: done[name] for name in names if name in done}


def finish(options: argparse.Namespace, name: str, raw: dict[str, Any], work: Path, text: str, *, complete: bool, right: bool) -> int:
    """Write OUT_DIR/NAME.json and NAME.tar.gz, print the table; the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    raw = {"command": sys.argv, "complete": complete, "right": right, "gpus": options.gpus, "machine": machine(), **raw}
    (options.out / f"{name}.json").write_text(json.dumps(raw, indent=1, default=str))
    archive(work, options.out / f"{name}.tar.gz")
    shutil.rmtree(work, ignore_errors=True)
    print(f"\n{text}", flush=True)
    print(f"raw numbers: {options.out / name}.json, logs and incidents: {name}.tar.gz{'' if complete else '; TIME WAS UP, the table is partial'}", flush=True)
    return OUT_OF_TIME if not complete else int(not right)


def scratch(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"rwgpu_{name}_"))


def archive(work: Path, to: Path) -> None:
    """Logs and incidents, small files first; of a long file its end."""
    kept = 0
    with tarfile.open(to, "w:gz") as tar:
        for path in sorted((path for path in work.rglob("*") if path.is_file() and not path.is_symlink()), key=lambda path: path.stat().st_size):
            if path.suffix not in (".json", ".jsonl", ".txt", ".log") or kept > ARCHIVE_BYTES:
                continue
            if path.stat().st_size > FILE_BYTES and path.suffix != ".log":
                continue
            if path.stat().st_size > FILE_BYTES:
                path.write_bytes(b"... cut ...\n" + path.read_bytes()[-FILE_BYTES:])
            tar.add(path, str(path.relative_to(work)))
            kept += path.stat().st_size // 4


def machine() -> dict[str, Any]:
    """Versions without importing torch: it would hold a GPU context."""
    from importlib import metadata

    found: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    for package in ("torch", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "py-spy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
