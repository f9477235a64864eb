"""Models whose forward is a loss, and archives that torch.export makes of them."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.capture.dump import archive
from roamc.capture.dump.exported import Exported, sizes_of
from roamc.frontends.workload import Workload
from tests import models
from tests.capture.dump.logged import OWN


class Whole(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(self.model, *batch)


class Mixed(nn.Module):
    """A tied head, a frozen layer, buffers that are written, views, and parts under no_grad and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.norm, self.frozen, self.both = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 64)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.ones(32), persistent=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        left, right = self.both(self.frozen(self.tokens(x))).chunk(2, -1)
        with torch.no_grad():
            scale = right.abs().amax()
        with torch.autocast("cpu", torch.bfloat16):
            low = left @ left.transpose(1, 2)
        h = (low.float() @ right) / scale * x.shape[0] + self.mask
        h = F.relu(self.norm(h.mean(1)), inplace=True)
        return F.cross_entropy(self.head(h), x[:, 0])


class Small(nn.Module):
    """A forward without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def tokens(batch: int) -> Tensor:
    return models.tokens(batch, 8)


def make(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model whose forward is a loss, and its batch."""
    torch.manual_seed(0)
    if name == "mixed":
        return Mixed(), (tokens(4),)
    if name in OWN:
        cls, shape = OWN[name]
        return cls(), (torch.randn(shape),)
    model, batch, loss = models.make(name)
    return Whole(model, loss), batch


def save(path: Path, model: nn.Module, batch: tuple[Any, ...], *, decomposed: bool = False, **options: Any) -> Path:
    """Write the archive of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, batch, **options)
        torch.export.save(program.run_decompositions() if decomposed else program, path)
    return path


def workload(path: Path, optimizer: Any = None, **sizes: int) -> Workload:
    """Return what is planned for an archive."""
    program = archive.read(str(path))
    model = Exported(program, sizes_of(program, sizes))
    return Workload("model", model, model.batch, optimizer=optimizer, notes=program.notes)


def member(path: Path, name: str) -> bytes:
    """Return one member of an archive."""
    with zipfile.ZipFile(path) as archive_file:
        return archive_file.read(name)


def changed(path: Path, change: Callable[[dict[str, Any]], object] = dict, **members: bytes | None) -> Path:
    """Write an archive again, with ``change`` applied to its program and members replaced, added or left out."""
    with zipfile.ZipFile(path) as archive_file:
        contents = {name: archive_file.read(name) for name in archive_file.namelist()}
    program = next(name for name in contents if "models/" in name or "exported_program" in name)
    data = json.loads(contents[program])
    change(data)
    contents[program] = json.dumps(data).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive_file:
        for name, content in {**contents, **members}.items():
            if content is not None:
                archive_file.writestr(name, content)
    path.write_bytes(buffer.getvalue())
    return path
