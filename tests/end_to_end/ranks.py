"""Several processes that form one group, for tests of what talks to other ranks.

They are forked from a server that has imported torch and roamc and done nothing else: importing takes four seconds of
processor time, more than most ranks need for their test.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

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
left = torch._C._distributed_c10d._get_work_registry_size()
dist.destroy_process_group()
assert not left, f"{left} collectives that nobody waited for"
"""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "roamc", "torch.distributed", "tests.parallel", "tests.end_to_end.helpers"])


def run_ranks(folder: Path, script: str, ranks: int = 2, arguments: Sequence[str] = (), seconds: float = 400) -> str:
    """Run ``script`` in every rank, between ``BEGIN`` and ``END``; what they printed.

    Raises:
        AssertionError: a rank failed, was not finished in time, or left a collective that nobody waited for.
    """
    logs = [folder / f"said.{rank}" for rank in range(ranks)]
    processes = [
        SERVER.Process(
            target=_as_program,
            args=(BEGIN + script + END, [str(folder), str(rank), str(ranks), *arguments], str(log)),
            daemon=True,
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + seconds
    try:
        with mock.patch.dict(os.environ, environment(GLOO_SOCKET_IFNAME="lo")):  # the server starts with the first one
            for process in processes:
                process.start()
        for process in processes:
            process.join(max(1.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    text = "\n".join(log.read_text() for log in logs)
    assert [process.exitcode for process in processes] == [0] * ranks, text[-6000:]
    return text


def _as_program(code: str, arguments: list[str], log: str) -> None:
    """In a forked process: run ``code`` as ``python -c`` would, and print into the file ``log``."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(code, main.__dict__)
