"""Bytes that operators take while they run, counted on the heap, beside what the plan counts for them.

Every ATen operator that an enlarged sample of torch's database calls, forward and backward, runs in a process whose
heap is counted, as eager runs it and as an emitted program does. Compared is ``workspace_bytes`` with the bytes of
results.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._measure import Heap
from roamc import compat
from roamc.capture import recurrent
from roamc.cost import workspace_bytes
from roamc.errors import CaptureError
from roamc.operators import ops
from roamc.operators.fakes import kept_whole
from roamc.operators.kernels import kernel_of
from roamc.operators.out_variants import FormKind, form_of
from tests.operator_calls import NUMERIC, functional_of, geometry, is_plain, node_of_call, storage_key, tensors
from tests.sweeps.compare import OutOfTime, time_limit
from tests.sweeps.databases import Case
from tests.sweeps.enlarged import ELEMENTS, enlarged

Run = Callable[[], Any]

THREADS = (1, 2)
NEAR = 64 << 10
"""Bytes that may be counted too many, whatever is measured."""

SHARE = 1.25
"""What is counted may be this many times what is measured."""

OBJECTS = 32 << 10
"""Bytes of tensor objects during one call, and of oneDNN's, which :func:`roamc.cost.objects` counts for a step."""

LARGEST = 32 << 20
"""Bytes of results above which a call is not made."""

SECONDS = 20
"""Processor time of one sample in one form."""


UNCOUNTED = {
    "torch_nn._linear_cross_entropy_batch_chunked.default": "torch chooses its chunks, and holds one's scores",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": "torch chooses its chunks",
}
"""Operators that take more than is counted, and why."""

BOUNDED = {
    "aten.convolution.default": "oneDNN chooses among its kernels, by processor; the largest is counted",
    "aten.convolution_backward.default": "as forward",
    "aten.linalg_matrix_exp.default": "large numbers are squared often",
    "aten.isin.Tensor_Tensor": "depends on how many elements are equal",
    "aten.masked_scatter_backward.default": "depends on how much the mask picks",
    "aten._chunk_cat.default": "parts that fill their chunks are not copied",
    "aten.scatter_reduce.two": "a mean that leaves out what was there takes less",
    "aten.native_dropout_backward.default": "a piece of the mask is converted if the result lies over the gradient",
    "aten.geqrf.default": "MKL chooses its block by processor and threads",
    "aten._linalg_svd.default": "as geqrf",
    "aten.linalg_pinv.atol_rtol_tensor": "as geqrf",
    "aten.ormqr.default": "as geqrf",
    "aten.linalg_qr.default": "as geqrf",
    "aten.linalg_householder_product.default": "as geqrf",
}
"""Operators of which an upper end is counted that most calls do not reach, and why."""


class TooLarge(RuntimeError):
    """A call has larger results than are made here."""


@dataclass(frozen=True)
class Measured:
    """One call: bytes on the heap and bytes counted, results included where it allocates them.

    Attributes:
        operator: qualified name.
        arguments: shapes, strides and dtypes of tensors, and the other arguments.
        way: "eager" or "program".
        threads: number of threads.
        taken, counted: bytes.
    """

    operator: str
    arguments: str
    way: str
    threads: int
    taken: int
    counted: int

    @property
    def verdict(self) -> str:
        """ "above" where more is taken than counted, "over" where far too much is, "named" where a table says so.

        Else "within". Whether too much is counted is judged of one thread: the buffers of several need not be there at
        the same time.
        """
        if self.taken > self.counted + OBJECTS:
            return "named" if self.operator in UNCOUNTED else "above"
        if self.threads > 1 or self.counted <= max(SHARE * self.taken, self.taken + NEAR):
            return "within"
        return "named" if self.operator in BOUNDED else "over"


class Meter(TorchDispatchMode):
    """Measures the calls that pass by, each geometry once.

    Attributes:
        rows: what was measured.
    """

    def __init__(self, seen: dict[str, str]) -> None:
        super().__init__()
        self.rows: list[Measured] = []
        self._seen = seen
        self._heap = Heap()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C._DisablePythonDispatcher():
            functional = functional_of(func)  # eager writes in place, a program may not
            self._measure(functional or func, args, kwargs, ways=("program",) if functional else ("eager", "program"))
            return func(*args, **kwargs)

    def _measure(self, target: Any, args: Any, kwargs: Any, ways: tuple[str, ...]) -> None:
        if ops.is_view(target) or not all(is_plain(tensor) for tensor in tensors((args, kwargs))):
            return
        said = repr(pytree.tree_map_only(Tensor, geometry, (args, kwargs)))
        if self._seen.get(f"{target}{said}"):
            raise TooLarge(self._seen[f"{target}{said}"])
        if f"{target}{said}" in self._seen:
            return
        self._seen[f"{target}{said}"] = ""
        try:
            node = node_of_call(target, (args, kwargs))
        except (*NUMERIC, CaptureError, compat.DynamicShapeError, compat.DataDependentError):
            return  # such an operator ends a graph
        results = _storages(node, args, kwargs)
        if sum(results.values()) > LARGEST:
            self._seen[f"{target}{said}"] = f"{target} gives {sum(results.values())} bytes"
            raise TooLarge(self._seen[f"{target}{said}"])
        if not results and not ops.rule(target).mutates:
            return
        calls = dict(_ways(node, args, kwargs, results))
        if "eager" in ways:  # some results of eager keep a larger storage than a graph notes
            kept = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors(calls["eager"][0]())}
            read = {storage_key(tensor) for tensor in tensors((args, kwargs))}
            own = sum(nbytes for key, nbytes in kept.items() if key not in read)
            calls["eager"] = calls["eager"][0], own
        for way in ways:
            call, allocated = calls[way]
            if way == ways[0] or call is not calls["eager"][0]:
                taken = [_taken(call, threads, self._heap) for threads in THREADS]
            for threads, nbytes in zip(THREADS, taken, strict=True):
                counted = workspace_bytes(node, threads, eager=way == "eager") + allocated
                self.rows.append(Measured(str(target), said, way, threads, nbytes, counted))


def _storages(node: fx.Node, args: Any, kwargs: Any) -> dict[int, int]:
    """Storages that a call makes, with their bytes."""
    before = {storage_key(tensor) for source in node.all_input_nodes for tensor in tensors(source.meta["val"])}
    after = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors(node.meta["val"])}
    return {key: nbytes for key, nbytes in after.items() if key not in before}


def _ways(node: fx.Node, args: Any, kwargs: Any, results: dict[int, int]) -> Iterator[tuple[str, tuple[Run, int]]]:
    """The call as eager makes it and as a program does, with the bytes of results that it allocates."""
    target: Any = node.target
    eager, own = functools.partial(target, *args, **kwargs), sum(results.values())
    yield "eager", (eager, own)
    form = form_of(node, len(results))
    outs = tuple(_like(fake) for fake in tensors(node.meta["val"]))
    if form.overload is not None:
        places: dict[str, Any] = dict(zip(form.arguments, outs, strict=True))
        yield "program", (functools.partial(form.overload, *args, **kwargs, **places), 0)
    elif form.kind is FormKind.KERNEL and (kernel := kernel_of(target)) is not None:
        out = outs if isinstance(node.meta["val"], list | tuple) else outs[0]
        yield "program", (functools.partial(kernel.function, *args, **kwargs, out=out), 0)
    else:
        yield "program", (eager, own)


def _like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)


def _taken(call: Run, threads: int, heap: Heap) -> int:
    """Bytes of the heap at the most during a call above those before it; a first call is not counted."""
    torch.set_num_threads(threads)
    try:
        call()
        before = heap.live()
        heap.reset()
        call()
        return heap.peak() - before
    finally:
        torch.set_num_threads(1)


def measured(case: Case, form: str, seen: dict[str, str], sizes: Sequence[int] = ELEMENTS) -> list[Measured] | None:
    """What the operators of one sample take; None if it cannot be enlarged.

    Args:
        case: the sample.
        form: one of :data:`tests.sweeps.enlarged.FORMS`.
        sizes: see :data:`tests.sweeps.enlarged.ELEMENTS`.
        seen: calls that were measured are left out; these are added. The text is why a call is not made, or "".
    """
    meter, tried = Meter(seen), False
    for args, kwargs in enlarged((case.args, case.kwargs), form, sizes):
        with contextlib.suppress(*NUMERIC, OutOfTime, MemoryError):  # the next way to enlarge it
            with (
                time_limit(SECONDS),
                torch.autograd.set_multithreading_enabled(False),
                recurrent.decomposed(),
                kept_whole(),
            ):
                _run(functools.partial(case.model, *args, **kwargs), tensors((args, kwargs)), meter)
            return meter.rows
        tried = True
    return meter.rows if tried and meter.rows else None


def _run(call: Callable[[], Any], inputs: Sequence[Tensor], meter: Meter) -> None:
    """Run forward, and backward where it has one."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), compat.quiet_meta(), enable_python_dispatcher(), meter:
        warnings.simplefilter("ignore")
        ends = [end for end in tensors(call()) if end.requires_grad]
        starts = [tensor for tensor in inputs if tensor.requires_grad]
        if ends and starts:
            with contextlib.suppress(*NUMERIC):
                torch.autograd.grad(ends, starts, [torch.ones_like(end) for end in ends], allow_unused=True)
