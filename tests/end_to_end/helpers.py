"""References to compare with, and comparisons that demand the same bits."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import roamc
from roamc import notices
from roamc.runtime.arena import ArenaPool

SEED = 17
Loss = Callable[..., Tensor]
Batches = Sequence[tuple[Any, ...]]


def differences(actual: Any, wanted: Any) -> list[str]:
    """Places where two nests of tensors are not equal bit for bit; nan equals nan."""
    left, left_shape = pytree.tree_flatten_with_path(actual)
    right, right_shape = pytree.tree_flatten_with_path(wanted)
    if left_shape != right_shape:
        paths = [{pytree.keystr(path) for path, _ in side} for side in (left, right)]
        return [f"another structure: only here {sorted(paths[0] - paths[1])}, missing {sorted(paths[1] - paths[0])}"]
    return [
        f"{pytree.keystr(path)}: {said}"
        for (path, a), (_, b) in zip(left, right, strict=True)
        if (said := _difference(a, b))
    ]


def assert_same(actual: Any, wanted: Any, where: str = "") -> None:
    """Fail with the list of places where ``actual`` has other bits than ``wanted``."""
    different = differences(actual, wanted)
    assert not different, "\n".join([where, *different])


def _difference(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if a == b else f"{a!r} for {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return f"{a.dtype}{tuple(a.shape)} on {a.device} for {b.dtype}{tuple(b.shape)} on {b.device}"
    if torch.equal(a, b) or torch.equal(a.nan_to_num(nan=1.5), b.nan_to_num(nan=1.5)):
        return ""
    return (
        f"{int((a != b).sum())} of {a.numel()} elements differ, most by {float((a.double() - b.double()).abs().max())}"
    )


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, non-persistent ones included, as copies."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Every ``.grad``, as a copy."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def gradients_of_batch(batch: tuple[Any, ...]) -> list[Tensor | None]:
    """The ``.grad`` of every leaf tensor of a batch."""
    return [x.grad for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.is_leaf]


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """The optimizer's state by number of the parameter, as copies; entries that are None left out."""
    states = copy.deepcopy(optimizer.state_dict())["state"]
    return {n: {key: value for key, value in sorted(s.items()) if value is not None} for n, s in sorted(states.items())}


def fresh(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch again, in tensors that nobody has written to."""
    return tuple(
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in batch
    )


def seeded(function: Callable[..., Any], *args: Any, seed: int = SEED) -> Any:
    """``function(*args)`` with random numbers from ``seed`` on."""
    torch.manual_seed(seed)
    return function(*args)


def eager_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    *batch: Any,
    clip: float | None = None,
) -> Tensor:
    """One step of eager PyTorch."""
    loss = loss_fn(model, *batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    model.zero_grad()
    return loss.detach()


def assert_steps_equal(
    model: nn.Module,
    loss_fn: Loss,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Batches,
    clip: float | None = None,
    **options: Any,
) -> roamc.TrainStep:
    """Train two copies, one with train_step; losses, tensors, states and .grad of batches are equal each time."""
    twin = copy.deepcopy(model)
    optimizer, reference = make_optimizer(model), make_optimizer(twin)
    step = roamc.train_step(model, loss_fn, optimizer, clip_grad_norm=clip, strict=True, **options)
    for number, batch in enumerate(batches):
        mine, theirs = fresh(batch), fresh(batch)
        loss = seeded(step, *mine, seed=number)
        wanted = seeded(lambda theirs=theirs: eager_step(twin, loss_fn, reference, *theirs, clip=clip), seed=number)
        assert_same(loss, wanted, f"loss of step {number}")
        assert_same(gradients_of_batch(mine), gradients_of_batch(theirs), f".grad of the batch of step {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
        assert_same(state_of(optimizer), state_of(reference), f"after step {number}")
    return step


def run_backward(model: nn.Module, loss_fn: Loss, batch: tuple[Any, ...], seed: int = SEED) -> dict[str, Any]:
    """Loss, gradients, parameters and buffers after one forward and backward; gradients add up."""
    loss = seeded(loss_fn, model, *fresh(batch), seed=seed)
    loss.backward()
    return {"loss": loss.detach(), "grad": gradients_of(model), "tensors": tensors_of(model)}


def optimized(model: nn.Module, **options: Any) -> nn.Module:
    """``model`` by way of roamc.optimize; a failure to plan is an error."""
    return roamc.optimize(model, strict=True, **options)


def aot_eager(model: nn.Module) -> nn.Module:
    """A copy of ``model`` by way of torch's own aot_eager, the reference of everything that torch.compile runs."""
    twin = copy.deepcopy(model)
    twin.compile(backend="aot_eager", dynamic=False)
    return twin


def assert_backward_equal(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    way: Callable[[nn.Module], nn.Module] = optimized,
    reference: Callable[[nn.Module], nn.Module] = aot_eager,
) -> nn.Module:
    """Run two copies, one by ``way`` and one by ``reference``; everything is equal after every backward."""
    twin = reference(model)
    model = way(model)
    for number, batch in enumerate(batches):
        results = run_backward(model, loss_fn, batch, seed=number)
        wanted = run_backward(twin, loss_fn, batch, seed=number)
        assert_same(results, wanted, f"backward {number}")
        assert roamc.plans(model), "nothing was planned"
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of tests that are not about optimizers."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with all kinds of state."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def square(model: nn.Module, *batch: Any) -> Tensor:
    """A loss that depends on every element of the output."""
    return (model(*batch).float() ** 2).mean()


def noise(*shape: int, seed: int = 3) -> Tensor:
    """Normal random numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """``torch.backends.mkldnn.flags`` without its warning about GPUs."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def arenas_waiting() -> int:
    """Arenas of this process that wait for a backward."""
    return sum(len(pool.waiting) for pool in gc.get_objects() if type(pool) is ArenaPool)


@contextlib.contextmanager
def warnings_of_roamc() -> Iterator[list[str]]:
    """While inside, every warning is caught; the list has the texts of roamc's when it is left."""
    texts: list[str] = []
    at_roamc = mock.patch.object(notices, "users_level", return_value=1)  # the line that warns, not the user's
    with warnings.catch_warnings(record=True) as caught, at_roamc:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in caught if "/roamc/" in one.filename or "roamc" in str(one.message)]
