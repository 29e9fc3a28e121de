"""What a recompile was for, out of torch's own text of the guard that failed. Pure.

The texts are made in torch/csrc/dynamo/guards.cpp and torch/_dynamo/guards.py (2.9-2.14): `0/1: tensor 'x' size mismatch at index 0.
expected 4, actual 5`, or the guard's code, padded, with the user's line behind it: `0/0: self.k == 1    # y = x * self.k  # model.py:54 in forward`.
Only tensor guards tell the value that was found; of the others the book learns it from the guard of the compile that followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CLASSES = (
    "tensor_size",
    "tensor_stride",
    "tensor_dtype",
    "tensor_other",
    "value",
    "identity",
    "type",
    "length",
    "dict_keys",
    "global_state",
    "shape_env",
    "other",
)
"""Stable names: they are labels of a metric."""

MAX_TEXT, MAX_SOURCE, MAX_VALUE = 300, 160, 120


@dataclass(frozen=True, slots=True)
class Guard:
    """One failed guard. Texts are "" where torch does not tell.

    kind: one of CLASSES. source: what was looked at, "x.size()[0]". ordinal: which compile of the frame (from 0) the guard belongs to.
    at: the user's line that made the guard, "model.py:54".
    """

    kind: str
    source: str
    text: str
    expected: str = ""
    actual: str = ""
    ordinal: int | None = None
    at: str = ""

    @property
    def words(self) -> str:
        """ "x.size()[0]: expected 4, actual 5", or the guard's text where there are no two values."""
        if not self.source or not self.expected or self.kind == "shape_env":
            return f"{self.text}, actual {self.actual}" if self.actual and self.kind == "shape_env" else self.text
        return f"{self.source}: expected {self.expected}{f', actual {self.actual}' if self.actual else ''}"


_HEAD = re.compile(r"(?:!\d+/)?\d+/(\d+):\s*")
_PLACE = re.compile(r"# (?:.*[/\\])?([^\s/\\]+\.\w+):(\d+) in \S")
_LOCAL = re.compile(r"\bL\['(\w+)'\]")
_DIMENSION = re.compile(r"tensor '(.*)' (size|stride) mismatch at index (\d+)\. expected (.+?), actual (.+)")
_TENSOR = re.compile(
    r"tensor '(.*)' (?:Tensor )?(.+?) mismatch[.:,]? expected (?:device to be |device index to be )?\s*(.+?)(?:, (?:but got |actual )(.+))?", re.IGNORECASE
)
_TENSOR_ANY = re.compile(r"tensor '(.*?)' (.+)")
_NOT_A_TENSOR = re.compile(r"expected type of '(.*)' to be a tensor type, '? ?but found (.+)")
_TYPE_OF = re.compile(r"<class '(?:[\w.]+\.)?([\w<>]+)'>")
_OBJECT = re.compile(r"(___check_(?:type|obj)_id\(.+), \d+\)")  # the number is an address: another one on each rank
_ID = re.compile(r"___check_(type|obj)_id\((.+), \.\.\.\)(?:, type=(.*))?")
_LENGTH = re.compile(r"(not )?len\((.+?)\) (==|!=|<|<=|>|>=) (\d+)")
_DICT = re.compile(r"dict\.keys\(|___dict_contains\(|___key|\.keys\(\)|DictGuard|'.*' (?:not )?in ")
_SIZE = re.compile(r"[\w.\[\]'\"]+\.(?:(?:size|stride)\(\)\[\d+\]|(?:storage_offset|size|stride)\(\))")
_RELATION = re.compile(r"\b(?:Eq|Ne|Mod|Le|Lt|Ge|Gt)\(")
_GLOBAL = re.compile(
    r"___check_global_state|torch_function_mode_stack|CURRENT_DEVICE|___is_grad_enabled|___is_torch_function|are_deterministic|autocast|___check_current_device|default_device"
)
_EQUAL = re.compile(r"(.+?) == (.+)")
_IS = re.compile(r"(.+?) is (not )?(.+)")
_NAN = re.compile(r"\(?type\((.+?)\) is (?:float|complex) and .*isnan\(")
_KINDS = {"size": "tensor_size", "stride": "tensor_stride", "dtype": "tensor_dtype"}


def parse(text: str) -> Guard:
    """The guard that `text` tells of; kind "other" for a text of no known form. Never raises."""
    line = text.lstrip().split("\n", 1)[0].strip()
    head = _HEAD.match(line)
    ordinal = int(head[1]) if head else None
    line = line[head.end() :] if head else line
    code, _, comment = line.partition("  # ")
    place = _PLACE.search(f"# {comment}") if comment else None
    code = _OBJECT.sub(r"\1, ...)", " ".join(_LOCAL.sub(r"\1", code).split()))
    kind, source, expected, actual = _read(code)
    return Guard(
        kind,
        source[:MAX_SOURCE],
        code[:MAX_TEXT],
        expected.strip()[:MAX_VALUE],
        actual.strip()[:MAX_VALUE],
        ordinal,
        f"{place[1]}:{place[2]}" if place else "",
    )


def _read(code: str) -> tuple[str, str, str, str]:
    """(kind, source, expected, actual)."""
    if found := _DIMENSION.fullmatch(code):
        name, what, index, expected, actual = found.groups()
        return _KINDS[what], f"{name}.{what}()[{index}]", expected, actual
    if code.startswith("tensor '"):
        return _tensor(code)
    if found := _NOT_A_TENSOR.fullmatch(code):
        return "type", found[1], "a tensor", _class(found[2])
    if code.startswith("Duplicate tensors found"):
        return "identity", code.partition(":")[2].strip(" []").replace('"', ""), "different tensors", "the same tensor"
    if code.startswith("GLOBAL_STATE changed"):
        return "global_state", code.partition(":")[2].strip(), "", ""
    if _GLOBAL.search(code):
        return "global_state", code[:MAX_SOURCE], "", ""
    if found := _ID.search(code):
        what, source, type_ = found.groups()
        return ("type", source, _class(type_ or ""), "") if what == "type" else ("identity", source, "", "")
    return _code(code)


def _tensor(code: str) -> tuple[str, str, str, str]:
    found = _TENSOR.fullmatch(code)
    if found is None:
        any_tensor = _TENSOR_ANY.match(code)
        return "tensor_other", any_tensor[1] if any_tensor else "", "", ""
    name, what, expected, actual = found.groups()
    attribute = {"dispatch key set": "dispatch_keys", "rank": "dim()", "device index": "device.index"}.get(what, what.replace(" ", "_"))
    if what == "dispatch key set":
        expected, actual = _device(expected), _device(actual or "")
    if what == "requires_grad":
        expected = expected.rpartition("=")[2]
        actual = actual or {"0": "1", "1": "0"}.get(expected, "")
    return _KINDS.get(what, "tensor_other"), f"{name}.{attribute}", expected, actual or ""


def _code(code: str) -> tuple[str, str, str, str]:
    """The same of a guard that is told as the Python code which was false."""
    if found := _LENGTH.fullmatch(code):
        dictionary = found[3] == "!="  # torch's guard of a dict says what is wrong, the others what should be
        return "dict_keys" if dictionary else "length", f"len({found[2]})", found[4], ""
    if _DICT.search(code):
        found = _EQUAL.fullmatch(code)
        return "dict_keys", found[1] if found else code, found[2] if found else "", ""
    if found := _NAN.match(code):
        return "value", found[1], "nan", ""
    if (found := _SIZE.search(code)) or _RELATION.search(code):
        return "shape_env", found[0] if found else code, code, ""
    if code.startswith("not ") and re.fullmatch(r"not [\w.\[\]'\"]+", code):
        return "length", f"len({code[4:]})", "0", ""
    if code.startswith("type(") or "isinstance(" in code:
        found = _EQUAL.fullmatch(code) or _IS.fullmatch(code)
        return "type", found[1] if found else code, _class(found[found.lastindex or 1]) if found else "", ""
    if found := _EQUAL.fullmatch(code):
        return "value", found[1], found[2], ""
    if found := _IS.fullmatch(code):
        plain = found[3] in ("None", "True", "False", "Ellipsis")
        return "value" if plain else "identity", found[1], f"{found[2] or ''}{found[3]}" if plain else "", ""
    return "other", "", "", ""


def _device(keys: str) -> str:
    """The first of a set of dispatch keys, which tells the device: "CPU" of "DispatchKeySet(CPU, BackendSelect, ...)"."""
    return keys.partition("(")[2].partition(",")[0].strip(" )") or keys


def _class(text: str) -> str:
    """ "Linear" of "<class 'torch.nn.modules.linear.Linear'>"."""
    found = _TYPE_OF.search(text)
    return found[1] if found else text.strip(" ,'")
