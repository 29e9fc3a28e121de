"""torch._dynamo.config as the user's threads see it."""

from __future__ import annotations

from rankwatch.agent.clock import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LEAST_NS = 1_000_000_000  # between two looks: torch's configuration is slow to read


class Configured:
    """The values that tell why frames are not compiled, as they were at the last look.

    What a user sets there is a context variable (seen in torch 2.13 and 2.14): any other thread, the heartbeat's and autograd's too, reads the default.
    So look() and stepped() are for the threads that run the user's code; everybody may read the values.
    """

    def __init__(self, utils: Any) -> None:
        self._utils = utils
        self._looked_ns = 0
        self.recompile_limit: Any = None
        self.disable = self.suppress_errors = False
        self.look(clock.now_ns())

    def look(self, now_ns: int) -> None:
        self._looked_ns = now_ns
        self.recompile_limit = self.value("recompile_limit")
        self.disable, self.suppress_errors = bool(self.value("disable")), bool(self.value("suppress_errors"))

    def stepped(self, now_ns: int) -> None:
        """Look again unless the last look was a moment ago."""
        if now_ns - self._looked_ns >= _LEAST_NS:
            self.look(now_ns)

    def value(self, name: str) -> Any:
        return getattr(getattr(self._utils, "config", None), name, None)
