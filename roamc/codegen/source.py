"""Emit a planned graph as Python source.

The program is a function ``bind(arena)``: it makes every planned tensor once, as a view of the arena, and
returns the functions that run one step over them. Each statement is one operator; a comment gives the
line of the user's model. Tensors outside the arena are deleted right after their last use. Where a range of the
arena is empty for a while, its memory may go back to the system: ``arena.close`` and ``arena.open`` say when.

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
from roamc.graph import (
    Phase,
    TrainGraph,
    attribute,
    output_values,
    placeholders,
    source_line,
    storage_name,
    tensors_of,
)
from roamc.graph.layout import Layout, Trim
from roamc.graph.memory import MemoryModel, Place, Storage, build_memory, started_by
from roamc.operators import ops
from roamc.operators.kernels import KERNELS
from roamc.operators.out_variants import Form, FormKind, form_of
from roamc.units import Bytes


@dataclass(frozen=True)
class Program:
    """Emitted source and what it needs beside torch.

    Attributes:
        source: Python text defining ``bind(arena)``.
        constants: names in the source to objects: operators, kernels, tensors of the graph, rare arguments.
        entries: the functions of the program, by name.
        statements: line of the source to the node that it runs, and which of the node's lines it is, from 0.
        places: node and position among its results to the name of its planned tensor.
        names: node to the name of its local.
    """

    source: str
    constants: dict[str, Any] = field(repr=False)
    entries: dict[str, Entry] = field(repr=False)
    statements: dict[int, tuple[str, int]] = field(default_factory=dict, repr=False)
    places: dict[tuple[str, int], str] = field(default_factory=dict, repr=False)
    names: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Entry:
    """One function of the program: its parameters, what it returns, and the phases it runs."""

    name: str
    parameters: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    phases: frozenset[Phase]


def emit(graph: TrainGraph) -> Program:
    """Emit ``graph``, whose layout pass has run.

    Raises:
        PlanError: the graph has no layout.
    """
    if graph.layout is None:
        raise PlanError("the graph has no layout; run the layout pass first")
    return _Emitter(graph, graph.layout).emit()


def entries_of(graph: TrainGraph) -> tuple[Entry, ...]:
    """One function for a whole step; two, split at the boundary, for a graph of ``torch.compile``."""
    inputs = placeholders(graph.graph)
    outputs = output_values(graph.graph)
    if not graph.boundary:
        return (Entry("step", tuple(inputs), outputs, frozenset(Phase)),)
    by_name = {node.name: node for node in graph.graph.nodes}
    saved = tuple(by_name[name] for name in graph.saved)
    fed = [(node, port) for node, port in zip(inputs, graph.inputs, strict=True)]
    early = tuple(node for node, port in fed if port.phase is Phase.FORWARD)
    late = tuple(node for node, port in fed if port.phase is not Phase.FORWARD)
    given = list(zip(outputs, graph.outputs, strict=True))
    forward = tuple(node for node, port in given if port.phase is Phase.FORWARD)
    backward = tuple(node for node, port in given if port.phase is not Phase.FORWARD)
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
        )

    def _saved(self) -> str:
        """The planned places of saved tensors, for a backward whose saved tensors come from elsewhere."""
        by_name = {node.name: node for node in self.graph.graph.nodes}
        placed = [self._tensor(by_name[name]) for name in self.graph.saved if self._in_arena(by_name[name])]
        return f"({', '.join(placed)},)" if placed else "()"

    def _function(self, entry: Entry) -> list[tuple[str, str, int]]:
        """The lines of one function; with each, where it is a part of an operator, the node and which part."""
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
        """Operators of the entry's phases, and the views of tensors outside the arena that they need here."""
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
        """The local name of a parameter; tensors that already lie in the arena arrive and are ignored."""
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
        found = []
        for position, _ in tensors_of(node):
            storage = self._storage(node, position)
            if storage.name == storage_name(node, position) and storage.place is not Place.INPUT:
                found.append((position, storage))
        return found

    def _tensor(self, node: fx.Node, position: int = 0) -> str:
        """The name that stands for one value: a constant, a planned view, made on first need, or a local."""
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
        return isinstance(node.meta.get("val"), list | tuple)

    def _view(self, node: fx.Node, position: int, storage: Storage) -> str:
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
        births = self._births(node)
        if node.name in self.graph.reuse:
            return self._overwriting(node)
        if not births and ops.is_view(node.target):
            return [self._plain(node)]
        form = form_of(node, len(births))
        placed = [(position, storage) for position, storage in births if self._placed(storage)]
        comment = self._comment(node)
        lean = form.kind is FormKind.KERNEL and KERNELS[node.target].lean  # type: ignore[index]
        if not placed and not lean and not ops.rule(node.target).whole_storage:  # ours alone, in an arena
            return [self._plain(node) + comment]
        if form.kind in (FormKind.OUT, FormKind.KERNEL):
            return [*self._allocate_rest(node, births), self._written(node, form) + comment]
        return self._copied(node, births, comment)

    def _plain(self, node: fx.Node) -> str:
        """The operator itself; the result is a local, or ignored where it is a planned tensor already."""
        if node.target is operator.getitem:
            return f"{self.names.of(node)} = {self.names.of(node.args[0])}[{node.args[1]!r}]"
        call = f"{self._function_name(node.target)}({self._arguments(node)})"
        return call if self._in_arena(node) or not node.users else f"{self.names.of(node)} = {call}"

    def _comment(self, node: fx.Node) -> str:
        line = source_line(node)
        return f"  # {line}" if line else ""

    def _overwriting(self, node: fx.Node) -> list[str]:
        """The result goes over an argument; outside the arena it is that tensor, under another name."""
        argument: Any = node.args[self.graph.reuse[node.name]]
        alias = [] if self._in_arena(node) else [f"{self.names.of(node)} = {self._tensor(argument)}"]
        return [*alias, self._written(node, form_of(node, 1)) + self._comment(node)]

    def _written(self, node: fx.Node, form: Form) -> str:
        results = [self._result(node, position) for position, _ in tensors_of(node)]
        if form.kind is FormKind.OUT:
            target: Any = form.overload
            outs = ", ".join(f"{key}={name}" for key, name in zip(form.arguments, results, strict=True))
        else:
            target = KERNELS[node.target].function  # type: ignore[index]
            outs = f"out={results[0]}" if len(results) == 1 else f"out=({', '.join(results)})"
        arguments = self._arguments(node)
        return f"{self._function_name(target)}({arguments}{', ' if arguments else ''}{outs})"

    def _result(self, node: fx.Node, position: int) -> str:
        if self._placed(self._storage(node, position)):
            return self._tensor(node, position)
        return self.names.of(node) if not self._many(node) else f"{self.names.of(node)}[{position}]"

    def _allocate_rest(self, node: fx.Node, births: Sequence[tuple[int, Storage]]) -> list[str]:
        """Results that are handed out, of an operator whose other results are planned: made just before."""
        if all(self._placed(storage) for _, storage in births):
            return []
        made = []
        for position, tensor in tensors_of(node):
            if self._placed(self._storage(node, position)):
                made.append("None")
                continue
            made.append(_empty(tensor))
        return [
            f"{self.names.of(node)} = ({', '.join(made)},)"
            if self._many(node)
            else f"{self.names.of(node)} = {made[0]}"
        ]

    def _copied(self, node: fx.Node, births: Sequence[tuple[int, Storage]], comment: str) -> list[str]:
        """No ``out=`` form: run the operator, copy what is planned, keep the rest."""
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
        kept = [f"{local}[{p}]" if p in own else "None" for p in range(len(node.meta["val"]))]
        return [*lines, f"{local} = ({', '.join(kept)},)"]

    # -- expressions ----------------------------------------------------------------------------

    def _arguments(self, node: fx.Node) -> str:
        parts = [self._literal(argument) for argument in node.args]
        parts += [f"{key}={self._literal(value)}" for key, value in node.kwargs.items()]
        return ", ".join(parts)

    def _literal(self, value: Any) -> str:
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
        return self._constant(f"run_{target.__name__}", target)

    def _constant(self, name: str, value: Any) -> str:
        while self.names.taken(name) or self.constants.get(name, value) is not value:
            name += "_"
        self.constants[name] = value
        return name


ARGUMENT = "constant_"
"""How the names of constants begin that are arguments of operators, and not called."""

RESERVED = frozenset({"torch", "arena", "args", "bind", "step", "forward", "backward", "_"})
"""Names that the program uses itself."""


def _empty(tensor: torch.Tensor) -> str:
    """The text that allocates a tensor of this geometry; where it does not begin its storage, with all of that."""
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    kind = f'dtype={tensor.dtype}, device="{tensor.device}"'
    if not tensor.storage_offset():
        return f"torch.empty_strided({shape}, {stride}, {kind})"
    whole = int(tensor.untyped_storage().nbytes()) // tensor.itemsize
    return (
        f"torch.empty_strided(({whole},), (1,), {kind}).as_strided({shape}, {stride}, {int(tensor.storage_offset())})"
    )


def _by_operator(trims: Iterable[tuple[str, Trim]]) -> dict[str, list[tuple[Bytes, Bytes]]]:
    """Operator to the ranges that go, or come back, at it, from the lowest on."""
    found: dict[str, list[tuple[Bytes, Bytes]]] = {}
    for name, trim in sorted(trims, key=lambda item: item[1].low):
        found.setdefault(name, []).append((trim.low, trim.high))
    return found


class _Names:
    """One Python identifier per node, unlike Python's words and the program's own names."""

    def __init__(self, graph: fx.Graph) -> None:
        self._taken = set(RESERVED)
        self._of = {node: self.fresh(node.name) for node in graph.nodes}

    def of(self, node: Any) -> str:
        name: str = self._of[node]
        return name

    def taken(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, name: str) -> str:
        while name in self._taken or keyword.iskeyword(name):
            name += "_"
        self._taken.add(name)
        return name


class _LastUses:
    """For one function: which locals may be deleted after which statement."""

    def __init__(self, entry: Entry, nodes: Sequence[fx.Node]) -> None:
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            start = started_by(node)
            for argument in [*node.all_input_nodes, *(start.all_input_nodes if start is not None else ())]:
                last[argument] = node
        mine = {*entry.parameters, *nodes}
        kept = {node for node in entry.results if node is not None}
        self._done: dict[fx.Node, list[fx.Node]] = {}
        self._used = set(last)
        for value, user in last.items():
            if value in mine and value not in kept:
                self._done.setdefault(user, []).append(value)
        for node in nodes:
            if node not in last and node not in kept and node.users:
                self._done.setdefault(node, []).append(node)
        self._used |= kept

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._used

    def get_done(self, node: fx.Node) -> list[fx.Node]:
        return self._done.get(node, [])
