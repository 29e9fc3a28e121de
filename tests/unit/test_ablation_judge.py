"""From what ranks recorded to the layer to blame: the decisions of `rankwatch ablate`, without a job."""

from __future__ import annotations

import json
import math

import pytest
from build_ablation import FRAMES, exception, graphs, rank_run, run

from rankwatch.commands.ablation import compare, records
from rankwatch.commands.ablation.advice import next_steps
from rankwatch.commands.ablation.bisect import bisect
from rankwatch.commands.ablation.judge import asked_of, conclude, confirmed, outcome, pace
from rankwatch.commands.ablation.ladder import Asked, layer, parse, worth_running

INDUCTOR = Asked(("inductor",), (4,))
LOWER = ("off", "eager", "aot_eager", "aot_eager_decomp_partition")


def judged(*runs, floor_run=None, slower_than=None):
    """(run, outcome) of each, the first being the lowest rung, and the floor."""
    lowest = runs[0]
    floor = compare.floor_of(lowest.ranks, (floor_run or lowest).ranks, 1e-3)
    return [(one, outcome(one, lowest if number else None, floor if number else None, slower_than)) for number, one in enumerate(runs)], floor


def concluded(*runs, asked=INDUCTOR, **more):
    rungs, floor = judged(*runs, **more)
    return conclude(rungs, floor, asked)


def healthy(**more):
    return [run(rung, **more) for rung in LOWER]


class TestConclusions:
    def test_a_healthy_job_shows_no_difference(self):
        found = concluded(*healthy(), run("inductor"))
        assert (found.code, found.words) == (0, "no difference up to inductor")

    def test_the_first_rung_that_differs_names_the_layer(self):
        found = concluded(*healthy(), run("inductor", losses=(4.0, 3.5, 3.0, 2.5, 2.0)))
        assert (found.code, found.rung, found.below, found.layer) == (3, "inductor", "aot_eager_decomp_partition", "Inductor")
        assert found.words == "to blame: Inductor (inductor gives wrong numbers, aot_eager_decomp_partition does not)"

    def test_all_rungs_from_aot_on_blame_aot_autograd(self):
        wrong = {"losses": (4.0, 3.5, 3.0, 2.5, 2.0)}
        runs = [run("off"), run("eager"), run("aot_eager", **wrong), run("aot_eager_decomp_partition", **wrong), run("inductor", **wrong)]
        assert concluded(*runs).layer == "AOTAutograd"

    def test_a_rung_that_fails_below_a_healthy_top_blames_nobody(self):
        found = concluded(run("off"), run("eager"), run("aot_eager", exit_code=1), run("inductor"))
        assert (found.code, found.words) == (0, "no difference up to inductor (aot_eager differs, and the job does not run on it)")

    def test_wrong_numbers_below_a_healthy_inductor_may_hide_behind_its_cache(self):
        wrong = run("aot_eager_decomp_partition", losses=(4.0, 3.5, 3.0, 2.5, 2.0))
        found = concluded(run("off"), run("eager"), run("aot_eager"), wrong, run("inductor"))
        assert found.code == 0
        assert found.words == (
            "no difference up to inductor (aot_eager_decomp_partition differs, and the job does not run on it); Inductor's code may come from a"
            " cache that is older than the fault: run again with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )

    def test_a_job_that_fails_without_compile_is_not_torch_compiles(self):
        found = concluded(run("off", exit_code=1), run("inductor", exit_code=1))
        assert found.code == 4
        assert found.words == "the job fails without torch.compile already: exit code 1; no layer can be blamed"

    def test_an_unseeded_job_is_inconclusive_and_says_how_to_seed_it(self):
        other = run("off", losses=(5.0, 3.0, 2.5, 2.25, 2.0))
        found = concluded(run("off"), run("inductor", losses=(6.0, 5.0, 4.0, 3.0, 2.0)), floor_run=other)
        assert found.code == 4
        assert "seed the job: two equal runs give different numbers at their first step" in found.words

    def test_an_unseeded_job_that_crashes_at_one_rung_still_names_the_layer(self):
        other = run("off", losses=(5.0, 3.0, 2.5, 2.25, 2.0))
        found = concluded(run("off"), run("inductor", exit_code=1), floor_run=other)
        assert found.code == 3

    def test_nothing_compiled_is_no_all_clear(self):
        found = concluded(run("off"), run("inductor", graphs=()))
        assert found.code == 4
        assert found.words.startswith("nothing was compiled; no graph reached a backend")

    def test_a_rung_whose_agent_did_not_load_is_inconclusive(self):
        found = concluded(run("off"), run("eager"), run("inductor", ranks={}))
        assert (found.code, found.words.split(":")[0]) == (4, "inductor")

    def test_a_job_without_optimizer_steps_is_inconclusive(self):
        found = concluded(run("off", losses=()), run("inductor", losses=()))
        assert (found.code, found.words) == (4, "off: no optimizer step was seen; a loop without torch.optim calls rankwatch.step()")

    def test_what_does_not_repeat_names_no_layer(self):
        rungs, floor = judged(*healthy(), run("inductor", exit_code=1))
        found = conclude(rungs, floor, INDUCTOR)
        again = outcome(run("inductor"), rungs[0][0], floor)
        assert confirmed(found, rungs[-1][1], rungs[-1][1]).code == 3
        assert confirmed(found, again, rungs[-1][1]).code == 4

    def test_a_job_own_not_finite_numbers_are_no_difference(self):
        losses = (4.0, math.nan, math.nan, math.nan, math.nan)
        assert concluded(run("off", losses=losses), run("inductor", losses=losses)).code == 0


class TestOutcomes:
    def test_nan_on_one_rank_tells_rank_and_step(self):
        ranks = {0: rank_run(0, graphs=graphs("inductor")), 1: rank_run(1, losses=(4.0, 3.0, math.nan, math.nan, math.nan), graphs=graphs("inductor"))}
        rungs, _floor = judged(run("off"), run("inductor", ranks=ranks))
        assert (rungs[1][1].kind, rungs[1][1].words) == ("not finite", "step 3, rank 1 of 2: loss 2.5 -> nan")
        assert compare.first_nonfinite(ranks[1]).number == 3

    def test_ranks_that_follow_later_are_told_after_the_first(self):
        ranks = {0: rank_run(0, losses=(4.0, 3.0, 2.5, 9.0, 9.0)), 1: rank_run(1, losses=(4.0, 9.0, 9.0, 9.0, 9.0))}
        rungs, _floor = judged(run("off"), run("inductor", ranks=ranks))
        assert rungs[1][1].words == "step 2, rank 1 of 2: loss 3 -> 9; rank 0 from step 4"

    def test_the_gradient_of_one_parameter_is_named(self):
        rungs, _floor = judged(run("off", grads=(2.0, 0.02, 0.001)), run("inductor", grads=(2.0, 0.03, 0.001)))
        assert rungs[1][1].words == "step 1, all ranks: gradient of block.weight 0.02 -> 0.03"

    def test_a_gradient_that_is_all_noise_does_not_count(self):
        rungs, _floor = judged(run("off", grads=(2.0, 1.0, 1e-9)), run("inductor", grads=(2.0, 1.0, 7e-9)))
        assert rungs[1][1].kind == "ok"

    def test_a_backend_that_raises_gives_error_and_frame(self):
        message = "backend='inductor' raised:\nNotImplementedError: no lowering for aten.sin\n"
        ranks = {
            0: rank_run(0, losses=(), graphs=graphs("inductor", ok=False), exception=exception(message=message, wall_ns=5)),
            1: rank_run(1, losses=(), exception=exception("RuntimeError", "Connection closed by peer", wall_ns=9)),
        }
        found = outcome(run("inductor", ranks=ranks, exit_code=1), None, None)
        assert (found.kind, found.rank, found.frame) == ("fails", 0, FRAMES[1])
        assert found.words == "rank 0: BackendCompilerFailed of NotImplementedError: no lowering for aten.sin in second@model.py:20"

    def test_dynamos_own_failure_gives_the_users_line(self):
        message = 'Unsupported\n\nfrom user code:\n   File "/job/model.py", line 31, in forward\n    x = f(x)\n'
        ranks = {0: rank_run(0, losses=(), exception=exception("torch._dynamo.exc.Unsupported", message))}
        found = outcome(run("eager", ranks=ranks, exit_code=1), None, None)
        assert (found.at, found.words) == ("model.py:31:forward", "rank 0: Unsupported: Unsupported in model.py:31:forward".replace(" in ", " at "))

    def test_a_failure_that_suppress_errors_hides_is_told(self):
        found = outcome(run("inductor", graphs=graphs("inductor", ok=False)), None, None)
        assert found.kind == "fails quietly"
        assert found.words.startswith("second@model.py:20 did not compile (NotImplementedError: no lowering for aten.sin)")

    def test_a_hang_carries_rankwatchs_own_verdict(self):
        doc = {"verdict": "stuck", "cause": "not_entered", "culprit_ranks": [1], "summary": "rank 1 is at train.py:31:load_batch; rank 0 waits"}
        found = outcome(run("inductor", timed_out=True, exit_code=-15, incidents=(doc,), wall_s=600.0), None, None)
        assert (found.kind, found.rank) == ("hangs", 1)
        assert found.words == "not done after 600 s, 5 steps by then; rankwatch: stuck, rank 1 is at train.py:31:load_batch; rank 0 waits"

    def test_a_script_that_keeps_the_exit_is_inconclusive_whatever_comes_after(self):
        lost = exception("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
        ranks = {0: rank_run(0, reached_last=True, caught="", exception=lost), 1: rank_run(1, reached_last=True, caught="train.py:5")}
        said = "the script goes on after SystemExit (caught at train.py:5); let it pass, so that a run can end after its steps"
        for end in ({"exit_code": 1}, {"exit_code": -15, "timed_out": True}, {"exit_code": 0}):
            found = outcome(run("off", ranks=ranks, **end), None, None)
            assert (found.kind, found.words) == ("not seen", said)
        assert concluded(run("off", ranks=ranks, exit_code=1), run("inductor")).words == f"off: {said}"

    def test_a_rank_that_fails_before_its_last_step_is_told_though_another_went_on(self):
        ranks = {0: rank_run(0, exception=exception("ValueError", "bad batch")), 1: rank_run(1, reached_last=True, caught="train.py:5")}
        assert outcome(run("off", ranks=ranks, exit_code=1), None, None).words == "rank 0: ValueError: bad batch at train.py:60:main"

    def test_a_rank_that_left_is_named_and_not_the_lost_connection_of_its_peer(self):
        lost = exception("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
        doc = {"verdict": "failed", "cause": "exited", "culprit_ranks": [1], "summary": "rank 1 failed first: ended with exit code 0"}
        found = outcome(run("inductor", ranks={0: rank_run(0, exception=lost), 1: rank_run(1)}, exit_code=1, incidents=(doc,)), None, None)
        assert (found.rank, found.words) == (1, "rank 1 failed first: ended with exit code 0")

    def test_the_first_cause_is_named_though_the_lost_connection_came_earlier(self):
        lost = exception("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", wall_ns=1)
        ranks = {0: rank_run(0, exception=lost), 1: rank_run(1, exception=exception("ValueError", "bad batch", wall_ns=2))}
        doc = {"verdict": "failed", "cause": "crashed", "culprit_ranks": [0], "summary": "rank 0 failed first"}
        for incidents in ((), (doc,)):
            found = outcome(run("inductor", ranks=ranks, exit_code=1, incidents=incidents), None, None)
            assert (found.rank, found.words) == (1, "rank 1: ValueError: bad batch at train.py:60:main")

    def test_of_several_incidents_of_a_hang_the_one_that_names_a_rank_is_told(self):
        docs = (
            {"verdict": "stuck", "cause": "unknown", "culprit_ranks": [], "summary": "somebody waits"},
            {"verdict": "stuck", "cause": "not_entered", "culprit_ranks": [1], "summary": "rank 1 has not entered"},
        )
        found = outcome(run("inductor", timed_out=True, exit_code=-15, incidents=docs, wall_s=60.0), None, None)
        assert (found.rank, found.words.partition("; ")[2]) == (1, "rankwatch: stuck, rank 1 has not entered")

    def test_slower_counts_only_when_asked_for(self):
        assert judged(run("off"), run("inductor", seconds=0.020))[0][1][1].kind == "ok"
        found = judged(run("off"), run("inductor", seconds=0.020), slower_than=1.5)[0][1][1]
        assert (found.kind, found.words) == ("slower", "2.00 times the step time of off")

    def test_the_pace_is_the_slowest_ranks_without_steps_that_compile(self):
        found = pace(run("inductor", ranks={0: rank_run(0, seconds=0.010), 1: rank_run(1, seconds=0.012)}))
        assert (round(found.median_s, 6), found.steps) == (0.012, 4)
        assert pace(run("inductor", losses=(4.0, 3.0))) is None


class TestTolerance:
    def test_it_grows_with_the_step(self):
        assert judged(run("off"), run("inductor", losses=(4.0, 3.0, 2.5, 2.25, 2.0 * 1.004)))[0][1][1].kind == "ok"
        assert judged(run("off"), run("inductor", losses=(4.0 * 1.004, 3.0, 2.5, 2.25, 2.0)))[0][1][1].kind == "wrong numbers"

    def test_noise_between_equal_runs_widens_it(self):
        noisy = run("off", losses=(4.0, 3.0, 2.5, 2.25, 2.1))
        assert judged(run("off"), run("inductor", losses=(4.0, 3.0, 2.5, 2.25, 2.3)), floor_run=noisy)[0][1][1].kind == "ok"

    def test_the_coarsest_element_type_counts(self):
        assert compare.rtol_for({"float32", "bfloat16"}) == 0.03
        assert compare.rtol_for({"float64"}) == 1e-6
        assert compare.rtol_for(set()) == 1e-3


class TestLadder:
    def test_rungs_come_in_their_order_whatever_the_user_wrote(self):
        assert parse("inductor, off") == ("off", "inductor")

    @pytest.mark.parametrize("text", ["inductor", "off,nvfuser", ""])
    def test_an_unknown_or_lone_rung_is_refused(self, text):
        with pytest.raises(ValueError, match=r"rung"):
            parse(text)

    def test_rungs_that_would_repeat_another_are_left_out(self):
        everything = parse("off,eager,aot_eager,aot_eager_decomp_partition,inductor,given")
        own, options = Asked(("mine",), (5,)), Asked(('inductor {"mode": "max-autotune"}',), (5,))
        assert [rung for rung in everything if worth_running(rung, everything, INDUCTOR)] == [*LOWER, "inductor"]
        assert [rung for rung in everything if worth_running(rung, everything, own)] == [*LOWER, "given"]
        assert [rung for rung in everything if worth_running(rung, everything, options)] == [*LOWER, "inductor", "given"]
        assert [rung for rung in everything if worth_running(rung, everything, Asked(("aot_eager",), (2,)))] == ["off", "eager", "aot_eager"]

    def test_a_ladder_with_gaps_names_all_layers_between(self):
        assert layer("inductor", "aot_eager", INDUCTOR) == "the decompositions or the partitioner or Inductor"
        assert layer("given", "aot_eager_decomp_partition", Asked(("mine",), (5,))) == "the backend mine"

    def test_what_the_job_asked_for_comes_from_all_ranks(self):
        found = asked_of([run("off", ranks={0: rank_run(0), 1: rank_run(1, given={"mine": 5})})])
        assert (found.backends, found.levels) == (("inductor", "mine"), (4, 5))


class TestBisect:
    UNITS = tuple(f"f{n}" for n in range(16))

    def test_one_culprit_is_found_in_about_log2_runs(self):
        found = bisect(self.UNITS, lambda switched: "f11" not in switched, 24)
        assert (found.culprits, len(found.tried)) == (("f11",), 6)

    def test_two_culprits_are_found_together(self):
        found = bisect(self.UNITS, lambda switched: not {"f3", "f11"} <= set(switched), 24)
        assert set(found.culprits) == {"f3", "f11"}

    def test_a_failure_that_no_frame_explains_names_none(self):
        found = bisect(self.UNITS, lambda switched: True, 24)
        assert (found.culprits, found.why) == ((), "the failure is there even with every frame switched: it is not in the code of a frame")

    def test_a_run_that_cannot_be_judged_ends_it(self):
        assert bisect(self.UNITS, lambda switched: None, 24).why == "a run with 16 of 16 switched could not be judged"

    def test_too_many_runs_end_it(self):
        assert bisect(self.UNITS, lambda switched: "f11" not in switched, 3).why == "3 runs were not enough (--bisect-runs)"


class TestAdvice:
    def test_wrong_numbers_of_inductor_lead_to_the_accuracy_minifier(self):
        rungs, floor = judged(*healthy(), run("inductor", losses=(4.0, 3.5, 3.0, 2.5, 2.0)))
        lines = next_steps(conclude(rungs, floor, INDUCTOR), rungs[-1][1], (), False)
        assert "TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4" in lines[0]
        assert lines[-1] == "which frame: the same command with --bisect"

    def test_a_crash_below_inductor_leads_to_the_minifier_after_dynamo(self):
        rungs, floor = judged(run("off"), run("eager"), run("aot_eager", exit_code=1))
        found = conclude(rungs, floor, Asked(("aot_eager",), (2,)))
        lines = next_steps(found, rungs[-1][1], ("f@m.py:1",), True)
        assert 'with backend="aot_eager": TORCHDYNAMO_REPRO_AFTER=dynamo TORCHDYNAMO_REPRO_LEVEL=2' in lines[0]
        assert lines[-1] == "until it is mended keep that frame out: @torch.compiler.disable on f@m.py:1"

    def test_no_layer_no_advice(self):
        rungs, floor = judged(*healthy(), run("inductor"))
        assert next_steps(conclude(rungs, floor, INDUCTOR), rungs[-1][1], (), False) == []


def test_records_survive_a_line_that_a_crash_cut():
    step = {"kind": "step", "n": 1, "loss": math.nan, "grad_norm": 1.0, "grads": [1.0, None], "param_norm": 2.0, "dtypes": ["float32"], "seconds": 0.1}
    lines = [
        json.dumps({"kind": "start", "rung": "off", "torch": "2.13.0", "pid": 1}),
        json.dumps({**step, "compiled": True}),
        '{"kind":"step","n":2,"lo',
        json.dumps({"kind": "graph", "ok": False, "error": "ValueError", "text": "no", "frame": "f@m.py:1", "key": "f@m.py:1#0", "backend": "b", "ops": 3}),
        json.dumps({"kind": "problem", "at": "torch", "text": "AttributeError: x"}),
    ]
    found = records.parse(3, lines)
    assert (found.rank, found.torch, len(found.steps), found.graphs[0].error, found.problems) == (
        3,
        "2.13.0",
        1,
        "ValueError: no",
        ["torch: AttributeError: x"],
    )
