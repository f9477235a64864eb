"""The groups of a GPU in programs for a CPU."""

from __future__ import annotations

import pytest

from roamc.operators.gpu import fused_kernel
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.passes.fuse import choose, write


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pass fuse make the groups of a GPU on a CPU, of any size; there their operators run one by one."""
    monkeypatch.setattr(fused_kernel, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(fused_kernel, "launcher", lambda text: None)
    monkeypatch.setattr(write, "kind_of_groups", lambda graph: FusedKernel)
    monkeypatch.setattr(choose, "_least_bytes", lambda graph, options: 1)
