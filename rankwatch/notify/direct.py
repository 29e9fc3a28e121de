"""The direct path: Alertmanagers and webhooks that a launcher tells itself, so that a job is heard that nobody scrapes, or that ends before the next scrape.

Called from the monitor's thread by the launcher that judges the job; nothing here waits but `flush`, and nothing is done where no target is given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from rankwatch.config import COMMAND_LINE, Options
from rankwatch.model import PAGING, Incident, Status
from rankwatch.notify import alertmanager, post, webhook
from rankwatch.notify.outbox import RESULTS, Outbox

LAST_POST_S = 1.0
"""How long the launcher's end may be held up by messages that have not arrived; not at all where there are none."""
API = "/api/v2/alerts"


class Direct:
    """All targets of one launcher. send: for tests, instead of post.post."""

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None],
        send: Callable[[post.Target, bytes], None] = post.post,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._labels = options.labels
        self._say = say
        self._clock = clock
        self._wall = wall
        self._board = alertmanager.Board()
        self._news = 0
        managers = [post.target(url, API, options.alertmanager_credentials) for url in options.alertmanager]
        hooks = [post.target(url) for url in options.webhook]
        self._managers = [Outbox(f"alertmanager {to.shown}", partial(send, to), say, clock) for to in managers]
        self._hooks = [(Outbox(f"webhook {to.shown}", partial(send, to), say, clock), to.host) for to in hooks]
        for warning in _warnings(options):
            say(warning)

    @property
    def tells(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._boxes)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """(channel, result) -> messages, for every channel that there is. ok and failed count attempts, dropped what was never taken."""
        found: dict[tuple[str, str], int] = {}
        for channel, boxes in (("alertmanager", self._managers), ("webhook", [box for box, _host in self._hooks])):
            total: Counter[str] = Counter()
            for box in boxes:
                total.update(box.counts)
            found |= {(channel, result): total[result] for result in RESULTS} if boxes else {}
        return found

    def look(self, status: Status) -> None:
        """After every look of the monitor: post the alerts of what is open now, where something is new or a minute is over."""
        if not self._managers:
            return
        self._board = alertmanager.look(self._board, status.open_incidents, status, self._labels, self._clock(), self._wall())
        self._post_board()

    def rest(self) -> None:
        """Another launcher judges the job from now on: its alerts have the same labels, ours are left to run out."""
        self._board = alertmanager.Board()

    def changed(self, kind: str, incident: Incident, status: Status, reason: str = "") -> None:
        """An incident was opened, has escalated or is closed: tell the webhooks, where it is news for a person."""
        if not self._hooks or not webhook.tells(kind, incident):
            return
        self._news += 1
        for box, host in self._hooks:
            body = partial(webhook.body, kind, reason, incident, status, host)
            box.put(f"{incident.id} {self._news}", body, critical=kind != "closed" and incident.verdict.verdict in PAGING)

    def finish(self) -> None:
        """The job is over: the last state of the alerts goes out, and what waits for another attempt gets one."""
        self._board = alertmanager.ended(self._board, self._clock(), self._wall())
        self._post_board()
        for box in self._boxes:
            box.hurry()

    def flush(self, timeout_s: float = LAST_POST_S) -> bool:
        """Whether everything has gone within timeout_s; what has not is said."""
        until = self._clock() + timeout_s
        late = [box.name for box in self._boxes if not box.empty(until - self._clock())]
        if late:
            self._say(f"not told how the job ended, it has not answered within {timeout_s:g} s: {', '.join(late)}")
        return not late

    @property
    def _boxes(self) -> list[Outbox]:
        return [*self._managers, *(box for box, _host in self._hooks)]

    def _post_board(self) -> None:
        if self._board.due:
            board = self._board
            for box in self._managers:
                box.put("alerts", lambda: alertmanager.body(board, self._wall()), critical=True)


def _warnings(options: Options) -> Iterator[str]:
    """Secrets that others may read."""
    file = options.alertmanager_credentials
    if file and options.alertmanager and post.open_to_others(file):
        yield f"others may read {file}: chmod 600 {file}"
    if options.origins.get("webhook") == COMMAND_LINE and any(url.startswith("https:") or "@" in url for url in options.webhook):
        yield "every user of this machine can read --webhook in the list of processes; put it into RANKWATCH_WEBHOOK or a configuration file"
    if options.origins.get("alertmanager") == COMMAND_LINE and any("@" in url for url in options.alertmanager):
        yield "every user of this machine can read the password in --alertmanager; put it into a file: --alertmanager-credentials FILE"
