"""`rankwatch ablate` inside a rank: torch.compile gets the plan's backend, whatever the script asked for, and the job ends after the plan's steps.

Only where RANKWATCH_ABLATE_PLAN names a plan, the JSON file that commands/ablation/plan.py writes:
  {rung, steps, seed, eager: [frame or frame#graph], skip: [frame] or ["*"], records: folder}
`rung` is off, eager, aot_eager, aot_eager_decomp_partition, inductor (without mode and options) or given. A backend that stands lower
than the rung stays as it is, so that torch's own helpers, which compile with `eager`, are never raised.
`eager`: frames whose graphs run as Dynamo captured them. `skip`: frames that Dynamo leaves alone with all they call.

Sources (torch 2.9-2.14): torch/_dynamo/eval_frame.py resolves each backend through its global get_compiler_fn, for torch.compile,
Module.compile, decorators and stances alike; its global _stance is what torch.compiler.set_stance changes.
"""

from __future__ import annotations

import json
import os
import sys

from rankwatch.agent import compat
from rankwatch.agent.ablate_steps import Steps, watch_what_scripts_say
from rankwatch.agent.guard import Probe, getpid, guarded
from rankwatch.agent.record_file import RecordFile
from rankwatch.agent.sources import is_users
from rankwatch.wire import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType
    from typing import Any

LEVELS = {
    "off": 0,
    "eager": 1, "eager_noexcept": 1, "eager_debug": 1, "pre_dispatch_eager": 1,
    "aot_eager": 2, "aot_eager_default_partitioner": 2,
    "aot_eager_decomp_partition": 3, "aot_eager_decomp_partition_with_mode": 3, "aot_eager_decomp_partition_crossref": 3,
    "inductor": 4,
}  # fmt: skip
GIVEN = 5  # a backend of the user's own, or inductor with mode= or options=
EVERY_FRAME = "*"

_WALK_FRAMES = 400
_OWN_CAPTURES = ("torch._dynamo.eval_frame", "torch._dynamo.testing", "torch._export", "torch.export", "torch.onnx")
_KEPT_NAMES = 64


class Ablation:
    """The plan in this process. One object, made when the first awaited module has been imported."""

    def __init__(self, plan: Mapping[str, Any], rank: int, world: int) -> None:
        self.rung = str(plan["rung"])
        self.level = LEVELS.get(self.rung, GIVEN)
        self.seed = plan.get("seed")
        self.eager = frozenset(plan.get("eager") or ())
        self.skip = frozenset(plan.get("skip") or ())
        self.file = RecordFile(os.path.join(str(plan["records"]), f"rank_{rank}.jsonl"))
        self.probe = Probe("ablate", lambda: self.file.write("problem", at="a hook", text=self.probe.detail))
        self.steps = Steps(self.file, self.probe, int(plan["steps"]), world)
        self._graphs: dict[str, int] = {}
        self._given: set[str] = set()
        self._frames: set[str] = set()

    def arm(self, module: Any) -> None:
        """Hang the hooks of one module; what fails is written into the record."""
        arms = {
            "torch": self._torch,
            "numpy": self._numpy,
            "torch.optim.optimizer": self._optimizer,
            "torch._dynamo.eval_frame": self._eval_frame,
            "torch._dynamo.convert_frame": self._convert_frame,
            "torch._inductor.config": self._inductor_config,
        }
        try:
            arms[module.__name__](module)
        except Exception as error:
            self.file.write("problem", at=module.__name__, text=f"{type(error).__name__}: {error}"[:300])

    # -- one method a module

    def _torch(self, torch: Any) -> None:
        self.file.write("start", rung=self.rung, torch=compat.version_of(torch), pid=getpid())
        if self.seed is not None:
            import random

            random.seed(self.seed)
            torch.manual_seed(self.seed)
        self.steps.watch_roots(torch)
        self.steps.at_exit()

    def _numpy(self, numpy: Any) -> None:
        if self.seed is not None:
            numpy.random.seed(self.seed % 2**32)

    def _optimizer(self, optimizer_module: Any) -> None:
        self.steps.watch_optimizers(optimizer_module)
        watch_what_scripts_say(self.steps, self.probe, optimizer_module.torch._disable_dynamo)

    def _inductor_config(self, config: Any) -> None:
        config.fallback_random = True  # dropout of inductor's own generator would differ from eager's in a healthy job

    def _eval_frame(self, eval_frame: Any) -> None:
        if self.rung == "off":
            eval_frame._stance = eval_frame.DynamoStance("force_eager")
        resolve, reason = compat.GET_COMPILER.find(eval_frame)
        if resolve is None:
            self.file.write("problem", at="torch._dynamo.eval_frame", text=reason)
            return
        self.steps.hide_from_dynamo(eval_frame.skip_code)
        eval_frame.get_compiler_fn = self.wrap_resolve(resolve, eval_frame.lookup_backend)

    def _convert_frame(self, convert_frame: Any) -> None:
        if self.skip:
            wrapper = convert_frame.CatchErrorsWrapper
            wrapper.__call__ = self.wrap_convert(wrapper.__call__, sys.modules["torch._dynamo.types"])

    # -- backends

    def wrap_resolve(self, resolve: Callable[[Any], Any], lookup: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function that torch gives every backend to."""
        wanted = guarded(self.probe)(self._wanted)

        def get_compiler_fn(compiler_fn: Any) -> Any:
            exporting = sys._getframe(1).f_locals.get("export") is True
            return resolve((None if exporting else wanted(compiler_fn, lookup)) or compiler_fn)

        return get_compiler_fn

    def _wanted(self, given: Any, lookup: Callable[[Any], Any]) -> Any:
        """Our backend in the place of `given`; None to leave it. A callable that torch itself captures graphs with is left."""
        if given is None or (str(getattr(given, "__module__", "")).startswith(_OWN_CAPTURES) and not hasattr(given, "compiler_name")):
            return None
        name, level = described(given)
        if name not in self._given and len(self._given) < _KEPT_NAMES:
            self._given.add(name)
            self.file.write("given", backend=name, level=level)
        function = lookup(given) if isinstance(given, str) else given
        lowered = lookup(self.rung if self.rung in LEVELS and self.rung != "off" else "eager") if level > self.level else None
        return Backend(self, function, lowered, lookup("eager"), self.rung if lowered is not None else name.split(" ")[0])

    def next_graph(self, frame: str) -> str:
        """`frame#2` for the third graph of a frame in this process."""
        number = self._graphs.get(frame, 0)
        self._graphs[frame] = number + 1
        return f"{frame}#{number}"

    # -- frames that Dynamo is to leave alone

    def wrap_convert(self, convert: Any, types: Any) -> Any:
        """The method that Dynamo hands each frame to."""
        wants = guarded(self.probe)(self._leaves)
        action = types.FrameAction
        recursively = types.FrameExecStrategy(action.SKIP, action.SKIP)

        def __call__(wrapper: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            if wants(frame.f_code):
                return types.ConvertFrameReturn(frame_exec_strategy=recursively)
            return convert(wrapper, frame, *args, **kwargs)

        return __call__

    def _leaves(self, code: CodeType) -> bool:
        if not is_users(code.co_filename):
            return False
        frame = name_of(code)
        if frame not in self._frames:
            self._frames.add(frame)
            self.file.write("frame", frame=frame)
        return EVERY_FRAME in self.skip or frame in self.skip


class Backend:
    """What torch calls with each captured graph. Code caches are keyed by the innermost `_torchdynamo_orig_backend`: the given one, as ever."""

    def __init__(self, ablation: Ablation, function: Any, lowered: Any, eager: Any, name: str) -> None:
        self._ablation, self._lowered, self._eager = ablation, lowered, eager
        self._torchdynamo_orig_backend = function
        self.compiler_name = self.__name__ = name
        if hasattr(function, "get_compiler_config"):
            self.get_compiler_config = function.get_compiler_config

    def __call__(self, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        ablation = self._ablation
        frame = guarded(ablation.probe)(compiling_frame)() or "?"
        key = ablation.next_graph(frame)
        as_captured = frame in ablation.eager or key in ablation.eager
        facts = guarded(ablation.probe)(facts_of)(graph) or {}
        facts |= {"frame": frame, "key": key, "backend": "eager" if as_captured else self.compiler_name}
        ablation.steps.compiles += 1
        try:
            if as_captured:
                compiled = self._eager(graph, inputs)
            elif self._lowered is not None:
                compiled = self._lowered(graph, inputs)
            else:
                compiled = self._torchdynamo_orig_backend(graph, inputs, **kwargs)
        except Exception as error:
            inner = getattr(error, "inner_exception", None) or error
            ablation.file.write("graph", ok=False, error=type(inner).__name__, text=str(inner)[:300], **facts)
            raise
        ablation.file.write("graph", ok=True, **facts)
        return compiled


def described(given: Any) -> tuple[str, int]:
    """("inductor mode/options", 5): the name that people know a backend by, and its place among the rungs."""
    name = given if isinstance(given, str) else getattr(given, "compiler_name", None) or getattr(given, "__name__", None) or type(given).__name__
    level = LEVELS.get(str(name), GIVEN)
    more = getattr(given, "config", None) or getattr(given, "kwargs", None)
    if level == LEVELS["inductor"] and isinstance(more, dict) and more:
        return f"{name} {json.dumps({str(key): str(value) for key, value in more.items()})[:200]}", GIVEN
    return str(name), level


def compiling_frame() -> str:
    """`forward@model.py:31`: the frame whose graph this is, from the caller torch._dynamo.convert_frame._compile; "?" when there is none."""
    frame = sys._getframe(1)
    for _ in range(_WALK_FRAMES):
        if frame.f_code.co_name == "_compile" and frame.f_code.co_filename.endswith("convert_frame.py"):
            code: Any = frame.f_locals.get("code")
            return name_of(code) if hasattr(code, "co_firstlineno") else "?"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


def name_of(code: CodeType) -> str:
    return f"{code.co_name}@{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def facts_of(graph: Any) -> dict[str, Any]:
    """{ops, dtypes}: how many operations, and the element types that they give (bfloat16 under autocast)."""
    operations, dtypes = 0, set()
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            operations += 1
        dtype = getattr(node.meta.get("example_value"), "dtype", None)
        if dtype is not None and getattr(dtype, "is_floating_point", False):
            dtypes.add(str(dtype).removeprefix("torch."))
    return {"ops": operations, "dtypes": sorted(dtypes)}


_ablation: Ablation | None = None


def arm(module: Any, environ: Mapping[str, str]) -> None:
    """One of boot.ABLATED has been imported. Raises what reading the plan raises; the import hook swallows it."""
    global _ablation
    if _ablation is None:
        with open(environ[env.ABLATE_PLAN], encoding="utf-8") as file:
            plan = json.load(file)
        _ablation = Ablation(plan, int(environ["RANK"]), int(environ.get("WORLD_SIZE") or 1))
    _ablation.arm(module)
