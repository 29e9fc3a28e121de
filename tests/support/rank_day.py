"""A day of one rank, played without torch through the agent's own hooks: steps, groups made anew, recompiles, splits, captures, threads that end."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank
from fake_dynamo import CODE, Torch, metrics

from rankwatch.agent import guard, threads
from rankwatch.agent.clock import clock
from rankwatch.agent.probes import collectives, cudagraph, ddp, numerics, steps
from rankwatch.wire import env

GROUPS = FRAMES = 14  # an hour
CPU = SimpleNamespace(type="cpu")


class Tensor:
    """One number on the CPU, as a loss, a norm or a parameter."""

    requires_grad, device, shape = True, CPU, (1,)

    def __init__(self, value: float) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        given = {"numel": 1, "element_size": 4, "is_floating_point": True, "stride": (1,), "tolist": [self.value], "detach": self, "reshape": self, "to": self}
        return lambda *_given: given[name]


class World:
    """torch's registry of groups."""

    def __init__(self) -> None:
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, Any] = {}


class Group:
    """A process group."""

    group_desc = "undefined"


def make_c10d() -> Any:
    """torch.distributed.distributed_c10d, of a world of one process."""
    world = World()
    c10d = SimpleNamespace(_world=world, default_pg_timeout=timedelta(minutes=30), is_initialized=lambda: bool(world.pg_names))

    def init_process_group(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1) -> None:
        c10d._new_process_group_helper(1, 0, [0], backend, None, "0")

    def _new_process_group_helper(group_size: int, group_rank: int, global_ranks_in_group: Any, backend: Any, store: Any, group_name: str, **_: Any) -> Any:
        if group_rank < 0:
            return None
        group = Group()
        world.pg_map[group], world.pg_names[group], world.pg_group_ranks[group] = (backend, None), group_name, {0: 0}
        return group

    def destroy_process_group(group: Any = None) -> None:
        for table in vars(world).values():
            del table[group]

    c10d.init_process_group, c10d._new_process_group_helper, c10d.destroy_process_group = init_process_group, _new_process_group_helper, destroy_process_group
    c10d.monitored_barrier = lambda group=None, timeout=None: None
    c10d._set_pg_timeout = lambda timeout, group: None
    c10d._add_ephemeral_timeout_for_all_pgs = lambda timeout: None
    c10d.split_group = lambda parent_pg: None
    return c10d


class Manager:
    """CUDAGraphTreeManager."""

    compile_id, warmed_up_functions = "0/0", ()

    def record_function(self, new_inputs: Any, function_id: Any) -> None:
        """Records a graph."""

    def run_eager(self, new_inputs: Any, function_id: Any) -> None:
        """Runs a function without a graph."""


class Optimizer:
    """DDPOptimizer."""

    def __init__(self, bucket_bytes_cap: int, backend_compile_fn: Any) -> None:
        self.bucket_bytes_cap, self.first_bucket_cap = bucket_bytes_cap, 1

    def compile_fn(self, gm: Any, example_inputs: Any) -> None:
        self.buckets = [SimpleNamespace(size=size, params=["L_self_a_weight_"]) for size in gm]
        for _bucket in self.buckets:
            Submod().compile_submod(None, None, None)


class Submod:
    """SubmodCompiler."""

    def compile_submod(self, input_mod: Any, args: Any, kwargs: Any) -> None:
        """Compiles one bucket."""


class RankDay:
    """The agent's objects of one rank, and what happens to them. `parts`: those that remember something."""

    def __init__(self, fake: FakeRank, patch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**12
        patch.setattr(clock, "now_ns", lambda: self.now_ns)
        patch.setattr(clock, "wall_ns", lambda: 17 * 10**17 + self.now_ns)
        for name in ("torch.distributed", "torch._dynamo.utils", "torch.nn.parallel.distributed", "torch.cuda"):
            patch.delitem(sys.modules, name, raising=False)
        patch.setitem(sys.modules, "torch", self._torch())
        patch.setattr(numerics, "gradient_norm", lambda *_: Tensor(1.5))
        patch.setattr(numerics, "checksums", lambda _torch, tensors: SimpleNamespace(device=CPU, tolist=lambda: [7] * (2 * len(tensors))))
        patch.setattr(guard.here, "pid", guard.getpid())
        patch.setenv(env.CLAIMED, "")
        patch.setattr(cudagraph, "_graphs", None)
        self.fake, rank = fake, fake.rank
        self.c10d = make_c10d()
        collectives.arm(rank, rank.probes["collectives"], self.c10d)
        membership = rank.on_exit[0].__self__  # type: ignore[attr-defined]
        self.c10d.init_process_group("nccl")
        membership._beat.stop()  # beats come from the test
        self.beat = membership._beat._beat
        self.steps = steps.Steps(rank, rank.probes["steps"])
        self.numerics = numerics.Numerics(rank, guard.Probe("numerics", lambda: None), 50)
        self.torch = Torch(fake)
        rank.on_beat.append(self.torch.compiles.beat)
        self.splits = ddp.Splits(rank, rank.probes["ddp"])
        self.manager = type("CUDAGraphTreeManager", (Manager,), {})
        graphs = cudagraph.Graphs(rank, rank.probes["cudagraph"])
        graphs.hook(SimpleNamespace(__name__="torch._inductor.cudagraph_trees", CUDAGraphTreeManager=self.manager))
        self._managers: deque[Any] = deque(maxlen=20)
        self.parts = {
            "rank": rank, "membership": membership, "steps": self.steps, "numerics": self.numerics, "compile": self.torch.compiles, "ddp": self.splits,
            "cudagraph": graphs, "names of regions": threads._names,
        }  # fmt: skip
        self.optimizer_class = type("DDPOptimizer", (Optimizer,), {"compile_fn": self.splits.wrap_compile(Optimizer.compile_fn)})
        self.parameter = Tensor(7.0)
        self.numerics._replicas.add(self._module("0", self.parameter), [self.parameter])
        self.optimizer = SimpleNamespace(param_groups=[{"params": [self.parameter]}])
        self._stepping, self._loss = self.numerics.hook(), self.numerics.loss_hook()
        self._clip = self.numerics.wrap_clip(lambda *_: Tensor(1.0))

    @staticmethod
    def _torch() -> Any:
        return SimpleNamespace(
            Tensor=Tensor, nn=SimpleNamespace(Parameter=Tensor), float32=None, stack=lambda found: found[0],
            compiler=SimpleNamespace(is_compiling=lambda: False), distributed=SimpleNamespace(get_process_group_ranks=lambda _group: [0]),
        )  # fmt: skip

    @staticmethod
    def _module(group: str, parameter: Tensor) -> Any:
        named = SimpleNamespace(named_parameters=lambda: [("weight", parameter)])
        process_group = SimpleNamespace(group_name=group, _get_sequence_number_for_group=lambda: 1)

        class Module:
            module, require_forward_param_sync, _comm_hooks = named, True, ()

        made = Module()
        made.process_group = process_group  # type: ignore[attr-defined]
        return made

    def play(self, hour: int, steps: int, look: Callable[[], None] = lambda: None) -> None:
        """An hour of so many steps. Nothing else in it happens under the same name twice; `look` is called now and then."""
        for number in range(steps):
            self.now_ns += 400 * 10**6
            if number % 3:
                self._loss(Tensor(2.0))
            if number % 7 == 0:
                self._clip([], 1.0)
            self._stepping(self.optimizer, (), {})
            self.steps.optimizer_stepped(self.optimizer)
            if number % 40 == 0:
                self.beat(number // 40)
        for number in range(hour * GROUPS, (hour + 1) * GROUPS):
            self._group(str(number + 1))
        for number in range(hour * FRAMES, (hour + 1) * FRAMES):
            self.now_ns += 10**9
            self._compile(number)
            if number % 8 == 0:
                self._checkpoint(str(number))
            look()

    def _group(self, name: str) -> None:
        """A group of its own for a while, or one that this rank is no member of."""
        c10d = self.c10d
        group = c10d._new_process_group_helper(1, -1 if int(name) % 2 else 0, [0], "nccl", None, name, timeout=timedelta(minutes=5))
        if group is not None:
            c10d.monitored_barrier(group)
            c10d._set_pg_timeout(timedelta(minutes=1), group)
            c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
            parameter = Tensor(1.0)
            self.numerics._replicas.add(self._module(name, parameter), [parameter])
            self.beat(4)
            c10d.destroy_process_group(group)

    def _compile(self, number: int) -> None:
        """A frame with a guard, a graph break, a failure, a split and a captured graph of its own."""
        torch, compile_id, name = self.torch, f"{number}/1", f"block_{number}"
        code = CODE.replace(co_name=name)
        torch._compile(code, compile_id, lambda: torch.guard_failures[code].append(f"0/0: size of {name}\n" + name * 200))
        for region in ("entire_frame_compile", f"backend_compile_{number}"):
            torch.begin(region, compile_id)
        self.optimizer_class(1000, None).compile_fn([100, number], [])
        for layer in ("fx_graph_cache_miss", "autograd_cache_bypass"):
            torch.compiles._cache_event(layer, {"cache_bypass_reason": name})
        torch.graph_break_reasons.append(SimpleNamespace(user_stack=[SimpleNamespace(filename=f"/home/u/{name}.py", lineno=1, name=name)], reason=name * 100))
        failed = {"fail_type": "BackendCompilerFailed", "fail_reason": name * 90} if number % 3 == 0 else {}
        limit = {"fail_type": "RecompileLimitExceeded", "fail_reason": "Dynamo recompile limit exceeded"} if number % 3 == 1 else {}
        torch.compiles.finished(metrics(compile_id=compile_id, co_name=name, recompile_reason=f"size of {name}\nmore", **failed, **limit))
        torch.hook({"name": "dynamo", "ph": "E", "args": {}})
        for forgotten in (torch.stack, torch.guard_failures, torch.chained):
            forgotten.clear()  # type: ignore[attr-defined]
        if number % 20 == 0:
            torch.graph_break_reasons.clear()  # torch._dynamo.reset()
        self._managers.append(self.manager())
        self._managers[-1].record_function([], number)

    def _checkpoint(self, name: str) -> None:
        """A thread that compiles, and one whose compile never ends: both write a checkpoint and are gone."""

        def save(ends: bool) -> None:
            self.torch.begin("dynamo", f"{name}/0")
            self.fake.rank.threads.progress(f"kernels of {name}")
            if ends:
                self.torch.end("dynamo")

        for ends in (True, False):
            thread = threading.Thread(target=save, args=(ends,))
            thread.start()
            thread.join()
        self.torch.stack.clear()
