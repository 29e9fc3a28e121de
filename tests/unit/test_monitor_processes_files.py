"""What processes.py reads from files of /proc and the cgroup tree, with trees of the test's own."""

from rankwatch.monitor.proc_stat import read_stat
from rankwatch.monitor.processes import Processes

STAT = "{pid} ({name}) {state} {ppid} 1 1 0 -1 4194560 0 0 0 0 {user} {system} {cuser} {csystem} 20 0 3 0 {start} 1000 250 18446744073709551615"


def put(proc, pid, ppid=1, name="python", state="S", user=0, system=0, cuser=0, csystem=0, start=100, io=""):
    place = proc / str(pid)
    (place / "task").mkdir(parents=True, exist_ok=True)
    (place / "stat").write_text(STAT.format(pid=pid, ppid=ppid, name=name, state=state, user=user, system=system, cuser=cuser, csystem=csystem, start=start))
    (place / "io").write_text(io or "rchar: 10\nwchar: 5\nsyscr: 1\n")


def put_thread(proc, pid, tid, comm, user, state="S", ran=1):
    place = proc / str(pid) / "task" / str(tid)
    place.mkdir(exist_ok=True)
    (place / "stat").write_text(STAT.format(pid=tid, ppid=1, name=comm, state=state, user=user, system=0, cuser=0, csystem=0, start=100))
    (place / "schedstat").write_text(f"100 200 {ran}\n")


def test_a_name_with_spaces_and_brackets_is_no_trouble(tmp_path):
    put(tmp_path, 7, name="a) R (b c", state="D", user=250)
    stat = read_stat(7, str(tmp_path))
    assert (stat.name, stat.state, stat.cpu_s, stat.start_ticks) == ("a) R (b c", "D", 2.5, 100)


def test_cpu_and_bytes_of_the_whole_tree_are_counted(tmp_path):
    put(tmp_path, 7, user=100, cuser=300)
    put(tmp_path, 8, ppid=7, user=50, csystem=25)
    put(tmp_path, 9, ppid=8, system=25)
    put(tmp_path, 10, ppid=1, user=9999)
    process = Processes(str(tmp_path)).look(7, 100, suspect=True)
    assert (process.cpu_s, process.tree_cpu_s, process.io_bytes) == (1.0, 5.0, 45)


def test_what_our_threads_use_while_a_rank_is_a_suspect_is_no_progress_of_it(tmp_path):
    clock = [0.0]
    processes = Processes(str(tmp_path), clock=lambda: clock[0])
    put(tmp_path, 7, user=100)
    put_thread(tmp_path, 7, 7, "python", 50)
    put_thread(tmp_path, 7, 71, "pt_workerserver", 50)
    assert processes.look(7, suspect=True).cpu_s == 1.0
    clock[0] = 1.5
    put(tmp_path, 7, user=180)
    put_thread(tmp_path, 7, 71, "pt_workerserver", 130)
    assert processes.look(7, suspect=True).cpu_s == 1.0
    clock[0] = 3.0
    put(tmp_path, 7, user=280)
    assert processes.look(7, suspect=True).cpu_s == 2.0


def test_figures_never_fall_when_a_child_ends_uncollected(tmp_path):
    clock = [0.0]
    processes = Processes(str(tmp_path), clock=lambda: clock[0])
    put(tmp_path, 7, user=100)
    put(tmp_path, 8, ppid=7, user=400)
    assert processes.look(7, suspect=True).tree_cpu_s == 5.0
    clock[0] = 2.0
    (tmp_path / "8" / "stat").unlink()
    assert processes.look(7, suspect=True).tree_cpu_s == 5.0


def test_a_process_that_never_was_is_gone_since_it_was_first_asked_for(tmp_path):
    clock = [3.0]
    processes = Processes(str(tmp_path), clock=lambda: clock[0])
    assert (processes.look(7).alive, processes.look(7).exited_at) == (False, 3.0)
    clock[0] = 9.0
    assert processes.look(7).exited_at == 3.0


def test_a_main_thread_that_has_ended_does_not_make_a_process_dead(tmp_path):
    put(tmp_path, 7, state="Z")
    put_thread(tmp_path, 7, 7, "python", 50, state="Z")
    put_thread(tmp_path, 7, 71, "trainer", 50, state="R")
    process = Processes(str(tmp_path)).look(7)
    assert (process.alive, process.state) == (True, "R")
    put_thread(tmp_path, 7, 71, "trainer", 50, state="X")
    assert not Processes(str(tmp_path)).look(7).alive


def test_children_of_a_suspect_are_named_and_dead_ones_counted_with_their_signal(tmp_path):
    put(tmp_path, 7)
    put(tmp_path, 8, ppid=7, name="aws", start=300)
    put(tmp_path, 9, ppid=7, name="sh", start=200)
    put(tmp_path, 10, ppid=7, state="Z", start=400)
    put(tmp_path, 11, ppid=7, name="loader", state="T", start=500)
    stat = (tmp_path / "10" / "stat").read_text().split()
    (tmp_path / "10" / "stat").write_text(" ".join(stat + ["0"] * (51 - len(stat)) + ["9"]))
    processes = Processes(str(tmp_path))
    process = processes.look(7, suspect=True)
    assert (process.children, process.dead_children) == (("sh", "aws", "loader"), ((10, 9),))
    assert process.stopped_children == (11,)
    assert processes.look(7).children == ()


def test_a_thread_sleeps_for_as_long_as_it_has_not_run(tmp_path):
    clock = [0.0]
    processes = Processes(str(tmp_path), clock=lambda: clock[0])
    put(tmp_path, 7)
    put_thread(tmp_path, 7, 7, "python", 50)
    put_thread(tmp_path, 7, 71, "writer", 50, state="D", ran=10)
    put_thread(tmp_path, 7, 72, "busy", 50, state="D", ran=10)
    processes.look(7, suspect=True)
    for now in (1.5, 3.0, 4.5):
        clock[0] = now
        put_thread(tmp_path, 7, 72, "busy", 50, state="D", ran=10 + int(now))
        process = processes.look(7, suspect=True)
    assert [(wait.tid, wait.state, wait.asleep_s) for wait in process.blocked_threads] == [(71, "D", 4.5), (72, "D", 0.0)]
    assert (process.main_wait.state, process.main_wait.asleep_s) == ("S", 4.5)


def test_bytes_to_storage_are_counted_beside_those_of_read_and_write(tmp_path):
    put(tmp_path, 7, io="rchar: 10\nwchar: 5\nsyscr: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n")
    process = Processes(str(tmp_path)).look(7, suspect=True)
    assert (process.io_bytes, process.disk_bytes) == (15, 12288)


def test_a_trackers_own_process_is_no_sign_of_the_ranks_life(tmp_path):
    """Its sockets are not looked at; those of the rank and its loader workers are."""
    asked = []

    class Recorded:
        def moved(self, key, pids):
            asked.append((key, tuple(pids)))
            return 5

    put(tmp_path, 7)
    put(tmp_path, 8, ppid=7, name="wandb-core")
    put(tmp_path, 9, ppid=7, name="pt_data_worker")
    assert Processes(str(tmp_path), sockets=Recorded()).look(7, suspect=True).net_bytes == 5
    assert asked == [((7, 100), (7, 9))]
