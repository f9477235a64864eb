"""Machine code that an installation brings along: what `compiled` functions are compiled to, in one file.

`setup.py` has it written when it builds roamc. Where it does not fit, `roamc warm-up` or the first calls compile the
functions, which takes about half a minute in all, and later processes read them from numba's cache.
"""

import functools
import hashlib
import pickle
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba
from numba.core.codegen import get_host_cpu_features

from roamc.solvers import arrays

FILE = Path(arrays.__file__).with_name("machine_code.bin")
"""Where an installation has its machine code; missing where it was built without numba."""

_V3 = (
    *("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse4.1", "sse4.2"),
    *("ssse3", "xsave"),
)

BASELINES = {"x86_64": ("x86-64-v3", _V3), "AMD64": ("x86-64-v3", _V3)}
"""For a machine as Python calls it, the processor to compile for, as LLVM calls it, and what it must have for that.

Haswell of 2013 has all of it. Other machines get LLVM's "generic" code."""

Code = tuple[Any, ...]
"""A compiled function as numba reduces it to plain data."""

UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, ImportError, AttributeError, ValueError, TypeError, LookupError),
    *(ArithmeticError, MemoryError, RuntimeError),
)
"""The errors of reading a damaged file of compiled functions: those of unpickling, and of LLVM for machine code."""


class Unfit(Exception):
    """The machine code is missing, or is not for this installation; the message says why."""


@functools.cache
def shipped(file: Path, triple: str, features: str) -> tuple[dict[str, bytes], str]:
    """Return the machine code in `file` by function and argument types, see `name_of`, pickled; read once.

    Args:
        file: written by `build`.
        triple: of the machine, as LLVM names it.
        features: of its processor, such as "+avx2,-avx512f".

    Returns:
        (codes, reason): why there are none: the file is missing or damaged, or was compiled from other sources, by
        another version of numba or of Python, or for another machine; "" where they fit.
    """
    try:
        return _read(file, triple, features), ""
    except Unfit as error:
        return {}, str(error)
    except UNREADABLE as error:
        return {}, f"{file.name} is damaged: {type(error).__name__}"


def _read(file: Path, triple: str, features: str) -> dict[str, bytes]:
    try:
        with file.open("rb") as stream:
            stamp, needed = pickle.load(stream), pickle.load(stream)
            for what, here in _stamp(triple).items():
                if stamp.get(what) != here:
                    raise Unfit(f"compiled for another {what}: {stamp.get(what)!s:.24}, here {here:.24}")
            check_processor(needed, features)
            digest, content = pickle.load(stream), stream.read()
    except OSError as error:
        raise Unfit(f"{file.name}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise Unfit(f"{file.name} is damaged")
    codes: dict[str, bytes] = pickle.loads(content)
    return codes


def check_processor(needed: Iterable[str], features: str) -> None:
    """Raise `Unfit` if a processor with `features`, such as "+avx2,-avx512f", lacks one of those `needed`."""
    if missing := sorted(set(needed) - {name[1:] for name in features.split(",") if name.startswith("+")}):
        raise Unfit(f"the processor lacks {', '.join(missing)}")


def name_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return the name in `shipped` of `function` for arguments of these numba types."""
    return f"{function.__module__}.{function.__qualname__}{arguments}"


def build() -> None:
    """Compile every loop of the solvers and write the machine code to `FILE`.

    `setup.py` calls it in a process that has imported no other solver: numba chooses the processor at the first one.

    Raises:
        Unfit: this machine cannot run what it would compile.
    """
    processor, needed = baseline()
    check_processor(needed, get_host_cpu_features())  # type: ignore[no-untyped-call]
    settings: Any = numba.config
    settings.CPU_NAME, settings.CPU_FEATURES = processor, ""
    FILE.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings.CACHE_DIR = folder
        from roamc.solvers import compiled, warm_up

        warm_up.warm_up()
        modules = [module for name, module in sys.modules.items() if name.startswith("roamc.solvers.")]
        codes, (triple, *compiled_for) = compiled.codes_of(
            value for module in modules for value in vars(module).values()
        )
    if compiled_for != [processor, ""]:
        raise Unfit(f"compiled for {compiled_for}: a solver was imported before")
    write(FILE, codes, triple, needed)


def write(file: Path, codes: dict[str, Code], triple: str, needed: Iterable[str]) -> None:
    """Write `codes`, compiled for the machine `triple` and processors that have what is `needed`, to `file`."""
    content = pickle.dumps({name: pickle.dumps(code) for name, code in codes.items()})
    with file.open("wb") as stream:
        for part in (_stamp(triple), tuple(needed), hashlib.sha256(content).hexdigest()):
            pickle.dump(part, stream)
        stream.write(content)


def baseline() -> tuple[str, tuple[str, ...]]:
    """Return the processor to compile for on this machine, and the features that it must have."""
    return BASELINES.get(platform.machine(), ("generic", ()))


@functools.cache
def _stamp(triple: str) -> dict[str, str]:
    """What must be equal where code was compiled and where it runs; sources count by their content, not by time."""
    digest = hashlib.sha256()
    for source in sorted(FILE.parent.rglob("*.py")):
        digest.update(f"{source.relative_to(FILE.parent).as_posix()} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    version = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    return {"Python": version, "numba": numba.__version__, "machine": triple, "source": digest.hexdigest()}
