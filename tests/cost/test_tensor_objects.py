"""Objects of tensors: as many are counted as an emitted program holds, by the planner and by the judge of layouts."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from roamc.cost import TensorObjects, objects, view_bytes
from roamc.cost.tensor_objects import OBJECT
from roamc.errors import VerifyError
from roamc.graph import Phase, Role, TrainGraph
from roamc.graph.memory import build_memory
from roamc.graph.verify import storage_lives
from roamc.operators.costs.others import NOTED
from roamc.options import Options
from roamc.passes.layout.placement import make_table
from roamc.planning import layout_judge, search
from roamc.planning.planned import Planned
from roamc.runtime.program import Pair, Whole
from tests.graphs import graph_and_inputs, model_graph, traced
from tests.random_graphs import random_model

Inside = npt.NDArray[np.bool_]


def views_of_views(seed: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A program of views of views, chunks and products, drawn from ``seed``; takes and gives matrices of 4 × 4."""
    draw = random.Random(seed)
    recipe = [(draw.choice(PIECES), draw.randrange(8), draw.randrange(99)) for _ in range(draw.randrange(5, 40))]

    def program(x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for piece, one, other in recipe:
            values.append(piece(values[-1 - one % len(values)], values[other % len(values)]))
        return sum((value.sum() for value in values), x.sum()), values[-1]

    return program


def parts(a: Tensor, b: Tensor) -> Tensor:
    head, tail = a.split([1, 3])
    return (head + tail).expand(1, 3, 4).sum(0)[:1].expand(4, 4) + 1


def chunks(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([*a.chunk(4)[::2], *b.chunk(2, 1)[0].chunk(2)[1].reshape(1, 4).expand(2, 4).split(1)])


PIECES: list[Callable[[Tensor, Tensor], Tensor]] = [
    parts,
    chunks,
    lambda a, b: a.reshape(-1).view(4, 4).t(),
    lambda a, b: a[:, :].t(),
    lambda a, b: a.unsqueeze(0).transpose(1, 2).squeeze(0),
    lambda a, b: a @ b,
    lambda a, b: a.sort()[0].t(),
    lambda a, b: a.sin() * b,
]


def of_planner(graph: TrainGraph) -> tuple[TensorObjects, Inside]:
    """What the planner counts, and which storages lie in the arena."""
    assert graph.layout is not None
    memory = build_memory(graph)
    inside = np.array([storage.name in graph.layout.offset for storage in memory.counted], dtype=bool)
    return make_table(memory, graph, graph.layout.alignment).objects, inside


def of_judge(graph: TrainGraph) -> dict[str, int]:
    """Name of each node to the bytes that the judge counts there."""
    assert graph.layout is not None
    lives = storage_lives(graph)
    outside = layout_judge._outside_lives(graph, graph.layout, lives)
    live = layout_judge._objects(graph, graph.layout, lives, outside.values())
    return dict(zip([node.name for node in graph.graph.nodes], live, strict=True))


def held(planned: Planned, inputs: Sequence[Any]) -> dict[str, int]:
    """Name of each node with a statement to the tensor objects that program and caller hold after it.

    What the caller has had before and what lies in the arena do not count.
    """
    graph = planned.graph
    runner = Pair(planned) if graph.boundary else Whole(planned)
    statements = runner.executable.program.statements
    of_line = {line: node for node, line in {node: line for line, (node, _) in sorted(statements.items())}.items()}
    fed = list(zip(inputs, graph.inputs, strict=True))
    callers = {id(value) for value, port in fed if port.role is not Role.TANGENT}
    outputs: list[Any] = []
    counts: dict[str, int] = {}
    done: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith("<roamc"):
            return None
        if node := of_line.get(done.get(frame, 0)):
            arena = {*frame.f_code.co_freevars, "_"}
            local = [value for name, value in frame.f_locals.items() if name not in arena]
            counts[node] = len(objects_of([*outputs, *local]) - callers)
        done[frame] = frame.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.no_grad():
            if isinstance(runner, Whole):
                runner([*inputs])
            else:
                results = runner.forward([value for value, port in fed if port.phase is Phase.FORWARD])
                outputs += results[: runner.first_saved]
                late = [value for value, port in fed if port.phase is not Phase.FORWARD]
                args = [*results[runner.first_saved :], *late]
                runner.backward(args)
    finally:
        sys.settrace(before)
        done.clear()  # frames hold arenas
    return counts


def objects_of(values: Sequence[Any]) -> set[int]:
    """The ids of all tensors among ``values`` and in tuples there, and of those that they are views of."""
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    tensors = [item for item in flat if isinstance(item, Tensor)]
    return {id(item) for tensor in tensors for item in (tensor, tensor._base) if item is not None}


CASES: dict[str, Callable[[], tuple[TrainGraph, list[Any]]]] = {
    "step": lambda: graph_and_inputs(*random_model(0), "step"),
    "forward and backward": lambda: graph_and_inputs(*random_model(0), "joint"),
    "views of views": lambda: (traced(views_of_views(0), MATRIX), [MATRIX]),
    "recurrent step": lambda: model_graph("lstm", "step"),
    "recurrent forward and backward": lambda: model_graph("lstm", "joint"),
}
MATRIX = torch.eye(4)
OPTIONS: dict[str, dict[str, Any]] = {
    "no budget": {},
    "program order": {"order": "program"},
    "no order": {"disable": ("reorder",)},
    "lowest peak": {"memory_budget": "min"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_as_many_are_counted_as_the_program_holds(case: str, options: str) -> None:
    graph, inputs = CASES[case]()
    planned = search.run(graph, Options(**OPTIONS[options]))
    counted, inside = of_planner(planned.graph)
    nodes = [node.name for node in planned.graph.graph.nodes]
    assert dict(zip(nodes, counted.live(inside).tolist(), strict=True)) == of_judge(planned.graph)
    outside = np.append(~inside, np.ones(len(counted.born) - len(inside)))  # objects of the others are made by bind
    counts = dataclasses.replace(counted, nbytes=outside.astype(np.int64)).live(inside)
    ours = {node: int(count) for node, count in zip(nodes, counts, strict=True) if not node.startswith("getitem")}
    theirs = {node: count for node, count in held(planned, inputs).items() if node in ours}
    assert theirs
    assert not {node: (count, ours[node]) for node, count in theirs.items() if count > ours[node]}
    assert max(theirs.values()) >= 0.9 * max(ours[node] for node in theirs) - 1


@pytest.mark.parametrize("seed", range(2, 12))
def test_the_judge_counts_what_the_planner_counts(seed: int) -> None:
    options = list(OPTIONS.values())[seed % len(OPTIONS)]
    graph = search.run(traced(views_of_views(seed), MATRIX), Options(**options)).graph
    counted, inside = of_planner(graph)
    assert counted.live(inside).tolist() == list(of_judge(graph).values())


def rows_again(x: Tensor) -> Tensor:
    return torch.cat(x.unbind(0))


def test_one_object_too_few_is_refused_by_name() -> None:
    graph = search.run(traced(rows_again, torch.ones(200, 2)), Options()).graph
    layout = graph.layout
    assert layout is not None
    assert layout.needed_bytes == layout.peak_bytes + 201 * OBJECT + 200 * NOTED
    layout_judge.check_layout(graph)
    low = layout.needed_bytes - OBJECT
    with pytest.raises(VerifyError, match=f"{layout.needed_bytes} bytes at cat, above the {low} that"):
        layout_judge.check_layout(graph.replace(layout=dataclasses.replace(layout, needed_bytes=low)))


def test_views_with_many_dimensions_are_larger() -> None:
    assert [view_bytes(torch.ones([1] * dims)) for dims in (0, 5, 6, 8)] == [512, 512, 616, 648]
    graph = search.run(traced(rows_again, torch.ones(200, 1, 1, 1, 1, 1, 2)), Options()).graph
    counted, inside = of_planner(graph)
    assert counted.peak(inside) == 200 * 616 + OBJECT


@pytest.mark.parametrize(
    ("nbytes", "of_tensors", "expected"),
    [(0, 0, 0), (1920, 0, 20), (1 << 30, 50, 256 << 10), (1 << 20, 99_999, 99_999)],
)
def test_objects_take_a_little(nbytes: int, of_tensors: int, expected: int) -> None:
    assert objects(nbytes, of_tensors) == expected
