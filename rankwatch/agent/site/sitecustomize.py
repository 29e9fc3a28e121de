"""First on a rank's PYTHONPATH: runs the sitecustomize that it hides, then starts the rankwatch agent. Fails no interpreter."""

import os
import sys


def _users_own():
    """Whether the job has a module `rankwatch` of its own, next to its script or on PYTHONPATH: it must get that one, and no agent then."""
    script, options = "", iter(sys.orig_argv[1:])
    for option in options:
        if not option.startswith("-"):
            script = option
            break
        if option in ("-W", "-X"):
            next(options, None)
        elif option[1:2] not in "-WX" and option[-1] in "cm":
            break
    for folder in (os.path.dirname(os.path.realpath(script)) if script else ".", *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        package = os.path.join(folder, "rankwatch")
        if os.path.isfile(package + ".py"):
            return True
        if os.path.isfile(os.path.join(package, "__init__.py")) and not os.path.isfile(os.path.join(package, "agent", "site", "sitecustomize.py")):
            return True
    return False


def _start():
    if _users_own():
        return
    from importlib._bootstrap import module_from_spec  # what importlib.util exports, without the imports of its own
    from importlib._bootstrap_external import spec_from_file_location

    folder = os.environ["RANKWATCH_AGENT_DIR"]
    spec = spec_from_file_location("rankwatch", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    module = sys.modules["rankwatch"] = module_from_spec(spec)  # so `import rankwatch` works in every process of the job
    spec.loader.exec_module(module)
    pid = str(os.getpid())
    if "RANK" in os.environ and "RANKWATCH_SLOT_DIR" in os.environ and os.environ.get("RANKWATCH_CLAIMED", pid) == pid:
        __import__("rankwatch.agent.boot", fromlist=["start"]).start(os.environ)


sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
del sys.modules[__name__]
try:
    import sitecustomize  # noqa: F401 - the next one; without one this raises what Python expects of a missing sitecustomize
finally:
    try:
        _start()
    except Exception:
        sys.modules.pop("rankwatch", None)
