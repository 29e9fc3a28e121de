"""The agent's edge: what goes wrong in a hook stays here, is counted, and switches the probe off before it costs the job anything.

Exception is caught, BaseException is not: a KeyboardInterrupt that falls into a hook goes on as if it had fallen into torch.
"""

from __future__ import annotations

import functools
from os import getpid as getpid  # bound now: a job may replace os.getpid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ERROR_LIMIT = 5


class Here:
    """The process that hooks may work in. `pid` is 0 once this process is inert: a fork child keeps the patched functions."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = getpid()


here = Here()


class Probe:
    """Health of one probe, as the `probes` record shows it: status armed|off|missing|failed, detail, errors."""

    __slots__ = ("_changed", "detail", "errors", "name", "on", "status")

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        self.name = name
        self.status = "armed"
        self.detail = ""
        self.errors = 0
        self.on = True
        self._changed = changed

    def report(self, status: str, detail: str = "") -> None:
        """Set what is shown. `off` and `missing` also switch the probe's hooks off."""
        self.status, self.detail = status, detail
        self.on = status == "armed"
        self._changed()

    def caught(self, error: Exception) -> None:
        """Count what a hook raised; the fifth error switches the probe off. Never raises Exception."""
        try:
            self.errors += 1
            self.detail = f"{type(error).__name__}: {error}"[:200]
            if self.errors >= ERROR_LIMIT:
                self.status, self.on = "failed", False
                self.detail = f"switched itself off after {self.errors} errors; the last one: {self.detail}"
            self._changed()
        except Exception:
            pass


def guarded(probe: Probe) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a hook: it runs while its probe is on and this is the process it was armed in, and gives None when it fails."""

    def decorate(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def guard(*args: Any, **kwargs: Any) -> Any:
            try:
                if not probe.on or getpid() != here.pid:
                    return None
                return hook(*args, **kwargs)
            except Exception as error:
                probe.caught(error)
                return None

        return guard

    return decorate
