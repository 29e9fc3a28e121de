"""What `rankwatch ablate` records of each optimizer step of a rank, and the end of the rank after its last one.

One line a step of one optimizer, in the rank's record file:
  {kind: "step", n, loss, grad_norm, grads: [norm or null a parameter], param_norm, dtypes, seconds, compiled}
n: rounds of optimizer steps from 1, as the steps probe counts them. loss: mean of what rankwatch.log_loss was given since the line before,
else of the scalars on which backward was called. Norms are of this rank's own shards: no collective is issued. seconds: since the line
before, without the time that recording took. compiled: a graph was compiled meanwhile. A line {kind: "names", names} tells once what the
parameters are called.

Everything waits for the device: this runs in `rankwatch ablate` only. Nothing here draws from a random generator.
"""

from __future__ import annotations

import os
import sys
from time import sleep

from rankwatch.agent import compat, public
from rankwatch.agent.clock import clock
from rankwatch.agent.crash import ending_exception
from rankwatch.agent.guard import getpid, guarded, here
from rankwatch.agent.sources import is_torch_or_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ast import ExceptHandler
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.record_file import RecordFile

PEERS_S = 60.0
"""How long a rank that is done waits for the others, so that no message is lost with the process that sends it."""
GIL_FREE_S = 0.2
"""Then the GIL is free for gloo's threads, which drop Python objects of their last work: one that has not when the process group is destroyed
under the GIL hangs the rank for ever (seen on torch 2.13, a thread of ProcessGroupGloo::runLoop against the reducer's destructor)."""
IGNORED_ENDS = 3  # times that SystemExit was swallowed, before the process is ended without it
_ROUND_LIMIT = 20_000
_NAMES = 4096
_LOSSES = 64


class Steps:
    """Of one process. `compiles` is counted up by the backend."""

    def __init__(self, file: RecordFile, probe: Probe, last: int, world: int) -> None:
        self._file, self._probe, self._last, self._world = file, probe, last, world
        self.compiles = 0
        self.round = 0
        self._per_round = 0  # optimizers in a round, known after the first
        self._stepped: list[int] = []
        self._roots: list[Any] = []
        self._logged: list[Any] = []
        self._line: dict[str, Any] = {}
        self._named = False
        self._compiles_before = 0
        self._since_ns = clock.now_ns()
        self._own_ns = 0
        self._codes: list[Any] = []
        self._done = False
        self._ends = 0  # times that SystemExit was raised
        self._raised_in: list[tuple[str, int]] = []  # (file, line) of its callers at the first, innermost first

    # -- hooks

    def watch_optimizers(self, optimizer_module: Any) -> None:
        """Hooks before and after each optimizer step, hidden from Dynamo. Raises where torch has no such hooks."""
        after, reason = compat.STEP_HOOK.find(optimizer_module)
        before, reason_before = compat.STEP_PRE_HOOK.find(optimizer_module)
        hide = getattr(getattr(optimizer_module, "torch", None), "_disable_dynamo", None)
        if after is None or before is None or hide is None:
            raise RuntimeError(reason or reason_before or "torch has no _disable_dynamo")
        begins, ends = guarded(self._probe)(self.begins), guarded(self._probe)(self.ends)

        def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            begins(optimizer)

        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            ends(optimizer)
            self.end_after_last()

        before(hide(before_step))
        after(hide(after_step))

    def watch_roots(self, torch: Any) -> None:
        """See the scalars on which backward is called. Dynamo never traces into this function; `hide_from_dynamo` keeps it off this wrapper too."""
        autograd = torch.autograd
        run, _reason = compat.RUN_BACKWARD.find(autograd)
        hide = getattr(torch, "_disable_dynamo", None)
        if run is None or hide is None:
            return
        seen = guarded(self._probe)(self._root)

        def note(roots: Any) -> None:
            seen(roots)

        noted = hide(note)

        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad"):
                noted(t_outputs)
            return run(t_outputs, *args, **kwargs)

        autograd._engine_run_backward = _engine_run_backward
        self._codes.append(_engine_run_backward.__code__)

    def hide_from_dynamo(self, skip_code: Callable[[Any], None]) -> None:
        """Have Dynamo leave our wrappers to Python. What they call is compiled as ever: recomputation in the backward pass may be."""
        for code in self._codes:
            skip_code(code)

    def at_exit(self) -> None:
        """Write the end of this process, and stand no peer in the way."""
        import atexit

        atexit.register(guarded(self._probe)(self._exits))

    # -- one step

    def begins(self, optimizer: Any) -> None:
        """An optimizer is about to step: gradients are whole."""
        torch = sys.modules["torch"]
        if self._done or _capturing(torch):
            return
        _synchronize(torch)
        arrived_ns = clock.now_ns()
        identity = id(optimizer)
        if not self._stepped or identity in self._stepped or len(self._stepped) >= _ROUND_LIMIT:
            self._per_round = len(self._stepped)
            self._stepped = []
            self.round += 1
        self._stepped.append(identity)
        parameters = _parameters(optimizer)
        if not self._named:
            self._named = True
            self._file.write("names", names=_names(torch, parameters[:_NAMES]))
        gradients = [_local(parameter.grad) for parameter in parameters]
        norms = _norms(torch, gradients)
        self._line = {
            "n": self.round,
            "loss": self._loss(),
            "grad_norm": _whole([norm for norm in norms if norm is not None]),
            "grads": [None if norm is None else float(f"{norm:.9g}") for norm in norms[:_NAMES]],
            "dtypes": sorted({str(gradient.dtype).removeprefix("torch.") for gradient in gradients if gradient is not None}),
        }
        self._own_ns += clock.now_ns() - arrived_ns

    def ends(self, optimizer: Any) -> None:
        """The optimizer has stepped: write the line."""
        if not self._line:
            return
        torch = sys.modules["torch"]
        _synchronize(torch)
        arrived_ns = clock.now_ns()
        norms = _norms(torch, [_local(parameter) for parameter in _parameters(optimizer)])
        self._line["param_norm"] = _whole([norm for norm in norms if norm is not None])
        self._write(arrived_ns)

    def explicit(self) -> None:
        """rankwatch.step() in a job whose optimizers nobody sees."""
        if self._stepped or self._done:
            return
        self.round += 1
        self._line = {"n": self.round, "loss": self._loss(), "grad_norm": None, "grads": [], "dtypes": [], "param_norm": None}
        self._write(clock.now_ns())

    def _write(self, arrived_ns: int) -> None:
        self._line["seconds"] = round(max(0, arrived_ns - self._since_ns - self._own_ns) / 1e9, 6)
        self._line["compiled"] = self.compiles != self._compiles_before
        self._compiles_before = self.compiles
        self._file.write("step", **self._line)
        self._line = {}
        self._own_ns = 0
        self._since_ns = clock.now_ns()

    def _root(self, roots: Any) -> None:
        root = roots[0] if isinstance(roots, (tuple, list)) and roots else roots
        if getattr(root, "numel", lambda: 0)() == 1 and len(self._roots) < _LOSSES:
            self._roots.append(_local(root.detach()))

    def loss_logged(self, loss: Any) -> None:
        """The script's own loss, a tensor of one element or a number."""
        if len(self._logged) < _LOSSES:
            self._logged.append(loss.detach() if hasattr(loss, "detach") else loss)

    def _loss(self) -> float | None:
        found = [float(loss) for loss in self._logged or self._roots]
        self._logged, self._roots = [], []
        return sum(found) / len(found) if found else None

    # -- the end

    def end_after_last(self) -> None:
        """After the last step, once all ranks are there: SystemExit(0), which runs every `finally` and no `except Exception`.

        A script that swallows it meets it again at its next step, which is recorded; after the third time the process ends without it.
        No collective is issued.
        """
        if not self._probe.on or getpid() != here.pid or self.round < self._last:
            return
        if self.round == self._last and len(self._stepped) < self._per_round:
            return
        if not self._done:
            self._done = True
            self._file.write("last", n=self.round)
            self._leave_word()
            self._wait_for_peers()
            sleep(GIL_FREE_S)
        if self._ends == 1:
            self._caught()
        if self._ends >= IGNORED_ENDS:
            self._exits()
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except Exception:
                    pass
            os._exit(0)
        if not self._ends:
            self._note_lines()
        self._ends += 1
        raise SystemExit(0)

    def _note_lines(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not is_torch_or_stdlib(frame.f_code.co_filename):
                self._raised_in.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back

    def _caught(self) -> None:
        """{kind: "caught", where}: the script goes on after SystemExit; where: "train.py:31", the innermost handler that keeps it, or ""."""
        where = ""
        try:
            for path, line in self._raised_in:
                handler = handler_of(path, line)
                if handler is not None:
                    where = f"{os.path.basename(path)}:{handler}"
                    break
        except Exception:  # a source that Python's own parser does not take (RecursionError)
            pass
        self._file.write("caught", where=where)

    def _leave_word(self) -> None:
        try:
            os.close(os.open(self._file.path + ".done", os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError:
            pass

    def _wait_for_peers(self) -> None:
        folder = os.path.dirname(self._file.path)
        end_ns = clock.now_ns() + int(PEERS_S * 1e9)
        while clock.now_ns() < end_ns:
            try:
                if sum(name.endswith(".done") for name in os.listdir(folder)) >= self._world:
                    return
            except OSError:
                return
            sleep(0.02)

    def _exits(self) -> None:
        self._file.write("end", exception=ending_exception())
        self._leave_word()


def handler_of(path: str, line: int) -> int | None:
    """The line of the `except` that keeps a SystemExit raised at a line: innermost first, those that raise on left out. None where there is none."""
    import ast

    try:
        with open(path, encoding="utf-8") as source:
            tree = ast.parse(source.read())
    except (OSError, ValueError, SyntaxError):
        return None
    found: tuple[int, int] | None = None
    for block in ast.walk(tree):
        if isinstance(block, ast.Try) and block.body[0].lineno <= line <= (block.body[-1].end_lineno or 0):
            handler = next((one for one in block.handlers if _takes_exits(one)), None)
            raises = handler is None or any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
            if handler is not None and not raises and (found is None or block.lineno > found[0]):
                found = block.lineno, handler.lineno
    return found and found[1]


def _takes_exits(handler: ExceptHandler) -> bool:
    import ast

    names = [] if handler.type is None else getattr(handler.type, "elts", [handler.type])
    return not names or any(ast.unparse(name).rpartition(".")[2] in ("SystemExit", "BaseException") for name in names)


def watch_what_scripts_say(steps: Steps, probe: Probe, hide: Callable[[Any], Any]) -> None:
    """Chain onto what rankwatch.step() and rankwatch.log_loss() call."""
    previous_loss = public._on_loss
    logged = guarded(probe)(steps.loss_logged)

    def note_loss(loss: Any) -> None:
        logged(loss)

    noted = hide(note_loss)

    def on_loss(loss: Any) -> None:
        if previous_loss is not None:
            previous_loss(loss)
        noted(loss)

    public._set_on_loss(on_loss)
    previous = public._on_step
    seen = guarded(probe)(steps.explicit)

    def on_step() -> None:
        if previous is not None:
            previous()
        seen()
        steps.end_after_last()

    public._set_on_step(on_step)


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Any) -> Any:
    """This rank's own part of a tensor; None stays None."""
    if tensor is None:
        return None
    to_local = getattr(tensor, "_local_tensor", None)  # DTensor: to_local() would build an autograd node
    tensor = (tensor if to_local is None else to_local).detach()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _norms(torch: Any, tensors: list[Any]) -> list[float | None]:
    """L2 norms, NaN and infinity included; None for no tensor."""
    with torch.no_grad():
        return [None if tensor is None else float(_norm(torch, tensor).item()) for tensor in tensors]


def _norm(torch: Any, tensor: Any) -> Any:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        tensor = tensor.float()
    return torch.linalg.vector_norm(tensor, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _whole(norms: list[float]) -> float | None:
    return sum(norm * norm for norm in norms) ** 0.5 if norms else None


def _synchronize(torch: Any) -> None:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available() and (not torch.cuda.is_available() or torch.cuda.is_initialized()):
        accelerator.synchronize()


def _capturing(torch: Any) -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _names(torch: Any, parameters: list[Any]) -> list[str | None]:
    """Names as the outermost module knows them, without what DDP and torch.compile put before them. Looks at all objects once."""
    import gc

    module_class = torch.nn.Module
    modules = [found for found in gc.get_objects() if issubclass(type(found), module_class)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    known: dict[int, str] = {}
    for module in modules:
        if id(module) not in inner:
            for name, parameter in module.named_parameters():
                known.setdefault(id(parameter), ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod")))
    return [known.get(id(parameter)) for parameter in parameters]
