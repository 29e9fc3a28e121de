"""What a training script may call. Everything here does nothing outside a rankwatch run."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_on_step: Callable[[], None] | None = None
_on_loss: Callable[[Any], None] | None = None


def step() -> None:
    """Say that one training step is done, for a loop whose optimizer step rankwatch cannot see. The first call replaces counting by optimizer."""
    if _on_step is not None:
        _on_step()


def log_loss(loss: Any) -> None:
    """Show rankwatch the loss of the step under way, a tensor of one element or a number; read later, without waiting for the device.

    With `--probe numerics` the first loss that is not finite is reported with its rank: losses differ between ranks, reduced gradients do not.
    """
    if _on_loss is not None:
        _on_loss(loss)


def _set_on_loss(function: Callable[[Any], None] | None) -> None:
    global _on_loss
    _on_loss = function


def _set_on_step(function: Callable[[], None] | None) -> None:
    global _on_step
    _on_step = function
