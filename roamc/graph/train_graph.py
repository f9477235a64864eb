"""TrainGraph: an FX graph of one training step, with the role of every input and output and the phase of every node.

A graph of ``torch.compile`` has a *boundary*: every FORWARD node runs before any BACKWARD node, because the user's code
runs in between. A graph of ``train_step`` has none.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc.compat import lazy_module
from roamc.graph.layout import Layout
from roamc.operators.ops import Need
from roamc.operators.table import Kind
from roamc.units import Bytes

if TYPE_CHECKING:
    from roamc.graph.storage_ids import StorageId


class Phase(enum.IntEnum):
    """Which part of the step a node belongs to: the forward pass, the backward pass, or the optimizer's update."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


class Role(enum.Enum):
    """What an input of the graph is, or what an output is for the caller.

    Attributes:
        PARAMETER: input, a parameter of the model; in a graph of ``torch.compile`` a buffer has this role as well.
        BUFFER: input, a buffer of the model.
        OPTIMIZER_STATE: input, a tensor of the optimizer's state.
        INPUT: input, anything else that the model or the step is called with.
        TANGENT: input of backward, the gradient of an output of forward.
        SCALAR: input, a number of the optimizer such as its learning rate.
        OUTPUT: output, a result of the model or the step.
        LOSS: output, the loss.
        GRADIENT: output, the gradient of an input.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    TANGENT = "tangent"
    SCALAR = "scalar"
    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Port:
    """One input or output of the graph.

    Attributes:
        name: the user's name for it where there is one (``"wte.weight"``), else the node's.
        role: what it is.
        phase: the part of the step that it enters in (inputs) or leaves in (outputs).
        overwritten: of an input or an output of forward, whether the caller may write to it when forward has run, which
            no operator shows: what backward reads of it is not what forward read.
        memory: of an input, the caller's memory that it lies in with other inputs, and its bytes; None if it shares
            none, or only with inputs of the same storage in the graph. Programs do not depend on it.
    """

    name: str
    role: Role
    phase: Phase = Phase.FORWARD
    overwritten: bool = False
    memory: StorageId | None = None


@dataclass(frozen=True)
class Encoding:
    """A smaller form in which a storage is kept for some of its readers, which read the decoded value.

    Attributes:
        storage: name of the storage, see :func:`storage_name`.
        codec: name of the codec.
        error: how far off slopes, and in the root of the mean square gradients of weights, are that readers compute of
            the decoded value, as a part of their norm; of inputs of norms the most by which an element is, in units of
            1 / rstd of its row. 0 for exact.
        keeps: what of the value is the same after decoding. Only readers that need no more may read it.
        encode: operators from the value, the first placeholder, to its code, the only output. Further placeholders
            stand for the last of what is ``beside``.
        decode: operators from the code and what is beside it to a tensor with the value's shape and strides.
        beside: names of the storages that ``decode`` reads besides the code, or of inputs. Each was made by an operator
            that reads the value, was read by one that makes such another, or is read by ``encode`` too.
        serves: of an encoding with an error, the kinds of readers that may read the decoded value.
    """

    storage: str
    codec: str
    error: float
    keeps: Need
    encode: fx.Graph = field(repr=False)
    decode: fx.Graph = field(repr=False)
    beside: tuple[str, ...] = ()
    serves: frozenset[Kind] = frozenset()


@dataclass(frozen=True)
class Agreement:
    """What all ranks of a group must have the same of, because the graph gives other numbers where they do not.

    Attributes:
        group: the group's name, as operators are called with it.
        inputs: names of the placeholders whose values must be the same.
        held: names of the module's own tensors that must be the same.
        draws: phase and device of the random operators whose numbers must be the same.
        digest: hash, in hexadecimal, of what was decided and of the operators that must be the same; empty where the
            ranks need the same sequence of collectives alone.
    """

    group: Any
    inputs: tuple[str, ...]
    held: tuple[str, ...]
    draws: tuple[tuple[Phase, torch.device], ...]
    digest: str


@dataclass(frozen=True)
class SamePlan:
    """A group of ranks that all run one plan: a collective of theirs runs again on all of them, or on none.

    Attributes:
        group: the group's name, as operators are called with it.
        sums: whether a sum over its ranks has the same bits each time.
    """

    group: Any
    sums: bool


@dataclass(frozen=True)
class TrainGraph:
    """One training step, or the forward and backward of one module, as ATen operators.

    Attributes:
        name: shown in logs and reports.
        module: the FX graph. Placeholders in the order of ``inputs``; one output node with a flat tuple.
        inputs: one port per placeholder.
        outputs: one port per element of the output; elements may be None.
        phase: node name to phase, for every ``call_function`` node.
        boundary: whether every FORWARD node must run before any BACKWARD node (graphs of ``torch.compile``).
        saved: with a boundary, node names in the order in which AOTAutograd saves them for backward; else empty.
        gradients: names of the nodes that are a parameter's gradient; eager keeps these until the end.
        waits: name of an update node to that of a gradient node; the update runs behind the gradient, whether or not it
            reads it.
        notes: sentences about the capture that the plan passes on to the user.
        eager_bytes: most live bytes of eager PyTorch at one step; None until the pipeline has counted them.
        eager_floor: for small graphs, name of an operator, or of a moment at which the caller's code runs, to the bytes
            that eager holds there at least: a pair, the first if the caller keeps the outputs of forward, the second
            if not. Empty for other graphs; see :func:`roamc.passes.layout.eager_floor`.
        threads: number of threads on a CPU that operators' workspace is counted for; set by the pipeline.
        device: the device of the arena, see :func:`main_device`; None until the pipeline has set it.
        reuse: operator name to the position of the argument whose memory its result takes over. The fake tensors of
            both keep storages of their own: :class:`roamc.graph.memory.SharedStorages` joins them.
        layout: offsets in the arena; None until the layout pass has run.
        encodings: the storages that some readers read from a smaller form.
        agreements: what ranks must have the same of, at most one for each group;
            :mod:`roamc.runtime.agreement` compares it before the first step.
        same_plan: the groups all of whose ranks run the plan that is made for this graph; collectives of others must
            run as often as in the graph.
        in_flight: how many micro-batches of a pipeline have run forward before one runs backward: what is saved for the
            others waits meanwhile. Above 1, all of FORWARD runs in front of all of BACKWARD.
        assumed_state: bytes of the states of an optimizer that the graph does not have, by the user's word; None where
            nothing is assumed of one.
        sums: whether gradients of several micro-batches are summed, in memory of their own: in a pipeline's stage.
        calls: whether ``in_flight`` counts calls of one module that run forward before a backward, instead of
            micro-batches of a pipeline. The caller holds the inputs and the outputs of each.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    phase: Mapping[str, Phase]
    boundary: bool = False
    saved: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    waits: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    eager_bytes: Bytes | None = None
    eager_floor: Mapping[str, tuple[Bytes, Bytes]] = field(default_factory=dict, repr=False)
    threads: int = 1
    device: torch.device | None = None
    reuse: Mapping[str, int] = field(default_factory=dict)
    layout: Layout | None = field(default=None, repr=False)
    encodings: tuple[Encoding, ...] = field(default=(), repr=False)
    agreements: tuple[Agreement, ...] = field(default=(), repr=False)
    same_plan: tuple[SamePlan, ...] = field(default=(), repr=False)
    in_flight: int = 1
    assumed_state: Bytes | None = None
    sums: bool = False
    calls: bool = False

    @property
    def apart(self) -> bool:
        """Whether all of FORWARD runs in front of all other operators."""
        return self.boundary or self.in_flight > 1

    @property
    def graph(self) -> fx.Graph:
        """The FX graph of ``module``."""
        return self.module.graph

    def replace(self, **changes: object) -> TrainGraph:
        """Return a copy with the fields in ``changes`` replaced; it shares the FX graph unless ``module`` is given."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def differ_in_layout_only(graph: TrainGraph, before: TrainGraph) -> bool:
    """Whether every field of ``graph`` but ``layout`` is the same object as that of ``before``.

    Nodes that were changed in place do not show, see :func:`roamc.graph.memory.kept_memory`.
    """
    names = (field.name for field in dataclasses.fields(graph) if field.name != "layout")
    return all(getattr(graph, name) is getattr(before, name) for name in names)


def copied(graph: TrainGraph) -> TrainGraph:
    """Return a copy of ``graph`` with nodes of its own, of the same names.

    Changes to the nodes of one do not show in the other; what a node's ``meta`` holds is shared.
    """
    fresh = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        copies[node] = fresh.node_copy(node, copies.__getitem__)
        copies[node].name = node.name  # which fx would not give to a new node where it is a word of Python's
    return graph.replace(module=lazy_module(graph.module, fresh))


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the input nodes of ``graph`` in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def operators(graph: fx.Graph) -> list[fx.Node]:
    """Return the ``call_function`` nodes of ``graph`` in graph order, views included."""
    return [node for node in graph.nodes if node.op == "call_function"]


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the one output node of ``graph``."""
    end: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return end


def output_values(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    """Return the elements of the flat output tuple of ``graph``: a node, or None where an output has no value."""
    return tuple(output_node(graph).args[0])  # type: ignore[arg-type]


def input_gradients(graph: TrainGraph) -> list[tuple[fx.Node, fx.Node]]:
    """Return inputs with the gradient that the graph returns for each; empty unless it has one output for every input.

    Graphs of ``torch.compile`` have; a whole step returns gradients of its batch only.
    """
    fed = zip(placeholders(graph.graph), graph.inputs, strict=True)
    inputs = [node for node, port in fed if port.role is not Role.TANGENT]
    returned = zip(output_values(graph.graph), graph.outputs, strict=True)
    gradients = [node for node, port in returned if port.role is Role.GRADIENT]
    if len(inputs) != len(gradients):
        return []
    return [(node, gradient) for node, gradient in zip(inputs, gradients, strict=True) if gradient is not None]


def tensors_of(node: fx.Node) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position, fake tensor) for each result of ``node`` that is a tensor; a single tensor has position 0."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield 0, value
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield position, item


def storage_name(node: fx.Node, position: int) -> str:
    """Return the name of the storage that result ``position`` of ``node`` makes.

    It is the name of ``node``, with ``#k`` for result k of a node that makes a list or tuple.
    """
    return node.name if isinstance(node.meta.get("val"), torch.Tensor) else f"{node.name}#{position}"


def maker_of(storage: str) -> str:
    """Return the name of the node that makes the storage with the name ``storage``, see :func:`storage_name`."""
    return storage.partition("#")[0]


def attribute(module: torch.nn.Module, path: str) -> Any:
    """Return what a ``get_attr`` node with the target ``path``, such as ``"body_0.weight"``, gets from ``module``.

    Raises:
        AttributeError: a part of ``path`` is missing.
    """
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def main_device(graph: TrainGraph) -> torch.device:
    """Return the device of the arena: ``graph.device``, or where most bytes of tensors are; the CPU without tensors."""
    if graph.device is not None:
        return graph.device
    total: dict[torch.device, int] = {}
    for node in graph.graph.nodes:
        for _, tensor in tensors_of(node):
            total[tensor.device] = total.get(tensor.device, 0) + tensor.numel() * tensor.itemsize
    return max(total, key=lambda device: total[device], default=torch.device("cpu"))
