"""Post-import hooks: called in time, once, and invisible to everybody else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwatch.agent import when_imported as hooks
from rankwatch.agent.when_imported import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "awaited_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from awaited_package.inner import value\n")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield folder
    hooks._finder.awaited.clear()
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("awaited_package")]:
        del sys.modules[name]


def test_a_hook_runs_before_the_importer_binds_names(package: Path) -> None:
    """`from module import name` gets the replaced name."""
    when_imported("awaited_package.inner", lambda module: setattr(module, "value", 2))
    module = importlib.import_module("awaited_package")
    assert module.value == 2


def test_a_module_looks_as_if_nobody_had_waited(package: Path) -> None:
    when_imported("awaited_package.inner", lambda module: None)
    module = importlib.import_module("awaited_package.inner")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
    assert module.__file__ == str(package / "inner.py")


def test_the_finder_leaves_when_nothing_is_awaited(package: Path) -> None:
    when_imported("awaited_package.inner", lambda module: None)
    assert hooks._finder in sys.meta_path
    importlib.import_module("awaited_package.inner")
    assert hooks._finder not in sys.meta_path


def test_a_module_that_is_there_already_is_handed_over_at_once(package: Path) -> None:
    importlib.import_module("awaited_package.inner")
    seen = []
    when_imported("awaited_package.inner", lambda module: seen.append(module.__name__))
    assert seen == ["awaited_package.inner"]
    assert hooks._finder not in sys.meta_path


def test_all_hooks_of_a_module_run_and_a_failing_one_is_swallowed(package: Path) -> None:
    seen = []
    when_imported("awaited_package.inner", lambda module: seen.append("first") or 1 / 0)  # type: ignore[func-returns-value]
    when_imported("awaited_package.inner", lambda module: seen.append("second"))
    importlib.import_module("awaited_package")
    assert seen == ["first", "second"]


def test_an_import_that_fails_is_awaited_again(package: Path) -> None:
    (package / "inner.py").write_text("raise ImportError('not yet')\n")
    seen = []
    when_imported("awaited_package.inner", lambda module: seen.append(module.value))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("awaited_package")
    (package / "inner.py").write_text("value = 1  # now it works\n")
    importlib.invalidate_caches()
    importlib.import_module("awaited_package")
    assert seen == [1]


def test_a_keyboard_interrupt_in_a_hook_goes_through(package: Path) -> None:
    def interrupt(_module: object) -> None:
        raise KeyboardInterrupt

    when_imported("awaited_package.inner", interrupt)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("awaited_package")


def test_a_module_that_does_not_exist_is_still_missing(package: Path) -> None:
    when_imported("awaited_package.absent", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=r"awaited_package\.absent"):
        importlib.import_module("awaited_package.absent")
