"""The rungs: from no torch.compile at all to what the job asks for. Each adds one layer, so the first one that differs names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OFF, EAGER, AOT_EAGER, DECOMP, INDUCTOR, GIVEN = "off", "eager", "aot_eager", "aot_eager_decomp_partition", "inductor", "given"
RUNGS = (OFF, EAGER, AOT_EAGER, DECOMP, INDUCTOR, GIVEN)
DEFAULT = ",".join(RUNGS)

HELP = {
    OFF: "no torch.compile: the frames run as Python (torch.compiler.set_stance('force_eager'))",
    EAGER: "Dynamo captures graphs and runs them as they are",
    AOT_EAGER: "AOTAutograd traces forward and backward; nothing is generated",
    DECOMP: "Inductor's decompositions and partitioner; nothing is generated",
    INDUCTOR: "Inductor, without the job's mode= and options=",
    GIVEN: "what the job asks for: its own backend, mode= and options=; left out where that is plain inductor",
}
_LAYERS = {
    EAGER: "Dynamo",
    AOT_EAGER: "AOTAutograd",
    DECOMP: "the decompositions or the partitioner",
    INDUCTOR: "Inductor",
    GIVEN: "the job's own backend",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the job gave to torch.compile: names of backends, and how high each stands (agent/ablate.py LEVELS)."""

    backends: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()

    @property
    def own(self) -> bool:
        """A backend that is not plain inductor or one of its lower rungs."""
        return any(level > RUNGS.index(INDUCTOR) for level in self.levels)

    @property
    def inductor(self) -> bool:
        """Inductor, with or without mode= and options=."""
        return any(name.split(" ")[0] == INDUCTOR for name in self.backends)


def parse(text: str) -> tuple[str, ...]:
    """Rungs in the order of RUNGS. ValueError for an unknown or a lone one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in RUNGS:
            raise ValueError(f"there is no rung {name!r}; there are {', '.join(RUNGS)}")
    if len(set(names)) < 2:
        raise ValueError("a ladder needs two rungs or more: the lowest is what the others are compared with")
    return tuple(rung for rung in RUNGS if rung in names)


def worth_running(rung: str, ladder: Sequence[str], asked: Asked) -> bool:
    """Whether a rung would show anything new for what the job asks for. Nothing known: yes."""
    if not asked.levels:
        return True
    if rung == INDUCTOR:
        return asked.inductor
    if rung == GIVEN:
        return asked.own or INDUCTOR not in ladder
    return RUNGS.index(rung) <= max(asked.levels) or rung == ladder[0]


def layer(rung: str, below: str, asked: Asked) -> str:
    """What is to blame when `rung` differs and `below` does not, in words."""
    if below not in RUNGS or rung not in RUNGS:
        return rung
    between = RUNGS[RUNGS.index(below) + 1 : RUNGS.index(rung) + 1]
    names = []
    for step in between:
        if step == INDUCTOR and rung == GIVEN and asked.levels and not asked.inductor:
            continue
        if step == GIVEN:
            own = [name for name, level in zip(asked.backends, asked.levels, strict=False) if level > RUNGS.index(INDUCTOR)]
            if not own and len(between) > 1:
                continue
            options = [name for name in own if name.startswith(INDUCTOR + " ")]
            custom = [name for name in own if not name.startswith(INDUCTOR + " ")]
            names += [f"the backend {name}" for name in custom] + [f"what the job asks of {name}" for name in options] or [_LAYERS[GIVEN]]
        else:
            names.append(_LAYERS[step])
    return " or ".join(names)
