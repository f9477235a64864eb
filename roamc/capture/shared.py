"""Tensors of a step that share memory: which do is part of a plan's key, and what a graph cannot follow is refused.

The trace knows of parameters and buffers which of them share a storage. A batch has storages of its own there:

    step(model.head.weight.detach())    the update writes what the batch is, perhaps before backward reads it

State of the optimizer has storages of its own there, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roamc.capture.addresses import extent, sharing
from roamc.capture.step import Source
from roamc.compat import identity
from roamc.compat_dtensor import part_of
from roamc.errors import CaptureError
from roamc.graph import TrainGraph, attribute, operators, placeholders
from roamc.graph.storage_ids import all_ids
from roamc.operators import ops
from roamc.units import Bytes


def shared_key(
    kept: Sequence[torch.Tensor], others: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[object, ...]:
    """Return which tensors of a step share memory, hashable: a step with another key is another program.

    Args:
        kept: parameters and buffers.
        others: tensors of the batch, and constants of a program.
        optimizer: has state with elements of its own, or is refused by :func:`check_state` when a program is made.

    Returns:
        The groups of :func:`sharing`, and of these the pairs with one of ``others`` that may have an element in common.
    """
    tensors = (*kept, *others)
    state = (value for own in optimizer.state.values() for value in own.values() if isinstance(value, torch.Tensor))
    groups = sharing(tensors, state)
    inside = ([place for place in group if place < len(tensors)] for group in groups)
    mixed = (group for group in inside if group and group[-1] >= len(kept))
    return groups, tuple(sorted(pair for group in mixed for pair in _overlapping(tensors, group, len(kept))))


def check_shared(graph: TrainGraph, sources: Sequence[Source], tensors: dict[Source, torch.Tensor]) -> None:
    """Refuse tensors of a step that have elements in common, unknown to its graph, if the step writes one of them.

    The graph knows of parameters and buffers that lie in one storage. It takes for apart a batch tensor and anything
    else, and what lies in two storages of the same memory, as two tensors of one array of numpy.

    Args:
        graph: of the step.
        sources: one for each of its inputs, in order.
        tensors: the live tensors of parameters, buffers and the batch; inputs that are missing here are not looked at.

    Raises:
        CaptureError: names both tensors.
    """
    fed = {node: source for node, source in zip(placeholders(graph.graph), sources, strict=True) if source in tensors}
    constants = {node: Source("constant", str(node.target)) for node in graph.graph.find_nodes(op="get_attr")}
    tensors = _constants(graph) | tensors
    storages = all_ids(argument for node in operators(graph.graph) for argument in ops.mutated_arguments(node))
    written = {source for node, source in {**fed, **constants}.items() if not storages.isdisjoint(all_ids([node]))}
    live_sources = [source for source in (*fed.values(), *dict.fromkeys(constants.values())) if source in tensors]
    for group in sharing(tensors[source] for source in live_sources):
        members = sorted((live_sources[position] for position in group), key=lambda source: _RANKS.index(source.kind))
        for first, second in _overlapping([tensors[source] for source in members], range(len(members))):
            mine, other = members[first], members[second]
            unknown = mine.kind == "batch" or identity(part_of(tensors[mine])) != identity(part_of(tensors[other]))
            if unknown and not written.isdisjoint((mine, other)):
                raise CaptureError(
                    f"{_words(mine, tensors)} shares memory with {_words(other, tensors)}, and the step writes there; "
                    + ("pass its .detach().clone()" if mine.kind == "batch" else "give one of them a .clone()")
                )


_RANKS = ("batch", "constant", "buffer", "parameter")
"""Kinds of sources, in the order in which a message names one as sharing the memory of another."""


def _overlapping(tensors: Sequence[torch.Tensor], group: Iterable[int], least: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the pairs, lower position first, of ``group`` in ``tensors`` that may have an element in common.

    Pairs of which both positions are below ``least`` are left out.
    """
    for pair in _meeting((*extent(tensors[place]), place) for place in group):
        first, second = sorted(pair)
        if second >= least and may_overlap(tensors[first], tensors[second]):
            yield first, second


def _meeting(extents: Iterable[tuple[int, int, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield whose each two overlapping ones of ``extents`` are, which are (start, end, whose); lower start first.

    The time grows with the number of such pairs, not with all pairs.
    """
    earlier: list[tuple[int, Any]] = []
    for start, end, whose in sorted(extents):
        earlier = [(last, other) for last, other in earlier if start < last]
        yield from ((other, whose) for _, other in earlier)
        earlier.append((end, whose))


def may_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one storage may have an element in common; False is certain.

    ::

        rows of 4, every other one      first   ####....####....     a block of 4 at 0 of every 8
                                        second  ....####....####     a block of 4 at 4 of every 8

    Each tensor is equal blocks of adjacent elements at distances that are multiples of one number, the period. Where
    the two blocks do not meet within a period, no elements do.

    Args:
        first: a tensor of any strides.
        second: another with elements in the same storage.
    """
    (start, end), (other_start, other_end) = extent(first), extent(second)
    if end <= other_start or other_end <= start:
        return False
    (block, distances), (other_block, other_distances) = _blocks(first), _blocks(second)
    period = math.gcd(*distances, *other_distances)
    ahead = other_start - start
    return not period or (ahead % period < block) or (-ahead % period < other_block)


def _blocks(tensor: torch.Tensor) -> tuple[Bytes, list[Bytes]]:
    """Return bytes of the largest block of adjacent elements, and the distances between such blocks."""
    part = part_of(tensor)
    item = block = part.element_size()
    distances: list[Bytes] = []
    for step, size in sorted((step * item, size) for size, step in zip(part.shape, part.stride(), strict=True)):
        if not distances and step in (0, block):
            block = max(block, size * step)
        elif size > 1:
            distances.append(step)
    return block, distances


def check_state(graph: TrainGraph, tensors: dict[Source, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizer state that lies, in part or whole, where another tensor of the step does.

    The trace gives each a storage of its own, and takes the updates for independent.

    Args:
        graph: of the step.
        tensors: the live tensors of parameters, buffers and the batch.
        optimizer: has the state.

    Raises:
        CaptureError: names both tensors.
    """
    tensors = _constants(graph) | tensors
    extents = [(*extent(tensor), (_words(source, tensors), False)) for source, tensor in tensors.items()]
    for source, tensor in tensors.items():
        for key, value in optimizer.state.get(tensor, {}).items() if source.kind == "parameter" else ():
            if isinstance(value, torch.Tensor):
                extents.append((*extent(value), (f"{key!r} of {source.name!r} in the optimizer's state", True)))
    for (first, first_is_state), (second, second_is_state) in _meeting(extents):
        if first_is_state or second_is_state:
            mine, other = (second, first) if second_is_state else (first, second)
            raise CaptureError(f"{mine} shares memory with {other}; give it a tensor of its own, such as a .clone()")


def _constants(graph: TrainGraph) -> dict[Source, torch.Tensor]:
    """The tensors that were made before the step, and that ``graph`` holds."""
    names = dict.fromkeys(str(node.target) for node in graph.graph.find_nodes(op="get_attr"))
    held = {Source("constant", name): attribute(graph.module, name) for name in names}
    return {source: value for source, value in held.items() if isinstance(value, torch.Tensor)}


_ALIASED = re.compile(r"input \d+ \((.+?)\) and input \d+ \((.+?)\) share storage but are not differentiable views")
"""In AOTAutograd's error: two inputs that share memory, neither a view of the other, and one is written to."""
_REFUSED = "does not yet handle non-differentiable view input mutations"
"""In AOTAutograd's error about inputs that share memory; torch 2.11 and 2.12 say no more of the two inputs."""


def shared_by(error: Exception) -> CaptureError | None:
    """Return a readable form of ``error``, if it is AOTAutograd's about inputs that share memory and are written to.

    AOTAutograd takes no graph that writes to one of two inputs that share memory without being views of each other by
    an operator, as ``.data =`` makes them.

    Returns:
        An error to raise, which names the inputs if torch does and says what to do; None for any other error.
    """
    if _REFUSED not in str(error):
        return None
    match = _ALIASED.search(str(error))
    names = f"{match[1]} and {match[2]}" if match else "two inputs"
    return CaptureError(
        f"{names} share memory that the step writes to, as .data = makes them; let both names hold "
        "one tensor (module.b = module.a), or a view made by an operator"
    )


def _words(source: Source, tensors: Mapping[Source, torch.Tensor]) -> str:
    if source.kind == "batch":
        return f"a batch tensor of shape {tuple(tensors[source].shape)}"
    if source.kind == "constant":
        return f"a tensor of shape {tuple(tensors[source].shape)} that was made before the step"
    return f"{source.kind} {source.name!r}"
