"""Last words: of ranks that failed, and of our own code."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from rankwatch.monitor.crash import tail
from rankwatch.monitor.pool import Pool
from rankwatch.monitor.workers import Worker

TAIL_BYTES = 4096


def log_tails(workers: Iterable[Worker], timeout_s: float) -> dict[int, str]:
    """The end of each rank's redirected stderr (else stdout), as far as the file system gives it within timeout_s."""
    workers = [worker for worker in workers if worker.stderr or worker.stdout]
    if not workers:
        return {}
    pool = Pool("tails", 1)
    found: dict[int, str] = {}

    def read() -> None:
        for worker in workers:
            text = tail(worker.stderr, TAIL_BYTES) or tail(worker.stdout, TAIL_BYTES)
            if text:
                found[worker.rank] = text

    job = pool.submit(read)
    if job is not None:
        job.wait(timeout_s)
    pool.close()
    return dict(found)


def where(error: BaseException) -> str:
    """`reader.py:91`: the innermost line of ours in an exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "no traceback"
