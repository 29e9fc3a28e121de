"""The parameters that DistributedDataParallel keeps equal on all ranks of its group, and bit checksums of a rotating sample of them.

Only parameters that DDP itself reduces count: not buffers, not ignored parameters, not sharded ones (DTensor). Nothing is kept alive.
A checksum is the sum of the parameter's bits, read as 64-bit integers, modulo 2**64. torch.hash_tensor, an exclusive or, is blind to whatever
comes in equal pairs: every constant tensor of even size gives 0.
"""

from __future__ import annotations

import struct
import weakref

from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

SAMPLE = 8
MAX_NAME = 40
MAX_RANKS = 64
MAX_GROUPS = 1024  # with modules in them, the newest: numbers have to be equal on all ranks, so they outlive their modules
_OWNER_LIMIT = 20_000
_INTEGERS = {2: "int16", 4: "int32", 8: "int64"}  # bytes of an element -> integers of that size
_SYNCING_HOOKS = ("default_hooks", "mixed_precision_hooks", "optimizer_overlap_hooks", "powerSGD_hook", "quantization_hooks")
"""torch's own communication hooks after which the gradients of all ranks are equal (torch/distributed/algorithms/ddp_comm_hooks)."""


class Replica:
    """One DDP module: `parameters` (weak, in DDP's order, on one device), their names, its group. model: its number within the group."""

    __slots__ = ("_module", "group", "model", "names", "next", "parameters", "ranks", "unsynced")

    def __init__(self, module: Any, parameters: Sequence[Any], model: int) -> None:
        self._module = weakref.ref(module)
        plain = [parameter for parameter in parameters if _plain(parameter) and parameter.device == parameters[0].device]
        names = {id(parameter): name for name, parameter in module.module.named_parameters()}
        self.parameters = [weakref.ref(parameter) for parameter in plain]
        self.names = [str(names.get(id(parameter), f"#{number}"))[-MAX_NAME:] for number, parameter in enumerate(plain)]
        self.model, self.next = model, 0
        self.group = self.ranks = ""
        self.unsynced = ""  # why its replicas may differ

    def describe(self, torch: Any) -> None:
        """Find out the group's name and ranks, once. Ranks that take too long a text are left to the `groups` record."""
        module = self._module()
        if not self.group and module is not None:
            self.group = str(getattr(module.process_group, "group_name", ""))
            ranks = compress(torch.distributed.get_process_group_ranks(module.process_group))
            self.ranks = ranks if len(ranks) <= MAX_RANKS else ""

    def issued(self) -> int:
        """How many collectives were issued in the group: equal numbers mean that two ranks are at the same point of the program."""
        module = self._module()
        return 0 if module is None else int(module.process_group._get_sequence_number_for_group())

    def look(self) -> None:
        """Note what makes replicas differ rightly: steps after a backward without reduction, a communication hook of the job's own."""
        module = self._module()
        if module is None or self.unsynced:
            return
        if not module.require_forward_param_sync:
            self.unsynced = "it steps without reducing gradients (no_sync)"
        for hook, _state in getattr(module, "_comm_hooks", ()):
            if str(getattr(hook, "__module__", "")).rpartition(".")[2] not in _SYNCING_HOOKS:
                self.unsynced = f"its gradients go through the communication hook {getattr(hook, '__name__', '?')}"[:120]

    def sample(self) -> tuple[int, list[Any]]:
        """(number of the first one, the next parameters in turn); an empty list where one of them is gone."""
        first = self.next
        wanted = self.parameters[first : first + SAMPLE]
        self.next = first + SAMPLE if first + SAMPLE < len(self.parameters) else 0
        found = [reference() for reference in wanted]
        return first, [] if None in found else found


class Replicas:
    """Every DDP module of the process, found by its parameters."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, Replica]] = {}
        self._counts: dict[str, int] = {}

    def add(self, module: Any, parameters: Sequence[Any]) -> None:
        """A DDP module is being built over `parameters`."""
        self._owners = {identity: held for identity, held in self._owners.items() if held[0]() is not None}
        if not parameters or len(self._owners) > _OWNER_LIMIT:
            return
        group = str(getattr(module.process_group, "group_name", ""))
        self._counts[group] = self._counts.pop(group, 0) + 1
        if len(self._counts) > MAX_GROUPS:
            del self._counts[next(iter(self._counts))]
        replica = Replica(module, parameters, self._counts[group])
        for reference in replica.parameters:
            self._owners[id(reference())] = (reference, replica)

    def of(self, parameter: Any) -> Replica | None:
        """The DDP module that keeps this parameter equal."""
        reference, replica = self._owners.get(id(parameter), (None, None))
        return replica if reference is not None and reference() is parameter else None


def checksums(torch: Any, tensors: Sequence[Any]) -> Any:
    """A flat int64 tensor on their device: the bit sum of each, then the bits of each L2 norm as float64."""
    with torch.no_grad():
        sums = [bit_sum(torch, tensor.detach()) for tensor in tensors]
        norms = torch.cat([l2_norms(torch, [tensor.detach()]).to(torch.float64) for tensor in tensors])
        return torch.cat([torch.stack(sums), norms.view(torch.int64)])


def decode(values: list[int]) -> tuple[list[str], list[float]]:
    """(bit sums as 16 hexadecimal digits, norms) of what `checksums` gave."""
    half = len(values) // 2
    return [f"{value & (1 << 64) - 1:016x}" for value in values[:half]], [struct.unpack("<d", struct.pack("<q", value))[0] for value in values[half:]]


def l2_norms(torch: Any, tensors: Sequence[Any]) -> Any:
    """The L2 norm of each tensor, as one flat tensor. All have one dtype; half precision is summed up in float32, where it does not overflow."""
    wider = torch.float32 if tensors[0].element_size() < 4 else None
    return torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=wider)))


def bit_sum(torch: Any, tensor: Any) -> Any:
    """The sum of a dense tensor's bits as an int64 scalar on its device; the same for equal content, wherever it lies in memory."""
    size = tensor.element_size()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    per_word = 8 // size
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    whole = flat.numel() // per_word * per_word
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == flat.numel() else total + flat[whole:].view(getattr(torch, _INTEGERS[size])).sum()


def _plain(parameter: Any) -> bool:
    """A dense parameter that this rank holds whole: no DTensor, no flat shard, nothing complex or quantized."""
    if hasattr(parameter, "_local_tensor") or hasattr(parameter, "_flat_param") or not parameter.is_floating_point() or not parameter.numel():
        return False
    wanted = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape)):  # noqa: B905 - same length
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return parameter.element_size() in _INTEGERS
