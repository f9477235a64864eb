"""The loss that a train step returns: a plain tensor whose ``backward`` says that the step has done that.

Whoever takes a training loop over may leave ``loss.backward()`` in it. Torch says of the detached loss that "element 0
of tensors does not require grad", which is no advice. The type of the loss, its bits, ``requires_grad``, pickles and
what is computed from it are those of any tensor.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from roamc.errors import BackwardTwiceError

ADVICE = "remove backward(), step() and zero_grad() from the training loop"
"""What to do where a training loop repeats what a train step does."""


def with_advice(loss: torch.Tensor) -> torch.Tensor:
    """Return ``loss``, whose ``backward`` raises :class:`BackwardTwiceError` with :data:`ADVICE` from now on.

    Args:
        loss: a tensor that nobody else holds.
    """
    own = _Backward(loss)
    loss.backward = own  # type: ignore[method-assign]
    loss.__deepcopy__ = own.deep_copy  # type: ignore[method-assign]
    loss.__getstate__ = own.state  # type: ignore[method-assign]
    return loss


class _Backward:
    """The ``backward`` of one loss, which it does not keep alive."""

    __slots__ = ("_loss",)

    def __init__(self, loss: torch.Tensor) -> None:
        self._loss = weakref.ref(loss)

    def __call__(self, *args: Any, **named: Any) -> None:
        """Raise, or do what torch does where the loss has been made to require a gradient.

        Raises:
            BackwardTwiceError: the loss requires no gradient.
        """
        loss = self._loss()
        if loss is None or not loss.requires_grad:
            raise BackwardTwiceError(
                f"this loss is that of a roamc.train_step, which has run backward and updated the parameters: {ADVICE}"
            )
        torch.Tensor.backward(loss, *args, **named)  # type: ignore[no-untyped-call]

    def deep_copy(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a deep copy of the loss, whose ``backward`` is torch's."""
        loss = self._loss()
        assert loss is not None  # it is being copied
        own = {name: loss.__dict__.pop(name) for name in _OWN}
        try:
            return loss.__deepcopy__(memo)  # type: ignore[no-any-return]
        finally:
            loss.__dict__.update(own)

    def state(self) -> dict[str, Any] | None:
        """Return what users have set on the loss, for pickles; None where there is nothing, as of any tensor."""
        loss = self._loss()
        assert loss is not None  # it is being pickled
        return {name: value for name, value in loss.__dict__.items() if name not in _OWN} or None


_OWN = ("backward", "__deepcopy__", "__getstate__")
"""Attributes that :func:`with_advice` sets."""
