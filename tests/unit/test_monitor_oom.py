"""Whose SIGKILL it was: counts of memory cgroups in trees of the test's own, and records of a kernel's log."""

import os

import pytest

from rankwatch.monitor.oom import OomWatch, memory_events


def tree(tmp_path, cgroup, *mounts):
    """mounts: (root, folder below tmp_path, "cgroup2" or "cgroup")."""
    for name in ("7", "self"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "7" / "cgroup").write_text(cgroup)
    lines = []
    for number, (root, folder, kind) in enumerate(mounts):
        options = "rw,memory" if kind == "cgroup" else "rw,nsdelegate"
        lines.append(f"{30 + number} 24 0:27 {root} {tmp_path}/{folder} rw,relatime shared:9 - {kind} {kind} {options}\n")
    (tmp_path / "self" / "mountinfo").write_text("24 1 8:1 / / rw - ext4 /dev/root rw\n" + "".join(lines))


def counts(tmp_path, folder, count, name="memory.events"):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / name).write_text(f"low 0\nmax 3\noom 1\noom_kill {count}\n")


def watch(tmp_path, clock):
    return OomWatch(str(tmp_path), str(tmp_path / "kmsg"), clock=lambda: clock[0])


V2 = (("/", "cg", "cgroup2"),)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "folder", "name"),
    [
        ("0::/job\n", V2, "cg/job", "memory.events"),
        ("0::/job/step_0/task\n", V2, "cg/job", "memory.events"),  # the controller is not on further down
        ("4:cpu,cpuacct:/x\n3:memory:/job\n0::/\n", (("/", "cg", "cgroup"),), "cg/job", "memory.oom_control"),
        ("3:memory:/docker/1f/job\n", (("/docker/1f", "cg", "cgroup"),), "cg/job", "memory.oom_control"),  # without a cgroup namespace
        ("0::/../other\n", V2, "cg", "memory.events"),
    ],
    ids=["v2", "v2 nested", "v1", "v1 in a container", "outside of the namespace"],
)
def test_the_nearest_cgroup_of_the_rank_that_counts_is_found(tmp_path, cgroup, mounts, folder, name):
    tree(tmp_path, cgroup, *mounts)
    counts(tmp_path, folder, 2, name)
    assert memory_events(7, str(tmp_path))[0] == f"{tmp_path}/{folder}/{name}"


def test_a_count_that_rises_with_the_kill_is_the_kernels(tmp_path):
    clock = [0.0]
    tree(tmp_path, "0::/job\n", *V2)
    counts(tmp_path, "cg/job", 2)
    oom = watch(tmp_path, clock)
    for now in range(40):
        clock[0] = float(now)
        oom.note(7)
    counts(tmp_path, "cg/job", 3)
    assert oom.killed(7) == (True, "memory.events of the memory cgroup /job: oom_kill rose from 2 to 3")


def test_a_kill_of_a_worker_a_minute_before_says_nothing_of_the_rank(tmp_path):
    clock = [0.0]
    tree(tmp_path, "0::/job\n", *V2)
    counts(tmp_path, "cg/job", 0)
    oom = watch(tmp_path, clock)
    for now in range(80):
        clock[0] = float(now)
        if now == 20:
            counts(tmp_path, "cg/job", 1)
        oom.note(7)
    assert oom.killed(7) == (False, "memory.events of the memory cgroup /job: oom_kill did not rise")


def test_a_cgroup_that_went_with_the_rank_says_nothing(tmp_path):
    tree(tmp_path, "0::/job\n", *V2)
    counts(tmp_path, "cg/job", 0)
    oom = watch(tmp_path, [0.0])
    oom.note(7)
    (tmp_path / "cg" / "job" / "memory.events").unlink()
    assert oom.killed(7) == (False, "")
    assert watch(tmp_path / "none", [0.0]).killed(7) == (False, "")


@pytest.fixture
def log(tmp_path):
    """Appends a record; numbers in it are those of the init namespace, and here /proc/self/ns/pid is a link to it."""
    (tmp_path / "kmsg").write_text("6,1,0,-;booted\n4,2,3,-;Memory cgroup out of memory: Killed process 7 (python) of an earlier life\n")

    def append(text):
        with open(tmp_path / "kmsg", "a") as file:
            file.write(f"3,1200,99,-;{text}\n")

    return append


def test_the_kernels_log_names_the_rank_where_its_numbers_are_ours(tmp_path, log):
    tree(tmp_path, "0::/\n")
    (tmp_path / "self" / "ns").mkdir()
    os.symlink("/proc/self/ns/pid", tmp_path / "self" / "ns" / "pid")
    ours = os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC
    oom = watch(tmp_path, [0.0])
    assert oom.killed(7) == (False, "")
    log("Out of memory: Killed process 7 (python) total-vm:9999kB")
    assert oom.killed(7) == ((True, "the kernel's log: Out of memory: Killed process 7 (python) total-vm:9999kB") if ours else (False, ""))
    oom.close()


def test_in_a_container_the_log_is_matched_by_cgroup_and_only_mentioned(tmp_path, log):
    tree(tmp_path, "0::/kubepods/pod1\n")
    oom = watch(tmp_path, [0.0])
    oom.note(7)
    log("oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/kubepods/pod1,task=python,pid=31007,uid=0")
    assert oom.killed(7) == (False, "")  # its memory cgroup is not known: nothing is mounted
    oom.close()
