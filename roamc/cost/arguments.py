"""Arguments that torch's kernels on a CPU copy first, where their elements do not lie as the kernel reads them.

Read off the heap with torch 2.13, operator by operator (``benchmarks/workspace.py --operators``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from roamc.cost.call import Call, tensor_at
from roamc.units import Bytes

Ordered = Callable[[torch.Tensor], bool]


def copied(call: Call) -> Bytes:
    """Bytes of the arguments of ``call`` that are copied first."""
    rows = list(_READ.get(call.name, ()))
    if call.name in _LIKE_FIRST:
        last = _channels_last(tensor_at(call, 0))
        rows.append((1, lambda tensor: _channels_last(tensor) == last))
    given = [(tensor_at(call, at), fits) for at, fits in rows if at < len(call.args)]
    return sum(tensor.numel() * tensor.itemsize for tensor, fits in given if not fits(tensor))


def matrix(tensor: torch.Tensor) -> bool:
    """Rows or columns lie side by side, none over another: what products read as it is."""
    if tensor.dim() < 2 or min(tensor.shape[-2:]) <= 1:
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous()


def _channels_last(tensor: torch.Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()


def _image(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or _channels_last(tensor)


def in_order(tensor: torch.Tensor) -> bool:
    """All matrices lie behind each other, by rows or by columns."""
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


_READ: dict[str, tuple[tuple[int, Ordered], ...]] = {
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm", "log_sigmoid_forward", "index_select"),
        ((0, _plain),),
    ),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward", "embedding_dense_backward", "im2col", "col2im"), ((0, _plain),)
    ),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward"),
        ((0, _plain), (1, _plain)),
    ),
    "masked_scatter": ((2, _plain),),
    "_cdist_forward": ((0, _plain), (1, _plain)),
    "_cdist_backward": ((1, _plain), (2, _plain)),
    **dict.fromkeys(("tril", "triu"), ((0, in_order),)),
    **dict.fromkeys(("mm", "mv"), ((0, matrix), (1, matrix))),
    "addmm": ((1, matrix), (2, matrix)),
    **dict.fromkeys(
        (
            *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
            *("upsample_nearest2d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
            *("reflection_pad2d", "replication_pad2d", "pixel_shuffle"),
        ),
        ((0, _image),),
    ),
    "max_pool2d_with_indices_backward": ((0, _image), (7, _image)),
    **dict.fromkeys(("convolution", "convolution_backward"), ((0, _image), (1, _image))),
}
"""By operator the positions of such arguments, and what they lie like if they are read as they are."""

_LIKE_FIRST = frozenset({"avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "reflection_pad2d_backward"})
"""The second argument is to lie like the first: both with channels last, or neither."""
