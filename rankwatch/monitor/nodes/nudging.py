"""A member of a job asks its judge to pull it now: one of its ranks has failed, or all is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from rankwatch.monitor.nodes import questions
from rankwatch.monitor.nodes.connection import Connection, Names, Unanswered
from rankwatch.monitor.nodes.peer import Peer

MAX_ANSWER_BYTES = 64 << 10


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
                problem = f"{connection.address} answers {answer.status}"
            connection.turn()
        return problem or "the judge has no address"
    finally:
        connection.close()
        names.close()
