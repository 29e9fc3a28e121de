"""Healthy jobs that look stuck: no paging verdict at scale 1, and none when every planned duration is three times as long."""

import pytest
from build_jobs import Job, barrier, burn, coll, compiling, destroy, die, group, handle, init, load, mark, nap, recv, save, send, stepped


def all_ranks_compile(scale):
    def script(rank):
        yield init()
        for _ in range(3):
            yield compiling((7 + 1.5 * rank) * scale, cpu=0.9, phase_s=1.0)
            yield coll()
        for _ in range(10):
            yield coll()
            yield stepped()
            yield nap(0.2 * scale)
        yield destroy()

    return script, 2


def rank0_checkpoint(scale):
    def script(rank):
        yield init()
        for step in range(40):
            yield coll()
            yield nap(0.2 * scale)
            if step == 19:
                yield barrier()
                if rank == 0:
                    yield save(15 * scale)
                yield barrier()
        yield destroy()

    return script, 3


def rank0_eval_long_group(scale):
    def script(rank):
        yield init(max(12.0, 12.0 * scale))
        yield group("1", (0, 1, 2), 7200.0)
        for epoch in range(2):
            for _ in range(20):
                yield coll()
                yield nap(0.15 * scale)
            if epoch == 0:
                if rank == 0:
                    for _ in range(30):
                        yield burn(0.5 * scale, "train.py:24:evaluate")
                yield barrier("1")
        yield destroy()

    return script, 3


def loader_hiccups(scale):
    def script(rank):
        yield init()
        for i in range(45):
            yield load((10 if {10: 1, 22: 0, 34: 2}.get(i) == rank else 0.05) * scale)
            yield coll()
            yield nap(0.1 * scale)
        yield destroy()

    return script, 3


def long_first_step(scale):
    def script(rank):
        yield init()
        yield burn(2 * scale)
        yield nap((14 + 2 * rank) * scale)
        for _ in range(40):
            yield coll()
            yield nap(0.2 * scale)
        yield destroy()

    return script, 3


def idle_store_worker(scale):
    def script(rank):
        yield init()
        for n in range(3):
            if rank == 0:
                yield nap((20, 12, 1)[n] * scale)
                yield send(f"job{n}")
            else:
                yield recv(f"job{n}")
            for _ in range(5):
                yield coll()
                yield nap(0.1 * scale)
        yield destroy()

    return script, 3


def pipeline_bubbles(scale):
    def script(rank):
        yield init()
        for n in range(6):
            for m in range(4):
                if rank > 0:
                    yield recv(f"f{n}.{m}.{rank}")
                yield nap((0.1, 0.5, 0.1)[rank] * scale)
                if rank < 2:
                    yield send(f"f{n}.{m}.{rank + 1}")
            if rank == 2 and n % 3 == 2:
                yield nap(6 * scale)
            for m in range(4):
                if rank < 2:
                    yield recv(f"b{n}.{m}.{rank}")
                yield nap((0.1, 0.5, 0.1)[rank] * scale)
                if rank > 0:
                    yield send(f"b{n}.{m}.{rank - 1}")
        yield destroy()

    return script, 3


def workers_and_children(scale):
    def script(rank):
        yield init()
        for _ in range(4):
            for _ in range(20):
                yield coll()
                yield nap(0.15 * scale)
            yield nap((1.0 + 0.6 * rank) * scale, "train.py:22:children")
            yield nap(2 * scale)
        yield destroy()

    return script, 2


def recreate_groups(scale):
    def script(rank):
        for g in range(5):
            yield init()
            members = (0, 2) if g == 2 else (0, 1, 2)
            yield group("1", members)
            for _ in range(8):
                yield coll()
                if rank in members:
                    yield coll(size=10, group="1")
                yield nap(0.25 * scale)
            yield barrier()
            yield destroy()
            yield nap((10 if g == 3 else 3) * scale)
            if g == 2 and rank == 1:
                yield nap(4 * scale)

    return script, 3


def monitored_barrier(scale):
    def script(rank):
        yield init()
        for step in range(40):
            yield coll()
            yield nap(0.2 * scale)
            if step % 10 == 9:
                if (step, rank) == (9, 1):
                    yield nap(8 * scale)
                if (step, rank) == (29, 0):
                    yield nap(6 * scale)
                for other in range(3):
                    yield send(f"{step}.{rank}.{other}")
                for other in range(3):
                    yield recv(f"{step}.{other}.{rank}")
        yield destroy()

    return script, 3


def no_sync_accumulation(scale):
    def script(rank):
        yield init()
        for _ in range(3):
            for _ in range(50):
                yield nap((0.24 if rank == 2 else 0.2) * scale)
            yield coll()
            yield stepped()
        yield destroy()

    return script, 3


def recompiles_all_ranks(scale):
    def script(rank):
        yield init()
        for step in range(25):
            if step % 5 == 0:
                yield compiling((10 if step == 0 else 4) * scale + 0.8 * rank, cpu=0.9, phase_s=0.7, compile_id=f"0/{step // 5}")
            yield coll()
            yield nap(0.3 * scale)
        yield destroy()

    return script, 2


def straggler_30pct(scale):
    def script(rank):
        yield init()
        for _ in range(70):
            yield burn(0.02 * scale)
            yield nap((0.63 if rank == 1 else 0.48) * scale)
            yield coll()
        yield destroy()

    return script, 3


def two_seconds(scale):
    def script(rank):
        yield init()
        for _ in range(50):
            yield coll()
        yield destroy()

    return script, 2


def signal_handler(scale):
    def script(rank):
        yield init()
        for step in range(60):
            yield coll()
            yield nap(0.2 * scale)
            if step in (10, 20, 30) and rank == 0:
                yield nap(4 * scale, "train.py:12:on_usr1")
        yield destroy()

    return script, 2


def staggered_exit(scale):
    def script(rank):
        yield init()
        for _ in range(40):
            yield coll()
            yield nap(0.2 * scale)
        yield destroy()
        if rank == 0:
            for _ in range(15):
                yield nap(1 * scale, "train.py:12:upload")

    return script, 3


def late_rank_at_start(scale):
    def script(rank):
        if rank == 2:
            yield nap(15 * scale)
        yield init()
        for _ in range(40):
            yield coll()
            yield nap(0.2 * scale)
        yield destroy()

    return script, 3


def async_handles(scale):
    def script(rank):
        yield init()
        for _ in range(3):
            yield handle()
            for _ in range(20):
                yield burn(0.05 * scale)
                yield nap(0.35 * scale)
        yield handle(size=10)
        yield handle(size=10)
        yield nap(4 * scale)
        yield barrier()
        yield destroy()

    return script, 3


def all_ranks_compile_asleep(scale):
    def script(rank):
        yield init(180.0)
        yield compiling(20 * scale)
        for _ in range(15):
            yield coll()
            yield nap(0.2)
        yield destroy()

    return script, 3


def gc_pause(scale):
    """A full garbage collection holds the GIL and a core on one rank."""

    def script(rank):
        yield init()
        for step in range(20):
            yield coll()
            yield nap(0.2)
            if step == 10 and rank == 1:
                yield ("busy", 41.0 * scale, {"frames": nap(0)[2]["frames"], "gil": True, "cpu": 1.0})
        yield destroy()

    return script, 3


def late_new_group(scale):
    def script(rank):
        yield init()
        for _ in range(5):
            yield coll()
            yield nap(0.2)
        if rank == 1:
            yield nap(14 * scale)
        yield group("1", (0, 1, 2))
        for _ in range(5):
            yield coll(group="1")
            yield nap(0.2)
        yield destroy()

    return script, 3


ANY = None
CONTROLS = {
    all_ranks_compile: {("slow", "compiling"): ANY},
    rank0_checkpoint: {("slow", "checkpointing"): {(0,)}, ("slow", "not_entered"): {(0,)}},
    rank0_eval_long_group: {("slow", "not_entered"): {(0,)}},
    loader_hiccups: {("slow", "data_loading"): {(0,), (1,), (2,)}, ("slow", "not_entered"): {(0,), (1,), (2,)}},
    long_first_step: {("slow", "not_entered"): ANY},
    idle_store_worker: {},
    pipeline_bubbles: {},
    workers_and_children: {},
    recreate_groups: {("slow", "store_wait"): {(1,)}},
    monitored_barrier: {},
    no_sync_accumulation: {("slow", "not_entered"): {(2,)}, ("straggler", "not_entered"): {(2,)}},
    recompiles_all_ranks: {("slow", "compiling"): ANY},
    straggler_30pct: {("straggler", "not_entered"): {(1,)}},
    two_seconds: {},
    signal_handler: {("slow", "not_entered"): {(0,)}},
    staggered_exit: {},
    late_rank_at_start: {("slow", "store_wait"): {(2,)}},
    async_handles: {},
    all_ranks_compile_asleep: {},
    gc_pause: {("slow", "not_entered"): {(1,)}, ("slow", "gil_held"): {(1,)}},
    late_new_group: {("slow", "store_wait"): {(1,)}},
}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_a_healthy_job_never_pages(control, scale):
    """Neither does it give notices other than the ones that are due, and it ends with every incident closed."""
    script, world = control(scale)
    job = Job(script, world).play(400)
    assert all(rank.exit_code == 0 for rank in job.ranks.values())
    assert job.pages() == []
    allowed = CONTROLS[control]
    for verdict, cause, culprits in job.kinds():
        assert (verdict, cause) in allowed, (verdict, cause, culprits)
        assert allowed[verdict, cause] is ANY or culprits in allowed[verdict, cause]
    assert job.book.open == ()


def test_the_straggler_is_told_once():
    """The 30 % slower rank is named alone, as one incident."""
    job = Job(*straggler_30pct(1.0)).play(100)
    assert job.kinds() == [("straggler", "not_entered", (1,))]


def test_the_checkpoint_is_recognised():
    """The notice about rank 0's checkpoint names the cause and the line, and is updated rather than reopened."""
    job = Job(*rank0_checkpoint(1.0)).play(100)
    (incident,) = job.incidents
    assert incident.history[0].verdict == "slow"
    assert ("slow", "checkpointing", (0,)) in job.kinds()
    assert incident.verdict.verdict == "recovered"
    assert incident.lost_rank_s == pytest.approx(2 * 15, abs=4)


def test_a_planned_exit_code_of_a_rank_after_the_group_is_gone_is_silent():
    def script(rank):
        yield init()
        for _ in range(5):
            yield coll()
        yield destroy()
        yield mark("left")
        yield nap(5.0 + rank)
        yield die(0)

    job = Job(script, 3).play(30)
    assert job.kinds() == []
