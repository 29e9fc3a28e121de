"""The files that other exporters of this node read: --textfile-dir for node_exporter, --dcgm-job-mapping-dir for dcgm-exporter.

Each directory has a thread of its own, so that one that does not answer delays neither the looks nor the other; the end of the job waits for them a moment.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from rankwatch.config import Options
from rankwatch.export import dcgm_jobs
from rankwatch.export.samples import own_reports
from rankwatch.model import Status

if TYPE_CHECKING:
    from rankwatch.export.textfile import Textfile

EVERY_S = 15.0
GPUS_EVERY_S = 5.0
SWEEP_EVERY = 40  # writes: ten minutes


class Periodic:
    """Calls `work(final)` in a daemon thread: at once, every `every_s`, and a last time with final=True after `finish`.

    What it raises is counted in `failed`; `trouble(text)` is told the first of each kind in a row: a disk that stays full is said once.
    """

    def __init__(self, name: str, work: Callable[[bool], None], trouble: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self.failed = 0
        self._work = work
        self._trouble = trouble
        self._every_s = every_s
        self._said = ""
        self._over = threading.Event()
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rankwatch-{name}", daemon=True)

    def start(self) -> None:
        """The first call follows at once."""
        self._thread.start()

    def finish(self) -> None:
        """The last call follows; `done` is set after it."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._once(final=False)
            self._over.wait(self._every_s)
        self._once(final=True)
        self.done.set()

    def _once(self, final: bool) -> None:
        try:
            self._work(final)
            self._said = ""
        except Exception as error:
            self.failed += 1
            text = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            if text != self._said:
                self._said = text
                self._trouble(text)


class NodeFiles:
    """Both kinds of files of one launcher, as far as they are asked for. No method waits but `wait`, for as long as it is told to."""

    def __init__(self, options: Options, status: Callable[[], Status], say: Callable[[str], None], wall: Callable[[], float] = time.time) -> None:
        """status: what this launcher may show now; called in the threads."""
        self._options = options
        self._status = status
        self._say = say
        self._wall = wall
        self._running: list[Periodic] = []
        self._started = False

    @property
    def failed(self) -> int:
        """Writes that failed."""
        return sum(each.failed for each in self._running)

    def start(self) -> None:
        """Begin, once the workers run; a second call does nothing."""
        if self._started:
            return
        self._started = True
        if self._options.textfile_dir:
            self._begin("textfile", self._textfile(), "--textfile-dir", self._options.textfile_dir, EVERY_S)
        if self._options.dcgm_job_mapping_dir:
            directory = self._options.dcgm_job_mapping_dir
            self._begin("dcgm-jobs", self._mapping(directory), "--dcgm-job-mapping-dir", directory, GPUS_EVERY_S)

    def finish(self) -> None:
        """The job is over: the last state is written, and the job is taken off its GPUs."""
        for each in self._running:
            each.finish()

    def wait(self, timeout_s: float) -> None:
        """Until that is done, timeout_s at most."""
        until = time.monotonic() + timeout_s
        for each in self._running:
            each.done.wait(max(0.0, until - time.monotonic()))

    def _begin(self, name: str, work: Callable[[bool], None], flag: str, directory: str, every_s: float) -> None:
        def trouble(text: str) -> None:
            self._say(f"{flag} {directory} cannot be written: {text}; it is tried again every {every_s:g} s, the job is not affected")

        periodic = Periodic(name, work, trouble, every_s)
        self._running.append(periodic)
        periodic.start()

    def _textfile(self) -> Callable[[bool], None]:
        file: Textfile | None = None
        writes = 0

        def work(final: bool) -> None:
            nonlocal file, writes
            if file is None:
                from rankwatch.export.textfile import Textfile  # prometheus_client: beside the looks, not before them

                file = Textfile(self._options.textfile_dir, self._options.metrics_level, self._wall)
            if writes % SWEEP_EVERY == 0 and not final:
                file.sweep()
            writes += 1
            file.write(self._status(), final)

        return work

    def _mapping(self, directory: str) -> Callable[[bool], None]:
        mapping = dcgm_jobs.JobMapping(directory, self._status().job.job_id)

        def work(final: bool) -> None:
            mapping.set(() if final else gpus(self._status()))

        return work


def gpus(status: Status) -> Collection[str]:
    """The host's numbers of the GPUs that the ranks of this launcher have; none while no rank has been seen."""
    ranks = [rank for report in own_reports(status) for rank in report.ranks]
    known = {rank.local_rank: rank.gpu.index for rank in ranks if rank.gpu is not None}
    return dcgm_jobs.gpus_of(os.environ, known, [rank.local_rank for rank in ranks], dcgm_jobs.has_device)
