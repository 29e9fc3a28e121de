"""What a real rank tells of its timeouts: each group's own, the line that set it, and how it changes while the job runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_rank import Node, go_on, printed, until

pytestmark = pytest.mark.ranks

CODE = """import sys
import datetime, json, torch, torch.distributed as dist
from torch._C import _distributed_c10d as bindings

def tell(**what):
    print(json.dumps(what), flush=True)
    sys.stdin.readline()

def seconds(number):
    return datetime.timedelta(seconds=number)

def main():
    dist.init_process_group("gloo", timeout=seconds(77))
    dist.all_reduce(torch.ones(1))
    tell()
    side = dist.new_group([0], timeout=seconds(33))
    dist.distributed_c10d._set_pg_timeout(seconds(44))
    dist.all_reduce(torch.ones(1))
    tell()
    side.set_timeout(seconds(55))  # C++: seen by looking at it
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(seconds(10))  # gloo has none
    dist.monitored_barrier()
    tell(entries=[entry["timeout_ms"] for entry in json.loads(bindings._dump_fr_trace_json(includeCollectives=True))["entries"]])
    dist.destroy_process_group()

main()
"""


def test_timeouts_of_a_real_rank(tmp_path: Path) -> None:
    def at(text: str) -> str:
        return f"script_0.py:{CODE[: CODE.index(text)].count(chr(10)) + 1}:main"

    with Node(tmp_path) as node:
        process = node.start(CODE)
        printed(process)
        record = node.record("groups")
        assert (record["join_timeout_s"], record["join_set_at"], record["extensions"]) == (77.0, at("dist.init_process_group"), [])
        assert [(group["timeout_s"], group["set_at"]) for group in record["groups"]] == [(77.0, at("dist.init_process_group"))]
        go_on(process)
        printed(process)
        record = node.record("groups")
        told = [(group["desc"], group["timeout_s"], group["set_at"]) for group in record["groups"]]
        assert told == [("default_pg", 44.0, at("dist.distributed_c10d._set_pg_timeout")), ("undefined", 33.0, at("side = dist.new_group"))]
        go_on(process)
        assert printed(process)["entries"] == [77000, 44000]
        until(lambda: node.record("groups")["groups"][1]["timeout_s"] == 55.0, process)
        barrier = node.record("lifecycle")["barrier"]
        assert (barrier["inside"], barrier["timeout_s"]) == (False, 1800.0), "the default of torch, not the group's"
        assert node.record("groups")["extensions"] == []
        assert node.record("probes")["collectives"]["errors"] == 0
        go_on(process)
