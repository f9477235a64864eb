"""Small problems are interpreted where nothing is compiled yet, with the same answers as compiled."""

import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from roamc.solvers import compiled, layout, order
from roamc.solvers.arrays import FloatArray
from roamc.solvers.compiled import SMALL, interpreted_first
from roamc.solvers.order.equal_peak import equal_peaks
from tests.solvers.layout.cases import training_problem as storages
from tests.solvers.order.cases import random_layers
from tests.solvers.order.cases import training_problem as operators

ROOT = Path(__file__).parents[2]


def answers() -> str:
    lines: list[object] = []
    for problem in (operators(4), operators(3, seed=1, reuse=True), random_layers(6, 5)):
        ordered = order.solve(problem, work_limit=2_000)
        lines.append((ordered.order.tolist(), ordered.candidates, ordered.bound_bytes, ordered.status, ordered.work))
        lines += [(other.name, other.order.tolist()) for other in equal_peaks(problem, ordered.order)]
    for seed in (1, 2):
        placed = layout.solve(storages(12, seed=seed), node_limit=300)
        lines.append((placed.offset.tolist(), placed.candidates, placed.bound_bytes, placed.status, placed.work))
    return "\n".join(map(str, lines))


SCRIPT = """
from roamc.solvers import compiled
from tests.solvers.test_compiled import answers
compiled._process.patience = 1000.0
compiled.machine_code.shipped = lambda *_: ({}, "")
print(answers())
"""


def test_interpreted_solvers_give_the_answers_of_compiled_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    monkeypatch.setattr(compiled._process, "patience", 0.0)
    assert done.stdout == answers() + "\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "something was compiled"


class Rounds:
    """A function to compile, and how often it ran as plain Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
        monkeypatch.setattr(compiled._process, "patience", patience)
        monkeypatch.setattr(compiled._Function, "enable_caching", lambda function: None)
        self.function = compiled.compiled(lambda array: array.sum())
        self.attempts = 0

    def solve(self) -> float:
        self.attempts += 1
        return float(self.function(np.arange(4.0)))

    @property
    def is_compiled(self) -> bool:
        return bool(self.function.overloads)  # type: ignore[attr-defined]


def test_a_small_problem_is_solved_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch, patience=60)
    assert interpreted_first(3, rounds.solve) == 6.0
    assert (rounds.attempts, rounds.is_compiled) == (1, False)
    assert compiled._process.patience < 60


def test_a_large_problem_is_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch, patience=60)
    assert interpreted_first(SMALL + 1, rounds.solve) == 6.0
    assert (rounds.attempts, rounds.is_compiled) == (1, True)


def test_a_problem_that_takes_too_long_is_solved_again_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch, patience=1e-9)
    assert interpreted_first(3, rounds.solve) == 6.0
    assert (rounds.attempts, rounds.is_compiled) == (2, True)
    assert interpreted_first(3, rounds.solve) == 6.0
    assert rounds.attempts == 3, "the patience of the process is spent"


def test_an_error_of_the_solver_passes_and_the_next_problem_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch, patience=60)
    with pytest.raises(ZeroDivisionError):
        interpreted_first(3, lambda: 1 // 0)
    assert interpreted_first(3, rounds.solve) == 6.0
    assert not rounds.is_compiled


def compiled_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[FloatArray], float]:
    """Compile a function whose file, and so its cache, is in ``folder``, and return it as it was before."""
    monkeypatch.setattr(compiled._process, "patience", 0.0)
    (folder / "added.py").write_text("def added(array):\n    return array.sum()\n")
    added: Callable[[FloatArray], float] = runpy.run_path(str(folder / "added.py"))["added"]
    assert compiled.compiled(added)(np.arange(4.0)) == 6.0
    return added


def test_a_cache_that_names_a_module_of_another_version_counts_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = compiled_into(tmp_path, monkeypatch)
    (index,) = tmp_path.rglob("*.nbi")
    with index.open("rb") as file:
        version = pickle.load(file)
    index.write_bytes(pickle.dumps(version) + b"cmodule_that_is_gone\nPair\n.")
    assert compiled.compiled(added)(np.arange(4.0)) == 6.0
    read = compiled.compiled(added)
    assert read(np.arange(4.0)) == 6.0
    assert sum(read.stats.cache_hits.values()) == 1  # type: ignore[attr-defined]


def test_a_constant_argument_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled._process, "patience", 0.0)
    monkeypatch.setattr(compiled._Function, "enable_caching", lambda function: None)
    inner = compiled.compiled(lambda array, number: array.sum() + number)
    outer = compiled.compiled(lambda array: inner(array, 0) + inner(array, 1) + inner(array, len(array)))
    assert outer(np.arange(4.0)) == 23.0
    assert len(inner.overloads) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("kept", [0, 1, 40])
def test_a_cache_that_is_cut_short_counts_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kept: int
) -> None:
    added = compiled_into(tmp_path, monkeypatch)
    (file,) = tmp_path.rglob(kind)
    file.write_bytes(file.read_bytes()[:kept])
    assert compiled.compiled(added)(np.arange(4.0)) == 6.0
    read = compiled.compiled(added)
    assert read(np.arange(4.0)) == 6.0
    assert sum(read.stats.cache_hits.values()) == 1  # type: ignore[attr-defined]


def test_a_cache_with_another_byte_counts_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = compiled_into(tmp_path, monkeypatch)
    (file,) = tmp_path.rglob("*.nbc")
    content = file.read_bytes()
    assert b"added.py" in content
    file.write_bytes(content.replace(b"added.py", b"addee.py"))
    for hits in (0, 1):
        read = compiled.compiled(added)
        assert read(np.arange(4.0)) == 6.0
        assert sum(read.stats.cache_hits.values()) == hits  # type: ignore[attr-defined]


def test_a_cache_that_can_be_neither_read_nor_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = compiled_into(tmp_path, monkeypatch)
    (file,) = tmp_path.rglob("*.nbi")
    file.unlink()
    (file / "full").mkdir(parents=True)
    assert compiled.compiled(added)(np.arange(4.0)) == 6.0
