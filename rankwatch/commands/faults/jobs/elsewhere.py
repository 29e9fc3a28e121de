"""Faults in which one rank is somewhere else while the others wait for it in an all_reduce. Run by torchrun: elsewhere.py NAME PLANTED TIMEOUT_S."""

from __future__ import annotations

import datetime
import os
import pdb
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])
NAME, PLANTED, TIMEOUT_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
FOR_EVER_S = 300.0  # longer than the demo lasts, so that a forgotten job ends by itself


def train(steps: int) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.1)


def planted() -> None:
    """Tells the demo that the fault begins now."""
    with open(PLANTED, "w") as file:
        file.write(str(time.time()))


# -- not_entered, evaluation, timeout_imminent, debugger, straggler ------------------------------------------------------------


def not_entered() -> None:
    if RANK == 1:
        planted()
        wait_for_a_queue_that_stays_empty()


def wait_for_a_queue_that_stays_empty() -> None:
    threading.Event().wait(FOR_EVER_S)


def evaluation() -> None:
    if RANK == 0:
        planted()
        evaluate(torch.nn.Linear(256, 256).eval(), 20.0)
    train(20)


def evaluate(model: Any, seconds: float) -> float:
    total, end = 0.0, time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end:
            total += float(model(torch.ones(64, 256)).sum())
    return total


def timeout_imminent() -> None:
    """It gets on, and yet not before the watchdog."""
    if RANK == 1:
        planted()
        sort_the_next_shard(FOR_EVER_S)


def sort_the_next_shard(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sorted((number * 7919) % 100_003 for number in range(100_000))


def debugger() -> None:
    if RANK == 1:
        planted()
        look_at_a_batch()


def look_at_a_batch() -> None:
    read, _write = os.pipe()  # nobody types
    with os.fdopen(read) as terminal, open(os.devnull, "w") as output:
        pdb.Pdb(stdin=terminal, stdout=output, nosigint=True).set_trace()
        time.sleep(0)


def traced() -> None:
    """The demo stops its main thread as strace or gdb do."""
    if RANK == 1:
        planted()
    train(3000)


def straggler() -> None:
    if RANK == 1:
        planted()
    for _ in range(300):
        if RANK == 1:
            augment_on_a_slow_cpu()
        train(1)


def augment_on_a_slow_cpu() -> None:
    time.sleep(0.25)


# -- data_loading, checkpointing, external_io ----------------------------------------------------------------------------------


class Samples(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if RANK == 1 and index == 20:
            planted()
            decode_a_file_that_never_opens()
        return torch.ones(8)


def decode_a_file_that_never_opens() -> None:
    threading.Event().wait(FOR_EVER_S)


def data_loading() -> None:
    for batch in DataLoader(Samples(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        dist.all_reduce(batch)


class SlowStorage:
    """A file on storage that takes a second for every megabyte."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "wb")  # noqa: SIM115

    def write(self, data: Any) -> int:
        if len(data) > 1 << 19:
            time.sleep(len(data) / (1 << 20))
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def checkpointing() -> None:
    if RANK == 0:
        planted()
        save_checkpoint(PLANTED + ".checkpoint")
    train(20)


def save_checkpoint(path: str) -> None:
    torch.save({f"layer{number}": torch.ones(1 << 18) for number in range(15)}, SlowStorage(path))
    os.remove(path)


class Stalling(BaseHTTPRequestHandler):
    """Sends the first part of a file, then nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 24))
        self.end_headers()
        self.wfile.write(bytes(1 << 16))
        time.sleep(FOR_EVER_S)

    def log_message(self, format: str, *words: object) -> None:
        pass


def external_io() -> None:
    if RANK == 1:
        server = HTTPServer(("127.0.0.1", 0), Stalling)
        threading.Thread(target=server.handle_request, daemon=True).start()
        planted()
        download_a_shard(f"http://127.0.0.1:{server.server_port}/shard-17")


def download_a_shard(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


# -- compiling -----------------------------------------------------------------------------------------------------------------


def block(x: torch.Tensor, rounds: int) -> torch.Tensor:
    for _ in range(rounds):
        x = torch.tanh(x * 1.01 + 0.01)
    return x


def compiler_that_tunes_large_graphs(module: Any, _inputs: Any) -> Any:
    if len(module.graph.nodes) > 40:
        sort_the_next_shard(12.0)
    return module.forward


def compiling() -> None:
    """A batch with more work in it: one rank compiles another graph while the others have theirs."""
    compiled = torch.compile(block, backend=compiler_that_tunes_large_graphs, dynamic=False)
    for step in range(12):
        lone = step == 8 and RANK == 1
        if lone:
            planted()
        compiled(torch.ones(64), 30 if lone else 2)
        train(1)
    train(20)


def compile_hung() -> None:
    if RANK == 1:
        planted()
        torch.compile(lambda x: x.sin() + 1, backend=compiler_that_hangs)(torch.ones(3))


def compiler_that_hangs(module: Any, _inputs: Any) -> Any:
    """As nvcc or g++ on a file system that does not answer: a child that neither works nor ends."""
    subprocess.run(["sleep", str(FOR_EVER_S)])
    return module.forward


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    train(10)
    globals()[NAME]()
    train(5)
    dist.destroy_process_group()


main()
