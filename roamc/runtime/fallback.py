"""What runs when an emitted program fails: the same planned operators, one by one, with torch's allocator.

A program that raises in the middle of a step leaves behind, in its arena and in the locals of its frame, every value
that the remaining operators read: no value dies before its last reader. So :func:`finish` goes on at the operator that
raised, every result in memory of its own, and nothing runs twice: no buffer is updated again, no random number drawn
again. Later steps run the planned graph by :func:`interpreter`.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.codegen.source import Entry, Program
from roamc.errors import UnfinishedError
from roamc.graph import Role, TrainGraph, attribute, operators, placeholders
from roamc.graph.memory import written_inputs
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.kernels import kernel_of
from roamc.operators.out_variants import FormKind, form_of
from roamc.runtime.arena import Arena
from roamc.runtime.whole_storage import extent_of, own

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A function that takes its arguments as a list and empties it, so that each argument can be freed early."""


def interpreter(gm: fx.GraphModule) -> Boxed:
    """Return a function that runs ``gm`` operator by operator.

    It takes the values of the placeholders as a list, which it empties, and returns the values of the output node. A
    value is freed after its last use.
    """

    def run(args: list[Any]) -> Sequence[Any]:
        values = list(args)
        args.clear()
        results: Sequence[Any] = fx.Interpreter(gm).boxed_run(values)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def finish(
    graph: TrainGraph, program: Program, filename: str, entry: Entry, arena: Arena, error: Exception
) -> tuple[Any, ...] | None:
    """Run the rest of a function of the program that raised ``error``, from the operator that raised on.

    The remaining operators run one by one; they update buffers, parameters and generators as the program would have.

    Args:
        graph: the planned graph.
        program: emitted from it.
        filename: the name under which the program was compiled.
        entry: the function that raised.
        arena: the arena over which it ran; its planned tensors are read.
        error: what it raised, with its traceback: the locals of the function are read off the frame.

    Returns:
        The results of ``entry``, one per item of :attr:`roamc.codegen.source.Entry.results` and None where that is
        None; none of them lies in the arena. None in the place of the tuple if nothing was run: the operator may have
        done half of its work and cannot run again, or ``error`` did not come from a line of the function that belongs
        to an operator.

    Raises:
        Exception: ``error`` itself if the operator raises again, as where the caller made a mistake; else what a later
            operator raises.
    """
    stopped = _stopped(program, filename, entry, error)
    if stopped is None:
        return None
    name, part, values = stopped
    rest = _Rest(graph, program, arena, values)
    nodes = [
        node for node in graph.graph.nodes if node.op == "call_function" and graph.phase[node.name] in entry.phases
    ]
    start = next(i for i, node in enumerate(nodes) if node.name == name)
    if not _may_run_again(graph, nodes[start], part):
        return None
    done = {node.name for node in nodes[:start]}
    for node in nodes[start:]:
        if node.target is operator.getitem and node.all_input_nodes[0].name in done:
            continue  # a result of an operator that has run: picked when it is read
        try:
            rest.run(node)
        except Exception as again:
            raise (error if node.name == name else again) from None
    return tuple(None if node is None else _outside(node, rest.value(node), arena) for node in entry.results)


def unfinished(graph: TrainGraph, program: Program, filename: str, entry: Entry, error: Exception) -> UnfinishedError:
    """Return the error to raise for a step that :func:`finish` could not finish.

    The message names the operator and says how many parameters and buffers the step has updated.

    Args:
        graph: the planned graph.
        program: emitted from it.
        filename: the name under which the program was compiled.
        entry: the function that raised.
        error: what the function raised, with its traceback.
    """
    stopped = _stopped(program, filename, entry, error)
    name = stopped[0] if stopped is not None else "an operator"
    updates = (
        written_before(graph, program, filename, entry, error)
        or "parameters, buffers and optimizer state are as before"
    )
    return UnfinishedError(
        f"{graph.name} failed in {name} ({type(error).__name__}: {error}), which may have done half of its work, so "
        f"this step cannot be finished with the same numbers; {updates}. Later steps run operator by operator"
    )


def written_before(graph: TrainGraph, program: Program, filename: str, entry: Entry, error: Exception) -> str:
    """Say what a function had updated, or begun to, when it raised ``error``: parameters and buffers, or else state.

    Where the operator that raised is not known, all updates of the function count.

    Args:
        graph: the planned graph.
        program: emitted from it.
        filename: the name under which the program was compiled.
        entry: the function that raised.
        error: what the function raised, with its traceback.

    Returns:
        Part of a sentence, such as "2 of 9 parameters and buffers were updated in it: load a checkpoint"; empty if
        there were none.
    """
    stopped = _stopped(program, filename, entry, error)
    begun = []
    for node in operators(graph.graph):
        if graph.phase[node.name] in entry.phases:
            begun.append(node)
        if stopped is not None and node.name == stopped[0]:
            break
    role = {node.name: port.role for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True)}
    owned = {name for name in role if role[name] in (Role.PARAMETER, Role.BUFFER)}
    written = written_inputs(graph, begun)
    if owned & written:
        return f"{len(owned & written)} of {len(owned)} parameters and buffers were updated in it: load a checkpoint"
    if any(role[name] is Role.OPTIMIZER_STATE for name in written):
        return "the optimizer's state was updated in it: load a checkpoint"
    return ""


def _stopped(program: Program, filename: str, entry: Entry, error: Exception) -> tuple[str, int, dict[str, Any]] | None:
    """Find where in ``entry`` the program stopped.

    The first frame of the function in the traceback counts: an error object that was raised once before has the frames
    of that time behind it.

    Returns:
        The name of the node, which of the lines of its statement raised, from 0, and the locals of the frame by name;
        None if no frame is of this function or its line belongs to no operator.
    """
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if (code.co_filename, code.co_name) == (filename, entry.name):
            statement = program.statements.get(trace.tb_lineno)
            return None if statement is None else (*statement, dict(trace.tb_frame.f_locals))
        trace = trace.tb_next
    return None


def _may_run_again(graph: TrainGraph, node: fx.Node, part: int) -> bool:
    """Whether the operator that raised has surely left all that it reads, and the random generators, as they were.

    One call of an ATen kernel checks its arguments before it writes or draws. An operator that makes several calls may
    have stopped between them.

    Args:
        graph: the planned graph.
        node: the operator that raised.
        part: which of the lines of its statement raised, from 0.
    """
    rule = ops.rule(node.target)
    if rule.collective or rule.ordered or rule.finishes is not None:
        return False
    if rule.mutates:  # a group may have written some blocks
        return not isinstance(node.target, Composite) and part == 0 and len(ops.mutated_arguments(node)) == 1
    births = sum(1 for value in _leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))
    kernel = kernel_of(node.target) if form_of(node, births).kind is FormKind.KERNEL else None
    if kernel is not None and not _is_one_call(kernel.function):
        return node.name not in graph.reuse and not rule.may_draw
    return not rule.unknown and (part == 0 or not rule.random)


def _is_one_call(kernel: Callable[..., Any]) -> bool:
    """Whether the code of a kernel of roamc's makes exactly one call."""
    return sum(line.opname.startswith("CALL") for line in dis.get_instructions(kernel)) == 1


@dataclass
class _Rest:
    """The values of a function that has stopped, and the values made since then.

    Attributes:
        graph: the planned graph.
        program: emitted from it.
        arena: the arena of the planned tensors.
        local: the locals of the function's frame by name.
        made: node to its value, for every node that :meth:`run` has run.
    """

    graph: TrainGraph
    program: Program
    arena: Arena
    local: dict[str, Any]
    made: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, node: fx.Node) -> None:
        """Run one operator and enter its value in :attr:`made`; new results lie outside the arena."""
        arguments: Any = fx.map_arg((node.args, node.kwargs), self.value)
        args, kwargs = arguments
        target: Any = node.target
        if target is torch.ops.aten.as_strided.default:
            self.made[node] = self._as_strided(node, *args, **kwargs)
            return
        if ops.rule(target).absolute:
            args = (_outside(node.all_input_nodes[0], args[0], self.arena), *args[1:])
        self.made[node] = target(*args, **kwargs)

    def _as_strided(
        self, node: fx.Node, base: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
    ) -> torch.Tensor:
        """Run ``as_strided`` with an offset into the base's planned storage, which may be a part of the arena."""
        planned = node.all_input_nodes[0].meta["val"].storage_offset()
        offset = planned if storage_offset is None else storage_offset
        return base.as_strided(size, stride, base.storage_offset() - planned + offset)

    def value(self, node: fx.Node) -> Any:
        """Return the value of ``node``: made since, planned, a local of the function, or a view of one of these.

        The value of an operator with several results is a list. A view that is not there is made.

        Raises:
            KeyError: the value is gone.
        """
        if node in self.made:
            return self.made[node]
        if node.op == "get_attr":
            return attribute(self.graph.module, str(node.target))
        if isinstance(node.meta.get("val"), list | tuple):
            return [self._result(node, position) for position in range(len(node.meta["val"]))]
        value = self._planned(node, 0)
        if value is None:
            value = self.local.get(self.program.names[node.name])
        if value is None and node.target is operator.getitem:
            value = self._result(node.all_input_nodes[0], int(node.args[1]))  # type: ignore[arg-type]
        if value is None and node.op == "call_function" and ops.is_view(node.target):
            self.run(node)
            value = self.made[node]
        if value is None:
            raise KeyError(f"{node.name} is gone")
        return value

    def _planned(self, node: fx.Node, position: int) -> torch.Tensor | None:
        """Return the planned tensor of a result of ``node``; None if it has none."""
        name = self.program.places.get((node.name, position))
        return None if name is None else self.arena.planned(name)

    def _result(self, node: fx.Node, position: int) -> Any:
        """Return result ``position`` of an operator with several; None if it is neither planned nor a local."""
        if node in self.made:
            return self.made[node][position]
        planned = self._planned(node, position)
        local = self.local.get(self.program.names[node.name])
        return planned if planned is not None or local is None else local[position]


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _outside(node: fx.Node, value: Any, arena: Arena) -> Any:
    """Return ``value``, that of ``node``; a copy in memory of its own if it lies in the arena."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if not arena.nbytes or value.untyped_storage().data_ptr() != arena.storage.data_ptr():
        return value
    return own(value, extent_of(node.meta["val"]))
