"""What to change about torch.compile: each line has evidence and is given once."""

from __future__ import annotations

import pytest

from rankwatch.monitor.compiles.advice import give
from rankwatch.monitor.compiles.cures import guard_cure


def frame(**fields):
    return {"frame": "forward@model.py:12", "compiles": 5, "recompiles": 4, "graphs": 1, "seconds_max": 20.0, "lost_rank_s": 0.0, "limited": ""} | fields


def doc(**parts):
    return {"run": {"world_size": 4}, "frames": []} | parts


def guard(kind, text="text of the guard"):
    return {"class": kind, "text": text, "ranks": "3"}


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("tensor_size", "torch._dynamo.mark_dynamic(tensor, dim)"),
        ("value", None),
        ("identity", None),
        ("global_state", None),
        ("length", None),
        ("dict_keys", None),
    ],
)
def test_each_kind_of_guard_has_its_own_cure_and_its_text_is_the_evidence(kind, setting):
    (one,) = give(doc(frames=[frame(guards=[guard(kind)])]))
    assert (one["key"], one["setting"]) == (f"guard forward@model.py:12 {kind}", setting)
    assert one["evidence"] == ["forward@model.py:12 was recompiled 4 times (20.0 s): text of the guard"]


@pytest.mark.parametrize(
    ("source", "expected", "set_"),
    [
        ("self.k", "4", True),
        ("self._modules['block'].k", "4", True),
        ("L['self'].k", "-1", True),
        ("self.scale", "2.5", False),
        ("self.training", "True", False),
        ("self.mode", "'warm'", False),
        ("self.cfg['warm']", "4", False),
        ("G['STEP']", "4", False),
    ],
)
def test_only_an_int_attribute_of_a_module_is_cured_by_the_setting_for_those(source, expected, set_):
    value = guard("value", f"{source} == {expected}") | {"source": source, "expected": expected}
    (one,) = give(doc(frames=[frame(guards=[value])]))
    setting = "torch._dynamo.config.allow_unspec_int_on_nn_module = True (an int attribute of a module)"
    assert one["setting"] == (setting if set_ else None)
    assert (setting in guard_cure("value", source, expected)) is set_


def test_graphs_that_differ_in_sizes_only_are_cured_by_dynamic_sizes_once():
    differ = {"kind": "different_graph", "frame": "forward@model.py:12", "words": "so it is", "groups": [{"ranks": "0"}, {"ranks": "1"}], "cause": "sizes"}
    (one,) = give(doc(frames=[frame(guards=[guard("tensor_size")])], divergence=[differ]))
    assert (one["key"], one["setting"], one["evidence"]) == ("guard forward@model.py:12 tensor_size", "torch._dynamo.mark_dynamic(tensor, dim)", ["so it is"])
    assert "branch" not in one["words"]


def test_where_sizes_or_a_branch_may_differ_the_sizes_are_looked_at_first():
    differ = {"kind": "different_graph", "frame": "f@m.py:1", "words": "so it is", "groups": [{"ranks": "0"}, {"ranks": "1"}]}
    (unknown,) = give(doc(divergence=[differ | {"cause": "sizes_or_branch"}]))
    (branch,) = give(doc(divergence=[differ]))
    cure = "let all ranks take the same branch: broadcast what it depends on, or write it as torch.where or torch.cond"
    assert branch["words"] == f"f@m.py:1: {cure}"
    assert unknown["words"] == f"f@m.py:1: compare the sizes of its inputs between ranks, and mark what differs dynamic; if they are alike, {cure}"


def test_a_frame_that_is_compiled_anew_in_the_loop_is_to_be_compiled_before_it():
    again = frame(compiles=20, recompiles=0, steps_compiled=20, last_step=19, ranks="0-1")
    (one,) = give(doc(run={"steps_max": 20}, frames=[again]))
    words = "forward@model.py:12: compile it once, before the loop: no torch._dynamo.reset() in the loop, and no torch.compile there"
    assert (one["words"], one["ranks"]) == (words, "0-1")
    assert one["evidence"] == ["forward@model.py:12 was compiled anew in 20 steps (20.0 s); no guard has failed"]


def test_a_cheap_recompile_or_a_guard_of_no_known_kind_gives_no_advice():
    assert give(doc(frames=[frame(recompiles=1, guards=[guard("tensor_size")])])) == []
    assert give(doc(frames=[frame(seconds_max=0.2, guards=[guard("tensor_size")])])) == []
    assert give(doc(frames=[frame(guards=[guard("other")])])) == []


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "torch._dynamo.config.capture_scalar_outputs = True"),
        ("Data-dependent branching", None),
        (
            "Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print` with argument types ['str']",
            "torch._dynamo.config.reorderable_logging_functions.add(print)",
        ),
        ("Call to `torch._dynamo.graph_break()`", None),
        ("Unhandled tensor method: it does not have an explicit handler, and P2P is disabled", "TORCH_LOGS=graph_breaks"),
        ("Attempted to use `one_hot` with data-dependent output shape", "torch._dynamo.config.capture_dynamic_output_shape_ops = True"),
        ("Call to footprint() of a class that is not known", "TORCH_LOGS=graph_breaks"),
        ("something new", "TORCH_LOGS=graph_breaks"),
    ],
)
def test_a_graph_break_is_advised_by_its_reason_at_its_line(reason, setting):
    found = {"at": "model.py:15", "reason": reason, "gb": "gb0124", "ranks": "0-3"}
    (one,) = give(doc(frames=[frame(recompiles=0, breaks=[found])]))
    assert (one["at"], one["setting"]) == ("model.py:15", setting)
    assert one["evidence"] == [f"graph break at model.py:15: {reason} (gb0124)"]


def test_one_break_seen_in_two_frames_is_advised_once():
    found = {"at": "model.py:15", "reason": "print", "ranks": "0-3"}
    assert len(give(doc(frames=[frame(recompiles=0, breaks=[found]), frame(frame="resume", recompiles=0, breaks=[found])]))) == 1


def test_a_rank_that_fails_alone_is_told_to_compare_its_node_before_the_layer_is_searched():
    failure = {"type": "InductorError", "reason": "no such file", "at": "model.py:14", "ranks": "3", "count": 1}
    words = "rank 3 failed to compile forward@model.py:12: no such file; ranks 0-2 compiled it"
    differ = {"kind": "failed_alone", "frame": "forward@model.py:12", "words": words, "groups": []}
    alone, layer = give(doc(frames=[frame(recompiles=0, failures=[failure])], divergence=[differ]))
    assert (alone["key"], alone["ranks"]) == ("failed_alone forward@model.py:12", "3")
    assert alone["evidence"] == ["forward@model.py:12: InductorError: no such file on rank 3"]
    assert layer["words"].startswith("find the layer that fails on forward@model.py:12: rankwatch ablate -- torchrun")


def test_of_a_rank_that_failed_before_any_other_got_as_far_it_is_not_said_that_it_fails_alone():
    failure = {"type": "InductorError", "reason": "no such file", "at": "model.py:14", "ranks": "3", "count": 1}
    assert [one["key"] for one in give(doc(frames=[frame(recompiles=0, failures=[failure])]))] == ["failed forward@model.py:12"]


def test_a_failure_of_a_forward_that_was_not_split_is_told_once():
    split = {"ranks": "3", "status": "failed", "error": "in split 2 of 4: ValueError: no kernel"}
    assert [one["key"] for one in give(doc(ddp={"groups": [split]}))] == ["ddp_failed"]
    assert give(doc(ddp={"groups": [split | {"error": "ValueError: no kernel"}]})) == []


def test_the_cure_of_a_guard_is_told_once_of_a_frame_that_one_rank_recompiles_alone():
    words = "rank 3 alone recompiled forward@model.py:12: x.size()[0]: expected 4, actual 5; ranks 0-2 did not"
    differ = {"kind": "lone_recompile", "frame": "forward@model.py:12", "words": words, "groups": [{"ranks": "0-2"}, {"ranks": "3"}]}
    (one,) = give(doc(frames=[frame(guards=[guard("tensor_size")])], divergence=[differ]))
    assert (one["key"], one["setting"], one["evidence"]) == ("lone forward@model.py:12", "torch._dynamo.mark_dynamic(tensor, dim)", [words])


def test_the_line_that_made_the_guard_is_named():
    (one,) = give(doc(frames=[frame(guards=[guard("value", "self.round == 4") | {"at": "model.py:14"}])]))
    assert one["at"] == "model.py:14"
    assert one["evidence"] == ["forward@model.py:12 was recompiled 4 times (20.0 s): self.round == 4 (model.py:14)"]


@pytest.mark.parametrize(
    ("caps", "words", "setting"),
    [
        (
            (1_572_864, 4_194_304),
            "DistributedDataParallel has other bucket caps on some ranks (1.5 on ranks 0-2, 4 on rank 3): give the same on every rank",
            "bucket_cap_mb",
        ),
        ((4_194_304, 4_194_304), "the bucket caps are alike, so the models are not: give every rank the same model, with the same parameters frozen", None),
    ],
    ids=["caps", "models"],
)
def test_splits_that_differ_are_explained_by_the_bucket_caps_where_these_do(caps, words, setting):
    groups = [{"ranks": ranks, "status": "split", "cap_bytes": cap} for ranks, cap in zip(("0-2", "3"), caps, strict=True)]
    differ = {"kind": "different_split", "frame": "forward@model.py:12", "words": "2 buckets and 4", "groups": [{"ranks": "0-2"}, {"ranks": "3"}]}
    (one,) = give(doc(ddp={"groups": groups}, divergence=[differ]))
    assert (one["words"], one["setting"], one["ranks"], one["evidence"]) == (words, setting, "3", ["2 buckets and 4"])


def test_what_costs_most_comes_first():
    cheap = {"at": "model.py:15", "reason": "print", "ranks": "0-3"}
    first, second = give(doc(frames=[frame(guards=[guard("tensor_size")], limited="3"), frame(frame="block", recompiles=0, breaks=[cheap])]))
    assert (first["key"], second["key"]) == ("guard forward@model.py:12 tensor_size", "break model.py:15")


def test_a_skew_far_below_the_timeout_is_no_danger():
    skew = {"worst_s": 200.0, "smallest_timeout_s": 600.0, "worst_ranks": "3", "worst_frame": "forward@model.py:12"}
    (one,) = give(doc(skew=skew))
    assert one["evidence"] == ["ranks 3 compiled forward@model.py:12 for 200 s while others waited under a timeout of 600 s"]
    assert give(doc(skew=skew | {"worst_s": 100.0})) == []


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ({"status": "init_failed", "error": "AssertionError: First bucket"}, "ddp_init"),
        ({"status": "not_applied", "reason": "graph breaks have cut the forward into frames"}, "ddp_not_applied"),
        ({"status": "single_bucket", "bytes": 20_000_000, "cap_bytes": 26_214_400}, "ddp_single"),
    ],
)
def test_ddp_optimizer_that_does_not_help_is_explained(group, key):
    (one,) = give(doc(ddp={"groups": [{"ranks": "0-3", **group}]}))
    assert one["key"] == key
    assert one["evidence"][0]


def test_a_small_model_in_one_bucket_is_no_news():
    assert give(doc(ddp={"groups": [{"ranks": "0-3", "status": "single_bucket", "bytes": 100_000, "cap_bytes": 26_214_400}]})) == []


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ({"library": 4}, "compile the model before DistributedDataParallel wraps it: DDP(torch.compile(model));"),
        ({}, "nothing of what was compiled has run: call what torch.compile returns, not the module itself;"),
    ],
    ids=["library frames alone", "no frame"],
)
def test_what_helps_where_nothing_was_compiled_depends_on_whether_a_frame_was_looked_at(totals, words):
    (one,) = give(doc(regime={"name": "compiled_nothing", "evidence": ["so it is"]}, totals=totals))
    assert one["words"].startswith(words)


def test_nothing_is_advised_without_evidence():
    assert give({}) == []
