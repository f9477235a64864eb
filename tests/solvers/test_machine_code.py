"""An installation brings the machine code of the solvers along, and compiles only where it does not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from roamc.solvers import compiled, machine_code
from roamc.solvers.arrays import FloatArray
from roamc.solvers.layout import first_fit
from tests.solvers.test_compiled import answers

ROOT = Path(__file__).parents[2]
TRIPLE, _, FEATURES = compiled._Function.targetdescr.target_context.codegen().magic_tuple()

SCRIPT = """
from roamc.solvers import compiled, machine_code
from roamc.solvers.warm_up import warm_up
def refuse(compiler, *signature):
    raise AssertionError(f"compiled: {compiler.py_func} {signature}")
compiled._Compiler.compile = refuse
warm_up()
from tests.solvers.test_compiled import answers
print(machine_code.FILE, answers(), sep="\\n")
"""


@pytest.mark.thorough
def test_a_wheel_compiles_nothing_and_gives_the_answers_of_what_is_compiled_here(tmp_path: Path) -> None:
    source, target, cache = tmp_path / "source", tmp_path / "target", tmp_path / "cache"
    for folder in ("roamc", "passes", "solvers"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.bin"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(target), str(built)], check=True)
    paths = os.pathsep.join([str(target), str(ROOT), *(path for path in sys.path if path)])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, _, text = done.stdout.partition("\n")
    assert Path(file).is_relative_to(target)
    assert text == answers() + "\n"
    assert not cache.exists()


def test_this_installation_uses_its_machine_code_or_has_a_reason_not_to() -> None:
    reasons = (
        r"machine_code.bin: No such file|compiled for another (Python|numba|machine|source): |the processor lacks "
    )
    names, reason = machine_code.shipped(machine_code.FILE, TRIPLE, FEATURES)
    assert re.match(reasons, reason) if not names else any(name.startswith(first_fit.__name__) for name in names)
    assert bool(names) != bool(reason)


class Written:
    """A function that was compiled and written to a file; and how often it is compiled from then on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled._process, "patience", 0.0)
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder / "cache"))
        self.file = folder / "written.bin"
        self.compilations = 0
        first = self.fresh()
        assert first(np.arange(4.0)) == 6.0
        codes, (triple, *_) = compiled.codes_of([first])
        machine_code.write(self.file, codes, triple, ("avx2",) if "+avx2" in FEATURES else ())
        shutil.rmtree(folder / "cache")
        monkeypatch.setattr(machine_code, "FILE", self.file)
        monkeypatch.setattr(compiled._Compiler, "compile", self._counted(compiled._Compiler.compile))

    def _counted(self, compile_one: Callable[..., Any]) -> Callable[..., Any]:
        def counted(compiler: Any, *signature: Any) -> Any:
            self.compilations += 1
            return compile_one(compiler, *signature)

        return counted

    @staticmethod
    def fresh() -> Callable[[FloatArray], float]:
        """The function as a new process has it."""
        return compiled.compiled(_total)


def _total(array: FloatArray) -> float:
    return float(array.sum())


def test_machine_code_that_fits_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path, monkeypatch)
    assert written.fresh()(np.arange(5.0)) == 10.0
    assert written.compilations == 0
    assert not (tmp_path / "cache").exists()


def test_other_argument_types_than_those_shipped_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path, monkeypatch)
    assert written.fresh()(np.arange(5)) == 10.0  # type: ignore[arg-type]
    assert written.compilations == 1


def test_machine_code_of_other_sources_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path, monkeypatch)
    monkeypatch.setattr(machine_code, "_stamp", lambda triple: {"source": "other"})
    assert written.fresh()(np.arange(5.0)) == 10.0
    assert written.compilations == 1
    assert compiled.compiling.reason.startswith("compiled for another source: ")


def test_machine_code_that_does_not_fit_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, reads = Written(tmp_path, monkeypatch), list[Path]()

    def read(file: Path, *_: str) -> dict[str, bytes]:
        reads.append(file)
        raise machine_code.Unfit("another machine")

    monkeypatch.setattr(machine_code, "_read", read)
    for size in (5.0, 6.0):
        written.fresh()(np.arange(size))
    assert (reads, compiled.compiling.reason) == ([written.file], "another machine")


def test_machine_code_for_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path, monkeypatch)
    machine_code.write(written.file, {}, TRIPLE, ("avx2", "avx9"))
    assert machine_code.shipped(written.file, TRIPLE, f"{FEATURES},+avx2") == ({}, "the processor lacks avx9")


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_machine_code_that_is_cut_short_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    written = Written(tmp_path, monkeypatch)
    written.file.write_bytes(written.file.read_bytes()[:kept])
    assert written.fresh()(np.arange(5.0)) == 10.0
    assert written.compilations == 1


def test_damaged_machine_code_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path, monkeypatch)
    content = bytearray(written.file.read_bytes())
    content[-len(content) // 4] ^= 1
    written.file.write_bytes(content)
    assert written.fresh()(np.arange(5.0)) == 10.0
    assert written.compilations == 1
    assert compiled.compiling.reason == "written.bin is damaged"
