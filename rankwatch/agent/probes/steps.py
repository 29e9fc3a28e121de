"""Training steps: the `steps` record {count, last_mono_ns, last_s, explicit}.

A step is a round of optimizer steps: it begins when an optimizer steps that has stepped in this round already. So several optimizers, one
optimizer a parameter, or an optimizer that was made anew count as a person would. `rankwatch.step()` replaces this from its first call on.
"""

from __future__ import annotations

from rankwatch.agent import compat, public
from rankwatch.agent.clock import clock
from rankwatch.agent.guard import getpid, here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

_ROUND_LIMIT = 20_000  # optimizers in one round; a script that makes a new one for each step must not fill memory


def arm(rank: Rank, probe: Probe, optimizer_module: Any) -> None:
    """Register the public hook for all optimizers of torch.optim.optimizer."""
    if not probe.on:
        return
    register, reason = compat.STEP_HOOK.find(optimizer_module)
    hide = getattr(getattr(optimizer_module, "torch", None), "_disable_dynamo", None)
    steps = Steps(rank, probe)
    public._set_on_step(steps.explicit_step)
    rank.on_claim.append(steps.write)
    rank.steps_done = lambda: steps.count
    if register is None:
        probe.report("missing", f"{reason}; rankwatch.step() works")
        return
    if hide is None:
        probe.report("missing", "torch has no _disable_dynamo to hide the hook from torch.compile; rankwatch.step() works")
        return

    # Hidden from Dynamo, which would compile one frame more. torch.compiler.disable would import torch._dynamo (seconds) at this point;
    # torch's own variant does at the first step, when the optimizer's construction has done so anyway.
    # A plain function: torch keeps its hidden variant as an attribute of what it is given.
    def count_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        steps.optimizer_stepped(optimizer)

    register(hide(count_step))
    probe.report("armed")


class Steps:
    """Counts and writes. Not thread-safe beyond what the GIL gives: steps come from one thread."""

    def __init__(self, rank: Rank, probe: Probe) -> None:
        self._rank, self._probe = rank, probe
        self.count = 0
        self.explicit = False
        self._last_ns = 0
        self._last_s: float | None = None
        self._stepped: set[int] = set()
        self._cursor = rank.slot.cursors["steps"]

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has finished its step."""
        try:
            if self.explicit or not self._probe.on or getpid() != here.pid:
                return
            identity = id(optimizer)
            if self._stepped and identity not in self._stepped and len(self._stepped) < _ROUND_LIMIT:
                self._stepped.add(identity)
                return
            self._stepped = {identity}
            self._count()
        except Exception as error:
            self._probe.caught(error)

    def explicit_step(self) -> None:
        """The user's own rankwatch.step()."""
        try:
            if not self._probe.on or getpid() != here.pid:
                return
            if not self.explicit:
                self.explicit = True
                self.count = 0
            self._count()
        except Exception as error:
            self._probe.caught(error)

    def write(self) -> None:
        """Write the record as it is."""
        if self.count:
            last_s = "null" if self._last_s is None else f"{self._last_s:.6f}"
            explicit = "true" if self.explicit else "false"
            payload = f'{{"count":{self.count},"last_mono_ns":{self._last_ns},"last_s":{last_s},"explicit":{explicit}}}'
            self._rank.slot.put(self._cursor, payload.encode(), clock.now_ns())

    def _count(self) -> None:
        now_ns = clock.now_ns()
        self._last_s = (now_ns - self._last_ns) / 1e9 if self._last_ns else None
        self._last_ns = now_ns
        self.count += 1
        self.write()
        for look in self._rank.on_step:
            look(now_ns)
