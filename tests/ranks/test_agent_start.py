"""How the agent gets into a process, and that nobody notices. Plain interpreters, no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from one_rank import PACKAGE, SITE, Node, printed

pytestmark = pytest.mark.ranks
WIRE = ["rankwatch.wire", "rankwatch.wire.env", "rankwatch.wire.layout"]
SHOW = """
import json, os, sys, threading, signal
print(json.dumps({
    "argv": sys.argv[1:], "main": sorted(vars(sys.modules["__main__"])), "path": [p for p in sys.path if "rankwatch" in p and p.endswith("site")],
    "excepthook": sys.excepthook is sys.__excepthook__, "threads": threading.active_count(), "meta_path": [type(f).__name__ for f in sys.meta_path],
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "agent": sorted(m for m in sys.modules if m.startswith("rankwatch")), "stdlib": sorted(m for m in sys.modules if not m.startswith("rankwatch")),
    "pythonpath": os.environ.get("PYTHONPATH"), "user": os.environ.get("USER_HOOK"),
}))
"""


def shown(node: Node, argv: list[str] | None = None, **more: str) -> dict[str, object]:
    code, out, err = node.run(SHOW, argv=argv, **more)
    assert (code, err) == (0, ""), err
    result: dict[str, object] = json.loads(out)
    return result


def test_a_process_with_the_agent_looks_like_one_without(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        bare = shown(node, PYTHONPATH="", RANKWATCH_AGENT_DIR="")
        watched = shown(node)
    for name in ("argv", "main", "path", "excepthook", "threads", "sigint", "sitecustomize"):
        assert watched[name] == bare[name], name
    assert watched["pythonpath"] == str(SITE)  # a shell or wrapper in between passes it on
    agent = ["boot", "clock", "mark", "orphan", "ownership", "when_imported"]
    assert watched["agent"] == ["rankwatch", "rankwatch.agent", *(f"rankwatch.agent.{name}" for name in agent), *WIRE]


def added_by(imports: str) -> set[str]:
    """Modules that `imports` adds to a bare interpreter without site-packages, less our own."""
    code = f"import sys; before = set(sys.modules); sys.path.insert(0, {str(PACKAGE.parent)!r}); import {imports}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=30)
    return {name for name in done.stdout.split() if not name.startswith("rankwatch")}


def test_booting_loads_nearly_nothing_of_the_standard_library() -> None:
    always = {"__future__", "os", "os.path", "posixpath", "genericpath", "stat", "_stat", "abc", "_abc", "_collections_abc"}
    assert added_by("rankwatch.agent.boot") <= always
    assert added_by("rankwatch.agent.mark") - always <= {"time", "struct", "_struct", "zlib"}


def test_arming_loads_an_allow_listed_handful() -> None:
    """What the agent adds when torch is imported: nothing that torch does not load itself."""
    allowed = "abc atexit codecs collections copyreg enum functools genericpath io itertools json keyword mmap operator os posixpath re reprlib stat struct"
    added = {name.partition(".")[0] for name in added_by("rankwatch.agent.rank") if not name.startswith("_")}
    assert added <= {*allowed.split(), "threading", "time", "types", "zlib"}


@pytest.mark.parametrize(
    ("change", "agent"),
    [
        pytest.param({}, True, id="a rank"),
        pytest.param({"RANK": ""}, False, id="no rank"),
        pytest.param({"RANKWATCH_CLAIMED": "1"}, False, id="a descendant of a rank"),
        pytest.param({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, False, id="a world inside a rank"),
    ],
)
def test_who_gets_an_import_hook(tmp_path: Path, change: dict[str, str], agent: bool) -> None:
    with Node(tmp_path, ranks=2) as node:
        assert ("_Finder" in shown(node, **change)["meta_path"]) is agent  # type: ignore[operator]


def test_rankwatch_is_importable_in_every_process_of_the_job(tmp_path: Path) -> None:
    """Also in a descendant, and where rankwatch is not installed: -S leaves site-packages away, and sitecustomize is run by hand."""
    code = f"""
import sys
sys.path.insert(0, {str(SITE)!r})
try:
    import sitecustomize
except ImportError:
    pass
import rankwatch
rankwatch.step()
print(rankwatch.__file__)
"""
    with Node(tmp_path) as node:
        for change in ({}, {"RANKWATCH_CLAIMED": "1"}):
            done = subprocess.run([sys.executable, "-S", "-c", code], env=node.environ(**change), capture_output=True, text=True, timeout=30)
            assert done.stdout.strip() == str(PACKAGE / "__init__.py"), done.stderr


@pytest.mark.parametrize("where", ["next to the script", "on PYTHONPATH", "next to the module"])
def test_a_module_of_that_name_that_the_job_has_is_the_jobs(tmp_path: Path, where: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "rankwatch.py").write_text("mine = True\n")
    (own / "train.py").write_text("import rankwatch\nprint(rankwatch.mine)\n")
    with Node(tmp_path) as node:
        environ = node.environ()
        script = own / "train.py"
        if where == "on PYTHONPATH":
            script = script.rename(tmp_path / "train.py")
            environ["PYTHONPATH"] += f"{os.pathsep}{own}"
        argv = ["-m", "train"] if where == "next to the module" else ["-u", "-W", "default", str(script)]
        folder = own if where == "next to the module" else tmp_path
        done = subprocess.run([sys.executable, *argv], env=environ, cwd=folder, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
        assert node.record("owner") == {}


def test_a_rank_leaves_a_mark_before_torch_is_imported(tmp_path: Path) -> None:
    """The first living Python does; a child of it, one after it, and one that is inert do not; one after its end does."""
    child = "import subprocess, sys, os; subprocess.run([sys.executable, '-c', 'pass'], check=True); print(os.getpid())"
    with Node(tmp_path) as node:
        assert node.run("pass", RANKWATCH_CLAIMED="1") == (0, "", "")
        assert node.record("owner") == {}
        for _ in range(2):
            code, out, err = node.run(child)
            assert (code, err) == (0, "")
            owner = node.record("owner")
            assert (owner["state"], owner["pid"], owner["rank"]) == ("loaded", int(out), 0)


def test_the_last_process_without_torch_removes_the_directory_of_a_dead_launcher(tmp_path: Path) -> None:
    base = tmp_path / "rankwatch.abcdefgh"
    slots = base / "a0"
    slots.mkdir(parents=True)
    (base / "owner.json").write_text("{}")
    with Node(slots, ranks=2) as node:
        launcher = node.start("import time; time.sleep(600)", RANK="")
        ranks = [node.start("import sys; print(1, flush=True); sys.stdin.readline()", rank=rank, RANKWATCH_LAUNCHER_PID=str(launcher.pid)) for rank in range(2)]
        for process in ranks:
            printed(process)
        launcher.kill()
        launcher.wait()
        for script in slots.glob("script_*"):
            script.unlink()
        ranks[0].communicate("\n", timeout=30)
        assert slots.exists()
        ranks[1].communicate("\n", timeout=30)
        assert list(tmp_path.iterdir()) == []
        slots.mkdir(parents=True)


def user_hook(folder: Path, code: str) -> str:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return f"{SITE}{os.pathsep}{folder}"


def test_the_users_sitecustomize_runs_and_is_the_one_that_is_seen(tmp_path: Path) -> None:
    hook = user_hook(tmp_path / "hooks", "import os\nos.environ['USER_HOOK'] = 'ran'\n")
    with Node(tmp_path) as node:
        result = shown(node, PYTHONPATH=hook)
    assert (result["user"], result["sitecustomize"]) == ("ran", str(tmp_path / "hooks" / "sitecustomize.py"))
    assert "_Finder" in result["meta_path"]  # type: ignore[operator]


@pytest.mark.parametrize("error", ["raise ValueError('mine')", "import not_there_at_all"])
def test_an_error_of_the_users_sitecustomize_is_what_it_is_without_us(tmp_path: Path, error: str) -> None:
    with_us = user_hook(tmp_path / "hooks", error)
    with Node(tmp_path) as node:
        without, watched = (node.run("print('went on')", PYTHONPATH=path) for path in (str(tmp_path / "hooks"), with_us))
    assert without == watched
    assert without[:2] == (0, "went on\n")


def test_an_exit_in_the_users_sitecustomize_is_one(tmp_path: Path) -> None:
    """Python prints a traceback of its own then, in which we have a line."""
    with_us = user_hook(tmp_path / "hooks", "raise SystemExit(7)")
    with Node(tmp_path) as node:
        without, watched = (node.run("print('went on')", PYTHONPATH=path) for path in (str(tmp_path / "hooks"), with_us))
    assert without[:2] == watched[:2] == (1, "")
    assert without[2].splitlines()[-1] == watched[2].splitlines()[-1] == "SystemExit: 7"


def test_a_broken_agent_costs_nothing(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        for change in ({"RANKWATCH_AGENT_DIR": "/nowhere"}, {"RANK": "not a number"}, {"RANKWATCH_SLOT_DIR": "/nowhere"}):
            assert node.run("print('fine')", **change) == (0, "fine\n", "")


def test_the_tracing_grant_is_given_only_where_it_is_needed(tmp_path: Path) -> None:
    code = "import sys; print('ctypes' in sys.modules)"
    with Node(tmp_path) as node:
        assert node.run(code, RANKWATCH_PTRACE_OPT_IN="1") == (0, "True\n", "")
        assert node.run(code) == (0, "False\n", "")


def test_an_exception_before_torch_is_in_the_slot_and_modules_beside_the_script_stay_the_jobs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("json", "mmap"):
        (own / f"{name}.py").write_text("print('mine')\n")
    script = own / "train.py"
    script.write_text("def load():\n    raise ValueError('boo')\n\nload()\n")
    with Node(tmp_path) as node:
        done = subprocess.run([sys.executable, str(script)], env=node.environ(), cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1] == "ValueError: boo"
        lifecycle = node.record("lifecycle")
        assert (lifecycle["stage"], lifecycle["exception"]["where"]) == ("exiting", "train.py:2:load")
        done = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], env=node.environ(), cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr, node.record("lifecycle")) == (3, "", {})
