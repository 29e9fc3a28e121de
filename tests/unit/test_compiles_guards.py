"""What torch says of a failed guard, read. The texts are those of torch 2.13 unless a test says otherwise."""

import pytest

from rankwatch.monitor.compiles.guards import CLASSES, Guard, parse

USER = "# return x*k  # src/train.py:28 in step"
PAD = " " * 40


@pytest.mark.parametrize(
    ("text", "kind", "source", "expected", "actual"),
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5", "tensor_size", "x.size()[0]", "4", "5"),
        ("3/1: tensor 'x' stride mismatch at index 1. expected 4, actual 1", "tensor_stride", "x.stride()[1]", "4", "1"),
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Double", "tensor_dtype", "x.dtype", "Float", "Double"),
        ("0/1: tensor 'x' rank mismatch. expected 2, actual 3", "tensor_other", "x.dim()", "2", "3"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", "tensor_other", "x.requires_grad", "0", "1"),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, BackendSelect), actual DispatchKeySet(Meta, BackendSelect)",
            "tensor_other",
            "x.dispatch_keys",
            "CPU",
            "Meta",
        ),
        ("0/0: expected type of 'k' to be a tensor type, ' but found <class 'int'>", "type", "k", "a tensor", "int"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "global_state", "grad_mode", "", ""),
        ("0/0: GLOBAL_STATE changed: autocast(cpu)_enabled ", "global_state", "autocast(cpu)_enabled", "", ""),
        ("0/0: ___check_global_state()", "global_state", "___check_global_state()", "", ""),
        (f"0/0: k == 1{PAD}  {USER}", "value", "k", "1", ""),
        (f"0/0: L['k'] == 1.5{PAD}  {USER}", "value", "k", "1.5", ""),
        (f"0/0: s == 'a'{PAD}  {USER}", "value", "s", "'a'", ""),
        (f"0/0: G['FLAG'] == True{PAD}  {USER}", "value", "G['FLAG']", "True", ""),
        (f"0/1: self.k == 2{PAD}  {USER} (HINT: torch.compile considers integer attributes of the nn.Module to be static.", "value", "self.k", "2", ""),
        (f"0/0: (type(k) is float and __math_isnan(k))  {USER}", "value", "k", "nan", ""),
        (f"0/0: x is None  {USER}", "value", "x", "None", ""),
        (f"0/0: len(l) == 1{PAD}  {USER}", "length", "len(l)", "1", ""),
        (f"0/0: not l  {USER}", "length", "len(l)", "0", ""),
        ("0/0: len(d) != 1", "dict_keys", "len(d)", "1", ""),
        (f"0/0: list(dict.keys(d))[0] == 'a'{PAD}  {USER}", "dict_keys", "list(dict.keys(d))[0]", "'a'", ""),
        (f"0/0: ___check_obj_id(h, 140245210240944), type=<class 'builtin_function_or_method'>  {USER}", "identity", "h", "", ""),
        ('0/0: Duplicate tensors found: ["x", "y"]', "identity", "x, y", "different tensors", "the same tensor"),
        (f"0/1: ___check_type_id(s._modules['l'], 939283), type=<class 'torch.nn.modules.linear.Linear'>  {USER}", "type", "s._modules['l']", "Linear", ""),
        (f"0/0: 2 <= x.size()[0] <= 10  {USER} (user code shown is first use)", "shape_env", "x.size()[0]", "2 <= x.size()[0] <= 10", ""),
        (f"0/0: (x.size()[0] % 8) == 0  {USER}", "shape_env", "x.size()[0]", "(x.size()[0] % 8) == 0", ""),
        ("0/0: y.size()[0] == x.size()[0]  # duck sizing added this equality", "shape_env", "y.size()[0]", "y.size()[0] == x.size()[0]", ""),
        ("0/0: Ne(L['x'].size()[0], 1)", "shape_env", "x.size()[0]", "Ne(x.size()[0], 1)", ""),
        ("something new", "other", "", "", ""),
        ("", "other", "", "", ""),
    ],
)
def test_a_text_gives_class_source_and_values(text, kind, source, expected, actual):
    guard = parse(text)
    assert (guard.kind, guard.source, guard.expected, guard.actual) == (kind, source, expected, actual)
    assert guard.kind in CLASSES


def test_the_compile_that_it_belongs_to_and_the_users_line_are_found():
    guard = parse(f'3/2: k == 1{PAD}  {USER}\nUser stack trace:\n  File "/src/train.py", line 28, in step')
    assert guard == Guard("value", "k", "k == 1", "1", "", 2, "train.py:28")


def test_an_id_of_compiled_autograd_is_an_id():
    assert parse("!1/3/2: k == 1").ordinal == 2


def test_addresses_do_not_tell_ranks_apart():
    texts = {parse(f"0/0: ___check_obj_id(h.__code__, {number}), type=<class 'code'>").text for number in (140245216398640, 93928303647984)}
    assert texts == {"___check_obj_id(h.__code__, ...), type=<class 'code'>"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5", "x.size()[0]: expected 4, actual 5"),
        ("0/0: k == 1", "k: expected 1"),
        ("0/0: 2 <= x.size()[0]", "2 <= x.size()[0]"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "GLOBAL_STATE changed: grad_mode"),
    ],
)
def test_words_say_the_two_values_where_there_are(text, words):
    assert parse(text).words == words
