"""The kinds of operators: what bounds their time.

There are two families. Kinds in ``PRODUCTS`` do many operations an element, and a profile gives FLOP/s for them. The
others do few, and are bound by memory or, where a profile gives a rate for them, by elements a second: a CPU draws
random numbers and takes exponentials far slower than it reads memory.
"""

from __future__ import annotations

VIEW = "view"
FREE = "free"
UNKNOWN = "unknown"
FUSED = "fused"
COLLECTIVE = "collective"
CONVOLUTIONS = tuple(f"convolution{what}{way}" for what in ("", "_1x1", "_grouped") for way in ("", "_backward"))
ONEDNN = {"onednn_matmul": "matmul", "onednn_batched_matmul": "batched_matmul"}
"""Kind of product by oneDNN to that of the same product by torch, whose rates stand in for it in older profiles."""
PRODUCTS = ("matmul", "batched_matmul", *ONEDNN, "attention", "attention_backward", *CONVOLUTIONS)

KINDS: dict[str, str] = {
    VIEW: "makes no tensor: takes no time",
    FREE: "makes a tensor and does not fill it: an operator's overhead",
    "matmul": "one matrix product",
    "batched_matmul": "many small matrix products",
    "onednn_matmul": "one matrix product in float32, by oneDNN",
    "onednn_batched_matmul": "many small matrix products in float32, by oneDNN",
    "attention": "fused scaled dot-product attention",
    "attention_backward": "backward of fused attention",
    "convolution": "dense, with a window",
    "convolution_backward": "backward of a dense convolution with a window",
    "convolution_1x1": "dense, without a window: a matrix product over pixels",
    "convolution_1x1_backward": "backward of a convolution without a window",
    "convolution_grouped": "depthwise, or in many groups",
    "convolution_grouped_backward": "backward of a grouped convolution",
    "pointwise": "arithmetic on elements, copies, fills: as fast as memory",
    "mixed": "pointwise over several dtypes, for which torch on a CPU has no vector code",
    "strided": "reads or writes elements in another order than memory's, as transposed copies do",
    "concatenation": "puts tensors together, or into a larger one",
    "root": "square roots",
    "exponential": "exp, log, erf and what is made of one of them, such as gelu and sigmoid",
    "exponential_backward": "backward of gelu, silu and the like",
    "tanh": "slow functions: tanh, sine, general powers",
    "random": "draws a number for every element",
    "random_backward": "backward of dropout: a gradient by the mask",
    "softmax": "softmax and log-softmax",
    "safe_softmax": "softmax that looks for rows without a finite element",
    "softmax_backward": "backward of softmax and log-softmax",
    "norm": "layer and group normalisation",
    "norm_backward": "backward of layer and group normalisation",
    "batch_norm": "batch normalisation",
    "batch_norm_backward": "backward of batch normalisation",
    "reduction": "sums, means, largest elements",
    "gather": "reads elements or rows by index",
    "scatter": "adds or writes elements or rows by index",
    "pool": "pooling, resampling",
    "pool_backward": "backward of pooling and resampling",
    "scan": "running sums, sorting, largest k",
    COLLECTIVE: "sends tensors around a ring of ranks",
    FUSED: "a group of operators that runs as one",
    UNKNOWN: "none of the above; taken for expensive, see roamc.cost.predict",
}
"""Name of every kind to the operators that are of it."""

HEAVY = frozenset({*PRODUCTS, "random", "scatter", "pool", "pool_backward", "scan", COLLECTIVE, UNKNOWN})
"""Kinds that do many operations an element, read and write memory in no regular order, or wait for other ranks."""

LIGHT = frozenset(KINDS) - HEAVY
"""Kinds that do a few operations an element, mostly in the order of memory: cheap on any device."""

CONVERTING = frozenset({"mixed", "pointwise", "strided", "tanh", "root", "exponential", "exponential_backward"})
"""Kinds whose operators, on a CPU, convert arguments to the dtype in which they compute."""
