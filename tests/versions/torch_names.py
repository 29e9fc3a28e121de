"""Whether every name of torch that rankwatch relies on exists in each supported release, read from the wheels' sources: no GPU, no install.

    python tests/versions/torch_names.py --wheels DIR            print one table; 0 all there, 1 a name is missing
    python tests/versions/torch_names.py --wheels DIR --write    and keep it as tests/versions/torch_names.md

Wheels that DIR lacks are downloaded with pip (the 75-130 MB macOS ones: their Python sources are the same as Linux'). Nothing is imported from
them. Functions that the agent wraps come from agent/compat.py's TARGETS, with their leading parameters; what else is used is listed below.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from glob import glob

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from rankwatch.agent.compat import TARGETS  # noqa: E402 - a script beside the package

VERSIONS = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.0")
PLATFORMS = ("macosx_11_0_arm64", "macosx_14_0_arm64")
RESULT = os.path.join(HERE, "torch_names.md")

ALSO = (
    ("torch._dynamo.utils", "graph_break_reasons"),
    ("torch._dynamo.utils", "guard_failures"),
    ("torch._dynamo.utils", "counters"),
    ("torch._dynamo.utils", "get_chromium_event_logger"),
    ("torch._dynamo.utils", "ChromiumEventLogger.get_stack"),
    ("torch._dynamo.utils", "get_optimize_ddp_mode"),
    *(
        ("torch._dynamo.utils", f"CompilationMetrics.{field}")
        for field in (
            "compile_id",
            "co_name",
            "co_filename",
            "co_firstlineno",
            "cache_size",
            "accumulated_cache_size",
            "guard_count",
            "graph_op_count",
            "graph_node_count",
            "graph_input_count",
            "graph_node_shapes",
            "is_forward",
            "is_runtime",
            "fail_type",
            "fail_reason",
            "fail_user_frame_filename",
            "fail_user_frame_lineno",
            "recompile_reason",
            "duration_us",
            "dynamo_cumulative_compile_time_us",
            "aot_autograd_cumulative_compile_time_us",
            "inductor_cumulative_compile_time_us",
            "triton_compile_time_us",
            "runtime_triton_autotune_time_us",
            "cudagraph_skip_reason",
        )
    ),
    ("torch._dynamo.convert_frame", "_compile"),
    ("torch._dynamo.config", "recompile_limit"),
    ("torch._dynamo.config", "accumulated_recompile_limit"),
    ("torch._dynamo.config", "optimize_ddp"),
    ("torch._dynamo.config", "disable"),
    ("torch._dynamo.config", "suppress_errors"),
    ("torch._dynamo.config", "log_compilation_metrics"),
    ("torch._dynamo.config", "capture_scalar_outputs"),
    ("torch._dynamo.config", "capture_dynamic_output_shape_ops"),
    ("torch._dynamo.config", "reorderable_logging_functions"),
    ("torch._dynamo.config", "allow_unspec_int_on_nn_module"),
    ("torch._dynamo.eval_frame", "_stance"),
    ("torch._dynamo.eval_frame", "DynamoStance"),
    ("torch._dynamo.eval_frame", "skip_code"),
    ("torch._dynamo.eval_frame", "lookup_backend"),
    ("torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__"),
    ("torch._dynamo.types", "FrameAction"),
    ("torch._dynamo.types", "FrameExecStrategy"),
    ("torch._dynamo.types", "ConvertFrameReturn.frame_exec_strategy"),
    ("torch._inductor.config", "_fuse_ddp_communication"),
    ("torch._inductor.async_compile", "AsyncCompile.process_pool"),
    ("torch._inductor.cudagraph_trees", "CUDAGraphTreeManager.current_node"),
    *(
        ("torch._inductor.config", f"triton.{name}")
        for name in (
            "cudagraph_skip_dynamic_graphs",
            "cudagraph_capture_sizes",
            "cudagraph_unexpected_rerecord_limit",
            "cudagraph_dynamic_shape_warn_limit",
        )
    ),
    ("torch.cuda.memory", "memory_stats"),
    ("torch.cuda.memory", "memory_snapshot"),
    ("torch.cuda", "current_device"),
    ("torch.distributed", "_DEFAULT_FIRST_BUCKET_BYTES"),
    ("torch._dynamo.backends.distributed", "DDPOptimizer"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel._get_active_ddp_module"),
    ("torch._compile", "_disable_dynamo"),
    ("torch.distributed.distributed_c10d", "_world"),
    ("torch.distributed.distributed_c10d", "_World.pg_map"),
    ("torch.distributed.distributed_c10d", "_World.pg_names"),
    ("torch.distributed.distributed_c10d", "_World.pg_group_ranks"),
    ("torch.distributed.distributed_c10d", "default_pg_timeout"),
    ("torch.distributed.distributed_c10d", "default_pg_nccl_timeout"),
    ("torch._C._distributed_c10d", "_WorkerServer"),
    ("torch._C", "_cuda_memoryStats"),
    ("torch._C", "_cuda_getDevice"),
    ("torch.cuda", "_lazy_call"),
    ("torch.cuda", "is_initialized"),
    ("torch.cuda", "is_current_stream_capturing"),
    ("torch.distributed.launcher.api", "LocalElasticAgent"),
    ("torch.distributed.elastic.multiprocessing.api", "SignalException"),
    *(
        ("torch.distributed.elastic.agent.server.local_elastic_agent", f"LocalElasticAgent.{name}")
        for name in ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown")
    ),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._rendezvous"),
)


class Wheel:
    """The sources of one release, parsed as they are asked for."""

    def __init__(self, path: str) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())
        self._trees: dict[str, ast.Module | None] = {}

    def missing(self, module: str, path: str, parameters: Sequence[str] = ()) -> str:
        """ "" where `module` defines or imports `path`, a function with these leading parameters; else what is wrong."""
        body = self._body(module)
        if body is None:
            return "no such module"
        node: ast.AST | None = None
        for number, name in enumerate(path.split(".")):
            node = next((found for known, found in definitions(body) if known == name), None)
            if node is None:
                return f"no {'.'.join(path.split('.')[: number + 1])}"
            body = getattr(node, "body", [])
        if parameters and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            there = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
            if there[: len(parameters)] != tuple(parameters):
                return f"({', '.join(there)})"
        return ""

    def _body(self, module: str) -> list[ast.stmt] | None:
        if module not in self._trees:
            base = module.replace(".", "/")
            file = next((name for name in (f"{base}.py", f"{base}/__init__.py", f"{base}.pyi", f"{base}/__init__.pyi") if name in self._names), None)
            self._trees[module] = ast.parse(self._zip.read(file)) if file else None
        tree = self._trees[module]
        return None if tree is None else tree.body


def definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of all that a module or class defines or imports, inside `if` and `try` too."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((name.id, node) for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from definitions(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from definitions(handler.body)


def wheel_of(version: str, folder: str) -> Wheel:
    """The release's wheel in `folder`, downloaded when it is not there. RuntimeError with pip's words when it cannot be had."""
    pattern = os.path.join(folder, f"torch-{version}-*.whl")
    if not glob(pattern):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", folder]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        done = subprocess.run([*command, f"torch=={version}"], capture_output=True, text=True)
        if not glob(pattern):
            raise RuntimeError(f"torch {version} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return Wheel(glob(pattern)[0])


def wanted() -> list[tuple[str, str, tuple[str, ...]]]:
    """(module, path, leading parameters) of every name in use."""
    return list(dict.fromkeys((*((target.module, target.path, target.parameters) for target in TARGETS), *((module, path, ()) for module, path in ALSO))))


def label(module: str, path: str, parameters: tuple[str, ...]) -> str:
    """What the table calls a name."""
    return f"{module}.{path}" + (f"({', '.join(parameters)})" if parameters else "")


def table(folder: str) -> tuple[str, int]:
    """(Markdown table: a row a name, a column a release; number of names that are missing somewhere)."""
    wheels = {version: wheel_of(version, folder) for version in VERSIONS}
    lines = [f"| name | {' | '.join(VERSIONS)} |", f"|---|{'---|' * len(VERSIONS)}"]
    bad = 0
    for module, path, parameters in wanted():
        found = [wheel.missing(module, path, parameters) for wheel in wheels.values()]
        bad += any(found)
        lines.append(f"| `{label(module, path, parameters)}` | {' | '.join(problem or 'ok' for problem in found)} |")
    return "\n".join(lines) + "\n", bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Exit codes: 0 every name is there, 1 one is missing, 2 wrong usage.")
    parser.add_argument("--wheels", metavar="DIR", required=True, help="where the wheels lie or are put (about 500 MB)")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {os.path.relpath(RESULT)}")
    arguments = parser.parse_args()
    os.makedirs(arguments.wheels, exist_ok=True)
    text, bad = table(arguments.wheels)
    sys.stdout.write(text)
    print(f"{len(text.splitlines()) - 2} names, {bad} missing in some release")
    if arguments.write:
        with open(RESULT, "w", encoding="utf-8") as file:
            file.write(
                f"# Names of torch that rankwatch relies on, by release\n\nWritten by `python tests/versions/torch_names.py --wheels DIR --write`.\n\n{text}"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
