"""Which line of the job a CUDA graph's capture, or the reason against one, comes from."""

from __future__ import annotations

import re
import sys

from rankwatch.agent.sources import is_torch_or_stdlib, is_users

_WALK_FRAMES = 40
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_GRAPHS_FILE = "/torch/cuda/graphs.py"
_OF_TORCH = ("/torch/_inductor/", "/torch/_dynamo/", "/triton/")  # they capture to benchmark, or an empty graph to hold a pool


def _short(file: str, line: object) -> str:
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def user_line(trace: str) -> str:
    """`model.py:31` of the innermost line in a printed stack that is neither torch's nor the standard library's; else the innermost one; else ""."""
    found = _FILE_LINE.findall(trace)
    own = [(file, line) for file, line in found if not is_torch_or_stdlib(file)]
    return _short(*(own or found)[-1]) if found else ""


def capture_site() -> tuple[str, str]:
    """(`train.py:31:capture`, what of torch.cuda it has called) of the capture that begins; ("", "") for one that torch itself makes."""
    frame = sys._getframe(2)
    via, library, outside = "CUDAGraph.capture_begin", "", False
    for _ in range(_WALK_FRAMES):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not outside and file.endswith(_GRAPHS_FILE):
            via = "make_graphed_callables" if name == "make_graphed_callables" or via == "make_graphed_callables" else "graph" if name == "__enter__" else via
        elif not outside and any(part in file for part in _OF_TORCH):
            return "", ""
        elif not is_torch_or_stdlib(file):
            outside = True
            if is_users(file):
                return f"{_short(file, frame.f_lineno)}:{name}", via
            library = library or f"{_short(file, frame.f_lineno)}:{name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return library, via
