"""A compile that waits for a lock which a compiling peer holds is in order; a silent one beside a busy peer is not."""

import pytest
from build_jobs import Job, coll, compiling, init

LOCK = ("@filelock/_api.py:344:acquire",)


def script(rank, inside=(), beside=()):
    yield init(600)
    yield coll()
    if rank == 0:
        yield compiling(100, cpu=0.9, phase_s=5.0)
    if rank == 1:
        yield compiling(105, inside=inside, beside=beside)
    yield coll()


@pytest.mark.parametrize(
    ("waits", "paged"),
    [({"inside": LOCK}, False), ({"beside": LOCK}, False), ({"beside": ("@threading.py:327:wait",)}, True), ({}, True)],
    ids=["waits for the lock", "a thread that builds a kernel waits for the lock", "a thread waits for nothing", "waits for nothing"],
)
def test_only_a_lock_makes_a_silent_compile_wait_for_its_peers(waits, paged):
    job = Job(lambda rank: script(rank, **waits), 3).play(104)
    assert any(seen.verdict.verdict == "stuck" for seen in job.history) is paged
    assert {rank for seen in job.history if seen.verdict.verdict == "stuck" for rank in seen.verdict.culprit_ranks} <= {1}


def test_the_wait_for_the_lock_is_told_of_the_rank_that_waits():
    job = Job(lambda rank: script(rank, LOCK), 3).play(60)
    told = {line for seen in job.history for line in seen.verdict.evidence if "a lock file" in line}
    assert told
    assert all(line.startswith("rank 1: torch.compile of block@train.py:31 [0/1] has run for ") for line in told)
    assert all(line.endswith(", it waits for a lock file that another process holds") for line in told)
