"""Emit a planned graph as Python source.

The program is a function ``bind(arena)``: it makes every planned tensor once, as a view of the arena, and
returns the functions that run one step over them. Each statement is one operator; a comment gives the
line of the user's model. Tensors outside the arena are deleted right after their last use. Where a range of the
arena is empty for a while, ``arena.close`` gives its memory back to the system and ``arena.open`` takes it again.

    def bind(arena):
        addmm = arena.view("addmm", 4096, (256, 768), (768, 1), torch.float32)
        def step(args):
            wte, wpe, tokens = args
            args.clear()
            addmm_out(bias, x, weight, out=addmm)                  # model.py:31
            ...
            return (loss,)
        return {"step": step}
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, attribute, output_values, placeholders, source_line, storage_name, tensors_of
from roamc.graph.layout import Layout, Trim
from roamc.graph.memory import MemoryModel, Place, Storage, build_memory, started_by
from roamc.operators import ops
from roamc.operators.fused import Fused
from roamc.operators.kernels import kernel_of
from roamc.operators.out_variants import Form, FormKind, form_of
from roamc.units import Bytes


@dataclass(frozen=True)
class Program:
    """Emitted source, the objects that it needs, and where in it the nodes of the graph are.

    ``bind(arena)`` returns a dict: the name of every entry to a function of a list of arguments, which it empties, that
    returns a tuple of results. For a graph with a boundary it has "saved" as well, a function without arguments that
    returns the planned places of those saved tensors that lie in the arena, in the order of ``TrainGraph.saved``.

    Attributes:
        source: Python text that defines ``bind(arena)``; ``arena`` has the methods ``view``, ``open`` and ``close`` of
            :class:`roamc.runtime.arena.Arena`.
        constants: global names of the source to objects: torch, operators, kernels, tensors of the graph, and arguments
            that have no literal form.
        entries: name to function of the program: "step", or "forward" and "backward".
        statements: line of the source, from 1, to (node that it runs, which of the lines of the node's statement it is,
            from 0).
        places: (node, position among its results) to the name of the planned tensor, as ``arena.view`` is given it.
        names: node to the name of the local variable that holds its value outside the arena.
        groups: the source of each group of operators that the program calls, in the order of the calls.
    """

    source: str
    constants: dict[str, Any] = field(repr=False)
    entries: dict[str, Entry] = field(repr=False)
    statements: dict[int, tuple[str, int]] = field(default_factory=dict, repr=False)
    places: dict[tuple[str, int], str] = field(default_factory=dict, repr=False)
    names: dict[str, str] = field(default_factory=dict, repr=False)
    groups: tuple[str, ...] = field(default=(), repr=False)

    @property
    def listing(self) -> str:
        """The source, then that of the groups that it calls, to be read and not to be run."""
        return "\n\n".join([self.source, *self.groups])


@dataclass(frozen=True)
class Entry:
    """One function of the program.

    Attributes:
        name: "step", "forward" or "backward".
        parameters: the nodes whose values it takes, in order: inputs of the graph, and in backward saved tensors first.
        results: the nodes whose values it returns, in order, and None where it returns None.
        phases: the phases whose operators it runs.
    """

    name: str
    parameters: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    phases: frozenset[Phase]


def emit(graph: TrainGraph) -> Program:
    """Return the program of a planned ``graph``, whose layout pass has run; ``graph`` stays as it is.

    Raises:
        PlanError: the graph has no layout.
    """
    if graph.layout is None:
        raise PlanError("the graph has no layout; run the layout pass first")
    return _Emitter(graph, graph.layout).emit()


def entries_of(graph: TrainGraph) -> tuple[Entry, ...]:
    """Return the functions that the program for ``graph`` has.

    Returns:
        One entry, "step", for a graph without a boundary; else two, "forward" and then "backward". Forward returns the
        user's outputs, then the saved tensors; backward takes the saved tensors, then the inputs that enter after
        forward, and returns the gradients.
    """
    inputs = placeholders(graph.graph)
    outputs = output_values(graph.graph)
    if not graph.boundary:
        return (Entry("step", tuple(inputs), outputs, frozenset(Phase)),)
    by_name = {node.name: node for node in graph.graph.nodes}
    saved = tuple(by_name[name] for name in graph.saved)
    fed = [(node, port) for node, port in zip(inputs, graph.inputs, strict=True)]
    early = tuple(node for node, port in fed if port.phase is Phase.FORWARD)
    late = tuple(node for node, port in fed if port.phase is not Phase.FORWARD)
    returned = list(zip(outputs, graph.outputs, strict=True))
    forward = tuple(node for node, port in returned if port.phase is Phase.FORWARD)
    backward = tuple(node for node, port in returned if port.phase is not Phase.FORWARD)
    return (
        Entry("forward", early, forward + saved, frozenset({Phase.FORWARD})),
        Entry("backward", saved + late, backward, frozenset({Phase.BACKWARD})),
    )


class _Emitter:
    """Walks the graph in order and writes one statement per operator."""

    def __init__(self, graph: TrainGraph, layout: Layout) -> None:
        self.graph = graph
        self.layout = layout
        self.memory: MemoryModel = build_memory(graph)
        self.names = _Names(graph.graph)
        self.constants: dict[str, Any] = {"torch": torch}
        self.planned: dict[tuple[str, int], str] = {}
        self.views: list[str] = []
        self.groups: dict[str, str] = {}
        self.statements: dict[int, tuple[str, int]] = {}
        self.closes = _by_operator((trim.after, trim) for trim in layout.trims)
        self.opens = _by_operator((trim.before, trim) for trim in layout.trims)

    def emit(self) -> Program:
        entries = entries_of(self.graph)
        bodies = [self._function(entry) for entry in entries]
        lines = ["def bind(arena):", *(f"    {view}" for view in self.views), ""]
        for body in bodies:
            for line, node, part in body:
                lines.append(f"    {line}")
                if node:
                    self.statements[len(lines)] = (node, part)
            lines.append("")
        exported = [f'"{entry.name}": {entry.name}' for entry in entries]
        if self.graph.boundary:
            exported.append(f'"saved": lambda: {self._saved()}')
        lines.append("    return {" + ", ".join(exported) + "}")
        names = {node.name: self.names.of(node) for node in self.graph.graph.nodes}
        return Program(
            "\n".join(lines) + "\n",
            self.constants,
            {entry.name: entry for entry in entries},
            self.statements,
            dict(self.planned),
            names,
            tuple(self.groups.values()),
        )

    def _saved(self) -> str:
        """Return the text of a tuple with the planned places of the saved tensors that lie in the arena."""
        by_name = {node.name: node for node in self.graph.graph.nodes}
        placed = [self._tensor(by_name[name]) for name in self.graph.saved if self._in_arena(by_name[name])]
        return f"({', '.join(placed)},)" if placed else "()"

    def _function(self, entry: Entry) -> list[tuple[str, str, int]]:
        """Return the lines of one function as (text, node, part).

        Node is the name of the operator that the line belongs to, and "" if there is none; part counts the lines of the
        operator's statement, from 0.
        """
        nodes = self._nodes_of(entry)
        last = _LastUses(entry, nodes)
        head = [f"def {entry.name}(args):"]
        local = [self.names.of(node) for node in entry.parameters]
        if local:
            head.append("    (" + ", ".join(self._parameter(node) for node in entry.parameters) + ",) = args")
        head.append("    args.clear()")
        unused = [self._parameter(node) for node in entry.parameters if node not in last]
        head += self._delete([name for name in unused if name != "_"])
        lines = [(line, "", 0) for line in head]
        for node in nodes:
            lines += [(f"    arena.open({low}, {high})", node.name, 0) for low, high in self.opens.get(node.name, ())]
            statement = self._statement(node)
            lines += [(f"    {line}", node.name, part) for part, line in enumerate(statement)]
            lines += [(f"    arena.close({low}, {high})", "", 0) for low, high in self.closes.get(node.name, ())]
            done = [self.names.of(done) for done in last.get_done(node) if self._is_local(done)]
            unread = self.names.of(node)
            if not node.users and node not in last and any(line.startswith(f"{unread} = ") for line in statement):
                done.append(unread)  # such as a random draw over an argument
            lines += [(line, "", 0) for line in self._delete(done)]
        results = ", ".join("None" if node is None else self._tensor(node) for node in entry.results)
        return [*lines, (f"    return ({results},)" if entry.results else "    return ()", "", 0)]

    def _nodes_of(self, entry: Entry) -> list[fx.Node]:
        """Return the operators of the entry's phases, in order, without views of planned tensors."""
        mine = [
            node
            for node in self.graph.graph.nodes
            if node.op == "call_function" and self.graph.phase[node.name] in entry.phases
        ]
        listed: dict[fx.Node, None] = {}
        mine_set = set(mine)
        for node in mine:
            if not (self._is_free_view(node) and self._in_arena(node)):
                listed[node] = None
                # Picks follow their operator at once, so that results nobody picks are freed there.
                picks = [user for user in node.users if user.target is operator.getitem]
                listed.update((user, None) for user in picks if user in mine_set and not self._in_arena(user))
        return list(listed)

    def _parameter(self, node: fx.Node) -> str:
        """Return the local name of a parameter; "_" for a saved tensor in the arena, which the function ignores."""
        return "_" if node.op == "call_function" and self._in_arena(node) else self.names.of(node)

    def _delete(self, names: Sequence[str]) -> list[str]:
        return [f"    del {', '.join(names)}"] if names else []

    def _is_local(self, node: fx.Node) -> bool:
        return not self._in_arena(node)

    # -- where tensors are ----------------------------------------------------------------------

    def _storage(self, node: fx.Node, position: int = 0) -> Storage:
        return self.memory.storages[self.memory.owner[node.name, position]]

    def _placed(self, storage: Storage) -> bool:
        return storage.name in self.layout.offset

    def _in_arena(self, node: fx.Node) -> bool:
        owned = [self._storage(node, position) for position, _ in tensors_of(node)]
        return bool(owned) and all(self._placed(storage) for storage in owned)

    def _is_free_view(self, node: fx.Node) -> bool:
        return not self._births(node) and ops.is_view(node.target) and started_by(node) is None

    def _births(self, node: fx.Node) -> list[tuple[int, Storage]]:
        """(result position, storage) for every storage that ``node`` makes."""
        births = []
        for position, _ in tensors_of(node):
            storage = self._storage(node, position)
            if storage.name == storage_name(node, position) and storage.place is not Place.INPUT:
                births.append((position, storage))
        return births

    def _tensor(self, node: fx.Node, position: int = 0) -> str:
        """Return the name of one value in the source: a constant, a planned tensor or a local.

        A planned tensor is added to the lines of ``bind`` when its name is first asked for.
        """
        if node.op == "get_attr":
            return self._attribute(node)
        if not isinstance(node.meta.get("val"), torch.Tensor) and position == 0 and not self._many(node):
            return self.names.of(node)
        storage = self._storage(node, position)
        if not self._placed(storage):
            return self.names.of(node)
        key = (node.name, position)
        if key not in self.planned:
            self.planned[key] = self._view(node, position, storage)
        return self.planned[key]

    def _many(self, node: fx.Node) -> bool:
        """Whether the operator has several results, even if that is a tuple of one."""
        return isinstance(node.meta.get("val"), list | tuple)

    def _view(self, node: fx.Node, position: int, storage: Storage) -> str:
        """Add the line of ``bind`` that makes a planned tensor, and return the tensor's name."""
        tensor = dict(tensors_of(node))[position]
        name = self.names.of(node) if not self._many(node) else self.names.fresh(f"{node.name}_{position}")
        offset = self.layout.offset[storage.name] + int(tensor.storage_offset()) * tensor.dtype.itemsize
        shape = tuple(int(size) for size in tensor.shape)
        stride = tuple(int(step) for step in tensor.stride())
        bits = (", conj=True" if tensor.is_conj() else "") + (", neg=True" if tensor.is_neg() else "")
        self.views.append(f'{name} = arena.view("{name}", {offset}, {shape}, {stride}, {tensor.dtype}{bits})')
        return name

    # -- statements -----------------------------------------------------------------------------

    def _statement(self, node: fx.Node) -> list[str]:
        """Return the lines that run one operator, without indentation."""
        births = self._births(node)
        if node.name in self.graph.reuse:
            return self._overwriting(node)
        if not births and ops.is_view(node.target):
            return [self._plain(node)]
        form = form_of(node, len(births))
        placed = [(position, storage) for position, storage in births if self._placed(storage)]
        comment = self._comment(node)
        kernel = kernel_of(node.target) if form.kind is FormKind.KERNEL else None
        lean = kernel is not None and kernel.lean
        if not placed and not lean and not ops.rule(node.target).whole_storage:  # ours alone, in an arena
            return [self._plain(node) + comment]
        if form.kind in (FormKind.OUT, FormKind.KERNEL):
            return [*self._allocate_rest(node, births), self._written(node, form) + comment]
        return self._copied(node, births, comment)

    def _plain(self, node: fx.Node) -> str:
        """Return a call of the operator as it is; its result is a local, or ignored if it is planned or never read."""
        if node.target is operator.getitem:
            return f"{self.names.of(node)} = {self.names.of(node.args[0])}[{node.args[1]!r}]"
        call = f"{self._function_name(node.target)}({self._arguments(node)})"
        return call if self._in_arena(node) or not node.users else f"{self.names.of(node)} = {call}"

    def _comment(self, node: fx.Node) -> str:
        line = source_line(node)
        return f"  # {line}" if line else ""

    def _overwriting(self, node: fx.Node) -> list[str]:
        """Return the lines of an operator with in-place reuse, which writes its result over an argument.

        Outside the arena the result is the argument's tensor under another name.
        """
        argument: Any = node.args[self.graph.reuse[node.name]]
        alias = [] if self._in_arena(node) else [f"{self.names.of(node)} = {self._tensor(argument)}"]
        return [*alias, self._written(node, form_of(node, 1)) + self._comment(node)]

    def _written(self, node: fx.Node, form: Form) -> str:
        """Return a call of the operator's ``out`` overload or kernel, which writes to the places of its results."""
        results = [self._result(node, position) for position, _ in tensors_of(node)]
        if form.kind is FormKind.OUT:
            target: Any = form.overload
            outs = ", ".join(f"{key}={name}" for key, name in zip(form.arguments, results, strict=True))
        else:
            target = kernel_of(node.target).function  # type: ignore[union-attr]
            outs = f"out={results[0]}" if len(results) == 1 else f"out=({', '.join(results)})"
        arguments = self._arguments(node)
        return f"{self._function_name(target)}({arguments}{', ' if arguments else ''}{outs})"

    def _result(self, node: fx.Node, position: int) -> str:
        """Return the name of the place that a result is written to: a planned tensor, a local or an item of one."""
        if self._placed(self._storage(node, position)):
            return self._tensor(node, position)
        return self.names.of(node) if not self._many(node) else f"{self.names.of(node)}[{position}]"

    def _allocate_rest(self, node: fx.Node, births: Sequence[tuple[int, Storage]]) -> list[str]:
        """Return the line that allocates the results of an operator that lie outside the arena.

        There is no line if all results are planned. In the tuple of several results, planned ones are None.
        """
        if all(self._placed(storage) for _, storage in births):
            return []
        items = []
        for position, tensor in tensors_of(node):
            if self._placed(self._storage(node, position)):
                items.append("None")
                continue
            items.append(_empty(tensor))
        return [
            f"{self.names.of(node)} = ({', '.join(items)},)"
            if self._many(node)
            else f"{self.names.of(node)} = {items[0]}"
        ]

    def _copied(self, node: fx.Node, births: Sequence[tuple[int, Storage]], comment: str) -> list[str]:
        """Return the lines of an operator without an ``out=`` form: run it, copy planned results, keep the others."""
        name = self.names.of(node)
        placed = [position for position, storage in births if self._placed(storage)]
        local = f"{name}_result" if self._in_arena(node) else name
        lines = [f"{local} = {self._function_name(node.target)}({self._arguments(node)}){comment}"]
        for position in placed:
            item = f"{local}[{position}]" if self._many(node) else local
            lines.append(f"{self._tensor(node, position)}.copy_({item})")
        if local != name:
            return [*lines, f"del {local}"]
        own = {position for position, _ in tensors_of(node)}.difference(placed)
        items = [f"{local}[{p}]" if p in own else "None" for p in range(len(node.meta["val"]))]
        return [*lines, f"{local} = ({', '.join(items)},)"]

    # -- expressions ----------------------------------------------------------------------------

    def _arguments(self, node: fx.Node) -> str:
        parts = [self._literal(argument) for argument in node.args]
        parts += [f"{key}={self._literal(value)}" for key, value in node.kwargs.items()]
        return ", ".join(parts)

    def _literal(self, value: Any) -> str:
        """Return the text of one argument; one that has no exact literal form becomes a constant."""
        if isinstance(value, fx.Node):
            return self._tensor(value)
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            inner = ", ".join(self._literal(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if value is None or isinstance(value, bool | int | str | torch.dtype):
            return repr(value)
        if isinstance(value, torch.memory_format | torch.layout) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        return self._constant(f"{ARGUMENT}{len(self.constants)}", value)

    def _attribute(self, node: fx.Node) -> str:
        return self._constant(f"attribute_{node.name}", attribute(self.graph.module, str(node.target)))

    def _function_name(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            overload = "" if target._overloadname == "default" else f"_{target._overloadname}"
            return self._constant(target._schema.name.replace("::", "_") + overload, target)
        group = getattr(target, "__self__", target)  # of the method of a group that writes
        if isinstance(group, Fused):
            self.groups[group.name] = group.text.source
            return self._constant(group.text.function, target)
        return self._constant(f"run_{target.__name__}", target)

    def _constant(self, name: str, value: Any) -> str:
        """Enter ``value`` among the constants, and return its name: ``name``, with underscores if that is taken."""
        while self.names.taken(name) or self.constants.get(name, value) is not value:
            name += "_"
        self.constants[name] = value
        return name


ARGUMENT = "constant_"
"""Prefix of the names of constants that are arguments of operators, and not operators."""

RESERVED = frozenset({"torch", "arena", "args", "bind", "step", "forward", "backward", "_"})
"""Names that the program uses itself."""


def _empty(tensor: torch.Tensor) -> str:
    """Return the text that allocates a tensor of this shape, strides, dtype and device.

    If the tensor does not begin at the start of its storage, the whole storage is allocated.
    """
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    kind = f'dtype={tensor.dtype}, device="{tensor.device}"'
    if not tensor.storage_offset():
        return f"torch.empty_strided({shape}, {stride}, {kind})"
    whole = int(tensor.untyped_storage().nbytes()) // tensor.itemsize
    return (
        f"torch.empty_strided(({whole},), (1,), {kind}).as_strided({shape}, {stride}, {int(tensor.storage_offset())})"
    )


def _by_operator(trims: Iterable[tuple[str, Trim]]) -> dict[str, list[tuple[Bytes, Bytes]]]:
    """Group trims by the operator that each comes with: operator to the ranges ``(low, high)``, the lowest first."""
    ranges: dict[str, list[tuple[Bytes, Bytes]]] = {}
    for name, trim in sorted(trims, key=lambda item: item[1].low):
        ranges.setdefault(name, []).append((trim.low, trim.high))
    return ranges


class _Names:
    """One Python identifier per node, none of them a keyword or one of the program's own names."""

    def __init__(self, graph: fx.Graph) -> None:
        self._taken = set(RESERVED)
        self._of = {node: self.fresh(node.name) for node in graph.nodes}

    def of(self, node: Any) -> str:
        name: str = self._of[node]
        return name

    def taken(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, name: str) -> str:
        """Take a new identifier: ``name``, with underscores behind it if that is taken or a keyword."""
        while name in self._taken or keyword.iskeyword(name):
            name += "_"
        self._taken.add(name)
        return name


class _LastUses:
    """For one function, the locals that may be deleted after each statement.

    ``node in last_uses`` says whether the function reads or returns the value of ``node``.
    """

    def __init__(self, entry: Entry, nodes: Sequence[fx.Node]) -> None:
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            start = started_by(node)
            for argument in [*node.all_input_nodes, *(start.all_input_nodes if start is not None else ())]:
                last[argument] = node
        mine = {*entry.parameters, *nodes}
        results = {node for node in entry.results if node is not None}
        self._done: dict[fx.Node, list[fx.Node]] = {}
        self._used = set(last)
        for value, user in last.items():
            if value in mine and value not in results:
                self._done.setdefault(user, []).append(value)
        for node in nodes:
            if node not in last and node not in results and node.users:
                self._done.setdefault(node, []).append(node)
        self._used |= results

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._used

    def get_done(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose values nothing reads after the statement of ``node``."""
        return self._done.get(node, [])
