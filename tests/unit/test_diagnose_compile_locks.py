"""A compile that waits for a lock which a compiling peer holds is in order; a silent one beside a busy peer is not."""

import pytest
from build_jobs import Job, coll, compiling, init

LOCK = ("@filelock/_api.py:344:acquire",)


def script(rank, inside):
    yield init(600)
    yield coll()
    if rank == 0:
        yield compiling(100, cpu=0.9, phase_s=5.0)
    if rank == 1:
        yield compiling(105, inside=inside)
    yield coll()


@pytest.mark.parametrize(("inside", "paged"), [(LOCK, False), ((), True)], ids=["waits for the lock", "waits for nothing"])
def test_only_a_lock_makes_a_silent_compile_wait_for_its_peers(inside, paged):
    job = Job(lambda rank: script(rank, inside), 3).play(104)
    assert any(seen.verdict.verdict == "stuck" for seen in job.history) is paged
    assert {rank for seen in job.history if seen.verdict.verdict == "stuck" for rank in seen.verdict.culprit_ranks} <= {1}
