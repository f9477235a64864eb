"""The kinds of operators: what bounds their time.

Two families. Kinds of ``PRODUCTS`` do many operations an element, and a profile gives FLOP/s for them. The others do
few, and are bound by memory or, where a profile gives it, by elements a second: a CPU draws random numbers and takes
exponentials far slower than it reads memory.
"""

from __future__ import annotations

VIEW = "view"
FREE = "free"
UNKNOWN = "unknown"
CONVOLUTIONS = tuple(f"convolution{what}{way}" for what in ("", "_1x1", "_grouped") for way in ("", "_backward"))
PRODUCTS = ("matmul", "batched_matmul", "attention", "attention_backward", *CONVOLUTIONS)

KINDS: dict[str, str] = {
    VIEW: "makes no tensor: takes no time",
    FREE: "makes a tensor and does not fill it: an operator's overhead",
    "matmul": "one matrix product",
    "batched_matmul": "many small matrix products",
    "attention": "fused scaled dot-product attention",
    "attention_backward": "of this",
    "convolution": "dense, with a window",
    "convolution_backward": "of this",
    "convolution_1x1": "dense, without a window: a matrix product over pixels",
    "convolution_1x1_backward": "of this",
    "convolution_grouped": "depthwise, or in many groups",
    "convolution_grouped_backward": "of this",
    "pointwise": "arithmetic on elements, copies, fills: as fast as memory",
    "mixed": "pointwise over several dtypes, for which torch on a CPU has no vector code",
    "strided": "reads or writes elements in another order than memory's, as transposed copies do",
    "concatenation": "puts tensors together, or into a larger one",
    "root": "square roots",
    "exponential": "exp, log, erf and what is made of one of them, such as gelu and sigmoid",
    "exponential_backward": "of these",
    "tanh": "slow functions: tanh, sine, general powers",
    "random": "draws a number for every element",
    "random_backward": "of dropout: what it is given, or a gradient, by its mask",
    "softmax": "softmax and log-softmax",
    "safe_softmax": "softmax that looks for rows without a finite element",
    "softmax_backward": "of either",
    "norm": "layer and group normalisation",
    "norm_backward": "of these",
    "batch_norm": "batch normalisation",
    "batch_norm_backward": "of this",
    "reduction": "sums, means, largest elements",
    "gather": "reads elements or rows by index",
    "scatter": "adds or writes elements or rows by index",
    "pool": "pooling, resampling",
    "pool_backward": "of these",
    "scan": "running sums, sorting, largest k",
    UNKNOWN: "none of the above; taken for expensive, see roamc.cost.predict",
}
"""Every kind and what is in it."""

HEAVY = frozenset({*PRODUCTS, "random", "scatter", "pool", "pool_backward", "scan", UNKNOWN})
"""Kinds that do much for an element, or read and write memory here and there."""

LIGHT = frozenset(KINDS) - HEAVY
"""Kinds that do a few operations an element, mostly one after the other in memory: cheap on any device."""
