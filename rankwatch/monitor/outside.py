"""All that a run tells beyond its own directory: messages to pagers, the archive, what other exporters read, its place for Prometheus, a pod's last word.

Each has a thread of its own and is waited for at the end only, within one bound (end_waits.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rankwatch.config import Options
from rankwatch.model import JobInfo, Status
from rankwatch.monitor import termination_log
from rankwatch.monitor.archive import Archive
from rankwatch.monitor.end_waits import ARCHIVE_WAIT_S, MESSAGES_WAIT_S, NODE_FILES_WAIT_S, end_wait_s
from rankwatch.monitor.node_files import NodeFiles
from rankwatch.monitor.target_file import TargetFile
from rankwatch.notify.direct import Direct
from rankwatch.report import archive as archive_names


class Outside:
    """shown: the status as surfaces show it; served_at: where the status page is reached on this node; say: one notice. All three from any thread."""

    def __init__(self, options: Options, job: JobInfo, shown: Callable[[], Status], served_at: Callable[[], str], say: Callable[[str], None]) -> None:
        self.direct = Direct(options, say)
        self.archive: Archive | None = None
        self.end_wait_s = end_wait_s(options)
        self._shown, self._say = shown, say
        self._external_url = options.external_url
        self._archive_names = archive_names.run_names(job.job_id, job.run_dir, job.started_wall_at, os.urandom(3).hex())
        if options.archive_dir:
            self.archive = Archive(options.archive_dir, self._archive_names[0], say)
        self._node_files = NodeFiles(options, shown, say)
        self._target = TargetFile.of(options, served_at, say)
        self._termination_log = options.termination_log

    @property
    def failed(self) -> int:
        """Files for other exporters that could not be written."""
        return self._node_files.failed

    @property
    def archive_failed(self) -> bool:
        """Whether links must not lead to the archive now."""
        return self.archive is not None and self.archive.failed

    def claim_archive(self) -> str:
        """The archive is the first node's, which has the whole job: its folder there is made. The run's address in it, "" without one."""
        return archive_names.run_url(self._external_url, self.archive.claim(self._archive_names)) if self.archive is not None else ""

    def begin(self, job: JobInfo, judges: bool) -> None:
        """The workers run. Returns at once; again for each attempt."""
        self._target.start(job, judges=judges)
        self._node_files.start()

    def tell_pod(self, speaks: bool) -> None:
        """The verdict on the job for `kubectl describe pod`, once its end is known. At most termination_log.WRITE_WAIT_S."""
        termination_log.tell(self._termination_log, self._shown(), speaks, self._say)

    def finish(self) -> None:
        """The last state is there: files for other exporters are written a last time."""
        self._node_files.finish()

    def wait(self, until: float, late_s: float, shown_at: float) -> list[str]:
        """Wait for what has gone on since shown_at, pages to people first; what could not be done in time, in words. Times are monotonic.

        until: the end that the launcher was promised; late_s: what files may take beyond it.
        """
        last, late = until + late_s + self.end_wait_s - 0.1, []

        def left_s(most_s: float) -> float:
            return max(0.0, min(most_s, last - time.monotonic()))

        self.direct.flush(round(left_s(MESSAGES_WAIT_S), 1))  # says itself what was not told
        self._node_files.wait(left_s(max(NODE_FILES_WAIT_S, until - time.monotonic())))
        if self.archive is not None and not self.archive.flush(left_s(shown_at + ARCHIVE_WAIT_S - time.monotonic())):
            late.append(f"not everything could be copied to {self.archive.root}: it has not answered in time; the run directory has everything")
        return late

    def stop(self) -> None:
        """Prometheus is told that nobody is here any more. At most target_file.STOP_WAIT_S."""
        self._target.stop()
