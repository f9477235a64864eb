"""Which arguments autograd keeps without reading an element: torch's database of operators, on real tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roamc.operators.table import ROWS

SAMPLES = 6
KNOWN = {name.split("::")[1].split(".")[0].lower() for name, row in ROWS.items() if row.saves}
LEFT_OUT = {"triangularsolve", "ormqr", "linalghouseholderproduct"}
"""Saved and not read for some flags alone: the table has no row for these, so that eager's peak is not overstated."""


class Reads(TorchDispatchMode):
    """Notes the storages that operators are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages.update(map(address, tensors(args, kwargs)))
        return func(*args, **(kwargs or {}))


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(*nest: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))


def saved(outputs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name of each node of autograd behind ``outputs``, and a tensor of several elements that it has saved."""
    left, seen = [output.grad_fn for output in outputs], set()
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from ((node.name(), each) for each in tensors(getattr(node, name)) if each.numel() > 1)


def unread(call: Any, sample: Any) -> set[str]:
    """Names of the nodes of autograd that save a tensor that backward reads no element of."""
    outputs = [each for each in tensors(call(sample.input, *sample.args, **sample.kwargs)) if each.requires_grad]
    kept = list(saved(outputs))
    with Reads() as reads:
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    return {name for name, tensor in kept if address(tensor) not in reads.storages}


def plain(node: str) -> str:
    """``GatherBackward0`` as ``gather``; without underscores, which the names of nodes do not have."""
    return node.rsplit("Backward", 1)[0].lower()


@pytest.mark.filterwarnings("ignore")
def test_the_table_knows_what_is_kept_unread() -> None:
    in_table = {name.replace("_", "") for name in KNOWN} | LEFT_OUT
    missing, calls = set(), 0
    for info in op_db:
        if not info.supports_autograd or torch.float32 not in info.supported_dtypes("cpu"):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=True), SAMPLES):
            try:
                names = {plain(name) for name in unread(info, sample)}
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                continue  # some samples have no backward
            calls += 1
            missing |= {name for name in names - in_table if "backward" not in name}  # of second derivatives
    assert calls > 1000
    assert missing == set()


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_row_is_of_an_operator_of_torch(name: str) -> None:
    assert hasattr(torch.ops.aten, name)
