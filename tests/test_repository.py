"""What holds for every file: lengths, docstrings, annotations, nothing unfinished, nothing of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).parent.parent
FOLDERS = ("roamc", "passes", "solvers", "tests", "benchmarks", "docs")  # with setup.py, the fixed names at the top
PACKAGES = FOLDERS[:3]  # what a user installs

SAY_NOTHING = {"found", "made", "known", "given", "now", "due"}  # of what a local variable holds
FILE_LINES = 600
FUNCTION_LINES = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef
TEXT = {".py", ".md", ".toml", ".txt", ".c", ".html", ".json", ".csv", ".in", ".yml", ""}

# Brackets in the patterns, and these two in the examples, keep this file from being found itself.
SLASH, DASH = "/", "-"
MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|Users|opt|work|mnt|scratch|tmp)/\w"  # a path of one machine
    r"|\b(?:extra-)?index[-]url\b|\bfind[-]links\b|\btrusted[-]host\b"  # pip told where packages come from
)
UNFINISHED = re.compile(r"\bT[O]DO\b|\bFIX[M]E\b|\bX[X]X\b|\braise NotImplemented[E]rror\b")


def python_files(*folders: str) -> list[Path]:
    """Return every Python file of the folders, and setup.py where all are asked for."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, ROOT / "setup.py"] if folders == FOLDERS else files


def text_files() -> Iterator[Path]:
    """Yield every file that belongs to the repository and is text."""
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.suffix in TEXT)
    for folder in (*FOLDERS, ".ci"):
        yield from (
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts
        )


def functions(path: Path) -> Iterator[Function]:
    """Yield every function of a file, inner ones and methods included."""
    tree = ast.parse(path.read_bytes())
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def public_functions(scope: ast.Module | ast.ClassDef) -> Iterator[Function]:
    """Yield functions and methods whose name, and whose class's name, has no leading underscore."""
    for node in scope.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield from public_functions(node) if isinstance(node, ast.ClassDef) else [node]


def locals_of(function: Function) -> Iterator[ast.Name | ast.arg]:
    """Yield the parameters of a function and the places where it, or a function within, binds a local variable."""
    yield from (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )


def length(function: Function) -> int:
    """Return the lines from `def` to the end."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_overload(function: Function) -> bool:
    """Whether it only declares a signature."""
    return any(ast.unparse(mark).endswith("overload") for mark in function.decorator_list)


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and does not even look at what it caught."""
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    return caught in ("BaseException", "Exception") and handler.name is None


def where(path: Path, line: int, what: str) -> str:
    """Return a place in the form that editors follow."""
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def in_functions(paths: list[Path], wrong: Callable[[Function], str]) -> list[str]:
    """Return the places where `wrong` has something to say of a function."""
    return [where(path, f.lineno, said) for path in paths for f in functions(path) if (said := wrong(f))]


def lines_with(pattern: re.Pattern[str], paths: Iterator[Path] | list[Path]) -> list[str]:
    """Return the places where a pattern occurs."""
    return [
        where(path, number, line.strip())
        for path in paths
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_names_at_the_top_are_the_fixed_ones() -> None:
    assert [name for name in (*FOLDERS, "setup.py") if not (ROOT / name).exists()] == []
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a checkout: what belongs to the repository is not known")
    tracked = {Path(line).parts for line in git.stdout.splitlines()}
    folders = {parts[0] for parts in tracked if len(parts) > 1 and not parts[0].startswith(".")}
    assert folders <= set(FOLDERS)
    assert {parts[0] for parts in tracked if len(parts) == 1 and parts[0].endswith(".py")} <= {"setup.py"}


def test_folders_with_modules_are_packages() -> None:
    folders = {path.parent for path in python_files(*PACKAGES)}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


MACHINE_CODE = ROOT / "solvers/machine_code.bin"
"""What setup.py compiles, and adds by itself where it could."""


def test_files_beside_modules_are_installed() -> None:
    setup = ast.parse((ROOT / "setup.py").read_bytes())
    patterns = next(
        node.value for node in ast.walk(setup) if isinstance(node, ast.keyword) and node.arg == "package_data"
    )
    named = {
        path
        for package, globs in ast.literal_eval(patterns).items()
        for pattern in globs
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    there = {
        path
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    } - {MACHINE_CODE}
    assert there == named


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in python_files(*FOLDERS)}
    assert [where(path, n, "too long") for path, n in lengths.items() if n > FILE_LINES] == []


def test_functions_are_short() -> None:
    def wrong(f: Function) -> str:
        return f"{f.name} has {length(f)} lines" if length(f) > FUNCTION_LINES else ""

    assert in_functions(python_files(*FOLDERS), wrong) == []


def test_locals_say_what_they_hold() -> None:
    def wrong(f: Function) -> str:
        names = {node.arg if isinstance(node, ast.arg) else node.id for node in locals_of(f)} & SAY_NOTHING
        return f"{f.name} calls a local variable {', '.join(sorted(names))}" if names else ""

    assert in_functions(python_files(*FOLDERS), wrong) == []


def test_functions_say_what_they_return() -> None:
    def wrong(f: Function) -> str:
        return "" if f.returns else f"{f.name} has no return annotation"

    assert in_functions(python_files(*PACKAGES, "benchmarks"), wrong) == []


def test_public_functions_have_a_docstring() -> None:
    bare = [
        where(path, f.lineno, f.name)
        for path in python_files(*PACKAGES)
        for f in public_functions(ast.parse(path.read_bytes()))
        if not ast.get_docstring(f) and not is_overload(f)
    ]
    assert bare == []


def test_nothing_is_unfinished() -> None:
    assert lines_with(UNFINISHED, python_files(*FOLDERS)) == []


def test_nothing_speaks_of_one_machine() -> None:
    assert lines_with(MACHINE, text_files()) == []


def test_no_handler_swallows_every_error() -> None:
    handlers = [
        where(path, node.lineno, "catches everything and does not name it")
        for path in python_files(*FOLDERS)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert handlers == []


@pytest.mark.parametrize("line", [f"cd {SLASH}home/ann/roamc", f"open('{SLASH}root/x')", f"--index{DASH}url=x"])
def test_machine_pattern_finds(line: str) -> None:
    assert MACHINE.search(line)


@pytest.mark.parametrize("line", ["#!/usr/bin/env bash", "roamc/opt/x", "a/home/b", "GiB/root/2"])
def test_machine_pattern_leaves(line: str) -> None:
    assert not MACHINE.search(line)


def test_tests_of_the_second_tier_exist() -> None:
    for name in tiers.FIRST:
        path, _, function = name.partition("::")
        assert re.search(rf"^    ?def {function}\(|^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_first_tier_has_as_many_cases_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid
            self.marks: list[str] = []

        def add_marker(self, mark: str) -> None:
            self.marks.append(mark)

    monkeypatch.setattr(tiers, "FIRST", {"a::some": 3, "a::none": 0})
    items = [Item(f"a::{name}[{number}]") for name in ("some", "none", "all") for number in range(10)]
    tiers.mark_thorough(items)  # type: ignore[arg-type]
    first = [item.nodeid for item in items if not item.marks]
    assert first == ["a::some[0]", "a::some[3]", "a::some[7]", *(f"a::all[{number}]" for number in range(10))]
