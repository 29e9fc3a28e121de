"""Rank 0 uploads a checkpoint for about 65 s over a real HTTP connection while the others wait in a barrier.

The server (on loopback, started by rank 1) takes the bytes slowly and steadily, so that rank 0 sits in one send() after the other. The group's
timeout is 110 s: the wait outlives half of it, which is all that an upload without progress would be given.
"""

import http.client
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from control import RANK, begin, finish, truth

SERVER = Path(__file__).with_name("slow_server.py")
BODY_BYTES = 13 << 20  # at 200 kB/s


def upload(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("PUT", "/checkpoint", body=body)
    status = connection.getresponse().status
    connection.close()
    return status


def main() -> None:
    begin(timeout_s=110)
    server = subprocess.Popen([sys.executable, str(SERVER), "200000"], stdout=subprocess.PIPE) if RANK == 1 else None
    port = [int(server.stdout.readline()) if server is not None and server.stdout is not None else 0]
    dist.broadcast_object_list(port, 1)
    if RANK == 0:
        truth("upload begins")
        assert upload(port[0], bytes(BODY_BYTES)) == 200
        truth("upload ends")
    dist.barrier()
    if server is not None:
        assert server.wait(30) == 0
    finish()


main()
