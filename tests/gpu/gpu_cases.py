"""The tables of faults.py and controls.py: what is enacted and what rankwatch has to say of it. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PAGES = ("stuck", "failed", "timeout_imminent", "diverged")
NAMED_S = 10.0  # the bar for every fault
UNHEALABLE_S = 5.0  # the bar where nothing can heal it


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted trouble of jobs/fault_job.py. Rank 1 plants it, whatever the number of ranks.

    verdicts, causes, culprits: what the final word may be; an earlier notice has to name the same rank, with a cause among `causes` or `first_causes`.
    named_s, paged_s: bars in seconds after the onset; paged_s None where `verdicts` holds no page. stacks: ranks whose stacks have to lie on disk.
    hold_s: how long after the onset it is watched for a page that must not come. until_exit: watched to the end of the job.
    cpu: it exists on gloo too (`--dry-run-on-cpu`). limit_s: of one run, its start included.
    """

    name: str
    timeout_s: float
    verdicts: tuple[str, ...]
    causes: tuple[str, ...]
    culprits: tuple[tuple[int, ...], ...] = ((1,),)
    either_side: bool = False  # two ranks have no majority: with two, both may be named
    everybody: bool = False  # all ranks may be named
    first_causes: tuple[str, ...] = ()
    named_s: float = NAMED_S
    paged_s: float | None = None
    stacks: tuple[int, ...] = (0, 1)
    hold_s: float = 0.0
    until_exit: bool = False
    compile_looks: int = 0  # so many different moments of the compile have to be told
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = False
    limit_s: float = 110.0

    def culprit_sets(self, num_ranks: int) -> list[list[int]]:
        sets = [list(each) for each in self.culprits]
        if self.everybody or (self.either_side and num_ranks == 2):
            sets.append(list(range(num_ranks)))
        return sets

    def on_cpu(self) -> Fault:
        """The same for gloo on a small machine: slow, and gloo itself refuses calls of different sizes, which ends the job."""
        refused = self.causes == ("mismatch",)
        return replace(
            self,
            verdicts=(*self.verdicts, "failed") if refused else self.verdicts,
            stacks=() if refused else self.stacks,
            named_s=4 * self.named_s,
            paged_s=self.paged_s and 4 * self.paged_s,
            limit_s=2 * self.limit_s,
        )


ABSENT = ("not_entered", "data_loading")

FAULTS = (
    # the two that compile first: they take longest
    Fault(
        "compile_alone", 300, ("slow",), ("compiling",), hold_s=60, compile_looks=3, cpu=True, limit_s=180,
        env={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
    ),
    Fault(
        "compile_past_timeout", 40, ("timeout_imminent",), ("compiling",), paged_s=25, limit_s=130, cpu=True, env={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
    ),
    Fault("abort", 15, ("stuck", "timeout_imminent", "failed"), ABSENT, paged_s=10, until_exit=True, limit_s=160, cpu=True),
    Fault("graph_stop", 60, ("slow", "stuck"), (*ABSENT, "unknown"), limit_s=150),
    Fault("graph_stop_eager", 60, ("stuck", "timeout_imminent"), (*ABSENT, "unknown"), paged_s=35),
    Fault("gil_held", 90, ("stuck",), ("gil_held",), paged_s=40, cpu=True),
    Fault("spin", 90, ("stuck",), ("all_entered",), paged_s=35, env={"TORCH_NCCL_ENABLE_TIMING": "1"}),
    Fault("spin_untimed", 90, ("stuck",), ("all_entered",), culprits=((), (1,)), paged_s=35, named_s=20, env={"TORCH_NCCL_ENABLE_TIMING": "0"}),
    Fault("fsdp_skip", 60, ("stuck", "diverged"), ("mismatch",), either_side=True, first_causes=ABSENT, paged_s=30, cpu=True),
    Fault("asleep", 60, ("stuck",), ABSENT, paged_s=15, cpu=True),
    Fault("shapes", 60, ("stuck",), ("mismatch",), either_side=True, named_s=UNHEALABLE_S, paged_s=UNHEALABLE_S, cpu=True),
    Fault("operations", 60, ("stuck", "diverged"), ("mismatch",), either_side=True, named_s=UNHEALABLE_S, paged_s=UNHEALABLE_S, cpu=True),
    Fault(
        "group_order", 60, ("stuck",), ("group_order_deadlock",), everybody=True, named_s=UNHEALABLE_S, paged_s=UNHEALABLE_S, cpu=True,
    ),
    Fault("killed", 60, ("failed",), ("killed",), named_s=UNHEALABLE_S, paged_s=UNHEALABLE_S, stacks=(), until_exit=True, cpu=True),
    Fault("never_joins", 120, ("slow", "stuck"), ("store_wait", *ABSENT), named_s=15, stacks=(1,), cpu=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Control:
    """One healthy job of jobs/control_job.py: never a page, nothing above `slow`, exit code 0."""

    name: str
    what: str
    timeout_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = False
    limit_s: float = 200.0


CONTROLS = (
    Control("autotune", "long max-autotune of the same frames on all ranks, twice", 240, {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}, cpu=True, limit_s=300),
    Control("graphs", "a step with its all_reduce captured and replayed, captured anew, with pauses"),
    Control("checkpoint", "rank 0 saves for 35 s while the others wait in the next step", cpu=True),
    Control("plain", "DDP training, eager", cpu=True),
    Control("small_calls", "bursts of small eager collectives in two groups", cpu=True),
)
