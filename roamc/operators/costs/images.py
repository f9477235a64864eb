"""Workspace of operators that resize images or take windows of them on a CPU, as ATen's kernels of torch 2.13 do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod

import torch

from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.arguments import INDEX, channels_last, fits_channels_last, is_half
from roamc.operators.schemas import stem
from roamc.units import Bytes

SMALL = 128
"""Height and width together up to which results are computed channels last, whatever they lie like."""

FEW = 3
"""Channels up to which images that lie channels last are not computed so if their results are large."""

READ = {"linear": 2, "cubic": 4, "lanczos": 6}
"""Part of an operator's name to the pixels that are read for one of the result, along each dimension; 1 for others."""


def resized(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an upsampling.

    Small results, and those of images that lie channels last, are computed channels last: image and result are copied
    if they do not lie so. Else it is place and weight of every pixel read, for each row, column and plane.
    """
    image = tensor_at(call, 0)
    if _computed_channels_last(call, image, result):
        return _copies(image, result)
    return sum(size * _read(call) * (INDEX + result.itemsize) for size in result.shape[2:])


def resized_by_one(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``upsample_bilinear2d`` with one thread: channels last, whatever its size."""
    return _copies(tensor_at(call, 0), result)


def _copies(*images: torch.Tensor) -> Bytes:
    """Bytes of ``images`` that do not lie channels last."""
    return sum(image.nbytes for image in images if not fits_channels_last(image))


def _computed_channels_last(call: Call, image: torch.Tensor, result: torch.Tensor) -> bool:
    if image.dim() < 4 or "cubic" in stem(call.target):
        return False
    small = image.dim() == 4 and sum(result.shape[2:]) <= SMALL
    return small or (fits_channels_last(image) and image.shape[1] > FEW)


def _read(call: Call) -> int:
    return next((count for method, count in READ.items() if method in stem(call.target)), 1)


def resized_smoothly(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an upsampling with antialiasing.

    It is the image with the result's width, if it has another, and place and weight of every pixel read, for each row
    and column.
    """
    image = tensor_at(call, 0)
    between = 0
    if image.shape[-1] != result.shape[-1]:
        between = prod(image.shape[:-1]) * result.shape[-1] * image.itemsize
    return between + sum(_weights(call, image, result))


def _weights(call: Call, image: torch.Tensor, result: torch.Tensor) -> Iterator[Bytes]:
    for before, after in zip(image.shape[2:], result.shape[2:], strict=True):
        reach = max(1.0, before / max(1, after)) * _read(call) / 2
        yield after * ((2 * math.ceil(reach) + 1) * result.itemsize + 4 * INDEX)


def image_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in an upsampling's backward in half precision; in other dtypes 0.

    It is an image of ``result`` in float32 if that lies channels last, else one channel of it.
    """
    if not is_half(result):
        return 0
    return 4 * prod(result.shape[1:] if channels_last(result) else result.shape[2:])


def windows_added(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``unfold_backward``: places along ``dim``."""
    return INDEX * result.shape[call.args[2]] if result.dim() else 0
