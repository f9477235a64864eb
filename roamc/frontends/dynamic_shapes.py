"""Dynamic shapes: each combination of input sizes that a call brings gets a program of its own.

Dynamo makes a size symbolic when it changes between calls, or when the user marks it. roamc plans sizes that are
known, so nothing is planned while dynamo compiles, and no guard is added: the first call with new sizes fixes them in a
copy of dynamo's graph and compiles that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from roamc import compat_dynamo
from roamc.compat import identity
from roamc.graph import output_values, placeholders
from roamc.locks import Lock

FOLDED = ("_operator", "math", "builtins")
"""Modules whose functions of sizes (``s0 * 2``, ``math.ceil``) are computed once the sizes are known. So are torch's
functions called ``sym_...``."""

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Compiled:
    """What was compiled of a graph for one combination of sizes.

    Attributes:
        call: takes the tensor arguments; returns the graph's results without those in ``numbers``.
        drop: forgets the plans behind ``call``.
        numbers: results of the graph that are numbers, by position among the results.
        total: number of results of the graph.
    """

    call: Callable[..., Any]
    drop: Callable[[], None]
    numbers: dict[int, Any]
    total: int


class Compiler(Protocol):
    """Compiles a graph once its sizes are known."""

    def compile_fixed(self, gm: fx.GraphModule, inputs: list[Any]) -> tuple[Callable[..., Any], Callable[[], None]]:
        """Compile a graph whose sizes are all numbers.

        Args:
            gm: the graph.
            inputs: a fake tensor, or a number, for each of its placeholders.

        Returns:
            (run, drop): ``run`` takes real inputs and returns the graph's results; ``drop()`` forgets the plans behind
            it.
        """

    def say_dropped(self) -> None:
        """Warn that the plan of a combination of sizes was dropped because more came than may keep one."""

    def fall_back(self, error: Exception, who: str) -> None:
        """Warn that the graph cannot be compiled, and that ``who`` runs it instead.

        Args:
            error: why the graph cannot be compiled.
            who: what runs the graph, such as "eager PyTorch".

        Raises:
            Exception: ``error``, if the option ``strict`` is set, or if it is about options or the budget; the
                interruption, such as Ctrl-C, if ``error`` came of one.
        """


def has_open_sizes(example_inputs: Sequence[Any]) -> bool:
    """Whether any size, stride or number among a graph's inputs is symbolic."""
    return any(isinstance(value, SYMBOLS) or _is_open_tensor(value) for value in example_inputs)


UNPLANNED = Compiled(lambda *_: (), lambda: None, {}, 0)
"""Stands for sizes that could not be compiled: dynamo's graph runs as it is."""


class BySize:
    """A compiled function for symbolic sizes: it looks at the sizes of a call and runs the program for them.

    Call it with the graph's inputs, real tensors and numbers; it returns the graph's results.

    Args:
        gm: the graph as dynamo captured it.
        example_inputs: its inputs, fake, some with symbolic sizes.
        compiler: compiles the graph for known sizes.
        limit: number of combinations of sizes that keep a program; the one used longest ago is dropped.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler: Compiler,
        limit: int,
    ) -> None:
        self._graph = owned(gm)
        nodes = placeholders(self._graph.graph)
        self._numbers = [i for i, value in enumerate(example_inputs) if _is_number(value, nodes[i])]
        self._tensors = [i for i in range(len(nodes)) if i not in self._numbers]
        self._open = [i for i in self._tensors if _is_open_tensor(example_inputs[i])]
        self._moving = [i for i in self._tensors if _may_alias(example_inputs[i])]
        self._compiler = compiler
        self._limit = limit
        self._programs: OrderedDict[object, Compiled] = OrderedDict()
        self._lock = Lock()

    def __call__(self, *args: Any) -> Any:
        """Run the program for the sizes of ``args``; compile it now if they are new."""
        key = self._key(args)
        with self._lock.now:
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._build(args)
                if len(self._programs) > self._limit:
                    self._programs.popitem(last=False)[1].drop()
                    self._compiler.say_dropped()
            self._programs.move_to_end(key)
        if program is UNPLANNED:
            return self._graph(*args)
        results = iter(program.call(*(args[i] for i in self._tensors)))
        return tuple(program.numbers[i] if i in program.numbers else next(results) for i in range(program.total))

    def _key(self, args: Sequence[Any]) -> object:
        """The numbers of a call, the geometry of tensors with open sizes, and which inputs share memory."""
        memory: dict[int, int] = {}
        shared = tuple(memory.setdefault(_storage(args[i]), i) for i in self._moving)
        return tuple(_number(args[i]) for i in self._numbers), tuple(_geometry(args[i]) for i in self._open), shared

    def _build(self, args: Sequence[Any]) -> Compiled:
        input_numbers = {i: _number(args[i]) for i in self._numbers}
        total = len(output_values(self._graph.graph))
        try:
            module, numbers = fixed(self._graph, input_numbers)
            with compat_dynamo.compilation([args[i] for i in self._tensors]) as fakes:
                call, drop = self._compiler.compile_fixed(module, fakes)
        except Exception as error:  # law 8; where planning failed, compile_fixed has fallen back by itself
            self._compiler.fall_back(error, "eager PyTorch")
            return UNPLANNED
        return Compiled(call, drop, numbers, total)


def fixed(gm: fx.GraphModule, input_numbers: dict[int, Any]) -> tuple[fx.GraphModule, dict[int, Any]]:
    """Copy ``gm`` with some inputs replaced by numbers, and compute what follows from numbers alone.

    Args:
        gm: a graph of dynamo's.
        input_numbers: maps the position of an input to its number.

    Returns:
        The copy, without these inputs and without results that are numbers; and these results, by position among all.
    """
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    position = 0
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            position += 1
            if position - 1 in input_numbers:
                values[node] = input_numbers[position - 1]
                continue
        values[node] = _folded(node, values) if _is_arithmetic(node, values) else _copied(graph, node, values)
    results = [values[node] if isinstance(node, fx.Node) else node for node in output_values(gm.graph)]
    graph.output(tuple(result for result in results if isinstance(result, fx.Node)))
    numbers = {i: result for i, result in enumerate(results) if not isinstance(result, fx.Node)}
    return compat_dynamo.dynamo_module(gm, graph), numbers


def owned(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` with a graph of its own: dynamo clears the one that it hands out."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copy in copies.items():
        compat_dynamo.keep_source(copy, node)
    return compat_dynamo.dynamo_module(gm, graph)


def _copied(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    copy = graph.node_copy(node, values.__getitem__)
    copy.meta.pop("unbacked_bindings", None)  # sizes that depend on data get other symbols
    compat_dynamo.keep_source(copy, node)
    return copy


def _is_arithmetic(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether ``node`` computes a number from numbers alone.

    ``values`` maps each input of ``node`` to its number if that is known, else to its copy, a node.
    """
    inputs = node.all_input_nodes
    if not inputs or any(isinstance(values[i], fx.Node) for i in inputs):
        return False
    if node.op == "call_method":  # ``item`` of a number that dynamo handed over as a tensor
        return node.target == "item"
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return getattr(node.target, "__module__", "") in FOLDED or name.startswith("sym_")


def _folded(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        return args[0]
    target: Any = node.target
    return target(*args, **kwargs)


def _is_number(value: Any, node: fx.Node) -> bool:
    """Whether an input stands for a number: a symbol, or a tensor in which dynamo hands over a float that changes."""
    if isinstance(value, SYMBOLS):
        return True
    picked = bool(node.users) and all(user.op == "call_method" and user.target == "item" for user in node.users)
    return picked and isinstance(value, torch.Tensor) and not value.dim() and value.dtype is torch.float64


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _is_open_tensor(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return any(isinstance(size, torch.SymInt) for size in _geometry(value))


def _may_alias(value: Any) -> bool:
    """Whether an input may share memory with others in some calls; dynamo guards the identity of parameters."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor's geometry that dynamo may have left symbolic."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape)
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that is the same for tensors that share a storage."""
    return identity(tensor) if tensor.layout is torch.strided else id(tensor)
