"""Finding torch's internals: a value, or the reason why not."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from rankwatch.agent import compat

TORCH = SimpleNamespace(__version__="2.99.0")


def module(**names: Any) -> SimpleNamespace:
    return SimpleNamespace(torch=TORCH, **names)


def test_a_function_with_the_known_parameters_is_found() -> None:
    def log_compilation_event(metrics: object) -> None: ...

    assert compat.COMPILATION_EVENT.find(module(log_compilation_event=log_compilation_event)) == (log_compilation_event, "")


def test_more_parameters_at_the_end_are_no_change() -> None:
    class DDPOptimizer:
        def compile_fn(self, gm: object, example_inputs: object, **compiler_configs: object) -> None: ...

    assert compat.DDP_COMPILE.find(module(DDPOptimizer=DDPOptimizer)) == (DDPOptimizer.compile_fn, "")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({}, "torch._dynamo.utils.log_compilation_event is absent in torch 2.99.0"),
        ({"log_compilation_event": 3}, "torch._dynamo.utils.log_compilation_event is no function in torch 2.99.0"),
        ({"log_compilation_event": lambda a, b: None}, "torch._dynamo.utils.log_compilation_event(a, b) has other parameters in torch 2.99.0"),
    ],
)
def test_what_cannot_be_used_is_explained(names: dict[str, Any], reason: str) -> None:
    assert compat.COMPILATION_EVENT.find(module(**names)) == (None, reason)


def test_decorated_functions_are_looked_through() -> None:
    def init_process_group(backend: object, init_method: object, timeout: object, world_size: int, rank: int) -> None: ...

    def wrapper(*args: object, **kwargs: object) -> None: ...

    wrapper.__wrapped__ = init_process_group  # type: ignore[attr-defined]
    assert compat.INIT_GROUP.find(module(init_process_group=wrapper))[1] == ""


def test_the_self_test_goes_on_past_modules_that_do_not_import() -> None:
    def load(name: str) -> Any:
        raise ImportError(f"no {name}")

    results = compat.self_test(load)
    assert len(results) == len(compat.TARGETS)
    assert results[0] == (
        "compile",
        "torch._dynamo.utils.record_chromium_event_internal",
        "torch._dynamo.utils does not import: no torch._dynamo.utils",
    )


def test_the_empty_hook_of_open_source_builds_is_not_called() -> None:
    namespace: dict[str, Any] = {"__name__": "torch._utils_internal"}
    exec("def stub(event):\n    return None\ndef real(event):\n    print(event)\n", namespace)
    assert compat.is_stub(namespace["stub"])
    assert not compat.is_stub(namespace["real"])
    assert not compat.is_stub(lambda event: None)  # somebody else's


def test_a_world_without_its_tables_is_explained() -> None:
    assert compat.world(module(_world=SimpleNamespace(pg_map={}))) == (
        None,
        "torch.distributed.distributed_c10d._world lacks pg_names, pg_group_ranks",
    )
    whole = SimpleNamespace(pg_map={}, pg_names={}, pg_group_ranks={})
    assert compat.world(module(_world=whole)) == (whole, "")


def test_bindings_that_are_absent_are_explained() -> None:
    assert compat.worker_server(module()) == (None, "torch 2.99.0 has no _WorkerServer")
    assert compat.recorder_status(module()) == (None, "torch 2.99.0 has no _dump_fr_trace_json")


def test_the_recorder_is_never_asked_for_entries() -> None:
    asked = []
    bindings = SimpleNamespace(_dump_fr_trace_json=lambda **options: asked.append(options) or b"{}")
    status, reason = compat.recorder_status(SimpleNamespace(torch=SimpleNamespace(__version__="2.13.0", _C=SimpleNamespace(_distributed_c10d=bindings))))
    assert (status(), reason) == (b"{}", "")
    assert asked == [{"includeCollectives": False}]


def test_a_timeout_comes_from_the_first_backend_that_has_one() -> None:
    class Group:
        _device_types = ("cuda", "cpu")

        def _get_backend(self, device: str) -> Any:
            if device == "cuda":
                raise RuntimeError("No backend type associated with device type cuda")
            return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=77)))

    assert compat.timeout_s(Group()) == 77.0
    assert compat.timeout_s(object()) is None


def test_whether_torch_checks_collectives_is_asked_of_torch_and_no_where_it_cannot_tell() -> None:
    def with_level(name: str) -> SimpleNamespace:
        bindings = SimpleNamespace(get_debug_level=lambda: SimpleNamespace(name=name))
        return SimpleNamespace(torch=SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=bindings)))

    assert compat.checks_collectives(with_level("DETAIL")) is True
    assert compat.checks_collectives(with_level("INFO")) is False
    assert compat.checks_collectives(SimpleNamespace()) is False
