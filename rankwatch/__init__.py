"""rankwatch: torchrun with eyes.

Imported in every rank (`rankwatch.step()`), so it holds the version, loads nothing, and resolves `step` on first use.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is not imported in ranks
    from rankwatch.agent.public import step as step

__all__ = ["__version__", "step"]


def __getattr__(name: str) -> object:
    if name == "step":
        from rankwatch.agent.public import step

        return step
    raise AttributeError(f"module 'rankwatch' has no attribute {name!r}")
