"""What processes.py reads from files of /proc and the cgroup tree, with trees of the test's own."""

from rankwatch.monitor.processes import Processes, oom_kills, read_stat

STAT = "{pid} ({name}) {state} {ppid} 1 1 0 -1 4194560 0 0 0 0 {user} {system} {cuser} {csystem} 20 0 3 0 {start} 1000 250 18446744073709551615"


def put(proc, pid, ppid=1, name="python", state="S", user=0, system=0, cuser=0, csystem=0, start=100, io=""):
    place = proc / str(pid)
    (place / "task").mkdir(parents=True, exist_ok=True)
    (place / "stat").write_text(STAT.format(pid=pid, ppid=ppid, name=name, state=state, user=user, system=system, cuser=cuser, csystem=csystem, start=start))
    (place / "io").write_text(io or "rchar: 10\nwchar: 5\nsyscr: 1\n")


def put_thread(proc, pid, tid, comm, user):
    place = proc / str(pid) / "task" / str(tid)
    place.mkdir(exist_ok=True)
    (place / "comm").write_text(f"{comm}\n")
    (place / "stat").write_text(STAT.format(pid=tid, ppid=1, name=comm, state="S", user=user, system=0, cuser=0, csystem=0, start=100))


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


def test_out_of_memory_kills_are_read_from_either_cgroup_version(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "cg" / "job").mkdir(parents=True)
    (tmp_path / "cg" / "job" / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n")
    assert oom_kills(str(tmp_path), str(tmp_path / "cg")) == 2
    (tmp_path / "self" / "cgroup").write_text("4:cpu,cpuacct:/x\n3:memory:/job\n0::/\n")
    (tmp_path / "cg" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "cg" / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_kills(str(tmp_path), str(tmp_path / "cg")) == 5
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    assert oom_kills(str(tmp_path), str(tmp_path / "cg")) is None
    assert oom_kills(str(tmp_path / "none")) is None
