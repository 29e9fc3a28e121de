"""torch._dynamo.utils as far as the compile probe looks at it, what drives its hooks, and records of finished compiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

from agent_fakes import FakeRank

from rankwatch.agent.compiling.finished import Compiles


def users_function(x: int) -> int:
    return x


CODE = users_function.__code__
FRAME = f"users_function@fake_dynamo.py:{CODE.co_firstlineno}"


class Torch:
    """torch._dynamo.utils as far as the probe looks at it, and what drives its hooks."""

    def __init__(self, fake: FakeRank) -> None:
        self.stack: list[str] = []
        self.guard_failures: dict[CodeType, list[str]] = defaultdict(list)
        self.graph_break_reasons: list[Any] = []
        self.config = SimpleNamespace(disable=False, recompile_limit=8)
        self.chained: list[Any] = []
        self.compiles = Compiles(fake.rank, fake.rank.probes["compile"], self)
        self.hook = self.compiles.live.wrap_event(self.chained.append)

    def get_chromium_event_logger(self) -> Any:
        return SimpleNamespace(get_stack=lambda: self.stack)

    def begin(self, name: str, compile_id: str = "0/0") -> None:
        self.hook({"name": name, "ph": "B", "args": {"compile_id": compile_id}})
        self.stack.append(name)

    def end(self, name: str) -> None:
        self.hook({"name": name, "ph": "E", "args": {}})
        self.stack.remove(name)

    def _compile(self, code: CodeType, compile_id: str = "0/0", inside: Callable[[], None] = lambda: None) -> None:
        """Named as torch's, whose local `code` the probe reads."""
        self.begin("dynamo", compile_id)
        inside()


def metrics(**fields: Any) -> SimpleNamespace:
    given = {"compile_id": "0/0", "co_name": "forward", "co_filename": "/home/u/model.py", "co_firstlineno": 31, "is_forward": True, "graph_op_count": 3}
    return SimpleNamespace(**{**given, "duration_us": 2_000_000, **fields})
