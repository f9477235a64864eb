"""Fake tensors on a GPU where torch is built without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roamc.compat import CaptureMode, flatten, unflatten

NOT_BUILT = "not linked with support for"
"""In the error of torch's methods, such as ``copy_``, for a tensor on a device that torch is not built for."""


class DeviceMode(CaptureMode):
    """A fake mode whose tensors may be on a GPU that torch is not built for.

    torch's fake kernels of some operators, such as batch norm and what draws numbers in place, call methods that ask
    for the GPU. Such an operator runs on the meta device, and its results are then taken to the GPU. No real kernel
    runs in the place of a missing fake one: on a GPU that is there the results are the same.

    Args:
        settings: the arguments of :class:`roamc.compat.CaptureMode`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.allow_fallback_kernels = False

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the results of the operator ``func`` for fakes; torch calls this for every operator under the mode.

        The other arguments are those of ``FakeTensorMode.dispatch``. An operator whose fake kernel asks for a device
        that torch is not built for runs on the meta device.
        """
        try:
            return super().dispatch(func, types, args, kwargs)
        except RuntimeError as error:
            if NOT_BUILT not in str(error):
                raise
        return self._by_meta(func, tuple(args), kwargs or {})

    def _by_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that makes no views on the meta device; an argument that it returns is returned itself."""
        leaves, spec = flatten((args, kwargs))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu")
        with self:
            metas = [_on(leaf, torch.device("meta")) for leaf in leaves]
            positional, named = unflatten(metas, spec)
            results, shape = flatten(func(*positional, **named))
            of = {id(meta): leaf for meta, leaf in zip(metas, leaves, strict=True) if isinstance(meta, torch.Tensor)}
            return unflatten([of.get(id(result), _on(result, device)) for result in results], shape)


def _on(value: Any, device: torch.device) -> Any:
    """Return a tensor on ``device`` with the geometry of ``value``; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
