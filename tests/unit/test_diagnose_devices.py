"""All ranks are in an NCCL collective that does not complete: who is named by which evidence, and what is said without any."""

from __future__ import annotations

import pytest
from nccl_stuck import all_in, gpu, job

from rankwatch.model import Ras, RasProblem, RasRank

DIVERGENCE = "all 3 ranks have entered #754 with equal operations: no divergence of the code"
NO_GPU = "absent (pip install 'rankwatch[gpu]')"


def test_without_evidence_nobody_is_named_and_what_is_missing_is_listed():
    verdict = all_in(job(gpu_note=NO_GPU, ras=Ras("refused", 0.0, note="nobody listens at localhost:28028")), until_s=130.0)
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks) == ("stuck", "all_entered", "network", ())
    assert "device or network, rank unknown" in verdict.summary
    assert verdict.evidence == (DIVERGENCE,)
    assert verdict.missing_evidence == (
        "which device has started it (--nccl-timing on would tell: TORCH_NCCL_ENABLE_TIMING is off)",
        "state of the GPUs of ranks 0-2 (gpu probe: absent (pip install 'rankwatch[gpu]'))",
        "NCCL's RAS as a second opinion (nobody listens at localhost:28028)",
    )


def test_all_gpus_busy_tell_none_from_the_others():
    verdict = all_in(job(gpus={rank: gpu(rank, utilisation_ratio=1.0) for rank in range(3)}, ras=Ras("ok", 0.0, processes=3)))
    assert verdict.culprit_ranks == ()
    assert verdict.evidence == (
        DIVERGENCE,
        "NCCL's RAS of 3 processes sees nothing wrong: it counts launches on the host and does not see whether a kernel runs",
        "the GPUs of ranks 0-2 are all busy, as one that waits in NCCL is: that tells none from the others",
    )
    assert verdict.missing_evidence == ("which device has started it (--nccl-timing on would tell: TORCH_NCCL_ENABLE_TIMING is off)",)


def test_timing_names_the_rank_whose_device_has_not_started():
    verdict = all_in(job(started={0: True, 1: False, 2: True}))
    assert (verdict.culprit_ranks, verdict.domain, verdict.confidence) == ((1,), "node", "likely")
    assert "rank 1: its device has not started it while others have" in verdict.summary
    assert any("Work that was queued on that GPU" in line for line in verdict.advice)
    assert not any("TORCH_NCCL_ENABLE_TIMING" in line for line in (*verdict.missing_evidence, *verdict.advice))


@pytest.mark.parametrize(
    ("found", "says", "confidence", "advice"),
    [
        (gpu(2, xids=((79, 4990.0),)), "rank 2: Xid 79 (GPU has fallen off the bus) on GPU 2", "certain", "Drain the node"),
        (gpu(2, lost="GPU is lost"), "rank 2: the driver has lost it (GPU is lost) on GPU 2", "certain", "Drain the node"),
        (gpu(2, ecc_new=1), "rank 2: 1 uncorrected ECC error since the job began on GPU 2", "certain", "Drain the node"),
        (gpu(2, by="order", xids=((48, 5001.0),)), "rank 2: Xid 48 (double-bit ECC error) on GPU 2", "likely", "Drain the node"),
        (gpu(2, xids=((31, 5001.0),)), "rank 2: Xid 31 (GPU memory page fault", "likely", "compute-sanitizer"),
        (gpu(2, xids=((999, 5001.0),)), "rank 2: Xid 999 (see NVIDIA's Xid catalogue) on GPU 2", "certain", "Drain the node"),
        (gpu(2, throttled=("power brake",)), "rank 2: the hardware holds the clocks of GPU 2 down (power brake)", "partial", "cooling and power"),
        (gpu(2, utilisation_ratio=0.0), "rank 2: its GPU does nothing while the others' are in the collective", "likely", "Work that was queued"),
    ],
)  # fmt: skip
def test_what_the_driver_reports_names_the_rank(found, says, confidence, advice):
    verdict = all_in(job(gpus={0: gpu(0), 1: gpu(1), 2: found}))
    assert (verdict.culprit_ranks, verdict.cause, verdict.domain, verdict.confidence) == ((2,), "all_entered", "node", confidence)
    assert says in verdict.summary
    assert any(advice in line for line in verdict.advice)


@pytest.mark.parametrize(
    "found",
    [gpu(2, xids=((79, 4000.0),)), gpu(2, xids=((45, 5001.0),)), gpu(2, ecc_uncorrected=7), gpu(2, remap_pending=True), gpu(2, utilisation_ratio=0.5)],
    ids=["an error of long before", "a consequence", "errors of before the job", "a repair that waits", "a busy GPU among waiting ones"],
)  # fmt: skip
def test_what_explains_nothing_names_nobody(found):
    assert all_in(job(gpus={0: gpu(0), 1: gpu(1), 2: found})).culprit_ranks == ()


def test_an_idle_gpu_names_nobody_unless_all_are_known_and_looked_at_since():
    assert all_in(job(gpus={0: gpu(0), 2: gpu(2, utilisation_ratio=0.0)})).culprit_ranks == ()
    assert all_in(job(gpus={0: gpu(0), 1: gpu(1), 2: gpu(2, at=4990.0, utilisation_ratio=0.0)})).culprit_ranks == ()
    assert all_in(job(gpus={rank: gpu(rank, utilisation_ratio=0.0) for rank in range(3)})).culprit_ranks == ()


def test_an_error_of_a_device_counts_before_one_of_a_link():
    verdict = all_in(job(gpus={0: gpu(0, xids=((74, 5001.0),)), 1: gpu(1, xids=((74, 5001.0), (79, 5001.0))), 2: gpu(2)}))
    assert verdict.culprit_ranks == (1,)


def test_links_that_fail_at_both_ends_name_both_and_are_not_certain():
    verdict = all_in(job(gpus={0: gpu(0, xids=((74, 5001.0),)), 1: gpu(1, xids=((74, 5001.0),)), 2: gpu(2)}))
    assert (verdict.culprit_ranks, verdict.confidence) == ((0, 1), "likely")


def test_a_process_that_answers_ras_no_more_is_the_networks():
    lost = RasProblem("INCOMPLETE", "Missing communicator data from 1 rank", "ab", (RasRank(1, 4001, "1", "192.0.2.2", rank=1),))
    verdict = all_in(job(ras=Ras("problems", 0.0, (lost,), 3)))
    assert (verdict.culprit_ranks, verdict.domain) == ((1,), "network")
    assert "NCCL's RAS, two polls alike: Missing communicator data from 1 rank: rank 1" in verdict.evidence


def test_launches_that_ras_counts_are_evidence_and_name_nobody():
    uneven = RasProblem(
        "MISMATCH", "Communicator ranks have different AllReduce operation counts", "ab",
        (RasRank(0, 4000, "0", "192.0.2.2", 0, 751), RasRank(1, 4001, "1", "192.0.2.2", 1, 748)),
    )  # fmt: skip
    verdict = all_in(job(ras=Ras("problems", 0.0, (uneven,), 3)))
    assert verdict.culprit_ranks == ()
    assert "NCCL's RAS, two polls alike: Communicator ranks have different AllReduce operation counts: rank 0 751, rank 1 748" in verdict.evidence


def test_the_code_is_never_blamed():
    for more in ({}, {"gpus": {2: gpu(2, xids=((13, 5001.0),))}}, {"started": {0: True, 1: False, 2: True}}):
        assert all_in(job(**more)).domain in ("node", "network")
