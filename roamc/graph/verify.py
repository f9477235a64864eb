"""The judge of graphs: every graph that a pass leaves is checked here before it runs.

The checks are dull on purpose and share nothing with the solvers. An error is one line: the fault, the pass that ran
last, and how to leave that pass out. The ten nodes around the fault go to the log, at debug level.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload, identity
from roamc.errors import VerifyError, way_out
from roamc.graph import Agreement, Phase, TrainGraph, operators, output_values, placeholders, storage_name, tensors_of
from roamc.graph.memory import SharedStorages, build_memory, reused_argument, started_by
from roamc.graph.ranks import runs_together
from roamc.graph.rewrite import mode_of, value_of
from roamc.graph.storage_ids import STORAGES, StorageId, id_of, ids_of, placed
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.corrections import corrected
from roamc.operators.table import Space

Life = tuple[int, int, int]
"""(born, dead, bytes) of a storage: it lives in ``[born, dead)``, in positions of the graph's node list."""

log = logging.getLogger(__name__)

NEIGHBOURS = 5
"""Nodes logged on each side of a fault."""


@dataclass(frozen=True)
class Constraints:
    """What a pass must leave as it is.

    Attributes:
        order: (before, after) pairs of names of nodes that must stay in this order: data, writes, random operators,
            collectives.
        effects: names of nodes that write, draw, talk to other ranks or assert, and so must not be removed. Collectives
            that may run again are left out: :mod:`roamc.graph.value_flow` sees that one of equal ones stays.
        agreements: what ranks compare before the first step, and still must.
    """

    order: tuple[tuple[str, str], ...] = ()
    effects: tuple[str, ...] = ()
    agreements: tuple[Agreement, ...] = ()


def constraints(graph: TrainGraph) -> Constraints:
    """Return what a pass must leave as it is in ``graph``, to be given to :func:`check_graph` behind the pass."""
    memory = build_memory(graph)
    names = [op.node.name for op in memory.operators]
    effects = tuple(
        op.node.name
        for op in memory.operators
        if ops.has_effect(op.node.target) and not runs_together(op.node, graph.same_plan)
    )
    order = tuple((names[before], names[after]) for before, after in memory.edges)
    return Constraints(order, effects, graph.agreements)


def check_graph(graph: TrainGraph, after: str, earlier: Constraints | None = None, *, deep: bool = False) -> None:
    """Check that a graph is well-formed: ports, phases, order, aliases and in-place reuse.

    Args:
        graph: what the pass left.
        after: name of the pass, for the message.
        earlier: constraints of the graph before the pass; pairs whose nodes are gone are skipped, effects must stay.
            None for no constraints.
        deep: whether to derive shape, dtype, strides and device of every result again from its operator as well.

    Raises:
        VerifyError: names the fault and the pass; the log has the neighbourhood.
    """
    try:
        graph.graph.lint()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise VerifyError(f"after pass {after!r}: the graph is malformed: {reason}; {way_out(after)}") from None
    _check_groups(graph, after)
    _check_numbered(graph, after)
    _check_ports(graph, after)
    _check_phases(graph, after)
    _check_finished(graph, after)
    _check_order(graph, after, earlier or Constraints())
    _check_agreements(graph, after, earlier or Constraints())
    if deep:
        _check_metadata(graph, after)
    _check_aliases(graph, after)
    _check_read(graph, after)
    _check_reuse(graph, after)


def storage_lives(graph: TrainGraph) -> dict[str, Life]:
    """Return when each storage of ``graph`` lives, derived from the node list alone, to judge a plan by.

    Results written over an argument lie in its storage. A view does not prolong a life, but what reads the view does;
    what an asynchronous operator touches lives until its wait. Inputs and constants have lives like any other storage.

    Returns:
        Storage name (see :func:`roamc.graph.storage_name`) to (born, dead, bytes). The storage lives in
        ``[born, dead)``: positions in ``graph.graph.nodes``, where views, inputs and the output node count as well.
    """
    shared = SharedStorages(graph)
    owner: dict[StorageId, str] = {}
    lives: dict[str, Life] = {}
    for step, node in enumerate(graph.graph.nodes):
        start = started_by(node)
        results = [(position, shared.of(storage)) for position, _, storage in placed(node)]
        for position, key in results:
            if key not in owner:
                owner[key] = storage_name(node, position)
                lives[owner[key]] = (step, step + 1, key.nbytes)
        if node.op == "call_function" and ops.is_view(node.target) and start is None:
            continue
        for key in shared.of_all([*node.all_input_nodes, *_under_way(start)]).union(key for _, key in results):
            born, _, nbytes = lives[owner[key]]
            lives[owner[key]] = (born, step + 1, nbytes)
    return lives


def _fail(graph: TrainGraph, after: str, node: fx.Node, fault: str) -> None:
    nodes = list(graph.graph.nodes)
    at = nodes.index(node)
    shown = []
    for other in nodes[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]:
        mark = ">" if other is node else " "
        shown.append(f"  {mark} {other.format_node()}")
    log.debug("after pass %r: %s\n%s", after, fault, "\n".join(shown))
    hint = "" if after == "capture" else f"{way_out(after)}; "
    raise VerifyError(f'after pass {after!r}: {fault}; {hint}TORCH_LOGS="+roamc" shows the graph around it')


def _check_groups(graph: TrainGraph, after: str) -> None:
    """Check that every group of operators is written down as one, before anything is asked of it."""
    for node in operators(graph.graph):
        target: Any = node.target
        fault = target.malformed(len(node.args)) if isinstance(target, Composite) else ""
        if fault:
            _fail(graph, after, node, f"{node.name} is a malformed group: {fault}")


def _check_numbered(graph: TrainGraph, after: str) -> None:
    """Check that every tensor of every node has a storage id."""
    for node in graph.graph.nodes:
        tensors, ids = sum(1 for _ in tensors_of(node)), node.meta.get(STORAGES, ())
        if len(ids) != tensors:
            _fail(graph, after, node, f"{node.name} has {len(ids)} storage ids for {tensors} tensors")


def _check_ports(graph: TrainGraph, after: str) -> None:
    if len(placeholders(graph.graph)) != len(graph.inputs):
        raise VerifyError(f"after pass {after!r}: {len(placeholders(graph.graph))} inputs, {len(graph.inputs)} roles")
    if len(output_values(graph.graph)) != len(graph.outputs):
        raise VerifyError(
            f"after pass {after!r}: {len(output_values(graph.graph))} outputs, {len(graph.outputs)} roles"
        )
    names = {node.name for node in graph.graph.nodes}
    missing = [name for name in graph.saved if name not in names]
    if missing:
        raise VerifyError(f"after pass {after!r}: saved node {missing[0]} is gone")


def _check_phases(graph: TrainGraph, after: str) -> None:
    late = {
        n for n, port in zip(placeholders(graph.graph), graph.inputs, strict=True) if port.phase is not Phase.FORWARD
    }
    returned = zip(output_values(graph.graph), graph.outputs, strict=True)
    early = {node for node, port in returned if port.phase is Phase.FORWARD}
    crossed = False
    for node in operators(graph.graph):
        if node.name not in graph.phase:
            _fail(graph, after, node, f"{node.name} has no phase")
        if not graph.apart or ops.is_view(node.target):
            continue
        if graph.boundary and graph.phase[node.name] is Phase.UPDATE:
            _fail(graph, after, node, f"{node.name} belongs to UPDATE, which this graph does not have")
        forward = graph.phase[node.name] is Phase.FORWARD
        if not forward and node in early:
            _fail(graph, after, node, f"{node.name} is an output of FORWARD and does not belong to it")
        if forward and (crossed or any(argument in late for argument in node.all_input_nodes)):
            _fail(graph, after, node, f"{node.name} belongs to FORWARD but stands behind or reads from BACKWARD")
        crossed = crossed or not forward


def _under_way(start: fx.Node | None) -> list[fx.Node]:
    """The asynchronous operator and what it reads, whose memory is in use until it has ended; empty for None."""
    return [] if start is None else [start, *start.all_input_nodes]


def _check_finished(graph: TrainGraph, after: str) -> None:
    """Check that in the same part of the step something waits for each operator that may return before it has ended."""
    waits = {start: node for node in operators(graph.graph) if (start := started_by(node)) is not None}
    for node in operators(graph.graph):
        if ops.rule(node.target).asynchronous and node not in waits:
            _fail(graph, after, node, f"{node.name} may not be finished when it returns: {node.target}")
    for start, wait in waits.items():
        if graph.apart and graph.phase[start.name] is not graph.phase[wait.name]:
            _fail(graph, after, wait, f"{wait.name} waits in another part of the step than {start.name} begins in")
    if waits:
        _check_under_way(graph, after, set(waits))


def _check_under_way(graph: TrainGraph, after: str, starts: set[fx.Node]) -> None:
    """Check that until an operator ends nothing writes what it reads, nor reads or writes what it writes."""
    shared = SharedStorages(graph)
    under_way: dict[fx.Node, tuple[set[StorageId], set[StorageId]]] = {}  # operator to what it reads and writes
    for node in operators(graph.graph):
        ended = started_by(node)
        if ended is not None and under_way.pop(ended, None) is None:
            _fail(graph, after, node, f"{node.name} waits for {ended.name}, which has ended")
        if ops.is_view(node.target):
            continue
        read, written = shared.of_all(node.all_input_nodes), shared.of_all(ops.mutated_arguments(node))
        if node.name in graph.reuse:
            written.add(shared.of(id_of(reused_argument(graph, node))))
        for start, (reads, writes) in under_way.items():
            if not (read.isdisjoint(writes) and written.isdisjoint(reads | writes)):
                _fail(graph, after, node, f"{node.name} needs the memory of {start.name}, which has not ended")
        if node in starts:
            changed = shared.of_all([node]) | written
            under_way[node] = read - changed, changed


def _check_order(graph: TrainGraph, after: str, earlier: Constraints) -> None:
    position = {node.name: index for index, node in enumerate(graph.graph.nodes)}
    by_name = {node.name: node for node in graph.graph.nodes}
    for node in operators(graph.graph):
        target: Any = node.target
        for name in target.stands_for if isinstance(target, Composite) else ():
            if name in position and name != node.name:
                _fail(graph, after, node, f"{node.name} stands for {name}, which runs for itself as well")
            position[name], by_name[name] = position[node.name], node
        source: Any = node.all_input_nodes[0].target if target is operator.getitem else None
        if isinstance(source, Composite):
            position[node.name] = position[node.all_input_nodes[0].name]  # a member, which runs there
    for name in earlier.effects:
        if name not in position:
            raise VerifyError(
                f"after pass {after!r}: {name}, which writes, draws or asserts, is gone; {way_out(after)}"
            )
    for before, behind in earlier.order:
        if before in position and behind in position and position[before] > position[behind]:
            _fail(
                graph, after, by_name[behind], f"{behind} must stay behind {before} (data, write, random or collective)"
            )


def _check_agreements(graph: TrainGraph, after: str, earlier: Constraints) -> None:
    """Ranks compare what they compared before, once for each group, and of inputs that there are."""
    lost = next((agreement.group for agreement in earlier.agreements if agreement not in graph.agreements), None)
    if lost is not None:
        raise VerifyError(
            f"after pass {after!r}: the ranks of {lost!r} no longer compare what they must; {way_out(after)}"
        )
    groups = [agreement.group for agreement in graph.agreements]
    names = {node.name for node in placeholders(graph.graph)}
    unknown = [name for agreement in graph.agreements for name in agreement.inputs if name not in names]
    if len(set(groups)) < len(groups) or unknown:
        what = f"compare {unknown[0]}, which is no input" if unknown else "of one group compare more than once"
        raise VerifyError(f"after pass {after!r}: ranks {what}; {way_out(after)}")


def _check_aliases(graph: TrainGraph, after: str) -> None:
    """Check that storage ids, fake tensors and the operator table agree on what shares memory.

    Inputs share an id exactly if their fake tensors share memory. A result has the id of an argument exactly if its
    fake tensor lies in that argument's, which the operator table must allow; any other result has an id that no value
    before it has. The fake tensors of a second run may be those of the first.
    """
    inputs: dict[int, StorageId] = {}  # address of the fake storage of an input or constant to its id
    earlier: set[StorageId] = set()
    lies: dict[fx.Node, dict[int, set[StorageId]]] = {}  # node to the addresses of its fake storages, and their ids
    for node in graph.graph.nodes:
        around = _joined([lies[argument] for argument in node.all_input_nodes] if node.op == "call_function" else [])
        results = [(identity(tensor), tensor, storage) for _, tensor, storage in placed(node)]
        lies[node] = _joined([{address: {storage}} for address, _, storage in results])
        if node.op == "call_function":
            _check_sharing(graph, after, node, [address in around for address, _, _ in results])
        by_address = {} if node.op == "call_function" else inputs
        for address, tensor, storage in results:
            if address in around:
                agrees = storage in around[address]
            elif address in by_address:
                agrees = storage == by_address[address]
            else:
                agrees = storage not in earlier and storage.nbytes == tensor.untyped_storage().nbytes()
                by_address[address] = storage
            earlier.add(storage)
            if not agrees:
                _fail(graph, after, node, f"{node.name} lies in another storage than its storage id says")


def _joined(parts: Sequence[dict[int, set[StorageId]]]) -> dict[int, set[StorageId]]:
    """All ``parts`` in one; a single part as it is, as every pick of one of many results reads all of them."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[int, set[StorageId]] = {}
    for part in parts:
        for address, storages in part.items():
            joined.setdefault(address, set()).update(storages)
    return joined


def _check_sharing(graph: TrainGraph, after: str, node: fx.Node, shared: Sequence[bool]) -> None:
    """Check an operator of which result k shares storage with an argument if ``shared[k]``, and a pick, which must."""
    rule = ops.rule(node.target)
    if node.target is operator.getitem and not all(shared):
        _fail(graph, after, node, f"{node.name} is not a result of {node.args[0]}")
    if any(shared) and not (rule.view_of or rule.mutates):
        fault = f"{node.name} shares storage with an input; the operator table has no row for {node.target}"
        _fail(graph, after, node, fault)


def _check_read(graph: TrainGraph, after: str) -> None:
    """Check that arguments lie as kernels take them that read memory whatever the strides are."""
    for node in operators(graph.graph):
        for argument, form in ops.misread(node):
            tensor = f"{argument.name}, {_short(value_of(argument))}"
            _fail(
                graph, after, node, f"{node.name} would read {tensor}, as if it were {str(form).removeprefix('torch.')}"
            )


def _check_reuse(graph: TrainGraph, after: str) -> None:
    """Check in-place reuse: the operator may do that, argument and result lie alike, nothing reads the old values."""
    shared = SharedStorages(graph)
    values_in: dict[StorageId, list[fx.Node]] = {}
    born: set[StorageId] = set()
    stale: set[fx.Node] = set()
    for node in graph.graph.nodes:
        old = [argument for argument in node.all_input_nodes if argument in stale]
        if old and node.op == "call_function" and ops.is_view(node.target):
            stale.add(node)
        elif old:
            _fail(graph, after, node, f"{node.name} reads {old[0].name}, which was written over")
        if node.name in graph.reuse:
            argument = reused_argument(graph, node)
            if id_of(node) in born:
                _fail(
                    graph, after, node, f"{node.name} is to be written over {argument}, and makes no memory of its own"
                )
            _check_overwriting(graph, after, node, argument, shared)
            of_storage = values_in[shared.of(id_of(argument))]
            if of_storage[0].op != "call_function":
                fault = f"{node.name} is to be written over {of_storage[0].name}, a tensor of the caller's"
                _fail(graph, after, node, fault)
            if any(ops.rule(maker.target).space is not Space.DEVICE for maker in (node, of_storage[0])):
                _fail(graph, after, node, f"{node.name} is to be written over {of_storage[0].name}, in another memory")
            stale.update(of_storage)
        for storage in ids_of(node):
            values_in.setdefault(shared.of(storage), []).append(node)
            born.add(storage)


def _check_overwriting(graph: TrainGraph, after: str, node: fx.Node, argument: fx.Node, shared: SharedStorages) -> None:
    if graph.reuse[node.name] not in ops.may_overwrite(node, ids_of):
        _fail(graph, after, node, f"{node.name} may not write over {argument.name}, says the operator table")
    result, reused = node.meta["val"], argument.meta["val"]
    lies_in = shared.of(id_of(argument))
    if _lies(result) != _lies(reused) or id_of(node).nbytes != lies_in.nbytes:
        _fail(graph, after, node, f"{node.name} is to be written over {argument.name}, which lies elsewhere")
    for other in node.all_input_nodes:
        read = [tensor for _, tensor, storage in placed(other) if shared.of(storage) == lies_in]
        if any(_lies(tensor) != _lies(reused) for tensor in read):
            fault = f"{node.name} is to be written over {argument.name}, and reads it as {other.name} as well"
            _fail(graph, after, node, fault)


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.is_conj(), tensor.is_neg(), *_geometry(tensor)


def _check_metadata(graph: TrainGraph, after: str) -> None:
    """Derive shape, dtype, strides and device of every result again, as the real kernels give them, and compare."""
    mode = mode_of(graph.graph)
    for node in operators(graph.graph):
        if mode is None or node.target is operator.getitem or not isinstance(node.target, OpOverload | Composite):
            continue
        with mode:
            arguments: Any = fx.map_arg(node.args, _copy)
            keywords: Any = fx.map_arg(node.kwargs, _copy)
            target: Any = node.target
            fresh = corrected(node, target(*arguments, **keywords), mode)
        results = dict(enumerate(fresh)) if isinstance(fresh, list | tuple) else {0: fresh}
        for position, noted in tensors_of(node):
            result = results.get(position)
            if not isinstance(result, torch.Tensor) or _geometry(noted) != _geometry(result):
                gives = _short(result) if isinstance(result, torch.Tensor) else repr(result)
                _fail(graph, after, node, f"{node.name} is noted as {_short(noted)}, its operator gives {gives}")


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def _copy(node: fx.Node) -> Any:
    value = value_of(node)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _short(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {tuple(tensor.stride())}"
