"""XLA: AlexNet and VGG-16 written in JAX, compiled for the CPU, and the temporary bytes that XLA reports.

The whole compiler competes, on a graph of its own: XLA fuses, picks its own algorithms, and is told that
parameters and state may be written over (XLA's donation). What its convolutions need for themselves is counted too,
which nobody else's figure does. Nothing is allocated or run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rivals import Missing
from roamc.units import Bytes

Layer = tuple[str, tuple[int, ...]]

ALEXNET: tuple[Layer, ...] = (
    ("conv", (64, 3, 11, 4, 2)), ("pool", (3,)), ("conv", (192, 64, 5, 1, 2)), ("pool", (3,)),
    ("conv", (384, 192, 3, 1, 1)), ("conv", (256, 384, 3, 1, 1)), ("conv", (256, 256, 3, 1, 1)), ("pool", (3,)),
    ("drop", ()), ("dense", (9216, 4096)), ("relu", ()), ("drop", ()), ("dense", (4096, 4096)), ("relu", ()),
    ("dense", (4096, 1000)),
)  # fmt: skip


def _vgg16() -> tuple[Layer, ...]:
    layers: list[Layer] = []
    width = 3
    for stage in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for wider in stage:
            layers.append(("conv", (wider, width, 3, 1, 1)))
            width = wider
        layers.append(("pool", (2,)))
    relu_drop: list[Layer] = [("relu", ()), ("drop", ())]
    dense: list[Layer] = [("dense", (25088, 4096)), *relu_drop, ("dense", (4096, 4096)), *relu_drop]
    return (*layers, *dense, ("dense", (4096, 1000)))


NETS: dict[str, tuple[Layer, ...]] = {"alexnet": ALEXNET, "vgg16": _vgg16()}


def temporary_bytes(name: str, batch: int, optimizer: str) -> Bytes:
    """What the compiled step needs beside its arguments: temporaries, and results that no argument makes room for.

    Args:
        name: a key of :data:`NETS`.
        batch: number of samples.
        optimizer: ``"sgd"`` or ``"adam"``.

    Raises:
        Missing: jax is not installed.
    """
    try:
        import jax
    except ImportError as error:
        raise Missing(f"jax is not here ({error}): pip install jax") from None
    jax.config.update("jax_platforms", "cpu")
    step, weights = _step(jax, NETS[name], optimizer)
    copies = 3 if optimizer == "adam" else 1
    state = tuple([jax.ShapeDtypeStruct(shape, "float32") for shape in weights] for _ in range(copies))
    images = jax.ShapeDtypeStruct((batch, 3, 224, 224), "float32")
    labels, key = jax.ShapeDtypeStruct((batch,), "int32"), jax.ShapeDtypeStruct((2,), "uint32")
    analysis = jax.jit(step, donate_argnums=0).lower(state, images, labels, key).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def _step(jax: Any, layers: Sequence[Layer], optimizer: str) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """A training step of (state, images, labels, key), and the shapes of the weights."""
    weights: list[tuple[int, ...]] = []
    for kind, sizes in layers:
        if kind == "conv":
            weights += [(sizes[0], sizes[1], sizes[2], sizes[2]), (sizes[0],)]
        elif kind == "dense":
            weights += [sizes, sizes[1:]]

    def loss(params: list[Any], images: Any, labels: Any, key: Any) -> Any:
        logits = _forward(jax, layers, params, images, key)
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    def step(state: tuple[list[Any], ...], images: Any, labels: Any, key: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state[0], images, labels, key)
        if optimizer == "sgd":
            return ([p - 1e-2 * g for p, g in zip(state[0], grads, strict=True)],), value
        params, first, second = state
        first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, grads, strict=True)]
        roots = [jax.numpy.sqrt(v) + 1e-8 for v in second]
        params = [p - 1e-3 * m / root for p, m, root in zip(params, first, roots, strict=True)]
        return (params, first, second), value

    return step, weights


def _forward(jax: Any, layers: Sequence[Layer], params: list[Any], x: Any, key: Any) -> Any:
    rest = iter(params)
    for number, (kind, sizes) in enumerate(layers):
        if kind == "conv":
            _, _, _, stride, padding = sizes
            x = jax.lax.conv_general_dilated(x, next(rest), (stride, stride), [(padding, padding)] * 2)
            x = jax.nn.relu(x + next(rest)[None, :, None, None])
        elif kind == "pool":
            window, strides = (1, 1, sizes[0], sizes[0]), (1, 1, 2, 2)
            x = jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, window, strides, "VALID")
        elif kind == "dense":
            x = x.reshape(x.shape[0], -1) @ next(rest) + next(rest)
        elif kind == "relu":
            x = jax.nn.relu(x)
        else:
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, x.shape)
            x = jax.numpy.where(keep, 2 * x, 0)
    return x
