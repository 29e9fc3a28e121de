"""Rank 1 stands at a breakpoint in pdb for 60 s, then its person goes on. The others wait in all_reduce.

The group's timeout is 200 s: a rank that does nothing would be stuck after 40 s. pdb reads from a pipe, since torchrun gives ranks no terminal.
"""

import os
import pdb
import threading
import time

from control import RANK, begin, finish, train, truth

SECONDS = 60.0


def person(write: int) -> None:
    time.sleep(SECONDS)
    os.write(write, b"p step\nc\n")


def step_that_is_looked_at(step: int) -> int:
    read, write = os.pipe()
    threading.Thread(target=person, args=(write,), daemon=True).start()
    with os.fdopen(read) as commands, open(os.devnull, "w") as output:
        pdb.Pdb(stdin=commands, stdout=output, nosigint=True).set_trace()
        return step + 1


def main() -> None:
    begin(timeout_s=200)
    for step in range(10):
        if step == 5 and RANK == 1:
            truth("breakpoint")
            step_that_is_looked_at(step)
            truth("continued")
        train(1)
    finish()


main()
