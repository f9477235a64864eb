"""Several processes that form one group, for tests of what talks to other ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.test_determinism import ROOT, environment

BEGIN = """
import datetime, sys, torch, roamc
import torch.distributed as dist
folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120)
)
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(folder: Path, script: str, ranks: int = 2, arguments: Sequence[str] = (), seconds: float = 400) -> str:
    """Run ``script`` in every rank, between ``BEGIN`` and ``END``; what they printed.

    Raises:
        AssertionError: a rank failed, was not finished in time, or left a collective that nobody waited for.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + script + END, str(folder), str(rank), str(ranks), *arguments],
            cwd=ROOT, env=environment(GLOO_SOCKET_IFNAME="lo"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    end = time.monotonic() + seconds
    try:
        said = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = "\n".join(said)
    assert [process.returncode for process in processes] == [0] * ranks, text[-6000:]
    assert "unwaited collective" not in text, text[-6000:]
    return text
