"""torch's raw region names -> the eight phases of a compile that rankwatch speaks of.

Source: names seen in torch 2.9-2.14 (`dynamo_timed` regions of torch/_dynamo/utils.py and its callers).
"""

from __future__ import annotations

PHASES = ("dynamo", "aot", "backend", "inductor", "kernel_compile", "autotune", "cudagraph_record", "cross_rank_wait", "other")

_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cross_rank_wait", ("compiler_collective", "guard_collective")),
    ("cudagraph_record", ("CUDAGraphNode.record", "cudagraphify")),
    (
        "kernel_compile",
        ("_template_precompiling", "async_compile", "compile_file", "CachingAutotuner.slow_precompile", "PyCodeCache", "TritonBundler", "triton_jit"),
    ),
    ("autotune", ("_template_autotuning", "CachingAutotuner", "benchmark_", "triton_autotune")),
    ("inductor", ("fx_codegen_and_compile", "GraphLowering", "Scheduler", "code_gen", "inductor_compile", "compile_fx", "fw_compiler", "bw_compiler")),
    ("aot", ("create_aot_dispatcher_function", "aot_", "min_cut", "_recursive_joint", "backward._backward_impl")),
    ("backend", ("backend_compile", "entire_backward_compile")),
    ("dynamo", ("bytecode_tracing", "compile_attempt", "build_guards", "dynamo", "entire_frame_compile", "gc", "pgo")),
)


def phase_of(raw: str) -> str:
    """Phase of a raw region name; "other" for one that no rule knows."""
    for phase, needles in _RULES:
        if any(needle in raw for needle in needles):
            return phase
    return "other"
