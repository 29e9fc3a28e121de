"""What the records of the numerics probe mean across ranks."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch.model import Group, RankState
from rankwatch.monitor.numerics import Finding, Numerics, records_of

NAMES = {"0": "a.weight", "1": "a.bias"}


def series(step: int, bad_step: int = 0, good_step: int = 0, bad_value: str = "nan") -> dict[str, Any]:
    bad = max(0, step - bad_step + 1) if bad_step else 0
    return {
        "checks": step,
        "step": step,
        "value": 1.25,
        "bad": bad,
        "bad_step": bad_step,
        "bad_value": bad_value if bad else "",
        "good_step": good_step or step,
    }


def check(step: int, *sums: int, issued: int | None = None, first: int = 0, norms: list[float | None] | None = None, model: int = 1) -> list[Any]:
    return [step, issued if issued is not None else 3 * step, model, first, " ".join(f"{one:016x}" for one in sums), norms or [2.0] * len(sums)]


def replicas(*checks: list[Any], ranks: str = "0-2", unsynced: str = "", model: int = 1) -> dict[str, Any]:
    return {"replicas": {"group": "0", "ranks": ranks, "model": model, "total": 2, "unsynced": unsynced, "names": NAMES, "checks": list(checks)}}


def looks(*pictures: dict[int, dict[str, Any]], numerics: Numerics | None = None) -> list[Finding]:
    numerics = numerics or Numerics()
    return [finding for at, picture in enumerate(pictures) for finding in numerics.look(picture, 10.0 + at)]


def test_the_rank_that_differs_from_the_majority_is_named_with_the_parameter() -> None:
    same, odd = check(50, 7, 8, norms=[2.0, 3.0]), check(50, 7, 9, norms=[2.0, 4.0])
    equal = {rank: replicas(check(0, 1, 1)) for rank in range(3)}
    [finding] = looks(equal, {0: replicas(same), 1: replicas(odd), 2: replicas(same)})
    assert (finding.kind, finding.ranks, finding.step) == ("replicas", (1,), 50)
    assert finding.words == ("parameters differ between replicas since step 50: a.bias, equal at step 0; rank 1 differs from the other 2; norms from 3 to 4")


def test_looks_between_that_were_at_other_parameters_leave_the_step_open() -> None:
    def every_5(*checks: list[Any]) -> dict[str, Any]:
        return {"every": 5, **replicas(*checks, ranks="0-1")}

    equal = dict.fromkeys((0, 1), every_5(check(10, 7), check(15, 5, first=1), check(20, 5, first=1), check(25, 5, first=1)))
    [finding] = looks(equal, {0: every_5(check(30, 7)), 1: every_5(check(30, 9))})
    assert finding.words.startswith(
        "parameters differ between replicas since between step 10 and 30 (not compared in between): a.weight; no majority among ranks 0-1; "
    )
    [finding] = looks({rank: every_5(check(25, 7)) for rank in (0, 1)}, {0: every_5(check(30, 7)), 1: every_5(check(30, 9))})
    assert finding.words.startswith("parameters differ between replicas since step 30: a.weight, equal at step 25; ")


def test_two_replicas_have_no_majority_and_nothing_is_said_twice() -> None:
    numerics = Numerics()
    picture = {0: replicas(check(50, 7), ranks="0-1"), 1: replicas(check(50, 9), ranks="0-1")}
    again = {0: replicas(check(100, 7), ranks="0-1"), 1: replicas(check(100, 9), ranks="0-1")}
    [finding] = looks(picture, again, numerics=numerics)
    assert finding.ranks == (0, 1)
    assert finding.words == (
        "parameters differ between replicas since step 50: a.weight, never seen equal; no majority among ranks 0-1;"
        " norms agree to 5 digits, as after a flipped bit, or with different GPUs or kernels"
    )
    [group] = numerics.document()["replicas"]
    assert (group["differ"], group["since_step"], group["where"], group["compared"], group["step"]) == ("0-1", 50, ["a.weight"], 2, 100)


def test_replicas_that_become_equal_again_differ_no_more() -> None:
    numerics = Numerics()
    looks({0: replicas(check(50, 7), ranks="0-1"), 1: replicas(check(50, 9), ranks="0-1")}, numerics=numerics)
    looks({rank: replicas(check(100, 5), ranks="0-1") for rank in (0, 1)}, numerics=numerics)
    assert numerics.document()["replicas"][0]["differ"] == ""


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replicas(check(50, 9, issued=149), ranks="0-1"), id="at another point of the program: one more collective was issued"),
        pytest.param(replicas(check(100, 9), ranks="0-1"), id="after another step"),
        pytest.param(replicas(check(50, 9, first=8), ranks="0-1"), id="other parameters"),
        pytest.param(replicas(check(50, 9, model=2), ranks="0-1"), id="another module"),
        pytest.param(replicas(check(50, 9), ranks="1-2"), id="another group"),
        pytest.param(replicas(check(50, 9), ranks="0-1", unsynced="it steps without reducing gradients (no_sync)"), id="replicas that may differ"),
        pytest.param({"replicas": {"ranks": "0-1", "checks": [[50, 150, 1, 0, "0000000000000009 00...", [2.0, 2.0]], 7]}}, id="a record that was cut"),
        pytest.param({"replicas": {"ranks": "x", "checks": 3}}, id="nonsense"),
    ],
)
def test_what_is_not_the_same_look_is_not_compared(other: dict[str, Any]) -> None:
    numerics = Numerics()
    picture = {0: replicas(check(50, 7), ranks="0-1"), 1: other}
    assert looks(*[picture] * 10, numerics=numerics) == []
    assert numerics.look(picture, 99.0, final=True) == ()


def test_numbers_that_are_not_finite_anywhere_are_equal_whatever_their_bits() -> None:
    assert looks({0: replicas(check(50, 7, norms=[None]), ranks="0-1"), 1: replicas(check(50, 9, norms=[None]), ranks="0-1")}) == []
    [finding] = looks({0: replicas(check(50, 7, norms=[None]), ranks="0-1"), 1: replicas(check(50, 9), ranks="0-1")})
    assert finding.words.endswith("not finite on some of them")


def test_a_look_waits_for_the_third_rank_before_it_names_one() -> None:
    two = {0: replicas(check(50, 7)), 1: replicas(check(50, 9)), 2: replicas()}
    three = {**two, 2: replicas(check(50, 7))}
    [finding] = looks(two, two, three)
    assert finding.ranks == (1,)


def test_a_rank_that_never_shows_its_look_does_not_hold_the_others_up_for_ever() -> None:
    two = {0: replicas(check(50, 7)), 1: replicas(check(50, 9)), 2: {}}
    [finding] = looks(two, two, two, two, two)
    assert finding.ranks == (0, 1)


def test_the_only_rank_that_was_not_finite_is_named_once_the_others_have_passed_that_step() -> None:
    bad = {"grad": series(120, bad_step=120, good_step=119)}
    [finding] = looks({0: {"grad": series(118)}, 1: bad}, {0: {"grad": series(121)}, 1: bad})
    assert finding == Finding("gradient", (1,), 120, "first non-finite gradient norm at step 120 (nan; 1.25 at step 119); rank 0 was finite then")


def test_reduced_gradients_say_that_they_cannot_tell() -> None:
    bad = {"grad": series(120, bad_step=120, good_step=119)}
    [finding] = looks({0: bad, 1: bad})
    assert finding.ranks == (0, 1)
    assert finding.words.endswith("on all of them at once: gradients are reduced before they are seen; rankwatch.log_loss(loss) tells whose loss was first")


def test_the_loss_that_was_first_is_named_with_the_gradients() -> None:
    bad = series(120, bad_step=120, good_step=119, bad_value="inf")
    loss, gradient = looks({0: {"grad": bad, "loss": series(120)}, 1: {"grad": bad, "loss": bad}})
    assert (loss.kind, loss.ranks, gradient.ranks) == ("loss", (1,), (0, 1))
    assert loss.words == "first non-finite loss at step 120 (inf; 1.25 at step 119); rank 0 was finite then"
    assert gradient.words.endswith("on all of them at once, after the non-finite loss of rank 1 at step 120")


def test_a_rank_that_looks_less_often_is_not_called_finite_for_it() -> None:
    """Rank 1 looks at every 50th step: it was finite at 100, and at 120 nobody knows."""
    picture = {0: {"grad": series(150, bad_step=120, good_step=119)}, 1: {"grad": series(150, bad_step=150, good_step=100)}}
    [finding] = looks(picture)
    assert finding.ranks == (0, 1)
    assert finding.words == "first non-finite gradient norm at step 120 (nan; 1.25 at step 119)"


def test_ranks_that_the_record_has_no_room_for_come_from_the_group() -> None:
    ranks = tuple(range(0, 1024, 8))
    group = Group(name="0", desc="dp", backend="nccl", ranks=ranks, timeout_s=600.0)
    states = {rank: RankState(rank=rank, groups=(group,), numerics=replicas(check(50, 7 + (rank == 8)), ranks="")) for rank in ranks}
    [finding] = looks(records_of(states))
    assert finding.ranks == (8,)


def test_without_the_probe_there_is_nothing() -> None:
    numerics = Numerics()
    assert numerics.look({0: {}, 1: {}}, 1.0, final=True) == ()
    assert numerics.document() == {}
