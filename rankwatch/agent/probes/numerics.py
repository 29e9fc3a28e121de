"""Signs of garbage numbers, off unless `--probe numerics`: gradients and losses that are not finite, checksums of replicated parameters.

The `numerics` record (step: of the one under way, from 1; parameters are looked at before it changes them):

  step, every     `every`: steps between two looks at the parameters, and on a CPU at the gradients
  grad, loss      {checks, step, value (the last finite one), bad (checks that were not), bad_step (the first), bad_value: nan|inf, good_step
                  (the last finite one before it)}; grad.by: clip (what clip_grad_norm_ gave) or norm (our own)
  replicas        {group, ranks ("": see the groups record), model, total, unsynced, names {number: name},
                  checks [[step, collectives issued, model, first number, sums, norms]]}

Nothing waits for a device, no collective is issued, nothing is looked at while a CUDA graph is captured. Gradients that GradScaler hands to a
fused optimizer (`found_inf`) are not judged: it skips such steps itself; steps that it skips before the optimizer are never seen.
"""

from __future__ import annotations

import functools
import math
import sys

from rankwatch.agent import compat, public
from rankwatch.agent.clock import clock
from rankwatch.agent.guard import guarded
from rankwatch.agent.readback import DEVICES, Readback
from rankwatch.agent.replicas import Replica, Replicas, checksums, decode, l2_norms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

DEFAULT_EVERY = 50
CHECKS_KEPT = 3
WRITE_EVERY_NS = 1_000_000_000  # news is written at once
SHARE = 0.005  # of a step's time, for the gradients' norm on a GPU; beyond it only every 2nd, 4th, ... step is looked at
MANY_OPTIMIZERS = 8
MAX_CLIPS = 4

_numerics: Numerics | None = None


def arm(rank: Rank, probe: Probe, module: Any) -> None:
    """Hang the one hook that belongs to `module`: torch.optim.optimizer, torch.nn.utils.clip_grad or torch.nn.parallel.distributed."""
    global _numerics
    if not probe.on:
        return
    if _numerics is None:
        _numerics = Numerics(rank, probe, int(rank.asked.get(probe.name) or DEFAULT_EVERY))
    if module.__name__ == compat.STEP_PRE_HOOK.module:
        register, reason = compat.STEP_PRE_HOOK.find(module)
        hide = getattr(getattr(module, "torch", None), "_disable_dynamo", None)
        if register is None or hide is None:
            probe.report("missing", reason or "torch has no _disable_dynamo to hide the hook from torch.compile")
            return
        register(hide(_numerics.hook()))
        public._set_on_loss(_numerics.loss_hook())
        rank.on_claim.append(_numerics.write)
        rank.on_exit.append(_numerics.finish)
        probe.report("armed")
    elif module.__name__ == compat.CLIP_NORM.module:
        clip, reason = compat.CLIP_NORM.find(module)
        if clip is not None:
            module.clip_grad_norm_ = _numerics.wrap_clip(clip)
    else:
        helper, reason = compat.DDP_HELPER.find(module)
        if helper is not None:
            module.DistributedDataParallel._ddp_init_helper = _numerics.wrap_ddp(helper)
    if reason:
        probe.report("armed", reason)


class Series:
    """What is known of one number a step: the last finite value, the first one that is not."""

    def __init__(self) -> None:
        self.checks = self.step = self.bad = self.bad_step = self.good_step = 0
        self.value: float | None = None
        self.bad_value = ""

    def add(self, step: int, value: float) -> bool:
        """Whether this is the first one that is not finite."""
        self.checks, self.step = self.checks + 1, max(self.step, step)
        if math.isfinite(value):
            self.value = float(f"{value:.6g}")
            if not self.bad:
                self.good_step = max(self.good_step, step)
            return False
        self.bad += 1
        if self.bad == 1:
            self.bad_step, self.bad_value = step, "nan" if math.isnan(value) else "inf"
        return self.bad == 1

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("checks", "step", "value", "bad", "bad_step", "bad_value", "good_step")}


class Numerics:
    """All three looks of one process. Steps come from one thread."""

    def __init__(self, rank: Rank, probe: Probe, every: int) -> None:
        self._rank = rank
        self._losses_follow: bool | None = None  # the script logs a loss after the optimizer's step
        self._torch = sys.modules["torch"]
        self.every = every
        self.step = 0
        self._grad, self._loss, self._grad_by = Series(), Series(), ""
        self._replicas = Replicas()
        self._readback = Readback(self._torch)
        self._stepped: set[int] = set()
        self._looked: set[int] = set()  # DDP modules looked at in this round
        self._clips: list[Any] = []
        self._checks: list[list[Any]] = []
        self._shown: Replica | None = None
        self._names: dict[int, str] = {}
        self._optimizers = 1  # in the round before
        self._stride = 1
        self._cost_ns = 0
        self._step_ns = 0
        self._began_ns = self._written_ns = 0
        self._guard = guarded(probe)
        self.finish = self._guard(self._finish)

    def hook(self) -> Any:
        """For register_optimizer_step_pre_hook; a plain function, since torch keeps its hidden variant as an attribute of it."""
        steps = self._guard(self._steps)

        def look_at_numbers(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            steps(optimizer)

        return look_at_numbers

    def loss_hook(self) -> Any:
        """For rankwatch.log_loss; nothing at all inside a compiled frame."""
        torch, log = self._torch, self._guard(self._log_loss)

        def log_loss(loss: Any) -> None:
            if not torch.compiler.is_compiling():
                log(loss)

        return log_loss

    def wrap_clip(self, clip: Any) -> Any:
        """clip_grad_norm_ as before; what it returned is kept until the optimizer steps. Dynamo sees torch's own function alone."""
        torch, clipped = self._torch, self._guard(self._clipped)

        @functools.wraps(clip)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            if not torch.compiler.is_compiling():
                clipped(norm)
            return norm

        return clip_grad_norm_

    def wrap_ddp(self, helper: Any) -> Any:
        """_ddp_init_helper as before; the module and the parameters that it reduces are noted."""
        add = self._guard(self._replicas.add)

        @functools.wraps(helper)
        def _ddp_init_helper(module: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            result = helper(module, parameters, *args, **kwargs)
            add(module, parameters)
            return result

        return _ddp_init_helper

    def write(self) -> None:
        """Write the record as it is."""
        record: dict[str, Any] = {"step": self.step, "every": self.every}
        record["grad"] = {**self._grad.record(), "by": self._grad_by}
        record["loss"] = self._loss.record()
        if self._shown is not None:
            shown = self._shown
            replicas = {"group": shown.group, "ranks": shown.ranks, "model": shown.model, "total": len(shown.parameters), "unsynced": shown.unsynced}
            record["replicas"] = {**replicas, "names": self._names, "checks": self._checks}
        self._rank.slot.write_json("numerics", record)
        self._written_ns = clock.now_ns()

    # -- the hooks, guarded ----------------------------------------------------------------------------------------------------

    def _steps(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        new_round = self._round(id(optimizer))
        parameter = next((p for group in optimizer.param_groups for p in group["params"] if p.requires_grad), None)
        if parameter is None or parameter.device.type not in DEVICES or self._readback.capturing(parameter.device):
            return
        if new_round:
            self._readback.poll()
        self._look_at_gradients(optimizer, parameter)
        replica = self._replicas.of(parameter)
        if replica is not None:
            self._look_at_replica(replica)
        if new_round and clock.now_ns() - self._written_ns >= WRITE_EVERY_NS:
            self.write()

    def _log_loss(self, loss: Any) -> None:
        if self._losses_follow is None:
            self._losses_follow = self.step > 0
        step = self.step + (not self._losses_follow)
        if not isinstance(loss, self._torch.Tensor):
            self._lost(step, float(loss))
            return
        if loss.numel() != 1 or type(loss) not in (self._torch.Tensor, self._torch.nn.Parameter) or loss.device.type not in DEVICES:
            return
        if not self._readback.capturing(loss.device):
            self._readback.take(loss.detach().reshape(1), lambda values: self._lost(step, float(values[0])))

    def _clipped(self, norm: Any) -> None:
        if type(norm) is self._torch.Tensor and norm.numel() == 1 and len(self._clips) < MAX_CLIPS:
            self._clips.append(norm.detach().reshape(()))

    def _finish(self) -> None:
        if self.step or self._loss.checks:
            self._readback.poll()
            self.write()

    # -- what they do ------------------------------------------------------------------------------------------------------------

    def _round(self, identity: int) -> bool:
        """Count rounds of optimizers as the steps probe does; whether this optimizer begins one."""
        if self._stepped and identity not in self._stepped and len(self._stepped) < 20_000:
            self._stepped.add(identity)
            return False
        self._optimizers = max(1, len(self._stepped))
        self._stepped = {identity}
        self._looked = set()
        now_ns = clock.now_ns()
        if self._began_ns:
            self._step_ns = now_ns - self._began_ns
        self._began_ns = now_ns
        self.step += 1
        return True

    def _look_at_gradients(self, optimizer: Any, parameter: Any) -> None:
        clips, self._clips = self._clips, []
        if getattr(optimizer, "found_inf", None) is not None:
            return
        step, device = self.step, parameter.device
        if clips:
            same = [clip.to(self._torch.float32) for clip in clips if clip.device == device]
            if same:
                self._readback.take(self._torch.stack(same), lambda values: self._normed(step, max(values, key=_worst), "clip"))
            return
        if self._optimizers > MANY_OPTIMIZERS and len(self._stepped) != 1 + step % self._optimizers:
            return
        if step % (self.every if device.type == "cpu" else self._stride):
            return
        began_ns = clock.now_ns()
        norm = gradient_norm(self._torch, optimizer, device)
        if norm is not None:
            self._readback.take(norm, lambda values: self._normed(step, float(values[0]), "norm"))
            self._afford(clock.now_ns() - began_ns)

    def _afford(self, cost_ns: int) -> None:
        """Look less often where a look costs more than its share of a step."""
        self._cost_ns = cost_ns if not self._cost_ns else min(cost_ns, (7 * self._cost_ns + cost_ns) // 8)
        while self._stride < self.every and self._step_ns and self._cost_ns > SHARE * self._stride * self._step_ns:
            self._stride *= 2

    def _look_at_replica(self, replica: Replica) -> None:
        replica.look()
        if (self.step - 1) % self.every or replica.model in self._looked:
            return
        self._looked.add(replica.model)
        replica.describe(self._torch)
        first, tensors = replica.sample()
        if not tensors or replica.unsynced:
            self._shown = replica
            return
        step, issued = self.step - 1, replica.issued()
        self._readback.take(checksums(self._torch, tensors), lambda values: self._summed(replica, step, issued, first, values))

    def _normed(self, step: int, value: float, by: str) -> None:
        self._grad_by = by
        if self._grad.add(step, value):
            self.write()

    def _lost(self, step: int, value: float) -> None:
        if self._loss.add(step, value):
            self.write()

    def _summed(self, replica: Replica, step: int, issued: int, first: int, values: list[int]) -> None:
        sums, norms = decode(values)
        shown = [float(f"{norm:.6g}") if math.isfinite(norm) else None for norm in norms]
        self._checks = [*self._checks[1 - CHECKS_KEPT :], [step, issued, replica.model, first, " ".join(sums), shown]]
        self._shown = replica
        self._names = {first + number: replica.names[first + number] for number in range(len(sums))}
        self.write()


def gradient_norm(torch: Any, optimizer: Any, device: Any) -> Any:
    """The L2 norm of the optimizer's dense gradients on `device`, at least in float32, as a flat tensor of one value; None without any.

    Of a sharded gradient (DTensor) this rank's part counts: a norm of the whole would be a collective.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grads = [getattr(grad, "_local_tensor", grad) for grad in grads]
    kinds: dict[Any, list[Any]] = {}
    for grad in grads:
        if grad.layout is torch.strided and grad.device == device and grad.is_floating_point() and grad.numel() and grad.element_size() > 1:
            kinds.setdefault(grad.dtype, []).append(grad.detach())
    if not kinds:
        return None
    with torch.no_grad():
        found = [torch.linalg.vector_norm(l2_norms(torch, same)) for same in kinds.values()]
        return (found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack([norm.to(torch.float32) for norm in found]))).reshape(1)


def _worst(value: float) -> tuple[bool, float]:
    return not math.isfinite(value), value if math.isfinite(value) else 0.0
