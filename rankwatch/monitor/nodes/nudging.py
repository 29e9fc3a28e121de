"""A member of a job asks its judge to pull it now: one of its ranks has failed or is stopped, or all is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from rankwatch.model import NodeReport
from rankwatch.monitor.nodes import questions
from rankwatch.monitor.nodes.connection import Connection, Names, Unanswered
from rankwatch.monitor.nodes.peer import Peer

MAX_ANSWER_BYTES = 64 << 10
GAP_S = 0.5
REFUSES = "refuses this launcher's secret"


def nudge(judge: Peer, secret: str, group_rank: int, wait_s: float, clock: Callable[[], float] = time.monotonic) -> str:
    """ "" when the judge was reached in time, else why not. Raises nothing."""
    names = Names(threads=1)
    connection = Connection(judge.addresses, judge.port, secret, names, clock)
    until = clock() + wait_s
    problem = ""
    try:
        for _ in judge.addresses[:4]:
            try:
                answer = connection.get(f"{questions.ROOT}nudge?node={group_rank}", until, MAX_ANSWER_BYTES)
            except Unanswered as error:
                problem = str(error)
            else:
                if answer.status == 200:
                    return ""
                problem = f"{connection.address} {REFUSES if answer.status == 401 else f'answers {answer.status}'}"
            connection.turn()
        return problem or "the judge has no address"
    finally:
        connection.close()
        names.close()


class Stops:
    """When a member tells the judge out of turn of a rank that is stopped: as it is first seen, and once its stack is there. Pure; nothing in quiet times."""

    def __init__(self) -> None:
        self._told: dict[int, bool] = {}  # stopped rank -> told with a stack
        self._nudged_at = -1e9

    def due(self, report: NodeReport, now: float) -> bool:
        """Whether this report has news of that kind; at most once in GAP_S, so that one who stops and goes on all day is told with the usual pulls."""
        stopped = {rank.rank: rank.stack is not None for rank in report.ranks if rank.process is not None and rank.process.alive and rank.process.state == "T"}
        news = any(rank not in self._told or has_stack > self._told[rank] for rank, has_stack in stopped.items())
        if news and now - self._nudged_at < GAP_S:
            return False
        self._told = stopped
        if news:
            self._nudged_at = now
        return news
