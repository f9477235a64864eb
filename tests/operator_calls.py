"""Calls of ATen operators with real arguments: what torch's own operator database calls, forward and backward.

:func:`recorded` runs samples of ``torch.testing._internal``'s ``op_db`` and keeps every overload that they reach with
its arguments, those of different geometry or settings once each.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from roamc import compat
from roamc.operators import ops
from roamc.operators.corrections import correct
from roamc.operators.table import ROWS

Call = tuple[tuple[Any, ...], dict[str, Any]]
Calls = dict[Any, list[Call]]
NUMERIC = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    NotImplementedError,
    AssertionError,
    AttributeError,
    KeyError,
)
"""What a sample raises that torch does not take here: no such device, no such dtype, no backward."""


class Placer:
    """Makes copies of tensors; tensors of one storage stay tensors of one storage.

    Args:
        storage_of: called with the bytes of each storage, gives a storage and the byte in it where these begin.
    """

    def __init__(self, storage_of: Callable[[Tensor], tuple[torch.UntypedStorage, int]]) -> None:
        self._storage_of = storage_of
        self._known: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """A tensor of its own with the values and the geometry of ``tensor``."""
        key = storage_key(tensor)
        if key not in self._known:
            self._known[key] = self._storage_of(all_bytes(tensor))
        storage, start = self._known[key]
        offset = start // tensor.itemsize + tensor.storage_offset()
        plain = torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.shape, tensor.stride())
        return compat.with_bits(plain, conj=tensor.is_conj(), neg=tensor.is_neg())

    def all_of(self, tree: Any) -> Any:
        """``tree`` with copies in the place of its tensors."""
        return pytree.tree_map_only(Tensor, self, tree)


def all_bytes(tensor: Tensor) -> Tensor:
    """Everything that lies in the storage of ``tensor``."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def apart() -> Placer:
    """Copies in storages of their own."""
    return Placer(lambda content: (content.clone().untyped_storage(), 0))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is what a planned program deals with: strided, on a CPU, of no subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.is_cpu


class Recorder(TorchDispatchMode):
    """Keeps the calls that pass by, arguments as they were before the call.

    Args:
        limit: of one overload and dtype of its first tensor, at most this many calls.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.calls: Calls = {}
        self._limit = limit
        self._seen: set[Any] = set()
        self._count: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for target in filter(None, (func, functional_of(func))):
            self._keep(target, args, kwargs)
        return func(*args, **kwargs)

    def _keep(self, target: Any, args: Any, kwargs: Any) -> None:
        operands = tensors((args, kwargs))
        kind = (target, operands[0].dtype if operands else None)
        if self._count.get(kind, 0) >= self._limit or not all(is_plain(tensor) for tensor in operands):
            return
        signature = (target, repr(pytree.tree_map_only(Tensor, geometry, (args, kwargs))))
        if signature in self._seen:
            return
        self._seen.add(signature)
        self._count[kind] = self._count.get(kind, 0) + 1
        with torch.no_grad():
            self.calls.setdefault(target, []).append(apart().all_of((tuple(args), dict(kwargs))))


def storage_key(tensor: Tensor) -> int:
    """The same for tensors of one storage only."""
    return int(tensor.untyped_storage()._cdata)


def aten_overloads() -> Iterator[Any]:
    """Every overload of every ATen operator."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        target = getattr(packet, schema.overload_name or "default", None)
        if target is not None:
            yield target


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype, place in the storage."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset()


def functional_of(target: Any) -> Any:
    """``aten::add.Tensor`` for ``aten::add_.Tensor``: what functionalisation makes of a write in place."""
    name, overload = target._schema.name, target._overloadname
    packet = getattr(torch.ops.aten, name.removeprefix("aten::")[:-1], None) if name.endswith("_") else None
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def node_of_call(target: Any, call: Call) -> fx.Node:
    """One call as the node of a graph, with the fake results that a captured graph notes."""
    mode = compat.FakeTensorMode()
    graph, placeholders = fx.Graph(), {}

    def placeholder(tensor: Tensor) -> fx.Node:
        if tensor not in placeholders:
            placeholders[tensor] = graph.placeholder(f"given_{len(placeholders)}")
            placeholders[tensor].meta["val"] = mode.from_tensor(tensor)
        return placeholders[tensor]

    args, kwargs = pytree.tree_map_only(Tensor, placeholder, apart().all_of(call))
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    graph.output((node,))
    correct(graph)
    return node


def recorded(dtypes: Iterable[torch.dtype], limit: int, wanted: Callable[[str], bool] = lambda _: True) -> Calls:
    """What the samples of ``op_db`` call.

    Args:
        dtypes: of the samples.
        limit: see :class:`Recorder`.
        wanted: which entries of the database, by name.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder(limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            for entry in op_db:
                if wanted(entry.name) and entry.supports_dtype(dtype, "cpu"):
                    _run_samples(entry, dtype, recorder)
    return recorder.calls


def _run_samples(entry: Any, dtype: torch.dtype, recorder: Recorder) -> None:
    torch.manual_seed(0)
    for sample in _samples(entry, dtype):
        arguments = (sample.input, sample.args, sample.kwargs)
        with recorder:
            try:
                results = entry(sample.input, *sample.args, **sample.kwargs)
                ends = [t for t in tensors(results) if t.requires_grad]
                starts = [t for t in tensors(arguments) if t.requires_grad]
                losses = [(end.abs() if end.is_complex() else end).sum() for end in ends]
                if ends and starts:
                    torch.autograd.grad(losses, starts, allow_unused=True)
            except NUMERIC:
                continue  # what was called until then is kept


def _samples(entry: Any, dtype: torch.dtype) -> Iterator[Any]:
    samples = iter(entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd and dtype.is_floating_point))
    while True:
        try:
            sample = next(samples, None)
        except NUMERIC:
            return
        if sample is None:
            return
        yield sample


def by_hand() -> Calls:
    """Calls that no sample of the database makes."""
    torch.manual_seed(0)
    aten, x, y = torch.ops.aten, torch.randn(5, 7), torch.randn(5, 7)
    image, volume, small = torch.randn(2, 3, 6, 5), torch.randn(1, 2, 4, 5, 4), torch.randint(-9, 9, (20, 32)).char()
    flat, cube = torch.randn(4, 3, 3, 2), torch.randn(3, 2, 2, 2, 2)
    up, up3 = torch.randn(3, 4, 3, 2), torch.randn(2, 3, 2, 2, 2)
    eighth, one = torch.randn(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    two, three = ([3, 2], None, [1, 1], [0, 0]), ([2, 2, 2], None, [1] * 3, [0] * 3)
    calls: dict[Any, list[tuple[Any, ...]]] = {
        aten._add_relu.Tensor: [(x, y)],
        aten._addmm_activation.default: [(torch.randn(4), x, torch.randn(7, 4))],
        aten._compute_linear_combination.default: [(x, torch.randn(3, 5))],
        aten._int_mm.default: [(small, small.t().contiguous())],
        aten._logcumsumexp.default: [(x, 0), (x, 1)],
        aten._stack.default: [([x, y], 1)],
        aten.bernoulli.p: [(x, 0.3)],
        aten.clamp_max.default: [(x, 0.2)],
        aten.clamp_min.default: [(x, 0.2)],
        aten.isin.Scalar_Tensor: [(3, torch.arange(5))],
        aten.isin.Tensor_Scalar: [(torch.arange(5), 3)],
        aten.lift_fresh_copy.default: [(x,)],
        aten.linalg_eigvals.default: [(x[:, :5],)],
        aten.normal.float_Tensor: [(0.5, x.abs())],
        aten._slow_conv2d_forward.default: [(image, flat, *two)],
        aten.slow_conv3d_forward.default: [(volume, cube, *three)],
        aten.slow_conv_transpose2d.default: [(image, up, [3, 2])],
        aten.slow_conv_transpose3d.default: [(volume, up3, [2, 2, 2])],
        aten._upsample_bicubic2d_aa.default: [(image, [4, 7], False)],
        aten._upsample_bicubic2d_aa_backward.default: [(torch.randn(2, 3, 4, 7), [4, 7], [2, 3, 6, 5], False)],
        aten._scaled_mm.default: [(eighth, eighth.t(), one, one, None, None, torch.float32)],
        aten._convert_indices_from_coo_to_csr.default: [(torch.tensor([0, 0, 2]), 4)],
        aten._convert_indices_from_csr_to_coo.default: [(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0]))],
    }
    if hasattr(aten, "_upsample_lanczos2d_aa"):  # new in torch 2.13
        calls[aten._upsample_lanczos2d_aa.default] = [(image, [4, 7], False)]
        calls[aten._upsample_lanczos2d_aa_backward.default] = [(torch.randn(2, 3, 4, 7), [4, 7], [2, 3, 6, 5], False)]
    all_calls: Calls = {target: [(args, {}) for args in some] for target, some in calls.items()}
    all_calls[aten.norm.ScalarOpt_dim_dtype] = [((x, 2, [1], False), {"dtype": torch.float64})]
    return all_calls


FULL = (67, 131)
SHAPES = (FULL, (131,), (67, 1), ())
NUMBERS = {"number": 2, "Scalar": 2, "float": 0.5, "int": 1, "bool": False, "SymInt": 1}


def broadcast(dtypes: Iterable[torch.dtype]) -> Calls:
    """Pointwise operators on arguments of several hundred elements, all but one of them broadcast in turn."""
    torch.manual_seed(0)
    calls: Calls = {}
    for target in aten_overloads():
        rule = ops.rule(target)
        if torch.Tag.pointwise in target.tags and rule.overwrites and not rule.mutates:
            target_calls = [call for dtype in dtypes for call in _broadcast(target, dtype)]
            if target_calls:
                calls[target] = target_calls
    return calls


def _broadcast(target: Any, dtype: torch.dtype) -> Iterator[Call]:
    arguments = [argument for argument in target._schema.arguments if not argument.kwarg_only]
    many = sum(str(argument.type) == "Tensor" for argument in arguments)
    for shapes in itertools.product(SHAPES, repeat=many):
        if FULL not in shapes:
            continue
        left, args = iter(shapes), []
        for argument in arguments:
            kind = str(argument.type)
            if kind == "Tensor":
                args.append(_positive(dtype, next(left)))
            elif argument.has_default_value():
                args.append(argument.default_value)
            elif kind in NUMBERS:
                args.append(NUMBERS[kind])
        if len(args) == len(arguments):
            yield tuple(args), {}


def _positive(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype.is_complex:
        return torch.complex(torch.rand(shape), torch.rand(shape)).to(dtype)
    return (torch.rand(shape) * (0.9 if dtype.is_floating_point else 9) + 0.05).to(dtype)


def rows_with(fact: str) -> list[Any]:
    """The overloads, without those that write to an argument, whose row of the operator table has ``fact``."""
    overloads = []
    for name in sorted({name.partition(".")[0] for name in ROWS}):
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator)
        overloads += [getattr(packet, overload) for overload in sorted(packet.overloads())]
    plain = [one for one in overloads if not ops.rule(one).mutates and "out" not in one._schema.overload_name]
    return [one for one in plain if getattr(ops.rule(one), fact)]
