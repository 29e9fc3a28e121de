"""What helps against a guard that fails again and again, and against a graph break: words, and the setting where there is one. Pure.

Settings are torch 2.9-2.14's own names. A break's cure is found by words in torch's own text of it (torch/_dynamo/graph_break_registry.json).
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Cure(NamedTuple):
    words: str
    setting: str = ""


GUARD_CURES: dict[str, Cure] = {
    "tensor_size": Cure(
        "a size changes from call to call: mark it dynamic on every rank, or pad batches to a few sizes (drop_last=True for the last one)",
        "torch._dynamo.mark_dynamic(tensor, dim)",
    ),
    "tensor_stride": Cure("the memory layout changes from call to call: call .contiguous() before the compiled function"),
    "tensor_dtype": Cure("the element type changes from call to call: cast before the compiled function"),
    "tensor_other": Cure("requires_grad, device or layout of a tensor changes from call to call: make it the same before the compiled function"),
    "value": Cure("a Python number or string that the graph has built in changes: hand it over as a tensor, or keep it out of the compiled function"),
    "identity": Cure("another object is passed each time: create modules and functions once, outside the loop"),
    "type": Cure("an argument changes its type: pass the same type at each call"),
    "length": Cure("a list or tuple changes its length: pad it, or pass one stacked tensor"),
    "dict_keys": Cure("a dict changes its keys: pass the same keys at each call"),
    "global_state": Cure(
        "grad mode, autocast or another global switch differs between calls: use one compiled function for training and another one for evaluation"
    ),
    "shape_env": Cure(
        "a condition on a symbolic size was specialised: avoid the branch on it, or give its bounds", "torch._dynamo.mark_dynamic(tensor, dim, min=, max=)"
    ),
}


_INT_OF_MODULE = "torch._dynamo.config.allow_unspec_int_on_nn_module = True (an int attribute of a module)"
_MODULE_ATTRIBUTE = re.compile(r"(?:L\['self'\]|self)(?:\._modules\['\w+'\]|\.\w+)*\.\w+")


def cure_of(kind: str, source: str = "", expected: str = "") -> Cure | None:
    """What helps against recompiles for a guard of this class (guards.CLASSES) of this source; None where nothing is known."""
    if kind == "value" and re.fullmatch(r"-?\d+", expected) and _MODULE_ATTRIBUTE.fullmatch(source):
        return Cure(GUARD_CURES[kind].words, _INT_OF_MODULE)
    return GUARD_CURES.get(kind)


def guard_cure(kind: str, source: str = "", expected: str = "") -> str:
    """The same as one text, its setting included; "" where nothing is known."""
    cure = cure_of(kind, source, expected)
    return f"{cure.words}{f' [{cure.setting}]' if cure.setting else ''}" if cure else ""


_BREAK_CURES: tuple[tuple[tuple[str, ...], Cure], ...] = (
    (
        (".item", "capture_scalar", "tolist", "int(", "float(", "bool("),
        Cure("a tensor's value is read in compiled code: keep it a tensor, or let Dynamo capture it", "torch._dynamo.config.capture_scalar_outputs = True"),
    ),
    (
        ("print", "logging", "logger", "warnings"),
        Cure("something is printed or logged: move it out of the compiled function", "torch._dynamo.config.reorderable_logging_functions.add(print)"),
    ),
    (
        ("nonzero", "unique", "dynamic shape operator", "output shape"),
        Cure("the output's shape depends on data", "torch._dynamo.config.capture_dynamic_output_shape_ops = True"),
    ),
    (("data-dependent", "dynamic control flow", "jump"), Cure("a branch depends on a tensor's value: write it as torch.where or torch.cond")),
    (("torch._dynamo.graph_break()", "user-inserted"), Cure("the code asks for this break: remove torch._dynamo.graph_break()")),
    (
        ("torch.compiler.disable", "skip function", "forbidden", "function marked as skipped"),
        Cure("a function that Dynamo must not enter is called: move the call out of the loop"),
    ),
)
_OTHER_BREAK = Cure("see what Dynamo cannot trace there; move it out of the compiled function, or out of the loop at least", "TORCH_LOGS=graph_breaks")


def break_cure(reason: str) -> Cure:
    """What helps against a graph break of this reason: by words of it that begin where no other word's letter is before them."""
    for needles, cure in _BREAK_CURES:
        if any(re.search(rf"(?<!\w){re.escape(needle)}", reason, re.IGNORECASE) for needle in needles):  # "int(" is not in "print("
            return cure
    return _OTHER_BREAK
