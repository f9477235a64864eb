"""Which kernels are alike: those of the layers of a model differ in names alone, and so do those of two processes."""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re

from torch import fx

from roamc.graph import tensors_of
from roamc.operators.gpu.kernel import KernelText
from roamc.operators.schemas import name_of

NAME = re.compile(r'"[^"]*"|(?<![\w.])[A-Za-z_]\w*')
"""A name in a source, but for those of attributes; or a text in quotes, such as the number in ``float("inf")``."""

KEPT = frozenset({*dir(builtins), *keyword.kwlist, "tl", "triton"})
"""Names that mean the same in every kernel."""


def described(body: fx.Graph) -> str:
    """Return, as text, what the kernel of a group depends on; equal for groups that differ in the names of nodes alone.

    It has the operators, their arguments, and the dtypes, shapes and strides of all tensors.
    """
    number = {node: f"%{at}" for at, node in enumerate(body.nodes)}
    lines = []
    for node in body.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda read: number[read])
        lies = [(tensor.dtype, tensor.shape, tensor.stride()) for _, tensor in tensors_of(node)]
        lines.append(f"{name_of(node.target) if node.op == 'call_function' else node.op} {arguments} {lies}")
    return "\n".join(lines)


def nameless(source: str) -> str:
    """Return the source of a kernel without comments, and with numbers for the names that it chooses itself.

    Names in capitals are those of compile-time constants, which a launch names: they stay.
    """
    numbers: dict[str, str] = {}

    def number(name: re.Match[str]) -> str:
        stays = name[0] in KEPT or name[0].isupper() or name[0].startswith('"')
        return name[0] if stays else numbers.setdefault(name[0], f"v{len(numbers)}")

    return NAME.sub(number, re.sub(r"  # .*", "", source))


def key_of(body: fx.Graph, text: KernelText) -> str:
    """Return a hash, in hexadecimal, of a group and its kernel; equal for kernels that differ in names alone.

    Args:
        body: the operators of the group, with fake values.
        text: the kernel as it is printed.
    """
    parts = [described(body), nameless(text.source), repr(sorted(text.constants.items())), repr(text.warps)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
