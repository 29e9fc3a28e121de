"""The planned trouble of a framework's job: what happens at PLACE on one rank. Everybody else's code goes on; nothing here knows rankwatch."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time

import torch

FAULT = sys.argv[1]
RANK = int(os.environ["RANK"])
AFTER = 4  # steps
TIMEOUT_S = 60


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """64 samples; with `worker` rank 1's loader never gives the 17th."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if FAULT in ("worker", "own_data") and RANK == 1 and self.reached(index):
            read_shard_that_never_comes()
        return {"x": torch.full((4,), float(index)), "labels": torch.zeros(1)}

    seen = 0

    def reached(self, index: int) -> bool:
        self.seen += 1
        return self.seen > 2 * AFTER


def read_shard_that_never_comes() -> None:
    time.sleep(100_000)


def in_step(step: int) -> None:
    """Called from the job's own training step."""
    if FAULT == "step" and RANK == 1 and step == AFTER:
        compute_loss_that_never_ends()


def compute_loss_that_never_ends() -> None:
    time.sleep(100_000)


class SlowDisk:
    """What a file on a stalled file system looks like to Python."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115

    def write(self, data: bytes) -> int:
        time.sleep(100_000 if len(data) > 64 else 0)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save_on_rank_0(model: torch.nn.Module, step: int) -> None:
    """Called from a callback or after a step."""
    if FAULT == "save" and RANK == 0 and step == AFTER:
        torch.save({"w": torch.ones(1 << 16), **model.state_dict()}, SlowDisk())


def evaluate_sample() -> None:
    """Called for each sample of a validation loop."""
    if FAULT == "evaluate" and RANK == 0:
        score_that_takes_long()


def score_that_takes_long() -> None:
    time.sleep(100_000)


def download_on_rank_0(step: int) -> None:
    """From a server that takes the connection and never answers."""
    if FAULT == "download" and RANK == 0 and step == AFTER:
        with socket.create_server(("127.0.0.1", 0)) as server:
            fetch_weights(f"http://127.0.0.1:{server.getsockname()[1]}")


def fetch_weights(endpoint: str) -> None:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        import urllib.request

        urllib.request.urlopen(endpoint)
        return
    hf_hub_download("some/model", "weights.bin", endpoint=endpoint, cache_dir=tempfile.mkdtemp(), etag_timeout=100_000)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def workers() -> int:
    return 1 if FAULT == "worker" else 0
