"""The driver's view of the GPUs: read where it can be, mapped to ranks, given up where it fails; never waited for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import Strict

from rankwatch.model import Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor import gpus
from rankwatch.monitor.gpus import ABSENT, GpuWatch, NvmlProcess, Place, assign, visible_devices
from rankwatch.monitor.nvml import Devices, answer
from rankwatch.monitor.second_opinions import SWITCHED_OFF, SecondOpinions


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 10: "Timeout", 15: "GPU is lost", 12: "NVML Shared Library Not Found"}[value])
        self.value = value


def refuse(value: int) -> Any:
    def call(*_arguments: Any) -> Any:
        raise NVMLError(value)

    return call


def nvml(events: list[Any] | None = None, **more: Any) -> Strict:
    """Two GPUs as a driver shows them; what is not listed here may not be called."""
    waiting = events if events is not None else []

    def next_event(event_set: str, timeout_ms: int) -> Any:
        assert (event_set, timeout_ms) == ("set", 0)
        if not waiting:
            raise NVMLError(10)
        return waiting.pop(0)

    known = {
        "NVMLError": NVMLError,
        "NVML_ERROR_GPU_IS_LOST": 15,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu{index}",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlEventSetCreate": lambda: "set",
        "nvmlDeviceRegisterEvents": lambda handle, kinds, event_set: None,
        "nvmlEventSetWait_v2": next_event,
        "nvmlDeviceGetIndex": lambda handle: int(handle[-1]),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=100 if handle == "gpu0" else 0, memory=0),
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1980,
        "nvmlDeviceGetPowerUsage": lambda handle: 131_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=2_475_000_000, total=150_000_000_000, free=0),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x48 if handle == "gpu1" else 0x1,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 0,
        "nvmlDeviceGetRemappedRows": lambda handle: (0, 1, 1, 0),
        "nvmlDeviceGetRetiredPagesPendingStatus": refuse(3),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=6381 + int(handle[-1]), usedGpuMemory=2_400_000_000)],
    }
    return Strict(**{**known, **more})


def test_a_look_gives_what_the_driver_knows_of_each_gpu():
    zero, one = Devices(nvml()).look()
    assert zero == {
        "index": 0, "uuid": "GPU-gpu0", "xids": [], "utilisation_ratio": 1.0, "sm_clock_hz": 1.98e9, "power_w": 131.0, "temperature_c": 41,
        "memory_used_bytes": 2_475_000_000, "memory_total_bytes": 150_000_000_000, "throttled": [], "ecc_uncorrected": 0, "remap_pending": True,
        "remap_failed": False, "processes": [[6381, 2_400_000_000]],
    }  # fmt: skip
    assert one["throttled"] == ["thermal slowdown", "hardware slowdown"]


def test_what_a_gpu_does_not_support_is_left_out():
    names = ("PowerUsage", "Temperature", "TotalEccErrors", "RemappedRows", "CurrentClocksEventReasons", "ComputeRunningProcesses", "MemoryInfo")
    bare = nvml(**{f"nvmlDeviceGet{name}": refuse(3) for name in names}, nvmlEventSetCreate=refuse(3))
    assert Devices(bare).look()[0] == {"index": 0, "uuid": "GPU-gpu0", "xids": [], "utilisation_ratio": 1.0, "sm_clock_hz": 1.98e9, "processes": []}


def test_errors_that_the_driver_reports_are_taken_once():
    xid = SimpleNamespace(device="gpu1", eventType=0x8, eventData=79)
    devices = Devices(nvml([xid]))
    assert [row["xids"] for row in devices.look()] == [[], [79]]
    assert [row["xids"] for row in devices.look()] == [[], []]


def test_a_gpu_that_is_lost_says_only_that():
    lost = Devices(nvml(nvmlDeviceGetUtilizationRates=refuse(15))).look()[1]
    assert lost == {"index": 1, "uuid": "GPU-gpu1", "xids": [], "lost": "GPU is lost"}


def test_a_driver_that_is_not_there_is_an_error_and_is_tried_anew():
    devices: list[Devices] = []
    assert answer(devices, lambda: nvml(nvmlInit=refuse(12)))["error"] == "NVMLError: NVML Shared Library Not Found"
    assert [row["index"] for row in answer(devices, nvml)["gpus"]] == [0, 1]


PLACES = [Place(0, 0, 6381), Place(1, 1, 6382)]
ROWS: list[dict[str, Any]] = [
    {"index": 0, "uuid": "GPU-aa", "utilisation_ratio": 1.0, "ecc_uncorrected": 2, "xids": [], "processes": [[6381, 10], [6382, 1]]},
    {"index": 1, "uuid": "GPU-bb", "utilisation_ratio": 0.0, "ecc_uncorrected": 0, "xids": [], "processes": [[6382, 9]]},
]


class Helper:
    """Answers what it is told to; asked counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.closed = False
        self.answers: list[bytes | None] = []

    def ask(self) -> None:
        assert not self.closed
        self.asked += 1

    def read(self) -> bytes | None:
        return self.answers.pop(0) if self.answers else b""

    def close(self) -> None:
        self.closed = True


class Watched:
    def __init__(self) -> None:
        self.now = 1000.0
        self.helpers: list[Helper] = []
        self.watch = GpuWatch("", self.start, lambda: self.now)

    def start(self) -> Helper:
        self.helpers.append(Helper())
        return self.helpers[-1]

    def pass_s(self, seconds: float, *answers: bytes | None, suspected: bool = False) -> None:
        self.now += seconds
        if self.helpers:
            self.helpers[-1].answers += answers
        self.watch.look(suspected)


def line(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return json.dumps({"gpus": rows}).encode() + b"\n"


def test_ranks_get_the_gpu_on_which_their_process_holds_most():
    job = Watched()
    job.pass_s(0)
    whole = line()
    job.pass_s(0.5, whole[:40])
    assert job.watch.of(PLACES) == {}
    job.pass_s(0.5, whole[40:])
    found = job.watch.of(PLACES)
    assert {rank: (gpu.index, gpu.by, gpu.uuid, gpu.utilisation_ratio) for rank, gpu in found.items()} == {
        0: (0, "process", "GPU-aa", 1.0),
        1: (1, "process", "GPU-bb", 0.0),
    }
    assert job.watch.note == ""


def test_it_looks_every_ten_seconds_and_every_two_while_something_is_suspected():
    job = Watched()
    for _ in range(80):
        job.pass_s(0.5, line())
    assert job.helpers[0].asked == 4
    for _ in range(40):
        job.pass_s(0.5, line(), suspected=True)
    assert job.helpers[0].asked == 14


def test_errors_count_from_the_first_look_and_stay():
    job = Watched()
    job.pass_s(0)
    job.pass_s(1, line())
    assert job.watch.of(PLACES)[0].ecc_new == 0
    job.pass_s(10)
    job.pass_s(1, line([{**ROWS[0], "ecc_uncorrected": 3, "xids": [48]}, ROWS[1]]))
    job.pass_s(10)
    job.pass_s(1, line([{**ROWS[0], "ecc_uncorrected": 3}, ROWS[1]]))
    gpu = job.watch.of(PLACES)[0]
    assert (gpu.ecc_new, gpu.ecc_uncorrected, gpu.xids) == (1, 3, ((48, 1012.0),))


def test_a_gpu_that_is_lost_is_still_its_ranks():
    job = Watched()
    job.pass_s(0)
    job.pass_s(1, line())
    job.watch.of(PLACES)
    job.pass_s(10)
    job.pass_s(1, line([ROWS[0], {"index": 1, "uuid": "GPU-bb", "xids": [79], "lost": "GPU is lost"}]))
    gpu = job.watch.of([Place(0, 0, 6381), Place(1, 1, 6382)])[1]
    assert (gpu.index, gpu.lost, [code for code, _at in gpu.xids]) == (1, "GPU is lost", [79])


def test_a_driver_that_hangs_is_said_and_not_asked_again():
    job = Watched()
    for _ in range(60):
        job.pass_s(1)
    assert job.helpers[0].asked == 1
    assert job.watch.note == "the NVIDIA driver has not answered for 59 s"


def test_five_failures_switch_it_off():
    job = Watched()
    for _ in range(100):
        job.pass_s(1, b'{"error": "NVMLError_Unknown: Unknown Error"}\n')
    assert job.watch.note == "switched off after 5 failures, the last: NVMLError_Unknown: Unknown Error"
    assert (len(job.helpers), job.helpers[0].asked, job.helpers[0].closed) == (1, 5, True)


def test_a_helper_that_ends_is_started_again_and_given_up_in_the_end():
    job = Watched()
    for _ in range(200):
        job.pass_s(1, None)
    assert (len(job.helpers), job.watch.note) == (5, "switched off after 5 failures, the last: its helper has ended")


def test_without_a_driver_it_is_off_at_once():
    job = Watched()
    job.pass_s(0)
    job.pass_s(1, b'{"error": "NVMLError_LibraryNotFound: NVML Shared Library Not Found"}\n')
    job.pass_s(60)
    assert job.watch.note == "no NVIDIA driver here (NVMLError_LibraryNotFound: NVML Shared Library Not Found)"
    assert job.helpers[0].asked == 1


@pytest.mark.parametrize("answer", [b"[]\n", b"\xff\n", b'{"gpus": 3}\n', b'{"gpus": [{"index": "x"}]}\n', b'{"gpus": [{}]}\n'])
def test_rubbish_is_a_failure(answer):
    job = Watched()
    job.pass_s(0)
    job.pass_s(1, answer)
    assert job.watch.note.startswith("its answer does not decode")
    assert job.watch.of(PLACES) == {}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {0: 0, 1: 1}),
        ("1,0", {0: 1, 1: 0}),
        ("GPU-bb,GPU-aa", {0: 1, 1: 0}),
        ("1", {0: 1, 1: 1}),
        ("", {}),
        ("7,8", {}),
    ],
)
def test_where_the_driver_knows_no_process_the_place_among_the_visible_gpus_counts(visible, expected):
    job = Watched()
    job.pass_s(0)
    job.pass_s(1, line([{**row, "processes": []} for row in ROWS]))
    found = job.watch.of([Place(0, 0, 5, visible), Place(1, 1, 6, visible)])
    assert {rank: gpu.index for rank, gpu in found.items()} == expected
    assert all(gpu.by == "order" for gpu in found.values())


def test_a_rank_that_has_not_begun_gets_no_guess_while_others_are_known():
    job = Watched()
    job.pass_s(0)
    job.pass_s(1, line())
    assert sorted(job.watch.of([Place(0, 0, 6381), Place(1, 1, 99)])) == [0]
    assert assign([], {}, {}) == {}


def test_the_extra_may_be_absent(monkeypatch):
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: None)
    watch = GpuWatch()
    watch.look(suspected=True)
    assert watch.note == ABSENT


def test_the_real_helper_answers_and_ends_with_its_stdin():
    """Without the extra, or without a driver, the answer is an error; with both it is a look."""
    helper = NvmlProcess()
    try:
        helper.ask()
        data = b""
        for _ in range(1000):
            part = helper.read()
            assert part is not None
            data += part
            if data.endswith(b"\n"):
                break
            helper._process.poll()
            __import__("select").select([helper._out], [], [], 0.1)
        assert set(json.loads(data)) in ({"error"}, {"gpus"})
        stdin = helper._process.stdin
        assert stdin is not None
        stdin.close()
        assert helper._process.wait(30) == 0
    finally:
        helper.close()


def test_the_visible_devices_of_a_process_are_read_from_its_start(monkeypatch):
    assert visible_devices(2**22 + 7) is None


def job_on(backend: str) -> JobSnapshot:
    group = Group("0", "default_pg", backend, (0, 1), 600.0)
    ranks = tuple(RankState(rank, local_rank=rank, groups=(group,), process=Process(6381 + rank, True, "S")) for rank in (0, 1))
    return JobSnapshot(0.0, 0.0, 2, 0, (NodeReport("n", ranks),))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_ras_is_asked_only_while_something_is_suspected_on_nccl(backend):
    asked: list[dict[int, int]] = []
    ras = Strict(look=lambda pids: asked.append(dict(pids)), close=lambda: None)
    opinions = SecondOpinions({}, (), GpuWatch("off"), ras)  # type: ignore[arg-type]
    opinions.into(job_on("gloo"), suspected=True)
    opinions.into(job_on(backend), suspected=False)
    assert asked == []
    opinions.into(job_on(backend), suspected=True)
    assert asked == [{0: 6381, 1: 6382}]


def test_the_switch_is_heard_and_a_job_without_gpus_hears_nothing():
    opinions = SecondOpinions({}, ("gpu",), ras=Strict(look=lambda pids: None, close=lambda: None))  # type: ignore[arg-type]
    assert opinions.into(job_on("gloo"), suspected=False).nodes[0].gpu_note == SWITCHED_OFF
    assert opinions.capabilities() == {}
    opinions.into(job_on("nccl"), suspected=False)
    assert opinions.capabilities() == {"gpu": SWITCHED_OFF}
    opinions.close()
