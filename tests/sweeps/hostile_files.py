"""Reads mutants of files and derives graphs of those that can be read: a plan's graph, or one of roamc's errors.

    python -m tests.sweeps.hostile_files text|log|archive FIRST LAST [read|derive]

Prints one line for each outcome with its count, every error that is none of roamc's, and the slowest and largest.
"""

from __future__ import annotations

import contextlib
import io
import resource
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from roamc.capture.dump import archive, files
from roamc.errors import RoamcError
from tests.capture.dump.hostile import mutant

SECONDS, BYTES = 5.0, 1 << 30


def read(kind: str, path: Path) -> Any:
    """Read a file to plain data, as the process with limits does."""
    return archive.read(str(path)) if kind == "archive" else files.read(str(path))


def derive(kind: str, data: Any) -> Any:
    """Return the graph of a step, as the command line makes it."""
    from roamc.capture.dump import graphs
    from roamc.capture.dump.exported import Exported, sizes_of
    from roamc.frontends.workload import Workload, capture

    if kind != "archive":
        return graphs.train_graph(data[0], "graph", {"s0": 8})
    model = Exported(data, sizes_of(data, {}))
    return capture(Workload("model", model, model.batch))


def outcome(kind: str, path: Path, deriving: bool) -> str:
    """What becomes of a file: "read", "derived" or the name of an error."""
    try:
        data = read(kind, path)
        if deriving:
            derive(kind, data)
    except RoamcError as error:
        if "\n" in str(error):
            return f"several lines: {error}"
        if path.name not in str(error):
            return f"names no file: {error}"
        return type(error).__name__
    except Exception as error:  # of any kind: what the sweep looks for
        return f"FAULT {type(error).__name__}: {str(error)[:200]}"
    return "derived" if deriving else "read"


def base() -> bytes:
    """An archive that is in order."""
    import torch

    from tests.capture.dump.archives import Mixed, save, tokens

    shapes = {"dynamic_shapes": ({0: torch.export.Dim("b", min=2)},)}
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder, "m.pt2"), Mixed(), (tokens(4),), **shapes)
        with zipfile.ZipFile(path) as file:
            kept = {name: file.read(name) for name in file.namelist() if "weight_" not in name}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in kept.items():
            file.writestr(name, content)
    return buffer.getvalue()


def main() -> int:
    """Run the sweep; returns 1 if there was a fault or a limit was passed."""
    kind, first, last, *more = sys.argv[1:]
    deriving, whole = more == ["derive"], base() if kind == "archive" else b""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    slowest = faults = 0.0
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.pt2" if kind == "archive" else "m.txt")
        for seed in range(int(first), int(last)):
            path.write_bytes(mutant(kind, seed, whole))
            start = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                said = outcome(kind, path, deriving)
            seconds = time.process_time() - start
            counts[said.split(":")[0]] += 1
            if said.startswith(("FAULT", "several", "names no file")) or seconds > SECONDS:
                faults += 1
                print(f"{kind} {seed}: {seconds:.1f} s, {said}", flush=True)
            slowest = max(slowest, seconds)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{kind}: {dict(counts)}; slowest {slowest:.2f} s, memory {begun >> 10} to {largest >> 10} MB")
    return int(faults > 0 or largest << 10 > BYTES)


if __name__ == "__main__":
    sys.exit(main())
