"""The judge of emitted programs refuses a program with one line left out, moved or changed, and says which."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from roamc.codegen import judge
from roamc.codegen.source import Program, emit
from roamc.errors import VerifyError
from roamc.graph import TrainGraph, copied
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.runtime import program as running
from roamc.runtime.program import Pair, Whole
from tests.sweeps.plan_mutants import small_graphs_have_arenas_with_holes, valid_plan

STEP, JOINT = 0, 1
"""Valid plans of one model, with trims and results over arguments: a whole step; forward and backward."""


@functools.cache
def emitted(number: int) -> tuple[TrainGraph, Program]:
    valid = valid_plan(number)
    with small_graphs_have_arenas_with_holes():
        plan = Plan.from_json(valid.plan_text)
        graph = search.run(copied(valid.graph), Options(), plan).graph
    return graph, emit(graph)


def with_lines(program: Program, lines: list[str]) -> Program:
    return dataclasses.replace(program, source="\n".join(lines) + "\n")


def is_refused(graph: TrainGraph, program: Program) -> bool:
    try:
        judge.check_program(graph, program)
    except VerifyError:
        return True
    return False


def lines_of(number: int) -> tuple[TrainGraph, Program, list[str]]:
    graph, program = emitted(number)
    return graph, program, program.source.splitlines()


@pytest.mark.parametrize("number", [STEP, JOINT])
def test_program_as_it_is_emitted_is_accepted(number: int) -> None:
    judge.check_program(*emitted(number))


@pytest.mark.parametrize("number", [STEP, JOINT])
def test_no_line_may_be_missing(number: int) -> None:
    graph, program, lines = lines_of(number)
    body = [at for at in range(1, len(lines)) if lines[at] and not lines[at].lstrip().startswith("def ")]
    unnoticed = {at for at in body if not is_refused(graph, with_lines(program, [*lines[:at], "", *lines[at + 1 :]]))}
    deleting = {at for at in body if lines[at].lstrip().startswith("del ")}
    assert [lines[at] for at in unnoticed - deleting] == []
    # A number, and what is returned or goes as the function ends, may keep its name.
    assert len(deleting - unnoticed) > len(deleting) / 2
    assert len(body) > 100


@pytest.mark.parametrize("number", [STEP, JOINT])
def test_no_line_with_a_call_may_stand_elsewhere(number: int) -> None:
    graph, program, lines = lines_of(number)
    calls = [
        at for at, line in enumerate(lines) if at + 1 in program.statements and re.search(r"\b(aten|run)_\w+\(", line)
    ]
    assert len(calls) > 20
    for at, other in itertools.pairwise(calls):
        moved = list(lines)
        moved[at], moved[other] = moved[other], moved[at]
        assert is_refused(graph, with_lines(program, moved)), (lines[at], lines[other])


def changes(line: str, in_place: bool) -> Iterator[str]:
    """The line with two arguments exchanged, or another number, or another place for a result not written in place."""
    call = re.match(r"(\s*(?:\w+ = )?\w+\()(.*?)(\).*)", line)
    if call:
        parts = call[2].split(", ")
        for at, (one, other) in enumerate(itertools.pairwise(parts)):
            if re.fullmatch(r"\w+", one) and re.fullmatch(r"\w+", other) and one != other:
                yield call[1] + ", ".join([*parts[:at], other, one, *parts[at + 2 :]]) + call[3]
        outs = re.search(r"out=(\w+)", line)
        if outs and not in_place and parts[0] != outs[1] and parts[0].isidentifier():
            yield line.replace(f"out={outs[1]}", f"out={parts[0]}")
    code = line.partition("  #")[0]
    for number in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        yield line[: number.start()] + str(int(number[0]) + 1) + line[number.end() :]
    for name, other in (("float32", "float64"), ("True", "False")):
        if name in code:
            yield line.replace(name, other)


@pytest.mark.parametrize("number", [STEP, JOINT])
def test_no_argument_number_or_place_may_be_another(number: int) -> None:
    graph, program, lines = lines_of(number)
    passed, count = [], 0
    for at, line in enumerate(lines):
        node, _ = program.statements.get(at + 1, ("", 0))
        for changed in list(changes(line, node in graph.reuse))[at % 3 :: 3]:
            count += 1
            if not is_refused(graph, with_lines(program, [*lines[:at], changed, *lines[at + 1 :]])):
                passed.append(changed)
    assert passed == []
    assert count > 100


def test_operators_and_kernels_are_those_of_the_graph() -> None:
    graph, program = emitted(STEP)
    called = [name for name, value in program.constants.items() if callable(value) and f"{name}(" in program.source]
    assert len(called) > 10
    for name in called:
        other = torch.ops.aten.sub.Tensor if program.constants[name] is not torch.ops.aten.sub.Tensor else max
        wrong = dataclasses.replace(program, constants={**program.constants, name: other})
        assert is_refused(graph, wrong), name


def test_notes_for_steps_that_fail_in_their_middle_are_judged() -> None:
    graph, program = emitted(STEP)
    lines, places = list(program.statements.items()), list(program.places.items())
    shifted = {line: other for (line, _), (_, other) in zip(lines, lines[1:] + lines[:1], strict=True)}
    assert is_refused(graph, dataclasses.replace(program, statements=shifted))
    moved = {key: other for (key, _), (_, other) in zip(places, places[1:] + places[:1], strict=True)}
    assert is_refused(graph, dataclasses.replace(program, places=moved))


@pytest.mark.parametrize(("number", "run"), [(STEP, Whole), (JOINT, Pair)])
def test_wrong_program_is_refused_before_it_runs(
    number: int, run: Callable[[Planned], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, program, lines = lines_of(number)
    at = next(at for at, line in enumerate(lines) if "aten_mul_out(" in line)
    wrong = with_lines(program, [*lines[:at], "", *lines[at + 1 :]])
    monkeypatch.setattr(running, "emit", lambda graph: wrong)
    planned = Planned(graph, Plan.from_json(valid_plan(number).plan_text))
    with pytest.raises(VerifyError, match=r"the program of \w+, line \d+, \w+: .*; please report this model"):
        run(planned)
