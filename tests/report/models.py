"""A model whose layers are called at several sizes, for reports."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Twice(nn.Sequential):
    """Two convolutions with norms."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, with the results of the way down beside those of the way up."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        sizes = [width << level for level in range(depth)]
        self.down = nn.ModuleList(Twice(before, after) for before, after in zip((3, *sizes), sizes, strict=False))
        self.middle = Twice(sizes[-1], 2 * sizes[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(sizes))
        self.join = nn.ModuleList(Twice(2 * size, size) for size in reversed(sizes))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((kept.pop(), up(x)), 1))
        result: Tensor = self.head(x)
        return result


def mean_square(model: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    """The loss of :class:`UNet`."""
    return F.mse_loss(model(x), wanted)
