"""What torch.compile computes wrongly with any backend, and what roamc does about it.

    FAULTS           graphs that are left to eager PyTorch
    FORGETS_FLAGS    operators that must run outside of torch's dispatch mode

``tests/sweeps/torch_road.py`` runs torch's database of operators through AOTAutograd to look for more. A test of each
fails with the first torch that has mended it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx

from roamc import compat, compat_aot
from roamc.operators import ops


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: of the row.
        operators: names of functions that dynamo puts into a graph, one of which a graph with this fault calls.
        holds: whether a graph that calls one has the fault. Takes the graph, its example inputs, and the code of each
            function whose lines are in it, once for each call.
        wrong: what torch.compile does.
        instead: what the user can do.
        report: where torch has been told.
    """

    name: str
    operators: frozenset[str]
    holds: Callable[[fx.GraphModule, Sequence[Any], Sequence[CodeType]], bool]
    wrong: str
    instead: str
    report: str

    @property
    def said(self) -> str:
        """One sentence for the user."""
        return f"torch.compile {self.wrong} ({self.report}): {self.instead}"


def fault_of(gm: fx.GraphModule, inputs: Sequence[Any], traced: Sequence[CodeType]) -> Fault | None:
    """Return the first row of the table that a graph has; None if it has none.

    Args:
        gm: the graph as dynamo captured it.
        inputs: its example inputs.
        traced: the code of each function whose lines are in it, once for each call.
    """
    called = _called(gm)
    rows = (row for row in FAULTS if not row.operators.isdisjoint(called))
    return next((row for row in rows if row.holds(gm, inputs, traced)), None)


def _called(gm: fx.GraphModule) -> frozenset[str]:
    """The names of the functions that the graph calls."""
    return frozenset(_name(node) for node in gm.graph.nodes if node.op == "call_function")


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def _loses_a_backward(gm: fx.GraphModule, inputs: Sequence[Any], traced: Sequence[CodeType]) -> bool:
    """Whether a custom function's forward is in the graph more often than its backward, and a gradient is asked for.

    Dynamo traces both where it takes the function as it is. Else its forward's operators are all that is left.
    """
    asked = _called(gm) & DIFFERENTIATE or any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
    if not asked:
        return False
    times = Counter(traced)
    kinds = list(_below(torch.autograd.Function))
    return sum(times[code] for code in _codes(kinds, "forward")) > sum(
        times[code] for code in _codes(kinds, "backward")
    )


def _below(kind: type) -> Iterable[type]:
    """All classes derived from ``kind``."""
    derived_kinds: list[type] = kind.__subclasses__()
    for derived in derived_kinds:
        yield derived
        yield from _below(derived)


def _codes(kinds: Iterable[type], name: str) -> set[CodeType]:
    """The code of the methods with this name."""
    codes = (getattr(getattr(kind, name, None), "__code__", None) for kind in kinds)
    return {code for code in codes if code is not None}


def _writes_an_input(gm: fx.GraphModule, inputs: Sequence[Any], traced: Sequence[CodeType]) -> bool:
    """Whether a custom function marks an input that gets a gradient, or a view of one, as written in place."""
    calls = [node for node in gm.graph.nodes if _name(node) == APPLY]
    dirty = [call.args[2 + position] for call in calls for position in call.kwargs.get("dirty_idx", ())]
    return not _trained(gm.graph.find_nodes(op="placeholder")).isdisjoint(_trained(dirty))


def _trained(nodes: Iterable[Any]) -> set[int]:
    """The storages of fake tensors that get a gradient, of those of ``nodes`` that are nodes."""
    examples = [node.meta.get("example_value") for node in nodes if isinstance(node, fx.Node)]
    return {compat.identity(value) for value in examples if isinstance(value, torch.Tensor) and value.requires_grad}


APPLY = "autograd_function_apply"
"""What dynamo calls in the place of a custom autograd.Function: with its forward, its backward, and the arguments."""

DIFFERENTIATE = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})
"""What ``torch.func.grad``, ``vjp``, ``jacrev``, ``jvp`` and ``jacfwd`` begin with in a graph."""

FAULTS = (
    Fault(
        "custom function in a transform",
        DIFFERENTIATE | {"_vmap_increment_nesting"},
        _loses_a_backward,
        "drops the backward of a custom autograd.Function that is called inside a transform such as torch.func.grad",
        "use roamc.train_step, or call the function outside the transform",
        "pytorch/pytorch#193279",
    ),
    Fault(
        "custom function that writes an input",
        frozenset({APPLY}),
        _writes_an_input,
        "drops the backward of a custom autograd.Function that marks an input of the graph as written in place",
        "use roamc.train_step, or call the function on a copy, such as x.clone()",
        "as pytorch/pytorch#184113, for inputs",
    ),
)

FORGETS_FLAGS = ("aten::linalg_pinv", "aten::linalg_polar", "aten::linalg_matrix_sqrth")
"""Operators whose kernels are made of others and conjugate by a flag, which any dispatch mode makes them forget.

Of complex numbers the results are wrong (pytorch/pytorch#198118).
"""


def unwatched(gm: fx.GraphModule, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return ``run``, outside the dispatch mode in which torch runs the first call of what a backend has compiled.

    That mode checks custom operators. With one of these in ``gm``, ``run`` stays inside, unless an operator of
    :data:`FORGETS_FLAGS` is there as well.

    Args:
        gm: the graph that ``run`` computes.
        run: takes a list of arguments, which it may empty.
    """
    stays = any(map(_has_custom, gm.graph.nodes)) and not any(map(_forgets_flags, gm.graph.nodes))
    return run if stays else compat_aot.unwatched(run)


def _has_custom(node: fx.Node) -> bool:
    """Whether a node calls an operator that neither torch nor roamc defines, or hands it to another that calls it."""
    called = [each for each in (node.target, *node.args) if isinstance(each, compat.OpOverload)]
    return any(each.namespace not in ops.KNOWN_NAMESPACES | ops.COLLECTIVE_NAMESPACES for each in called)


def _forgets_flags(node: fx.Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, compat.OpOverload) else ""
    inputs = [argument.meta.get("val") for argument in node.all_input_nodes]
    complex_input = any(isinstance(value, torch.Tensor) and value.is_complex() for value in inputs)
    return complex_input and name in FORGETS_FLAGS
