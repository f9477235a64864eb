"""How a kernel may be divided among programs and warps without a change of a bit.

A kernel whose elements are each computed alone has the same bits in every shape, so that the fastest may be taken.
Sums along a row are added up in an order that follows from the rows of a program and from its warps: such a kernel
keeps the shape that it is printed for, which follows from the matrix alone. What was fastest here today might not be
so on another GPU of the same kind or tomorrow, and a value that runs again there would have other last bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roamc.operators.blocks import Matrix
from roamc.operators.gpu.kernel import PIECE, KernelText

FACTORS = ((1, 1), (1, 2), (2, 1), (1, 0.5))
"""Block and warps of the shapes that are tried, as multiples of those that a kernel is printed for."""

TRIED = 3
"""At most so many shapes of one kernel are tried: each is compiled, which takes longer than to time it."""

MOST_WARPS = 16


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is divided.

    Attributes:
        block: elements of one program, in a kernel without rows; else rows of one program.
        warps: warps of 32 threads that run one program.
    """

    block: int
    warps: int


def shape_of(text: KernelText) -> LaunchShape:
    """Return the shape that ``text`` is launched in."""
    return LaunchShape(text.constants[_block(text)], text.warps)


def _block(text: KernelText) -> str:
    """The name of the constant that says how many elements or rows a program has."""
    return "BLOCK" if "BLOCK" in text.constants else "ROWS"


def shapes_of(text: KernelText, matrix: Matrix) -> tuple[LaunchShape, ...]:
    """Return the shapes in which a kernel has the same bits, first the one that it is printed for.

    Only that one for a kernel that adds up, and for one whose programs are not parts of its matrix, one behind the
    other.

    Args:
        text: the kernel as it is printed.
        matrix: rows and columns of the group.
    """
    first = shape_of(text)
    if text.joins or text.partials is not None or text.programs != _programs(text, matrix, first.block):
        return (first,)
    wide = text.constants.get("COLUMNS", 1)
    shapes = []
    for block, warps in FACTORS:
        shape = LaunchShape(int(first.block * block), int(first.warps * warps))
        fits = block <= 1 or (shape.block * wide <= PIECE and _programs(text, matrix, shape.block) > 1)
        if fits and shape.block >= 1 and 1 <= shape.warps <= MOST_WARPS:
            shapes.append(shape)
    return tuple(shapes[:TRIED])


def _programs(text: KernelText, matrix: Matrix, block: int) -> int:
    return -(-(matrix.numel if "BLOCK" in text.constants else matrix.rows) // block)


def launched_in(text: KernelText, matrix: Matrix, shape: LaunchShape) -> KernelText:
    """Return ``text``, launched in one of its :func:`shapes_of`; its source is the same."""
    constants = {**text.constants, _block(text): shape.block}
    return replace(text, constants=constants, programs=_programs(text, matrix, shape.block), warps=shape.warps)
