"""How many kernels torch.compile makes of a graph for a GPU, without one: Inductor's lowerings and scheduler alone.

The graph runs through Inductor's decompositions, is lowered for an H100 that is only described, and fused by its
scheduler. Its passes behind autograd, which need a GPU's tensors, are left out; nothing is generated or compiled.
Forward and backward are one graph here, so that the scheduler may join more than torch.compile does, which schedules
them apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

from roamc.graph import TrainGraph, placeholders

H100 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    total_memory=80 << 30,
    shared_memory_per_block_optin=232448,
    name="H100",
    gcnArchName="",
)
"""What Inductor asks of a device."""


def kernels(graph: TrainGraph) -> dict[str, int]:
    """Count what Inductor would launch for ``graph``, made for a GPU.

    Returns:
        "triton": kernels that it would generate; "extern": calls of operators of ATen, such as products.
    """
    from torch._inductor import scheduler as inductor
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import replace_random
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes: list[Any] = [node.meta["val"] for node in placeholders(graph.graph)]
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, torch.Tensor))  # type: ignore[attr-defined]
    with _described(), mode, torch.no_grad():
        # Decompositions of operators in place write to a tensor of the GPU; Inductor lowers such operators as they are.
        table = {target: how for target, how in select_decomp_table().items() if not _writes(target)}
        traced = make_fx(fx.GraphModule(graph.module, graph.graph), table)(*fakes)
        with V.set_fake_mode(mode):
            replace_random.replace_random_passes(traced)
        lowering = GraphLowering(traced, example_inputs=fakes, shape_env=None, is_inference=False)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            lowering.run(*fakes)
            nodes = inductor.Scheduler(lowering.operations).nodes
    extern = sum(isinstance(node, inductor.ExternKernelSchedulerNode) for node in nodes)
    nothing = sum(isinstance(node, inductor.NopKernelSchedulerNode) for node in nodes)
    return {"triton": len(nodes) - extern - nothing, "extern": extern}


def _writes(target: Any) -> bool:
    """Whether an operator, if it is one of ATen, writes an argument."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


@contextlib.contextmanager
def _described() -> Iterator[None]:
    """Have torch answer as if :data:`H100` were there."""
    from torch._dynamo.device_interface import CudaInterface

    def properties(*device: object) -> SimpleNamespace:
        return H100

    system = {"device": {"name": H100.name}, "version": {}, "hash": "0"}
    with contextlib.ExitStack() as stack:
        for place in (CudaInterface, CudaInterface.Worker):
            stack.enter_context(mock.patch.object(place, "get_device_properties", staticmethod(properties)))
        stack.enter_context(mock.patch.object(CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", properties))
        answers = {"is_available": True, "current_device": 0, "device_count": 1, "get_device_capability": (9, 0)}
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        stack.enter_context(mock.patch("torch._inductor.codecache.CacheBase.get_system", staticmethod(lambda: system)))
        # Asked before, torch remembers that there is none without a GPU.
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        yield
