"""torch's private interfaces: what autograd calls, one operator after the other. See roamc/compat.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from roamc.compat import quiet_meta
from roamc.compat_hooks import nodes_behind
from roamc.compat_operators import tensors_in


@dataclass(frozen=True)
class Called:
    """An operator that has run.

    Attributes:
        target: the operator.
        results: shape and dtype of each tensor that it has returned.
        number: of its node of autograd, the same in forward and backward; of an operator without one, the last one's.
        adds: whether autograd adds two gradients with it, between nodes.
    """

    target: OpOverload
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    number: int
    adds: bool


class Recorder(TorchDispatchMode):
    """Within this context, notes in ``called`` which operators that return tensors run below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[Called] = []
        self._node: int | None = None
        self._between = False

    def __torch_dispatch__(
        self, target: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note it."""
        result = target(*args, **(kwargs or {}))
        number = torch.autograd._get_sequence_nr() - 1 if self._node is None else self._node
        results = tuple((each.shape, each.dtype) for each in tensors_in(result))
        if results:
            self.called.append(Called(target, results, number, self._between))
        return result

    def follow(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note from now on which operators run in the backward of each node behind ``outputs``."""
        for node in nodes_behind(outputs):
            node.register_prehook(functools.partial(self._enter, node._sequence_nr()))
            node.register_hook(self._leave)

    def _enter(self, number: int, _: object) -> None:
        self._node, self._between = number, False

    def _leave(self, *_: object) -> None:
        self._node, self._between = None, True


@contextlib.contextmanager
def on_fakes(recorder: Recorder) -> Iterator[None]:
    """Within this context, tensors are fake, and ``recorder`` notes the operators that autograd makes of a call.

    Operators decompose as inside AOTAutograd. This thread runs backward, not the one that autograd has for a GPU.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    here = torch.autograd.set_multithreading_enabled(False)
    with mode, enable_python_dispatcher(), quiet_meta(), here, torch.enable_grad(), recorder:
        yield
