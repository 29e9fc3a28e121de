"""The heartbeat of a rank: torch's status numbers of gloo and what the main thread handles, written into the slot twice a second.

Its coming late while the worker server answers is how the launcher sees that somebody holds the GIL.
"""

from __future__ import annotations

import _thread
import json
import threading

from rankwatch.agent import compat
from rankwatch.agent.clock import clock
from rankwatch.agent.guard import Probe, getpid, here
from rankwatch.agent.handling import Handling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.groups import Groups
    from rankwatch.agent.rank import Rank

BEAT_S = 0.5
LAST_ENTRIES = 16
_HANDLED_BYTES = 800  # kept free in the record for what the main thread handles
_STOP_S = 1.0
_TIMEOUT_LOOK_BEATS = 4  # ProcessGroup.set_timeout is C++: nothing can be wrapped there
_ENTRY_KEYS = (
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "input_sizes", "output_sizes", "input_dtypes",
    "time_created_ns", "timeout_ms", "state", "retired",
)  # fmt: skip


class Heartbeat:
    """A thread that needs the GIL: while it is late and the server answers, somebody holds the GIL.

    Not a threading.Thread: a script that joins all of threading.enumerate() must not meet it.
    """

    def __init__(self, rank: Rank, probe: Probe, c10d: Any, groups: Groups | None) -> None:
        self._rank, self._probe, self._groups = rank, probe, groups
        self._status, reason = compat.recorder_status(c10d)
        self._entries = compat.recorder_entries(c10d)
        self.notes = [f"no recorder status: {reason}"] if reason else []
        self._last = b"{}"
        self._handling = Handling(threading.main_thread().ident or 0)
        self._asleep, self._running = _thread.allocate_lock(), _thread.allocate_lock()
        self._asleep.acquire()
        self._running.acquire()
        _thread.start_new_thread(self._run, ())

    def stop(self) -> None:
        """Beat no more. Waits until the thread has ended: the interpreter must not end in the middle of a call into torch."""
        if self._asleep.locked():
            self._asleep.release()
        self._running.acquire(timeout=_STOP_S)

    def last_words(self) -> None:
        """At the end by an exception: the newest operations go into the slot, the server that could tell them is about to stop."""
        if self._entries is None or not self._rank.slot.owned:
            return
        try:
            self._rank.slot.write("heartbeat", with_entries(self._last, self._entries(), self._rank.slot.cursors["heartbeat"].payload_bytes))
        except Exception as error:
            self._probe.caught(error)

    def _run(self) -> None:
        try:
            beats = 0
            while self._probe.on and here.pid == getpid():
                try:
                    self._beat(beats)
                except Exception as error:
                    self._probe.caught(error)
                beats += 1
                if self._asleep.acquire(timeout=_until_next_beat_s(clock.now_ns())):
                    return
        finally:
            self._running.release()

    def _beat(self, beats: int) -> None:
        groups = self._groups
        if groups is None or not groups.creating:
            if self._status is not None:
                self._last = shorten_status(self._status(), self._rank.slot.cursors["heartbeat"].payload_bytes - _HANDLED_BYTES)
            if groups is not None and beats % _TIMEOUT_LOOK_BEATS == 0:
                groups.refresh()
        self._rank.slot.write("heartbeat", with_handled(self._last, self._handling.look()))
        self._rank.threads.sweep()
        for look in self._rank.on_beat:
            look()


def _until_next_beat_s(now_ns: int) -> float:
    """BEAT_S in the mean, never the same: the launcher samples by these beats whether a rank waits, and training steps are regular."""
    return BEAT_S * (0.8 + 0.4 * (now_ns // 64 % 1009) / 1009)


def shorten_status(status: bytes, limit: int) -> bytes:
    """torch's status JSON as it is if it fits; else its pg_status alone, of as many groups as fit."""
    if len(status) <= limit:
        return status
    groups = json.loads(status).get("pg_status", {})
    kept: dict[str, Any] = {}
    used = len(b'{"pg_status":{}}')
    for key, value in groups.items():
        used += len(json.dumps({key: value}, separators=(",", ":")))
        if used > limit:
            break
        kept[key] = value
    return json.dumps({"pg_status": kept}, separators=(",", ":")).encode()


def with_handled(status: bytes, handled: dict[str, Any] | None) -> bytes:
    """The status JSON with `handling`, what the main thread handles; as it is where that is nothing."""
    if handled is None or not status.startswith(b"{"):
        return status
    added = json.dumps({"handling": handled}, separators=(",", ":")).encode()
    if len(added) > _HANDLED_BYTES:  # a message of other alphabets; four bytes a character at most
        added = json.dumps({"handling": {**handled, "message": handled["message"][:20]}}, separators=(",", ":")).encode()
    return added if status == b"{}" else added[:-1] + b"," + status[1:]


def with_entries(status: bytes, recorder: bytes, limit: int) -> bytes:
    """The status JSON with `entries`, what matters of the newest operations, as far as they fit; at least the status as it was."""
    found = json.loads(recorder).get("entries") or []
    record = {**json.loads(status), "entries": []}
    used = len(json.dumps(record, separators=(",", ":")))
    for entry in reversed(found[-LAST_ENTRIES:]):
        short = {key: entry[key] for key in _ENTRY_KEYS if key in entry}
        used += len(json.dumps(short, separators=(",", ":"))) + 1
        if used > limit:
            break
        record["entries"].insert(0, short)
    return json.dumps(record, separators=(",", ":")).encode() if record["entries"] else status
