"""From the plain data of a file to the graph of a step, as torch.compile's capture would have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from roamc import compat_aot
from roamc.capture import joint
from roamc.capture.dump import calls, lacks, phases, writes
from roamc.capture.dump.annotations import Sizes
from roamc.capture.dump.build import Builder, device_of
from roamc.capture.dump.files import Dump, is_size
from roamc.capture.dump.text import TANGENTS
from roamc.errors import DumpError, RoamcError
from roamc.graph import Port, TrainGraph
from roamc.graph.origin import path_of

LEFT_OUT = "as torch logs it without what no result needs: eager runs that too, and may need more"
"""The end of a note on operators of the model that a log does not have."""

NO_DYNAMO = (
    "the file does not say what the model writes in place, which a log of TORCH_TRACE does: eager's peak is that "
    "without such writes"
)
"""Note on a joint graph without the graph of dynamo."""

MOVED = "the file is of a CPU: on a GPU torch may run other operators, such as another kernel of attention"
"""Note on a graph that is planned for another device."""


def device_in(dump: Dump) -> torch.device:
    """Return the device of a graph: the GPU that its annotations or constants name, else the CPU."""
    return next((device for device in map(device_of, dump.texts) if device.type == "cuda"), torch.device("cpu"))


def train_graph(dump: Dump, name: str, sizes: Mapping[str, int], device: torch.device | None = None) -> TrainGraph:
    """Return the graph of a step for planning: what :func:`roamc.capture.joint.stitch` gives for a captured one.

    Args:
        dump: a graph of a file.
        name: of the graph, for reports.
        sizes: values of symbolic sizes, such as ``{"s0": 32}``.
        device: a GPU to plan for where the file is of a CPU; None for the file's own.

    Raises:
        DumpError: the graph names what is not known, or contradicts itself, or an operator of it cannot be planned.
    """
    moved = device is not None and device.type == "cuda" and device_in(dump).type == "cpu"
    builder = Builder(Sizes(sizes, str(dump.path)), str(dump.path), device if moved else None)
    notes = (*dump.notes, *((MOVED,) if moved else ()))
    shared = {position: storage for position, (_, storage) in enumerate(dump.inputs) if storage is not None}
    dump = dump.of_tensors()
    try:
        graph, more = _stitched(builder, dump, shared, name)
    except DumpError:
        raise
    except RoamcError as error:
        raise DumpError(f"{dump.path}: {error}") from error
    except Exception as error:  # of any kind: an operator on tensors that the file has otherwise than torch derives
        reason = str(error).partition("\n")[0][:200]
        raise DumpError(f"{dump.path}: the graph contradicts itself: {reason or type(error).__name__}") from error
    notes = (*graph.notes, *notes, *more, *builder.findings.notes())
    return graph.replace(inputs=_named(dump, graph), notes=notes)


def _stitched(
    builder: Builder, dump: Dump, shared: Mapping[int, object], name: str
) -> tuple[TrainGraph, tuple[str, ...]]:
    """The graph of a step, and notes on it."""
    static, notes = dump.static or (), tuple[str, ...]()
    if dump.joint is not None and not dump.joint.has_tangents:
        if dump.joint.joint:
            raise DumpError(f"{dump.path}: a joint graph, of which no input is {TANGENTS}_1: a line is missing")
        return joint.inference(builder.module(dump.joint, shared), static, name), notes
    if dump.joint is not None:
        module = builder.module(dump.joint, shared)
        phases.tag(module.graph)
        outputs = len(dump.joint.results) - sum(not is_size(each) for each in dump.primals)
        notes = (
            *lacks.notes(dump.joint, module.graph, outputs, dump.dynamo),
            *_as_eager_runs_it(dump, module, outputs, builder),
        )
        forward, backward = compat_aot.partition(module, builder.mode, outputs, static)
    else:
        forward, backward, outputs = _halves(builder, dump, shared)
    return joint.stitch(forward, backward, outputs, static, name), notes


def _as_eager_runs_it(dump: Dump, module: fx.GraphModule, outputs: int, builder: Builder) -> tuple[str, ...]:
    """Note in a joint graph what eager's peak depends on beside operators; return notes on what could not be found."""
    lost, gone = writes.mark(module.graph, dump.dynamo)
    notes: tuple[str, ...] = ()
    if lost:
        notes = (f"{lost} writes in place of the model were not found in its graph: eager's peak may be lower",)
    if gone:
        notes = (*notes, f"{gone} writes in place are no part of the graph, {LEFT_OUT}")
    if not dump.dynamo:
        notes = (*notes, NO_DYNAMO)
    if dump.decomposed or calls.number(module, outputs):
        return notes
    return (
        *notes,
        "not every operator of backward was found in a trace of forward: eager's peak is estimated",
    )


def _named(dump: Dump, graph: TrainGraph) -> tuple[Port, ...]:
    """The inputs, with the names that the user knows their tensors by where the file has them."""
    ports = []
    for position, port in enumerate(graph.inputs):
        name = path_of(dump.inputs[position][0]) if position < len(dump.inputs) else ""
        ports.append(replace(port, name=name) if name else port)
    return tuple(ports)


def _halves(builder: Builder, dump: Dump, shared: Mapping[int, object]) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Both halves, built in one fake mode: what backward reads are forward's own tensors; and forward's outputs."""
    assert dump.forward is not None
    assert dump.backward is not None
    forward = builder.module(dump.forward, shared)
    values = {node.name: node.meta["val"] for node in forward.graph.nodes if "val" in node.meta}
    saved = [each for each in dump.backward.inputs if not each.name.startswith((TANGENTS, "bwd_rng_state"))]
    outputs = len(dump.forward.results) - len(saved)
    if outputs < 0:
        raise DumpError(f"{dump.path}: backward reads {len(saved)} values, more than forward returns")
    for result, entry in zip(dump.forward.results[outputs:], saved, strict=True):
        if (name := getattr(result.value, "name", None)) != entry.name and "rng_state" not in entry.name:
            raise DumpError(
                f"{dump.path}: backward reads {entry.name!r:.60} where forward saves {name!r:.60}: a line was changed, "
                "or the halves are of two graphs"
            )
    backward = builder.module(dump.backward, values=values)
    return forward, backward, outputs
