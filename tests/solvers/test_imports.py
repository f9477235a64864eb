"""The solvers stand alone: numpy, numba, ortools, the standard library and themselves."""

import ast
import sys
from pathlib import Path

import pytest

SOLVERS = Path(__file__).parents[2] / "solvers"
ALLOWED = {"numpy", "numba", "ortools", *sys.stdlib_module_names}
FILES = sorted(SOLVERS.rglob("*.py"))


def imported(path: Path) -> list[str]:
    """Full names of the modules that a file imports from."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def test_there_are_files_to_look_at() -> None:
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOLVERS)))
def test_file_imports_no_more_than_that(path: Path) -> None:
    for name in imported(path):
        assert name.startswith("roamc.solvers") or name.split(".")[0] in ALLOWED, name


@pytest.mark.parametrize("problem", ["order", "layout", "retain"])
def test_judge_shares_no_code_with_the_algorithms(problem: str) -> None:
    ours = [name for name in imported(SOLVERS / problem / "validate.py") if name.startswith("roamc")]
    assert sorted(ours) == [f"roamc.solvers.{problem}.problem", "roamc.solvers.status"]


@pytest.mark.parametrize("problem", ["order", "layout", "retain"])
def test_judge_takes_data_and_no_functions_from_the_problem(problem: str) -> None:
    tree = ast.parse((SOLVERS / problem / "validate.py").read_text("utf-8"))
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == f"roamc.solvers.{problem}.problem"
        for alias in node.names
    ]
    assert names
    assert all(name[0].isupper() for name in names)
