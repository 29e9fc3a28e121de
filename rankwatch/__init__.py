"""rankwatch: torchrun with eyes.

Imported in every rank (`rankwatch.step()`), so it holds the version, loads nothing, and resolves the public functions on first use.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is not imported in ranks
    from rankwatch.agent.public import log_loss as log_loss
    from rankwatch.agent.public import step as step

__all__ = ["__version__", "log_loss", "step"]


def __getattr__(name: str) -> object:
    if name in ("step", "log_loss"):
        from rankwatch.agent import public

        return getattr(public, name)
    raise AttributeError(f"module 'rankwatch' has no attribute {name!r}")
