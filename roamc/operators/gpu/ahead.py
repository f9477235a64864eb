"""Kernels compiled ahead of time for GPUs that need not be here, and what they take of such a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from roamc.errors import OptionError
from roamc.graph import placeholders, tensors_of
from roamc.operators import blocks
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel import NUMBER, KernelText
from roamc.operators.gpu.launch import jit_function
from roamc.operators.gpu.launch_shapes import LaunchShape, launched_in
from roamc.operators.gpu.partial_sums import WARPS
from roamc.units import Bytes

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Name of a target, A100, H100 and MI300, to what Triton calls it: its backend, its architecture, threads of a warp."""

ASSEMBLERS = ("ptxas-blackwell", "ptxas")
"""Assemblers that come with Triton, the one that reads the newest form of its output first."""

TOLD_BY_NVIDIA = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
TOLD_BY_AMD = (r"\.vgpr_count:\s*(\d+)", r"\.vgpr_spill_count:\s*(\d+)")
"""Where an assembler's output tells the registers and the spilled bytes (AMD: registers, of four bytes) of a thread."""

POINTERS = {
    **{torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64"},
    **{torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"},
    torch.bool: "*i1",
}
"""Dtype of an operand to Triton's name for a pointer to it."""

MISSING = "compiling kernels needs Triton: pip install 'roamc[gpu]'"


@dataclass(frozen=True)
class Compiled:
    """What one program of a kernel takes of a GPU.

    Attributes:
        kernel: name of the kernel's function.
        target: the GPU, a key of :data:`TARGETS`.
        registers: registers of one thread; on an AMD GPU those that differ between the threads of a warp.
        shared_bytes: shared memory of the program.
        spilled_bytes: bytes of one thread's values that have no register and go through memory.
    """

    kernel: str
    target: str
    registers: int
    shared_bytes: Bytes
    spilled_bytes: Bytes


def compiled(group: FusedKernel, target: str, shape: LaunchShape | None = None) -> tuple[Compiled, ...]:
    """Compile the kernels of a group; takes about a second for each.

    Args:
        group: the group.
        target: the GPU, a key of :data:`TARGETS`.
        shape: one of the group's shapes of a launch; None for that which it is launched in.

    Raises:
        OptionError: Triton is not installed.
    """
    text = group.text if shape is None else launched_in(group.printed, group.matrix, shape)
    kernels = []
    for source in sources_of(group.body, text):
        kernel = compile_for(target, source)
        registers, spilled = taken_of(kernel, target)
        kernels.append(Compiled(source.name, target, registers, kernel.metadata.shared, spilled))
    return tuple(kernels)


@dataclass(frozen=True)
class Source:
    """A kernel as Triton's compiler wants it.

    Attributes:
        name: of the function.
        function: the kernel, of ``triton.jit``.
        signature: the types of its arguments by their names.
        constants: names and values of the compile-time constants.
        warps: warps of 32 threads that run one program.
    """

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, int]
    warps: int

    @property
    def attributes(self) -> dict[tuple[int], list[list[object]]]:
        """What Triton sees of pointers when a kernel is launched: those into an arena are multiples of 16."""
        pointers = (at for at, kind in enumerate(self.signature.values()) if kind.startswith("*"))
        return {(at,): [["tt.divisibility", 16]] for at in pointers}


def compile_for(target: str, source: Source) -> Any:
    """Return what Triton's compiler makes of a kernel for ``target``, a key of :data:`TARGETS`.

    Raises:
        OptionError: Triton is not installed.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError:
        raise OptionError(MISSING) from None
    return triton.compile(
        ASTSource(source.function, source.signature, source.constants, attrs=source.attributes),
        target=GPUTarget(*TARGETS[target]),
        options={"num_warps": source.warps, "enable_fp_fusion": False},
    )


def sources_of(body: fx.Graph, text: KernelText) -> tuple[Source, ...]:
    """Return the kernels of a group, ready to compile: one, or two if the group adds up over rows.

    Args:
        body: the operators of the group, with fake values.
        text: the kernel as text.
    """
    operands = [next((POINTERS[one.dtype] for _, one in tensors_of(node)), NUMBER) for node in placeholders(body)]
    ends, kernel = text.partials, jit_function(text)
    # What the members write over operands has no pointer of its own, and partial sums have one for all.
    tables = [POINTERS[table.dtype] for table in text.tables]
    stored = len(kernel.arg_names) - len(operands) - len(tables) - len(text.constants)
    stored += 0 if ends is None else len(ends.results) - 1
    results = [POINTERS[blocks.only_tensor(node).dtype] for node in blocks.results_of(body)[:stored]]
    if ends is None:
        return (_source(kernel, text.function, [*operands, *results, *tables], text.constants, text.warps),)
    others = [kind for at, kind in enumerate(results) if at not in ends.results]
    partials, sums = POINTERS[torch.float32], [results[at] for at in ends.results]
    second = jit_function(text, ends.function)
    return (
        _source(kernel, text.function, [*operands, *others, partials, *tables], text.constants, text.warps),
        _source(second, ends.function, [partials, *sums], ends.constants, WARPS),
    )


def _source(function: Any, name: str, pointers: Sequence[str], constants: dict[str, int], warps: int) -> Source:
    types = [*pointers, *("constexpr" for _ in constants)]
    return Source(name, function, dict(zip(function.arg_names, types, strict=True)), constants, warps)


def taken_of(kernel: Any, target: str) -> tuple[int, Bytes]:
    """Return registers, and spilled bytes, of one thread of a compiled kernel.

    Args:
        kernel: as :func:`compile_for` returns it.
        target: what it was compiled for, a key of :data:`TARGETS`.

    Raises:
        RuntimeError: neither is told.
        subprocess.CalledProcessError: NVIDIA's assembler refuses the kernel.
        StopIteration: NVIDIA's assembler is not there.
    """
    amd = TARGETS[target][0] == "hip"
    about = kernel.asm["amdgcn"] if amd else _assembled(kernel.asm["ptx"], target)
    patterns = TOLD_BY_AMD if amd else TOLD_BY_NVIDIA
    registers, spilled = (re.search(pattern, about) for pattern in patterns)
    if registers is None or spilled is None:
        raise RuntimeError(f"what the kernel takes on {target} is not told: {about}")
    return int(registers[1]), int(spilled[1]) * (4 if amd else 1)


def _assembled(ptx: str, target: str) -> str:
    """What NVIDIA's assembler, which comes with Triton, says of a kernel."""
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    tool = next(folder / name for name in ASSEMBLERS if (folder / name).exists())
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # Triton writes for sm_90 with the instructions that no later GPU has.
        command = [str(tool), "-v", f"-arch={target}{'a' if target == 'sm_90' else ''}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
