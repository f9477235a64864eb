"""The groups of a GPU in programs for a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from roamc.operators.gpu import fused_kernel
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.passes.fuse import choose, inline, write


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pass fuse make the groups of a GPU on a CPU, of any size; there their operators run one by one."""
    monkeypatch.setattr(fused_kernel, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(fused_kernel, "launcher", lambda text: None)
    monkeypatch.setattr(write, "kind_of_groups", lambda graph: FusedKernel)
    monkeypatch.setattr(choose, "_least_bytes", lambda graph, options: 1)


def use_pass(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a pass for a GPU run in programs for a CPU, with such groups, which make every value again that they can."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(module, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(inline, "EFFORT", inline.Effort(least_bytes=1))
    monkeypatch.setattr(inline._Inliner, "_spare", lambda inliner: 1.0)
