"""Sums over rows, such as gradients of biases: a program of a kernel adds up its rows, a second kernel the programs'.

    partials    part 0:  sum of rows    0 to 31, for each column          one row of float32 for each program and sum
                part 1:  sum of rows   32 to 63
                ...

    @triton.jit
    def fused_sum_1_ends(partials, out, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
        part = tl.arange(0, PARTS)[:, None]
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (part < 250) & (column < 768)
        out_parts = tl.load(partials + part * 768 + column, inside, 0)
        tl.store(out + column, tl.sum(out_parts, 0, keep_dims=True), column < 768)

How many programs there are follows from the shape, not from the GPU, and no program adds to memory that another has
written: the same values give the same bits in every run, on every GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roamc.operators.blocks import Matrix
from roamc.units import Bytes

PARTS = 256
"""Programs of a kernel that adds up over rows, at most: about two for each processor of a large GPU."""

TOGETHER = 4096
"""Elements of a block of rows that a program of such a kernel reads at a time."""

WIDEST = 8192
"""Columns of a sum over rows at most: a program holds one number for each column, beside a whole row of each value."""

COLUMNS = 32
"""Columns of one program of the kernel that ends the sums."""

WARPS = 8
"""Warps of one program of the kernel that ends the sums."""

ITEM: Bytes = 4
"""Bytes of a partial sum, a float32."""


@dataclass(frozen=True)
class PartialSums:
    """The second kernel of a group, which adds up the partial sums that the programs of the first one write.

    Attributes:
        function: name of the second kernel. It takes the partial sums, the results, then the constants.
        results: positions of the sums among the results of the group.
        parts: rows of partial sums: programs of the first kernel.
        chunk: rows of the matrix that a program of the first kernel adds up.
        columns: number of columns of the group's matrix.
    """

    function: str
    results: tuple[int, ...]
    parts: int
    chunk: int
    columns: int

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the partial sums."""
        return self.numel * ITEM

    @property
    def numel(self) -> int:
        """Number of partial sums, each a float32: columns x parts x sums over rows."""
        return len(self.results) * self.parts * self.columns

    @property
    def programs(self) -> int:
        """How many programs of Triton the launch of the second kernel has."""
        return -(-self.columns // COLUMNS)

    @property
    def constants(self) -> dict[str, int]:
        """Names and values of the compile-time constants of the second kernel."""
        return {"PARTS": 1 << (self.parts - 1).bit_length(), "COLUMNS": COLUMNS}

    def place(self, number: int, pointer: str, part: str) -> str:
        """Return the expression, in Triton, of a pointer to the partial sums of one part, one for each ``column``.

        Args:
            number: position of the sum over rows among :attr:`results`, from 0.
            pointer: name of the pointer to the first partial sum.
            part: expression of the number of the first kernel's program.
        """
        first = number * self.parts * self.columns
        return f"{pointer} + " + (f"{first} + " if first else "") + f"{part} * {self.columns} + column"

    def source(self, outs: Sequence[str]) -> str:
        """Return the source of the second kernel.

        Args:
            outs: for each of :attr:`results`, in order, the name of the pointer that the sum is written to.
        """
        constants = [f"{name}: tl.constexpr" for name in self.constants]
        lines = [
            "part = tl.arange(0, PARTS)[:, None]",
            "column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]",
            f"inside = (part < {self.parts}) & (column < {self.columns})",
        ]
        for number, out in enumerate(outs):
            lines.append(f"{out}_parts = tl.load({self.place(number, 'partials', 'part')}, inside, 0)")
            total = f"tl.sum({out}_parts, 0, keep_dims=True)"
            lines.append(f"tl.store({out} + column, {total}, column < {self.columns})")
        head = f"@triton.jit\ndef {self.function}({', '.join(['partials', *outs, *constants])}):\n"
        return head + "".join(f"    {line}\n" for line in lines)


def partial_sums(kernel: str, frame: Matrix, rows: int, results: Sequence[int]) -> PartialSums:
    """Return the second kernel of a group that adds up over rows.

    Args:
        kernel: name of the first kernel.
        frame: the matrix of the group.
        rows: rows that a program of the first kernel reads at a time.
        results: positions of the sums among the results of the group.
    """
    blocks = -(-frame.rows // rows)
    chunk = -(-blocks // PARTS) * rows
    return PartialSums(f"{kernel}_ends", tuple(results), -(-frame.rows // chunk), chunk, frame.columns)
