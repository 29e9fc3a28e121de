"""Calls a function when a module has been imported: one finder on sys.meta_path that leaves as soon as nothing is awaited.

A hook runs right after the module's own code, before the importing module can bind names from it, so that also
`from module import name` gives the replaced name. A module that is imported already is handed over at once.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook(module)` once when module `name` is there. What the hook raises (Exception) is swallowed: an import never fails by it."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call((hook,), module)
        return
    _finder.awaited.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Answers only for awaited names, each once, and hands out the spec of the finders behind it."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Hook]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        hooks = self.awaited.pop(name, None)
        if hooks is None:
            return None
        spec = _spec_behind(self, name, path, target)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            self.awaited[name] = hooks
            return spec
        spec.loader = _Loader(spec.loader, name, hooks)  # type: ignore[assignment]
        return spec


class _Loader:
    """Stands in for a module's loader until its code runs, then gives the place back."""

    def __init__(self, loader: Any, name: str, hooks: list[Hook]) -> None:
        self._loader, self._name, self._hooks = loader, name, hooks

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            _finder.awaited.setdefault(self._name, self._hooks)  # the next attempt of the same import
            raise
        _call(self._hooks, module)
        if not _finder.awaited and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


def _spec_behind(finder: _Finder, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    for other in list(sys.meta_path):
        if other is finder or not hasattr(other, "find_spec"):
            continue
        spec = other.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _call(hooks: Sequence[Hook], module: ModuleType) -> None:
    for hook in hooks:
        try:
            hook(module)
        except Exception:  # the hook reports itself; a user's import must not fail
            pass


_finder = _Finder()
