"""Attention as CUDA runs it, for a step that is traced on a CPU and planned for a GPU.

``scaled_dot_product_attention`` comes apart into the kernel that its device has for its arguments. A CPU's kernel takes
no dropout, and saves other values for backward than a GPU's. The choice is therefore made while the step is traced, so
that its gradients are those of the chosen kernel. The rules are those of torch's ``sdp_utils.cpp`` for GPUs of compute
capability 8.0 and 9.0. For cuDNN's kernel, which torch may prefer on some of these, the flash kernel stands in: both
save the result and one float32 for each query.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from roamc.compat_operators import decompositions

aten = torch.ops.aten

NARROW = (torch.float16, torch.bfloat16)

FLASH_WIDTH = 256
"""The widest heads that the flash kernel takes."""

FLASH_MULTIPLE = 8
"""The flash kernel gets heads padded to a multiple of this width."""

MASK_MULTIPLE = 8
"""The memory-efficient kernel takes masks whose rows begin at multiples of so many elements."""

LOAD_BYTES = 16
"""Bytes that the memory-efficient kernel loads at once: the width of heads must be a multiple."""


def on_cuda() -> AbstractContextManager[None]:
    """While inside, attention that this thread traces on a CPU becomes the operators that CUDA has for it."""
    return decompositions({aten.scaled_dot_product_attention.default: attend})


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """``scaled_dot_product_attention`` by the operators that torch runs for these arguments on a GPU.

    Args:
        query: (batch, heads, queries, width), or with other leading dimensions.
        key: (batch, heads, keys, width); with ``enable_gqa`` of fewer heads.
        value: (batch, heads, keys, width of values).
        attn_mask: bool, or added to the scores; None for none.
        dropout_p: probability of dropout.
        is_causal: whether a query reads no later key.
        scale: of the scores; None for one over the root of the width.
        enable_gqa: whether several heads of queries read one head of keys.

    Returns:
        (batch, heads, queries, width of values).
    """
    if torch.backends.cuda.flash_sdp_enabled() and _flash_takes(query, key, value, attn_mask, is_causal, enable_gqa):
        width = query.size(-1)
        factor = 1 / math.sqrt(width) if scale is None else scale
        padded = (_padded(part) for part in (query, key, value))
        output = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=factor)[0]
        return output if output.size(-1) == width else output[..., :width]
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient_takes(query, key, value):
        mask = None if attn_mask is None else _expanded(_added(attn_mask, query.dtype), query, key)
        trained = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, trained, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _flash_takes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, grouped: bool
) -> bool:
    parts = (query, key, value)
    if mask is not None or not _dense_in_four(parts) or any(part.dtype not in NARROW for part in parts):
        return False
    if len({part.size(-1) for part in parts}) > 1 or query.size(-1) > FLASH_WIDTH:
        return False
    if is_causal and query.size(-2) != key.size(-2):
        return False
    heads = key.size(1) == value.size(1) and query.size(1) % key.size(1) == 0
    return query.size(0) == key.size(0) == value.size(0) and (heads if grouped else _heads_agree(parts))


def _efficient_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    parts = (query, key, value)
    if not _dense_in_four(parts) or any(part.dtype not in (*NARROW, torch.float32) for part in parts):
        return False
    aligned = all(part.size(-1) * part.itemsize % LOAD_BYTES == 0 for part in parts)
    alike = query.size(0) == key.size(0) == value.size(0) and query.size(-1) == key.size(-1)
    return aligned and alike and _heads_agree(parts)


def _dense_in_four(parts: tuple[Tensor, ...]) -> bool:
    """Whether all have four dimensions, none of size 0, and elements of a head one behind the other."""
    return all(part.dim() == 4 and part.numel() > 0 and part.stride(-1) == 1 for part in parts)


def _heads_agree(parts: tuple[Tensor, ...]) -> bool:
    return len({part.size(1) for part in parts}) == 1


def _padded(part: Tensor) -> Tensor:
    missing = -part.size(-1) % FLASH_MULTIPLE
    return F.pad(part, (0, missing)) if missing else part


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _expanded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask for all heads, with rows that begin where the kernel loads from."""
    if mask.stride(-1) != 1 or any(stride % MASK_MULTIPLE for stride in mask.stride()[:-1]):
        length = mask.size(-1)
        mask = F.pad(mask, (0, MASK_MULTIPLE - length % MASK_MULTIPLE))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
