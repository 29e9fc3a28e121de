"""What a training script may call. Everything here does nothing outside a rankwatch run."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_on_step: Callable[[], None] | None = None


def step() -> None:
    """Say that one training step is done, for a loop whose optimizer step rankwatch cannot see. The first call replaces counting by optimizer."""
    if _on_step is not None:
        _on_step()


def _set_on_step(function: Callable[[], None] | None) -> None:
    global _on_step
    _on_step = function
