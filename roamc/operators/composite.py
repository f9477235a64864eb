"""What a target is that stands for several operators."""

from __future__ import annotations

from typing import Any


class Composite:
    """A target that stands for several operators, which run as one. It knows itself what tables say of operators.

    Attributes:
        title: what is shown and hashed in the place of an operator's qualified name; the same in every process.
        stands_for: names of the nodes in place of which it runs and that write an argument; it writes these arguments.
        rule: the :class:`roamc.operators.ops.OpRule` that follows from the operators.
        exact: its results have the bits of the operators run one after the other.
        kernel: the :class:`roamc.operators.kernels.Kernel` that writes its results into planned memory.
    """

    title: str
    stands_for: tuple[str, ...] = ()
    rule: Any
    exact: bool
    kernel: Any

    def malformed(self, arguments: int) -> str:
        """Return what is wrong with how the operators are written down, or "": then alone may anything else be asked.

        Args:
            arguments: number of arguments that it is called with.
        """
        return ""
