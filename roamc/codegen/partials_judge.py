"""The judge of sums over rows in a Triton kernel: what its programs store of them, and the kernel that adds that up.

    tl.store(partials + part * 768 + column, tl.sum(down, 0, keep_dims=True), column < 768)
                                        does each program store one row of partial sums, in a place of its own?
                                        is it what the operator gives for the rows of that program alone?
    tl.store(out + column, tl.sum(out_parts, 0, keep_dims=True), column < 768)
                                        is every column of the result stored once, in its place?
                                        is it the sum of that column in all rows of partial sums, each taken once?

Shares nothing with what prints kernels but the stand-in for Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from roamc.codegen.group_verdicts import GroupFault, Verdict
from roamc.codegen.triton_stand_in import WIDE, Jit, Language, Pointer
from roamc.operators.gpu.kernel import KernelText

FIRST = torch.zeros((), dtype=torch.int32, device="cpu")
"""The place of a pointer before anything is added to it."""


class PartialRows:
    """The rows of partial sums that a kernel stores, as seen by a judge that runs some of the kernel's programs.

    Args:
        sums: position among the results of the group to the node of the sum over rows there.
        parts: programs of the launch, each of which stores a row for each sum.
        columns: columns of the group's matrix.
        programs: the numbers of those that run, int64[programs, 1, 1].
        wide: columns of a block, no fewer than ``columns``.
    """

    def __init__(self, sums: Mapping[int, fx.Node], parts: int, columns: int, programs: Tensor, wide: int) -> None:
        self.positions, self.sums = tuple(sums), tuple(sums.values())
        self.parts, self.columns, self.programs = parts, columns, programs
        self.numbers = torch.arange(wide, dtype=torch.int64, device="cpu")
        shape = (len(sums), len(programs), 1, wide)
        self.seen = torch.zeros(shape, dtype=torch.int32, device="cpu")
        self.stored = torch.zeros(shape, dtype=WIDE, device="cpu")

    def store(self, places: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Keep partial sums that the kernel stores.

        Args:
            places: where each element is stored, in elements from the first partial sum.
            value: what is stored.
            mask: True where it is stored; None for everywhere.

        Raises:
            GroupFault: a program stores elsewhere than in a row of its own, behind the last column, or twice.
        """
        active = torch.ones((), dtype=torch.bool, device="cpu") if mask is None else mask
        active, places, value = torch.broadcast_tensors(active, places.to(torch.int64), value.to(WIDE))
        if active.shape != self.seen.shape[1:]:
            raise GroupFault(Verdict.TWICE, f"blocks of {tuple(active.shape[1:])} are stored as partial sums")
        if (active & (self.numbers >= self.columns)).any():
            raise GroupFault(Verdict.MASK, "partial sums behind the last column are stored")
        far = (places - self.programs * self.columns - self.numbers)[active]
        number, remainder = divmod(int(far[0]), self.parts * self.columns) if far.numel() else (0, 0)
        if remainder or not 0 <= number < len(self.sums) or (far != far[0]).any():
            raise GroupFault(Verdict.PLACE, "partial sums are stored in other places")
        self.seen[number] += active
        self.stored[number] = torch.where(active, value, self.stored[number])
        if (self.seen[number] > 1).any():
            raise GroupFault(Verdict.TWICE, "some programs store partial sums twice", self.sums[number].name)

    def check_complete(self) -> None:
        """Check that the programs that ran have stored all of their partial sums.

        Raises:
            GroupFault: some are missing.
        """
        for node, store_counts in zip(self.sums, self.seen, strict=True):
            missing = int((store_counts[..., : self.columns] == 0).sum())
            if missing:
                raise GroupFault(Verdict.MISSING, f"{missing} partial sums", node.name)


def judge_ends(text: KernelText, rows: PartialRows, close: Callable[[Tensor, Tensor], bool]) -> None:
    """Check the source of the kernel that ends sums over rows, and what its launch is told.

    Args:
        text: the kernel of the group.
        rows: the partial sums that the first kernel stores.
        close: whether two results are equal up to rounding.

    Raises:
        GroupFault: the second kernel or its launch is missing a partial sum, adds up or stores anything else, or stores
            elsewhere.
    """
    ends = text.partials
    if ends is None or (ends.parts, ends.columns) != (rows.parts, rows.columns):
        stored = f"{rows.parts} rows of {rows.columns} partial sums"
        raise GroupFault(Verdict.MISSING, f"{stored} are there, and others are added up")
    if ends.results != rows.positions:
        raise GroupFault(Verdict.PLACE, f"results {rows.positions} are sums over rows, and {ends.results} are stored")
    run = _Ends(rows.sums, rows.parts, rows.columns, ends.programs)
    names: dict[str, Any] = {"triton": Jit, "tl": Language(run, over_rows=True)}
    exec(compile(text.source, "<judged>", "exec"), names)
    names[ends.function](Pointer(None, FIRST), *(Pointer(node, FIRST) for node in rows.sums), **ends.constants)
    run.compare(close)


class _Ends:
    """Runs all programs of the kernel at once: programs are the first dimension of every block."""

    def __init__(self, sums: Sequence[fx.Node], parts: int, columns: int, programs: int) -> None:
        self.sums, self.parts, self.columns, self.programs = sums, parts, columns, programs
        self.numel = len(sums) * parts * columns
        self.seen = {node: torch.zeros(columns, dtype=torch.int32, device="cpu") for node in sums}
        self.stored = {node: torch.zeros(columns, dtype=WIDE, device="cpu") for node in sums}

    def program_id(self, axis: int) -> Tensor:
        """Return the numbers of all programs, in 32 bits."""
        if axis != 0:
            raise GroupFault(Verdict.TWICE, f"programs are counted along axis {axis}, where there is one")
        return torch.arange(self.programs, dtype=torch.int32, device="cpu").reshape(-1, 1, 1)

    def load(self, pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
        """Return the numbers that stand for partial sums."""
        if pointer.node is not None:
            raise GroupFault(Verdict.VALUE, "the result is read", pointer.node.name)
        active = torch.ones((), dtype=torch.bool, device="cpu") if mask is None else mask
        active, places = torch.broadcast_tensors(active, pointer.places)
        used = places[active]
        if used.numel() and not (used.min() >= 0 and used.max() < self.numel):
            raise GroupFault(Verdict.OUTSIDE, f"partial sums {int(used.min())} to {int(used.max())} are read")
        return torch.where(active, _content(places), torch.zeros((), dtype=WIDE, device="cpu") + other)

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
        """Check where sums are stored, and keep them."""
        if pointer.node is None:
            raise GroupFault(Verdict.PLACE, "a sum over rows is stored over partial sums")
        active = torch.ones((), dtype=torch.bool, device="cpu") if mask is None else mask
        active, places, value = torch.broadcast_tensors(active, pointer.places, value.to(WIDE))
        places, value = places[active].to(torch.int64), value[active]
        if places.numel() and not (places.min() >= 0 and places.max() < self.columns):
            raise GroupFault(Verdict.MASK, "elements behind the last one are stored", pointer.node.name)
        self.seen[pointer.node].index_add_(0, places, torch.ones(len(places), dtype=torch.int32, device="cpu"))
        self.stored[pointer.node][places] = value

    def compare(self, close: Callable[[Tensor, Tensor], bool]) -> None:
        """Check that every column is stored once, with the sum of its partial sums."""
        numbers = torch.arange(self.numel, dtype=torch.int64, device="cpu")
        expected_sums = _content(numbers).reshape(len(self.sums), self.parts, self.columns).sum(1)
        for node, want in zip(self.sums, expected_sums, strict=True):
            if (self.seen[node] > 1).any():
                raise GroupFault(Verdict.TWICE, "some programs store a column twice", node.name)
            if (self.seen[node] == 0).any():
                raise GroupFault(Verdict.MISSING, f"{int((self.seen[node] == 0).sum())} columns", node.name)
            if not close(self.stored[node], want):
                raise GroupFault(Verdict.NUMBERS, "other partial sums are added up", node.name)


def _content(places: Tensor) -> Tensor:
    """The numbers at ``places`` among the partial sums: they follow from the place, and look like random ones."""
    mixed = (places.to(torch.int64) + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 32)) & ((1 << 30) - 1)
    return mixed.to(WIDE) / (1 << 30) + 0.5
