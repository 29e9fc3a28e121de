"""Whether and where the program asks for torch.compile, and what keeps it from compiling: the environment, the configuration, a stance.

torch.compile and Module.compile both end in torch._dynamo.eval_frame.optimize, whose global `_optimize` is replaced: Dynamo, which may meet
a torch.compile while it traces, never gets that far. Called when a function is wrapped, never when it runs.
"""

from __future__ import annotations

import os
import sys

from rankwatch.agent.clock import clock
from rankwatch.agent.guard import guarded
from rankwatch.agent.sources import is_torch_or_stdlib, is_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rankwatch.agent.compiling.configured import Configured
    from rankwatch.agent.guard import Probe

_ENTRIES = ("/torch/_dynamo/eval_frame.py", "/torch/__init__.py", "/torch/nn/modules/module.py", "/torch/compiler/__init__.py")
_BACKENDS = 8
_WALK_FRAMES = 60
_WRITTEN_AT_ONCE = 16  # calls; a model may wrap a thousand blocks


class Asked:
    """Calls of torch.compile by the user's code: count, first line, backends; how many of them are switched off where they are made."""

    def __init__(self, probe: Probe, configured: Configured, changed: Callable[[], None]) -> None:
        self._configured, self._changed = configured, changed
        self._state = ("", "")
        self.requested: dict[str, Any] = {"count": 0, "disabled": 0, "first_at": "", "backends": []}
        guard = guarded(probe)
        self._note, self.look = guard(self._note), guard(self.look)  # type: ignore[method-assign]

    def wrap(self, optimize: Any) -> Any:
        """Stands in for torch._dynamo.eval_frame._optimize(rebuild_ctx, backend, *, ...)."""
        note = self._note

        def _optimize(*args: Any, **kwargs: Any) -> Any:
            note(args, kwargs, sys._getframe(1))
            return optimize(*args, **kwargs)

        _optimize.__wrapped__ = optimize  # type: ignore[attr-defined]
        return _optimize

    def look(self) -> None:
        """Write the totals if the stance or the switch has changed: without compiles nobody else would."""
        if (self.stance(), self.disabled()) != self._state:
            self._changed()

    def fields(self) -> dict[str, Any]:
        """What goes into the totals."""
        self._state = (self.stance(), self.disabled())
        found: dict[str, Any] = {"requested": self.requested, "stance": self._state[0], "disabled": self._state[1]}
        if self._configured.suppress_errors:
            found["suppress_errors"] = True
        return found

    def stance(self) -> str:
        """torch.compiler.set_stance in force; "" for the default."""
        stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
        name, backend = str(getattr(stance, "stance", "default")), getattr(stance, "backend", None)
        if backend is not None:
            return f"force_backend={_name(backend)}"
        return "" if name == "default" else name

    def disabled(self) -> str:
        """What switches torch.compile off for the whole process; "" when nothing does."""
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return "TORCHDYNAMO_DISABLE=1"
        if not self._configured.disable:
            return ""
        return "TORCH_COMPILE_DISABLE=1" if os.environ.get("TORCH_COMPILE_DISABLE") == "1" else "torch._dynamo.config.disable"

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> None:
        at = _users_call(frame)
        if not at:
            return  # torch wraps something of its own
        self._configured.look(clock.now_ns())
        found = self.requested
        found["count"] += 1
        found["disabled"] += bool(kwargs.get("disable")) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        found["first_at"] = found["first_at"] or at
        backend = _name(kwargs.get("backend", args[1] if len(args) > 1 else "inductor"))
        if backend not in found["backends"] and len(found["backends"]) < _BACKENDS:
            found["backends"].append(backend)
        if found["count"] <= _WRITTEN_AT_ONCE or found["count"] % 64 == 0:
            self._changed()


def _users_call(frame: Any) -> str:
    """`train.py:31` of the line that asks for torch.compile; "" when it is torch's own. A package's line where no user's is above it."""
    packages = ""
    for _ in range(_WALK_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not file.endswith(_ENTRIES):
            if is_users(file):
                return f"{os.path.basename(file)}:{frame.f_lineno}"
            if not is_torch_or_stdlib(file):
                packages = packages or f"{os.path.basename(file)}:{frame.f_lineno}"
            elif not packages and "/torch/" in file:
                return ""
        frame = frame.f_back
    return packages


def _name(backend: Any) -> str:
    """A backend as people write it."""
    if isinstance(backend, str):
        return backend[:40]
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None) or type(backend).__name__
    return str(name).split(" at 0x", 1)[0][:40]
