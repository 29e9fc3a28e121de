"""How long the end of a job waits for what lies outside its run directory. One bound, for the monitor that waits and for the launcher around it.

All of it goes on at the same time, so that the longest counts; the termination log is waited for before, the target file after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rankwatch.config import Options
from rankwatch.monitor import target_file, termination_log

ARCHIVE_WAIT_S = 2.0  # from its last page on
MESSAGES_WAIT_S = 1.0  # for an Alertmanager or a webhook that is to hear how the job ended
NODE_FILES_WAIT_S = 0.1  # at least, for what other exporters are to read of the end


def end_wait_s(options: Options, environ: Mapping[str, str] = os.environ) -> float:
    """Seconds at most, beyond those for the last look, the lines and the run directory: 0 where nothing is asked for that could take them."""
    at_once = (
        ARCHIVE_WAIT_S if options.archive_dir else 0.0,
        MESSAGES_WAIT_S if options.alertmanager or options.webhook else 0.0,
        NODE_FILES_WAIT_S if options.textfile_dir or options.dcgm_job_mapping_dir else 0.0,
    )
    before = termination_log.WRITE_WAIT_S if termination_log.place(options.termination_log, environ) else 0.0
    after = target_file.STOP_WAIT_S if options.sd_dir and options.listen != "off" else 0.0
    return before + max(at_once) + after
