"""Where each torch internal that the agent touches lives, and whether it still looks as it did in torch 2.9-2.14.

Modules are handed in, nothing is imported. A lookup gives the value, or None and the reason; the probe then says so and does without.
Sources: torch/_dynamo/utils.py, eval_frame.py and backends/distributed.py, torch/optim/optimizer.py, torch/distributed/distributed_c10d.py,
torch/_inductor/async_compile.py, select_algorithm.py, runtime/triton_heuristics.py, cudagraph_trees.py and cudagraph_utils.py,
torch/cuda/graphs.py of the six releases.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Target:
    """One function that the agent replaces or wraps: `path` inside module `module`, and the names of its leading parameters."""

    __slots__ = ("module", "parameters", "path", "probe")

    def __init__(self, probe: str, module: str, path: str, parameters: tuple[str, ...]) -> None:
        self.probe, self.module, self.path, self.parameters = probe, module, path, parameters

    def find(self, module: Any) -> tuple[Any, str]:
        """(function, "") or (None, why it cannot be used)."""
        value = module
        for name in self.path.split("."):
            value = getattr(value, name, None)
            if value is None:
                return None, f"{self.module}.{self.path} is absent in torch {version_of(module)}"
        if not callable(value):
            return None, f"{self.module}.{self.path} is no function in torch {version_of(module)}"
        names = parameters_of(value)
        if names is not None and names[: len(self.parameters)] != self.parameters:
            return None, f"{self.module}.{self.path}({', '.join(names)}) has other parameters in torch {version_of(module)}"
        return value, ""


CHROMIUM_EVENT = Target("compile", "torch._dynamo.utils", "record_chromium_event_internal", ("event",))
COMPILATION_EVENT = Target("compile", "torch._dynamo.utils", "log_compilation_event", ("metrics",))
INSTANT_EVENT = Target("compile", "torch._dynamo.utils", "ChromiumEventLogger.log_instant_event", ("self", "event_name", "time_ns", "metadata"))
OPTIMIZE = Target("compile", "torch._dynamo.eval_frame", "_optimize", ("rebuild_ctx", "backend"))
KERNEL_PROGRESS = Target("compile", "torch._inductor.async_compile", "tqdm", ())
CHOICES = Target("compile", "torch._inductor.select_algorithm", "AlgorithmSelectorCache.benchmark_choices", ("cls", "choices", "autotune_args"))
CHOICE = Target("compile", "torch._inductor.select_algorithm", "AlgorithmSelectorCache.benchmark_choice", ("cls", "choice", "autotune_args"))
CONFIGS = Target("compile", "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.benchmark_all_configs", ("self",))
CONFIG = Target("compile", "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.bench", ("self", "launcher"))
PRECOMPILED = Target("compile", "torch._inductor.select_algorithm", "as_completed", ())
PRECOMPILE_CONFIG = Target("compile", "torch._inductor.runtime.triton_heuristics", "CachingAutotuner._precompile_config", ("self", "cfg"))
DESCENT = Target("compile", "torch._inductor.runtime.coordinate_descent_tuner", "CoordescTuner.autotune", ("self", "func", "baseline_config"))
DESCENT_CALL = Target("compile", "torch._inductor.runtime.coordinate_descent_tuner", "CoordescTuner.call_func", ("self", "func", "config"))
TRITON_PRUNE = Target("compile", "triton.runtime.autotuner", "Autotuner.prune_configs", ("self", "kwargs"))
TRITON_BENCH = Target("compile", "triton.runtime.autotuner", "Autotuner._bench", ("self",))
TRITON_COMPILE = Target("compile", "triton.runtime.jit", "JITFunction._do_compile", ("self", "key"))
DDP_INIT = Target("ddp", "torch._dynamo.backends.distributed", "DDPOptimizer.__init__", ("self", "bucket_bytes_cap", "backend_compile_fn"))
DDP_COMPILE = Target("ddp", "torch._dynamo.backends.distributed", "DDPOptimizer.compile_fn", ("self", "gm", "example_inputs"))
DDP_SUBMOD = Target("ddp", "torch._dynamo.backends.distributed", "SubmodCompiler.compile_submod", ("self", "input_mod", "args", "kwargs"))
STEP_HOOK = Target("steps", "torch.optim.optimizer", "register_optimizer_step_post_hook", ("hook",))
STEP_PRE_HOOK = Target("numerics", "torch.optim.optimizer", "register_optimizer_step_pre_hook", ("hook",))
CLIP_NORM = Target("numerics", "torch.nn.utils.clip_grad", "clip_grad_norm_", ("parameters", "max_norm", "norm_type"))
DDP_HELPER = Target("numerics", "torch.nn.parallel.distributed", "DistributedDataParallel._ddp_init_helper", ("self", "parameters"))
STEP_PRE_HOOK = Target("ablate", "torch.optim.optimizer", "register_optimizer_step_pre_hook", ("hook",))
GET_COMPILER = Target("ablate", "torch._dynamo.eval_frame", "get_compiler_fn", ("compiler_fn",))
RUN_BACKWARD = Target("ablate", "torch.autograd", "_engine_run_backward", ("t_outputs",))
INIT_GROUP = Target("collectives", "torch.distributed.distributed_c10d", "init_process_group", ("backend", "init_method", "timeout", "world_size", "rank"))
DESTROY_GROUP = Target("collectives", "torch.distributed.distributed_c10d", "destroy_process_group", ("group",))
NEW_GROUP = Target(
    "collectives",
    "torch.distributed.distributed_c10d",
    "_new_process_group_helper",
    ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
)
SPLIT_GROUP = Target("collectives", "torch.distributed.distributed_c10d", "split_group", ("parent_pg",))
MONITORED_BARRIER = Target("collectives", "torch.distributed.distributed_c10d", "monitored_barrier", ("group", "timeout"))
SET_TIMEOUT = Target("collectives", "torch.distributed.distributed_c10d", "_set_pg_timeout", ("timeout", "group"))
EXTEND_TIMEOUT = Target("collectives", "torch.distributed.distributed_c10d", "_add_ephemeral_timeout_for_all_pgs", ("timeout",))
GRAPH_RECORD = Target("cudagraph", "torch._inductor.cudagraph_trees", "CUDAGraphTreeManager.record_function", ("self", "new_inputs", "function_id"))
GRAPH_EAGER = Target("cudagraph", "torch._inductor.cudagraph_trees", "CUDAGraphTreeManager.run_eager", ("self", "new_inputs", "function_id"))
GRAPH_SKIP = Target("cudagraph", "torch._inductor.cudagraph_utils", "log_cudagraph_skip_and_bump_counter", ("msg",))
CAPTURE_BEGIN = Target("cudagraph", "torch.cuda.graphs", "CUDAGraph.capture_begin", ("self", "pool"))
CAPTURE_END = Target("cudagraph", "torch.cuda.graphs", "CUDAGraph.capture_end", ("self",))

TARGETS = (
    CHROMIUM_EVENT,
    COMPILATION_EVENT,
    INSTANT_EVENT,
    OPTIMIZE,
    KERNEL_PROGRESS,
    CHOICES,
    CHOICE,
    CONFIGS,
    CONFIG,
    PRECOMPILED,
    PRECOMPILE_CONFIG,
    DESCENT,
    DESCENT_CALL,
    DDP_INIT,
    DDP_COMPILE,
    DDP_SUBMOD,
    STEP_HOOK,
    STEP_PRE_HOOK,
    CLIP_NORM,
    DDP_HELPER,
    STEP_PRE_HOOK,
    GET_COMPILER,
    RUN_BACKWARD,
    INIT_GROUP,
    DESTROY_GROUP,
    NEW_GROUP,
    SPLIT_GROUP,
    MONITORED_BARRIER,
    SET_TIMEOUT,
    EXTEND_TIMEOUT,
    GRAPH_RECORD,
    GRAPH_EAGER,
    GRAPH_SKIP,
    CAPTURE_BEGIN,
    CAPTURE_END,
)


TRITON_TARGETS = (TRITON_PRUNE, TRITON_BENCH, TRITON_COMPILE)
"""Of Triton, which a rank may be without."""


def self_test(load: Callable[[str], Any]) -> list[tuple[str, str, str]]:
    """(probe, target, "" or the reason) of every target. `load` imports a torch module by name; what it raises becomes the reason."""
    results = []
    for target in TARGETS:
        try:
            reason = target.find(load(target.module))[1]
        except Exception as error:
            reason = f"{target.module} does not import: {error}"
        results.append((target.probe, f"{target.module}.{target.path}", reason))
    return results


def parameters_of(function: Any) -> tuple[str, ...] | None:
    """Names of a Python function's positional parameters, looking through functools.wraps; None for what is no Python function."""
    for _ in range(16):
        if not hasattr(function, "__wrapped__"):
            break
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return None if code is None else tuple(code.co_varnames[: code.co_argcount])


def is_stub(function: Any) -> bool:
    """Whether a hook function of torch/_utils_internal.py is the empty one of the open-source builds, which need not be called."""
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and getattr(function, "__module__", "") == "torch._utils_internal"
        and not code.co_names
        and set(code.co_consts) <= {None, code.co_name}
    )


def version_of(module: Any) -> str:
    """torch's version as seen from one of its modules; "?" when it cannot be told."""
    torch = getattr(module, "torch", module)
    return str(getattr(torch, "__version__", "?"))


def worker_server(c10d: Any) -> tuple[Any, str]:
    """(torch's `_WorkerServer` class, "") or (None, reason). Takes a socket path with port -1."""
    found = getattr(_bindings(c10d), "_WorkerServer", None)
    return (found, "") if found is not None else (None, f"torch {version_of(c10d)} has no _WorkerServer")


def recorder_status(c10d: Any) -> tuple[Any, str]:
    """(function giving torch's status-only recorder JSON as bytes, "") or (None, reason). 10 us; never asks for entries, which hold the GIL."""
    dump = getattr(_bindings(c10d), "_dump_fr_trace_json", None)
    if dump is None:
        return None, f"torch {version_of(c10d)} has no _dump_fr_trace_json"
    return (lambda: dump(includeCollectives=False)), ""


def recorder_entries(c10d: Any) -> Any:
    """Function giving torch's recorder JSON with its entries as bytes, or None. It holds the GIL for up to 60 ms at 2,000 entries: at the end only."""
    dump = getattr(_bindings(c10d), "_dump_fr_trace_json", None)
    return None if dump is None else (lambda: dump(includeCollectives=True))


def world(c10d: Any) -> tuple[Any, str]:
    """(the object that holds all process groups, "") or (None, reason)."""
    found = getattr(c10d, "_world", None)
    wanted = ("pg_map", "pg_names", "pg_group_ranks")
    absent = [name for name in wanted if not hasattr(type(found), name) and not hasattr(found, name)]
    if found is None or absent:
        return None, f"torch.distributed.distributed_c10d._world lacks {', '.join(absent or wanted)}"
    return found, ""


def timeout_s(group: Any) -> float | None:
    """Timeout of a process group's first backend that has one, in seconds; None when torch does not tell."""
    for device in getattr(group, "_device_types", ()):
        try:
            timeout = group._get_backend(device).options._timeout
        except Exception:  # a backend of another device that this build lacks, or one without options
            continue
        return float(timeout.total_seconds())
    return None


def checks_collectives(c10d: Any) -> bool:
    """Whether torch wraps the groups that it makes now, to check each collective ahead of it: TORCH_DISTRIBUTED_DEBUG=DETAIL, or set_debug_level."""
    level = getattr(_bindings(c10d), "get_debug_level", None)
    return level is not None and getattr(level(), "name", "") == "DETAIL"


def default_timeout_s(c10d: Any, backend: str = "gloo") -> float | None:
    """What torch takes where no timeout is given: 10 minutes for plain "nccl", 30 minutes for every other backend. None when torch does not tell."""
    timeout = getattr(c10d, "default_pg_nccl_timeout" if backend.lower() == "nccl" else "default_pg_timeout", None)
    return seconds_of(timeout)


def seconds_of(timeout: Any) -> float | None:
    """A timeout as callers give it, a timedelta or (monitored_barrier) a number, in seconds; None for anything else."""
    if hasattr(timeout, "total_seconds"):
        return float(timeout.total_seconds())
    return float(timeout) if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) else None


def memory_segments(cuda: Any) -> tuple[Any, str]:
    """(list of the CUDA allocator's segments, "") or (None, why they are not asked for). The allocation history stays out of it."""
    snapshot = getattr(cuda, "memory_snapshot", None)
    if snapshot is None:
        return None, f"torch {version_of(cuda)} has no torch.cuda.memory_snapshot"
    if "include_traces" in (parameters_of(snapshot) or ()):
        return snapshot(include_traces=False), ""
    keeps = getattr(getattr(getattr(cuda, "torch", None), "_C", None), "_cuda_isHistoryEnabled", None)
    if keeps is None or keeps():
        return None, f"torch {version_of(cuda)} cannot list the allocator's segments without the allocation history that is being kept"
    return snapshot(), ""


def counts_moved_parameters(trees: Any) -> bool:
    """Whether CUDAGraphTreeManager.num_rerecord counts a re-recording for a parameter that has moved: it does before torch 2.13."""
    numbers = version_of(trees).split(".")[:2]
    return len(numbers) == 2 and all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) < (2, 13)


def active_ddp(torch_distributed_nn: Any) -> Any:
    """The DistributedDataParallel module whose forward is running, or None. `torch_distributed_nn`: torch.nn.parallel.distributed, or None."""
    ddp_class = getattr(torch_distributed_nn, "DistributedDataParallel", None)
    getter = getattr(ddp_class, "_get_active_ddp_module", None)
    return getter() if getter is not None else None


class CudaMemory:
    """stats(device): the allocator's nested statistics, host bookkeeping only; device(): this thread's current device. Both only once CUDA is initialised.

    observe(observer): calls observer(device, tried, total, free) when an allocation fails, for ever; it would initialise CUDA.
    when_initialised(call): calls it at once, or on the thread that initialises CUDA. Both None where torch has no such thing.
    """

    __slots__ = ("device", "observe", "stats", "when_initialised")

    def __init__(self, stats: Any, device: Any, observe: Any, when_initialised: Any) -> None:
        self.stats, self.device, self.observe, self.when_initialised = stats, device, observe, when_initialised


def cuda_memory(cuda: Any) -> tuple[CudaMemory | None, str]:
    """(what reads the memory of torch.cuda's devices, "") or (None, reason)."""
    bindings = getattr(getattr(cuda, "torch", None), "_C", None)
    stats, device = getattr(bindings, "_cuda_memoryStats", None), getattr(bindings, "_cuda_getDevice", None)
    if stats is None or device is None:
        return None, "torch is built without CUDA"
    return CudaMemory(stats, device, getattr(bindings, "_cuda_attach_out_of_memory_observer", None), getattr(cuda, "_lazy_call", None)), ""


def _bindings(c10d: Any) -> Any:
    torch = getattr(c10d, "torch", None)
    return getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
