"""A group of operators that runs as one Triton kernel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roamc.errors import users_level
from roamc.graph import placeholders
from roamc.operators import blocks, ops
from roamc.operators.blocks import Matrix
from roamc.operators.fused import Fused, same_geometry
from roamc.operators.gpu import here, kept
from roamc.operators.gpu.frame import Access, access_of, frame_of, shape_reach
from roamc.operators.gpu.kept import Kept
from roamc.operators.gpu.kernel import (
    LONGEST_ROW,
    KernelText,
    kernel_text,
    partials_of,
    unfit,
    unfit_writes,
    written_as,
)
from roamc.operators.gpu.kernel_keys import key_of
from roamc.operators.gpu.launch import launcher
from roamc.operators.gpu.launch_shapes import LaunchShape, launched_in, shape_of, shapes_of
from roamc.operators.gpu.lines import DoesNotPrintError
from roamc.operators.gpu.operands import reduces
from roamc.operators.gpu.printed import is_exact
from roamc.operators.gpu.reorders import reorders
from roamc.operators.gpu.results import first_of, is_sum_over_rows, results_of, shape_of_operands
from roamc.operators.gpu.shifts import moves_columns, unfit_shifts
from roamc.operators.kernels import Kernel
from roamc.units import Bytes

DEVICES = frozenset({"cuda"})

COMPARED_BYTES: Bytes = 1 << 26
"""Bytes of a group's values up to which its first result is compared with that of the operators, once on a machine."""

ROUNDING = 0.05
"""Part of a value, and of the largest, by which a kernel with other last bits may differ in 16-bit floats."""


class FusedKernel(Fused):
    """A group that runs as one Triton kernel on a GPU. Values inside live in registers."""

    in_blocks = False
    several = True

    # -- which operators fit ----------------------------------------------------------------------------

    @staticmethod
    def frame(root: fx.Node) -> Matrix | None:
        """Return the rows and columns of a group whose last member is ``root``; None if ``root`` cannot be the last."""
        return frame_of(root)

    @staticmethod
    def fits_numerics(node: fx.Node, *, fast: bool) -> bool:
        """Whether a kernel may print ``node`` under the option ``numerics``.

        Args:
            node: an operator.
            fast: other last bits are allowed; else ``node`` must have the bits of ATen's kernel.
        """
        return fast or is_exact(node)

    @staticmethod
    def misfit(members: Sequence[fx.Node], matrix: Matrix, threads: int) -> str:
        """Say why these nodes cannot run as one kernel; "" if they can.

        Args:
            members: members of a group and the views between them, in graph order.
            matrix: rows and columns of the group.
            threads: not used: the threads are the CPU's.
        """
        nodes = [node for node in members if not ops.is_view(node.target)]
        called = set(nodes)
        if first_of(nodes[-1]).device.type not in DEVICES:
            return f"{nodes[-1].name} lies on no GPU"
        wrong = next((reason for node in nodes if (reason := unfit(node, matrix, called))), "")
        return wrong or unfit_shifts(nodes, matrix, [node for node in nodes if reduces(node)], LONGEST_ROW)

    @staticmethod
    def unwritable(node: fx.Node, matrix: Matrix) -> str:
        """Say why the result of ``node`` cannot be a result of its group; "" if it can.

        Args:
            node: a member.
            matrix: rows and columns of the group.
        """
        if shape_reach(node.meta["val"].shape, matrix) is None and not is_sum_over_rows(node):
            return f"{node.name} has fewer columns than its group"
        try:
            written_as(node, matrix, ())
        except DoesNotPrintError as reason:
            return str(reason)
        return ""

    def unfit_writes(self) -> str:
        """Say why the group cannot write the arguments that its members write; "" if it can."""
        return unfit_writes(self.nodes, self.written, self.matrix)

    @property
    def launches(self) -> int:
        """Number of kernels of one run: 2 if a result is a sum over rows, which a second kernel ends, else 1."""
        return 2 if self._adds_rows else 1

    @functools.cached_property
    def _adds_rows(self) -> bool:
        """Whether some result is a sum over rows. To print the kernel, which says so as well, takes long."""
        return any(map(is_sum_over_rows, self.results))

    def _overwrites(self) -> tuple[int, ...]:
        """The arguments over which the result may be written: every program reads what it writes, and before.

        No arguments if there are several results, or sums over rows, or members that move columns, or a copy in another
        order: lanes read other elements than those that they write.
        """
        if len(self.results) > 1 or self._adds_rows or moves_columns(self.nodes) or reorders(self.nodes):
            return ()
        result = blocks.only_tensor(self.results[0])
        columns = self.matrix.columns
        written = access_of(result, result.shape, columns)
        return tuple(
            at
            for at, node in enumerate(placeholders(self.body))
            if isinstance(node.meta["val"], torch.Tensor)
            and same_geometry(node.meta["val"], result)
            and self._read_in_place(node, written)
        )

    def _read_in_place(self, node: fx.Node, written: Access | None) -> bool:
        """Whether all members read an argument element by element, where the result has its elements."""
        return all(
            access_of(node.meta["val"], shape_of_operands(user), self.matrix.columns) == written
            and shape_of_operands(user).numel() == self.matrix.numel
            for user in node.users
        )

    # -- how it runs ------------------------------------------------------------------------------------

    @functools.cached_property
    def printed(self) -> KernelText:
        """The kernel as text; printed when it is first asked for."""
        return kernel_text(f"fused_{self.name}", self.body, self.matrix, self.written)

    @functools.cached_property
    def text(self) -> KernelText:  # type: ignore[override]
        """The kernel as it runs: as it is printed, unless :meth:`launch_in` has said otherwise."""
        return self.printed

    @functools.cached_property
    def key(self) -> str:
        """A hash of operators and kernel, in hexadecimal; equal for groups that differ in names alone."""
        return key_of(self.body, self.printed)

    @functools.cached_property
    def shapes(self) -> tuple[LaunchShape, ...]:
        """The shapes of a launch in which the kernel has the same bits, first the one that it is printed for."""
        return shapes_of(self.printed, self.matrix)

    def launch_in(self, shape: LaunchShape) -> None:
        """Launch the kernel in ``shape``, one of :attr:`shapes`, from now on.

        Raises:
            ValueError: it is none of them.
        """
        if shape not in self.shapes:
            raise ValueError(f"the kernel of {self.title} has no shape {shape}")
        self.__dict__["text"] = launched_in(self.printed, self.matrix, shape)
        self.__dict__.pop("_run", None)

    def block_rows(self, threads: int) -> int:
        """Return the number of rows that run at a time: all rows of the matrix, whatever ``threads``."""
        return self.matrix.rows

    def block_bytes(self, threads: int) -> Bytes:
        """Return the bytes that a run takes for itself: those of partial sums over rows, whatever ``threads``."""
        sums = [at for at, node in enumerate(self.results) if is_sum_over_rows(node)]
        return partials_of("", self.matrix, sums).nbytes if sums else 0

    @functools.cached_property
    def kernel(self) -> Kernel:
        """How the program calls the group: a :class:`Kernel` for CUDA whose function is :meth:`write`."""
        return Kernel(self.write, DEVICES)

    @functools.cached_property
    def _run(self) -> Callable[..., None]:
        return launcher(self.text) or self._one_by_one

    def _one_by_one(self, *args: torch.Tensor | float, out: Any) -> None:
        for place, result in zip(self._places(args, out), self.run_members(args), strict=True):
            place.copy_(result)

    def _places(self, args: Sequence[torch.Tensor | float], out: Any) -> list[torch.Tensor]:
        """Where the group writes: its results, then arguments."""
        return [*_each(out), *(args[at] for at in self.writes)]  # type: ignore[list-item]

    def write(self, *args: torch.Tensor | float, out: Any) -> None:
        """Write the results for the arguments ``args`` to ``out``, a tensor or a tuple with the results' geometry.

        An argument that lies otherwise in memory than in the body is copied first. What the first run writes is
        compared with what the operators give, once for each kernel on a machine (:mod:`roamc.operators.gpu.kept`),
        unless they would take more than :data:`COMPARED_BYTES`. Where it differs, Triton is not installed, or Triton
        does not compile the kernel, the operators run one after the other from then on, and a warning says so.
        """
        lie = self.laid_out(args)
        if "_begun" in self.__dict__:
            self._run(*lie, out=out)
        else:
            self.__dict__["_begun"] = True
            self._first(lie, out)
        self.put_back(args, lie)

    def _first(self, args: Sequence[torch.Tensor | float], out: Any) -> None:
        """Run for the first time; the kernel may write over an argument, so what is compared is computed before."""
        made_inside = [tensor for node in self.nodes for tensor in results_of(node) if tensor is not None]
        compared = sum(tensor.numel() * tensor.itemsize for tensor in made_inside) <= COMPARED_BYTES
        compared = compared and not self._was_right
        # A member that changes nothing may return its argument, which is written then.
        want = [result.clone() for result in self.run_members(args)] if compared else None
        try:
            self._run(*args, out=out)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            self._run(*args, out=out)
        else:
            pairs = list(zip(self._places(args, out), want, strict=True)) if want is not None else []
            if not all(self._agrees(place, right) for place, right in pairs):
                self._give_up("its first result is not that of the operators")
                for place, right in pairs:
                    place.copy_(right)
            elif pairs:
                self._keep_as_right()

    @functools.cached_property
    def _machine(self) -> kept.Machine | None:
        """The GPU that the kernel runs on; None where there is none."""
        return here.machine(first_of(self.nodes[-1]).device)

    @property
    def _was_right(self) -> bool:
        """Whether the first result of this kernel, in this shape, was that of the operators before on this machine."""
        return self._machine is not None and kept.of(self._machine, self.key).compared == shape_of(self.text)

    def _keep_as_right(self) -> None:
        """Note that the first result was that of the operators; the program writes it down behind its first run."""
        if self._machine is not None:
            kept.note(self._machine, {self.key: Kept(compared=shape_of(self.text))})

    def _agrees(self, out: torch.Tensor, want: torch.Tensor) -> bool:
        if self.exact or not want.is_floating_point():
            return bool(((out == want) | ((out != out) & (want != want))).all())
        scale = torch.where(want.isfinite(), want, 0).abs().amax().item()
        return bool(torch.isclose(out, want, rtol=ROUNDING, atol=ROUNDING * scale, equal_nan=True).all())

    def _give_up(self, reason: str) -> None:
        warnings.warn(
            f"the Triton kernel of {self.title} does not run here, so its operators run one by one: {reason}",
            RuntimeWarning,
            stacklevel=users_level(),
        )
        self.__dict__["_run"] = self._one_by_one


def _each(out: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of one result or several; none for None."""
    return (out,) if isinstance(out, torch.Tensor) else tuple(out or ())
