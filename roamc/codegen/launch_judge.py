"""The judge of how a kernel is launched: in another shape than it is printed for it has the same bits.

    BLOCK=2048, num_warps=8             each element is computed alone: which program has it makes no difference
    ROWS=4, num_warps=8, and tl.sum     lanes are added up in another order than with ROWS=1, num_warps=4

That all elements are stored, once and in their place, is for :mod:`roamc.codegen.kernel_judge`, which runs the kernel
in the shape that it is launched in.
"""

from __future__ import annotations

import ast

from roamc.codegen.group_verdicts import GroupFault, Verdict
from roamc.codegen.triton_stand_in import JOINS
from roamc.operators.gpu.kernel import KernelText


def judge_launch(printed: KernelText, text: KernelText) -> None:
    """Check that a kernel joins no elements if it is launched in another shape than it is printed for.

    Args:
        printed: the kernel as it is printed.
        text: the kernel as it is launched.

    Raises:
        GroupFault: the shapes differ, and the order in which elements are joined with them.
    """
    before, after = ({**one.constants, "warps": one.warps} for one in (printed, text))
    joined = sorted(_functions(text.source) & JOINS)
    if before != after and joined:
        detail = f"it is launched with {_said(after)}, and printed for {_said(before)}, on which tl.{joined[0]} depends"
        raise GroupFault(Verdict.ORDER, detail)


def _functions(source: str) -> set[str]:
    """Names of the functions of Triton's language in a source."""
    nodes = ast.walk(ast.parse(source))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl"
    }


def _said(shape: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.items())
