"""What /proc tells of a thread in a system call, from files of the test's own."""

import os

import pytest

from rankwatch.model import KernelWait
from rankwatch.monitor.kernel_waits import KernelWaits, look, mount_of

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/vda1 rw
23 22 0:40 / /ckpt rw,relatime shared:4 - nfs4 filer:/export/ckpt rw,vers=4.2
24 23 0:41 / /ckpt/fast\\040disk rw - fuse.s3fs s3fs rw
25 22 0:42 / /data rw - autofs /etc/auto.data rw
26 22 0:43 / /data rw - lustre 10.0.0.1@tcp:/data rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/ckpt/step_10/a.pt", "nfs4 filer:/export/ckpt at /ckpt"),
        ("/ckpt", "nfs4 filer:/export/ckpt at /ckpt"),
        ("/ckpts/a.pt", "ext4 /dev/vda1 at /"),
        ("/ckpt/fast disk/a.pt", "fuse.s3fs s3fs at /ckpt/fast disk"),
        ("/data/x", "lustre 10.0.0.1@tcp:/data at /data"),
        ("pipe:[77]", ""),
    ],
)
def test_the_mount_of_a_path_is_found_by_text(path, mount):
    assert mount_of(path, MOUNTS) == mount


def put(proc, syscall, state="D", wchan="folio_wait_bit_common"):
    place = proc / "7" / "task" / "7"
    place.mkdir(parents=True)
    (place / "stat").write_text(f"7 (py) on) {state} 1 1 1")
    (place / "wchan").write_text(wchan)
    (place / "syscall").write_text(syscall + "\n")
    (proc / "7" / "mountinfo").write_text(MOUNTS)
    (proc / "7" / "fd").mkdir()
    os.symlink("/ckpt/a.pt", proc / "7" / "fd" / "9")
    os.symlink("/dev/pts/3", proc / "7" / "fd" / "0")
    os.symlink("socket:[42]", proc / "7" / "fd" / "11")


NFS = "nfs4 filer:/export/ckpt at /ckpt"


@pytest.mark.parametrize(
    ("syscall", "machine", "expected"),
    [
        ("1 0x9 0x7f 0x10 0x0 0x0 0x0 0x7ffe 0x7f6a", "x86_64", ("write", 9, "/ckpt/a.pt", NFS)),
        ("74 0x9 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f6a", "x86_64", ("fsync", 9, "/ckpt/a.pt", NFS)),
        ("82 0x9 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f6a", "aarch64", ("fsync", 9, "/ckpt/a.pt", NFS)),
        ("0 0x0 0x7f 0x10 0x0 0x0 0x0 0x7ffe 0x7f6a", "x86_64", ("read", 0, "/dev/pts/3", "ext4 /dev/vda1 at /")),
        ("45 0xb 0x7f 0x10 0x0 0x0 0x0 0x7ffe 0x7f6a", "x86_64", ("recvfrom", 11, "socket:[42]", "")),
        ("61 0xffffffffffffffff 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f6a", "x86_64", ("wait4", -1, "", "")),
        ("600 0x9 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f6a", "x86_64", ("system call 600", -1, "", "")),
        ("1 0x9 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f6a", "riscv64", ("system call 1", -1, "", "")),
        ("-1 0x7ffe 0x7f6a", "x86_64", ("a page fault", -1, "", "")),
        ("running", "x86_64", ("", -1, "", "")),
    ],
)
def test_a_call_is_told_with_the_file_that_it_is_about(tmp_path, syscall, machine, expected):
    put(tmp_path, syscall)
    wait = look(7, 7, str(tmp_path), machine)
    assert (wait.state, wait.wchan) == ("D", "folio_wait_bit_common")
    assert (wait.call, wait.fd, wait.target, wait.mount) == expected


def test_a_process_that_is_gone_leaves_nothing(tmp_path):
    assert look(7, 7, str(tmp_path), "x86_64") == KernelWait(7, "")


def test_a_look_is_had_later_and_begun_at_most_every_two_seconds(tmp_path):
    put(tmp_path, "74 0x9 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f6a")
    clock = [10.0]
    waits = KernelWaits(str(tmp_path), clock=lambda: clock[0])
    assert waits.of((7, 100), (7,))[1] == {}
    assert waits._seen[7, 100].job.wait(10)
    at, seen = waits.of((7, 100), (7,))
    assert (at, seen[7].wchan) == (10.0, "folio_wait_bit_common")
    (tmp_path / "7" / "task" / "7" / "wchan").write_text("other")
    clock[0] = 11.9
    assert waits.of((7, 100), (7,))[1][7].wchan == "folio_wait_bit_common"
    assert waits._seen[7, 100].job is None
    clock[0] = 12.0
    assert waits.of((7, 100), (7,))[0] == 10.0
    assert waits._seen[7, 100].job.wait(10)
    at, seen = waits.of((7, 100), (7,))
    assert (at, seen[7].wchan) == (12.0, "other")
