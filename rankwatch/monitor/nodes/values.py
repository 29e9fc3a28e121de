"""Frozen dataclasses <-> JSON values, by their type hints. What encodes and decodes a class is put together once, not at every call. Pure.

A field that has its default is left out. Decoding takes bytes of another launcher, so it checks every type; fields that are not known are left
alone, a newer launcher may have them.
"""

from __future__ import annotations

import base64
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rankwatch.monitor.frozen import constructor, default_of

Kind = Literal["mono", "wall", "plain"]
Kinds = tuple[Kind, ...]
"""What a float field holds: times of a clock, or another quantity. Several: by place in a tuple, the last one for the rest."""
WRONG = (ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError)
"""What decoding of any value at all may raise."""
LEAST_INT, MOST_INT = -(1 << 63), (1 << 64) - 1
"""Whole numbers have 64 bits, with a sign or without: pages and metrics make floats of them, which ends at 1e308."""
_MOST = 1e300


@dataclass(frozen=True, slots=True)
class Shift:
    """Seconds to add to a node's times to get the judge's."""

    mono_s: float
    wall_s: float


class CodecError(ValueError):
    """A value from another launcher is none of this model. The text begins with the field: "process.pid: an int is wanted, found str"."""


class Codec(NamedTuple):
    """Both ways of one type. exact: JSON values of this very type are the value, both ways."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Shift], Any]
    exact: type | None = None


class _Field(NamedTuple):
    name: str
    default: Any
    codec: Codec


class Record:
    """One dataclass."""

    def __init__(self, cls: type[Any], codecs: Codecs) -> None:
        codecs.records[cls] = self
        self.cls = cls
        self._make = constructor(cls)
        hints = get_type_hints(cls, localns={"Mapping": Mapping})
        self.fields = {each.name: _Field(each.name, default_of(each), codecs.of_field(cls, each.name, hints[each.name])) for each in fields(cls)}

    def encode(self, value: Any) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        found = {}
        for name, default, codec in self.fields.values():
            held = getattr(value, name)
            if held is default or held == default:
                continue
            found[name] = held if codec.exact is not None else codec.encode(held)
        return found

    def decode_fields(self, value: Mapping[str, Any], shift: Shift) -> dict[str, Any]:
        """The known fields among these. CodecError names the one that is wrong; ValueError where there are no fields at all."""
        if not isinstance(value, Mapping):
            raise ValueError(f"an object is wanted, found {type(value).__name__}")
        found = {}
        try:
            for name, given in value.items():
                of = self.fields.get(name)
                if of is not None:
                    codec = of.codec
                    found[of.name] = given if type(given) is codec.exact else codec.decode(given, shift)
        except WRONG as error:
            raise CodecError(f"{name}{'.' if isinstance(error, CodecError) else ': '}{error}") from None
        return found

    def decode(self, value: Any, shift: Shift) -> Any:
        """One value of the class. ValueError and CodecError as above."""
        found = self.decode_fields(value, shift)
        try:
            return self._make(**found)
        except TypeError as error:  # a field without default is missing
            raise ValueError(str(error).removeprefix(f"{self.cls.__name__}.__init__() ")) from None


class Codecs:
    """All classes that are reachable from some class.

    times: "Class.field" -> what its floats are; every float field has to be there. special: "Class.field" -> its codec, instead of its hint's.
    """

    def __init__(self, times: Mapping[str, Kind | Kinds], special: Mapping[str, Codec]) -> None:
        self.records: dict[type[Any], Record] = {}
        self._times = times
        self._special = special

    def record(self, cls: type[Any]) -> Record:
        return self.records.get(cls) or Record(cls, self)

    def of_field(self, cls: type[Any], name: str, hint: Any) -> Codec:
        """LookupError where a float is not classified, TypeError for a hint that has no JSON form here."""
        where = f"{cls.__name__}.{name}"
        if where in self._special:
            return self._special[where]
        kind = self._times.get(where)
        return self._of(hint, (kind,) if isinstance(kind, str) else kind or (), where)

    def _of(self, hint: Any, kinds: Kinds, where: str) -> Codec:
        origin, args = get_origin(hint), get_args(hint)
        if hint is float:
            if not kinds:
                raise LookupError(f"{where} is a float that is not classified as mono, wall or plain: add it to TIMES in monitor/nodes/codec.py")
            return Codec(_finite, _FLOATS[kinds[0]])
        if hint is int:
            return Codec(_same, whole_number)
        if hint in _EXACT:
            return Codec(_same, _exact(hint), hint)
        if hint is bytes:
            return Codec(lambda value: base64.b64encode(value).decode("ascii"), lambda text, _shift: base64.b64decode(text, validate=True))
        if hint is Any:
            return Codec(_same, shifted)
        if origin is Literal:
            return Codec(_same, _one_of(args))
        if origin in (Union, types.UnionType):
            (inner,) = (arg for arg in args if arg is not types.NoneType)
            return _optional(self._of(inner, kinds, where))
        if origin is tuple and args[1:] == (...,):
            return _many(self._of(args[0], kinds, where))
        if origin is tuple:
            return _each([self._of(arg, kinds[min(place, len(kinds) - 1) :] if kinds else (), where) for place, arg in enumerate(args)])
        if origin in (dict, Mapping) and args[0] in (str, int):
            return _keyed(self._of(args[1], kinds, where), args[0])
        if is_dataclass(hint) and isinstance(hint, type):
            record = self.record(hint)
            return Codec(record.encode, record.decode)
        raise TypeError(f"{where}: {hint} has no JSON form here")


def shifted(value: Any, shift: Shift) -> Any:
    """JSON of a rank's own records: what is named wall_ns or mono_ns, alone or at the end of a name, is a time (wire/layout.py); 0 is none.

    ValueError where a number is too large, or none.
    """
    if type(value) is dict:
        found = {}
        for name, held in value.items():
            kind = type(held)
            if kind is not str and held is not None and (kind is not int or not LEAST_INT <= held <= MOST_INT):
                held = shifted(held, shift)
            if (kind is int or kind is float) and held and name[-7:] in ("wall_ns", "mono_ns"):
                held = held + round((shift.wall_s if name[-7:] == "wall_ns" else shift.mono_s) * 1e9)
            found[name] = held
        return found
    if type(value) is list:
        return [shifted(each, shift) for each in value]
    if type(value) is int:
        return whole_number(value)
    return _plain(value, shift) if type(value) is float else value


def whole_number(value: Any, _shift: Shift | None = None) -> int:
    """ValueError where it is no whole number, or one of more than 64 bits."""
    if type(value) is int:
        if LEAST_INT <= value <= MOST_INT:
            return value
        raise ValueError("a number of at most 64 bits is wanted")
    raise ValueError(f"int is wanted, found {type(value).__name__}")


def _same(value: Any) -> Any:
    return value


def _finite(value: Any) -> Any:
    """JSON has no infinity, and no judgement wants one."""
    return value if -_MOST < value < _MOST else 0.0


def _plain(value: Any, _shift: Shift) -> float:
    if type(value) is float or (type(value) is int and LEAST_INT <= value <= MOST_INT):
        number = float(value)
        if -_MOST < number < _MOST:
            return number
    raise ValueError(f"a finite number is wanted, found {value!r:.40}")


def _mono(value: Any, shift: Shift) -> float:
    at = _plain(value, shift)
    return at + shift.mono_s if at else at  # 0 is not known


def _wall(value: Any, shift: Shift) -> float:
    at = _plain(value, shift)
    return at + shift.wall_s if at else at


_EXACT = (str, bool)
_FLOATS: dict[Kind, Callable[[Any, Shift], float]] = {"plain": _plain, "mono": _mono, "wall": _wall}


def _exact(wanted: type) -> Callable[[Any, Shift], Any]:
    def decode(value: Any, _shift: Shift) -> Any:
        if type(value) is wanted:
            return value
        raise ValueError(f"{wanted.__name__} is wanted, found {type(value).__name__}")

    return decode


def _one_of(words: tuple[Any, ...]) -> Callable[[Any, Shift], Any]:
    known = {word: word for word in words}

    def decode(value: Any, _shift: Shift) -> Any:
        if type(value) is str and value in known:
            return known[value]
        raise ValueError(f"one of {', '.join(known)} is wanted, found {value!r:.40}")

    return decode


def _optional(of: Codec) -> Codec:
    encode, decode = of.encode, of.decode
    return Codec(lambda value: None if value is None else encode(value), lambda value, shift: None if value is None else decode(value, shift), of.exact)


def _list(value: Any) -> list[Any]:
    if type(value) is list:
        return value
    raise ValueError(f"a list is wanted, found {type(value).__name__}")


def _many(of: Codec) -> Codec:
    encode, decode = of.encode, of.decode
    return Codec(lambda value: [encode(each) for each in value], lambda value, shift: tuple([decode(each, shift) for each in _list(value)]))


def _each(parts: list[Codec]) -> Codec:
    def encode(value: Any) -> Any:
        return [part.encode(each) for part, each in zip(parts, value, strict=True)]

    def decode(value: Any, shift: Shift) -> Any:
        return tuple([part.decode(each, shift) for part, each in zip(parts, _list(value), strict=True)])

    return Codec(encode, decode)


def _keyed(of: Codec, key: type) -> Codec:
    encode, decode, exact = of.encode, of.decode, of.exact

    def to_json(value: Any) -> Any:
        return {str(name): encode(held) for name, held in value.items()}

    def from_json(value: Any, shift: Shift) -> Any:
        if type(value) is not dict:
            raise ValueError(f"an object is wanted, found {type(value).__name__}")
        names = value if key is str else [whole_number(int(name)) if len(name) <= 20 else whole_number(None) for name in value]
        return {name: held if type(held) is exact else decode(held, shift) for name, held in zip(names, value.values(), strict=True)}

    return Codec(to_json, from_json, None)
