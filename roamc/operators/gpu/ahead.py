"""Kernels compiled ahead of time for GPUs that need not be here, and what they take of such a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from roamc.errors import OptionError
from roamc.graph import placeholders, tensors_of
from roamc.operators import blocks
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel import KernelText
from roamc.operators.gpu.launch import jit_function
from roamc.units import Bytes

CAPABILITIES = {"sm_80": 80, "sm_90": 90}
"""Name of a target to its compute capability: A100 and H100."""

ASSEMBLERS = ("ptxas-blackwell", "ptxas")
"""Assemblers that come with Triton, the one that reads the newest form of its output first."""

POINTERS = {
    **{torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64"},
    **{torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"},
    torch.bool: "*i1",
}
"""Dtype of an operand to Triton's name for a pointer to it."""

NUMBER = "fp32"
"""Triton's name for the type of a number that a kernel is passed: a float of Python's."""

MISSING = "compiling kernels needs Triton: pip install 'roamc[gpu]'"


@dataclass(frozen=True)
class Compiled:
    """What one program of a kernel takes of a GPU.

    Attributes:
        kernel: name of the kernel's function.
        target: the GPU, a key of :data:`CAPABILITIES`.
        registers: of one thread.
        shared_bytes: of shared memory.
        spilled_bytes: of one thread's values that have no register and go through memory.
    """

    kernel: str
    target: str
    registers: int
    shared_bytes: Bytes
    spilled_bytes: Bytes


def compiled(group: FusedKernel, target: str) -> Compiled:
    """Compile the kernel of ``group`` for ``target``, a key of :data:`CAPABILITIES`; takes about a second.

    Raises:
        OptionError: Triton is not installed.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError:
        raise OptionError(MISSING) from None
    function = jit_function(group.text)
    signature = signature_of(function, group.body, group.text)
    made: Any = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=group.text.constants),
        target=GPUTarget("cuda", CAPABILITIES[target], 32),
        options={"num_warps": group.text.warps, "enable_fp_fusion": False},
    )
    registers, spilled = assembled(made.asm["ptx"], target, Path(triton.__file__).parent / "backends/nvidia/bin")
    return Compiled(group.text.function, target, registers, made.metadata.shared, spilled)


def signature_of(function: Any, body: fx.Graph, text: KernelText) -> dict[str, str]:
    """Return the types of the arguments of a kernel by their names, as Triton's compiler wants them.

    Args:
        function: the kernel, of ``triton.jit``.
        body: the operators of the group, with fake values.
        text: the kernel as text.
    """
    inputs = [next((POINTERS[one.dtype] for _, one in tensors_of(node)), NUMBER) for node in placeholders(body)]
    results = len(function.arg_names) - len(inputs) - len(text.constants)
    outs = [POINTERS[blocks.only_tensor(node).dtype] for node in blocks.results_of(body)[:results]]
    return dict(zip(function.arg_names, [*inputs, *outs, *("constexpr" for _ in text.constants)], strict=True))


def assembled(ptx: str, target: str, folder: Path) -> tuple[int, Bytes]:
    """Return registers and spilled bytes of a thread, as NVIDIA's assembler in ``folder`` says for ``target``.

    Raises:
        RuntimeError: the assembler says neither.
    """
    tool = next(folder / name for name in ASSEMBLERS if (folder / name).exists())
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # Triton writes for sm_90 with the instructions that no later GPU has.
        command = [str(tool), "-v", f"-arch={target}{'a' if target == 'sm_90' else ''}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, stores = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    if registers is None or stores is None:
        raise RuntimeError(f"{tool.name} does not say what the kernel takes: {said}")
    return int(registers[1]), int(stores[1])
