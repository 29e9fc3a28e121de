"""Fast constructors of frozen dataclasses: a judge makes some hundred thousand of these values every few seconds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")


def constructor(cls: type[Value]) -> Callable[..., Value]:
    """What makes a frozen dataclass with slots, in a fifth of the time that the class takes; the class itself where that does not work.

    A frozen class sets each field by `object.__setattr__`. A twin with the same slots that is not frozen sets plain attributes and then becomes
    one of the class, which CPython allows for equal slots.
    """

    def become(made: Any) -> None:
        made.__class__ = cls

    specs: list[Any] = [(each.name, Any, _like(each)) for each in fields(cls)]  # type: ignore[arg-type]
    twin = make_dataclass(cls.__name__, specs, slots=True, eq=False, repr=False, namespace={"__post_init__": become})
    try:
        twin(*(None for _ in specs))
    except TypeError:
        return cls
    return twin


def default_of(of: Field[Any]) -> Any:
    """MISSING where there is none."""
    return of.default_factory() if of.default_factory is not MISSING else of.default


def _like(of: Field[Any]) -> Any:
    if of.default is not MISSING:
        return field(default=of.default)
    return field(default_factory=of.default_factory) if of.default_factory is not MISSING else field()
