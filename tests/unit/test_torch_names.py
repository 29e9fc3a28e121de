"""The check of torch's releases tells what is there from what is not, and its kept result covers every name in use."""

from __future__ import annotations

import importlib.util
import os
import zipfile

import pytest

FOLDER = os.path.join(os.path.dirname(__file__), "..", "versions")
SOURCE = """
from elsewhere import borrowed
if True:
    FLAG: bool = False
class Tree:
    def walk(self, start, *, deep=False): ...
try:
    import fast
except ImportError:
    def slow(a, b): ...
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("torch_names", os.path.join(FOLDER, "torch_names.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "path", "parameters", "problem"),
    [
        ("torch.a", "Tree.walk", ("self", "start"), ""),
        ("torch.a", "borrowed", (), ""),
        ("torch.a", "FLAG", (), ""),
        ("torch.a", "slow", ("a",), ""),
        ("torch.a", "slow", ("b",), "(a, b)"),
        ("torch.a", "Tree.run", (), "no Tree.run"),
        ("torch.a", "Forest.walk", (), "no Forest"),
        ("torch.b", "x", (), "no such module"),
    ],
)
def test_a_name_is_found_where_the_source_defines_or_imports_it(script, tmp_path, module, path, parameters, problem):
    with zipfile.ZipFile(tmp_path / "torch-9.whl", "w") as wheel:
        wheel.writestr("torch/a.py", SOURCE)
    assert script.Wheel(str(tmp_path / "torch-9.whl")).missing(module, path, parameters) == problem


def test_the_kept_result_covers_every_name_and_every_release_has_it(script):
    with open(script.RESULT, encoding="utf-8") as file:
        rows = {line.split("`")[1]: line.rstrip().split("` | ")[1].split(" | ") for line in file if line.startswith("| `")}
    assert sorted(rows) == sorted(script.label(*name) for name in script.wanted()), "run: python tests/versions/torch_names.py --wheels DIR --write"
    assert {name: row for name, row in rows.items() if [cell.strip(" |") for cell in row] != ["ok"] * len(script.VERSIONS)} == {}
