"""Rank 0 prepares the data set alone for 60 s, computing all the time, before the others read its result: `with main_process_first():`.

The group's timeout is 200 s: a rank that does nothing would be stuck after 40 s.
"""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator

import torch.distributed as dist
from control import begin, finish, truth

SECONDS = 60.0
TEXT = "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds that lour'd upon our house. " * 40


@contextlib.contextmanager
def main_process_first(rank: int) -> Iterator[None]:
    if rank:
        dist.barrier()
    yield
    if not rank:
        dist.barrier()


def tokenize(text: str, vocabulary: "Counter[str]") -> list[int]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    vocabulary.update(words)
    index = {word: number for number, (word, _) in enumerate(vocabulary.most_common())}
    return [index[word] for word in words]


def prepare(rank: int) -> int:
    if rank:
        return 0  # read from rank 0's cache
    vocabulary: Counter[str] = Counter()
    end, tokens = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        tokens += len(tokenize(TEXT, vocabulary))
    return tokens


def main() -> None:
    rank = begin(timeout_s=200)
    truth("prepare begins")
    with main_process_first(rank):
        prepare(rank)
    truth("prepare ends")
    finish()


main()
