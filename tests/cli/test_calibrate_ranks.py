"""``roamc calibrate`` as ``torchrun`` starts it: several processes with one command line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from roamc.cost import read_profile
from tests.cli.test_cli import run
from tests.end_to_end.test_determinism import ROOT, environment


def launched(rank: int = 0, ranks: int = 1, port: int = 1) -> dict[str, str]:
    """What ``torchrun`` sets in the environment of a rank, all of them being on one node."""
    return {
        **{"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_two(arguments: Sequence[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each of two ranks that run ``roamc calibrate --quick`` with ``arguments``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "roamc", "calibrate", "--quick", *arguments],
            cwd=ROOT, env=environment(**launched(rank, 2, port)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def test_first_rank_writes_the_links_and_all_say_so(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first, second = run_two(["--json", "--output", str(path)])
    profile = read_profile(path)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert json.loads(first[1]) == json.loads(path.read_text())
    assert second[1] == ""
    assert second[2].strip() == f"rank 1: rank 0 has written the profile to {path}"
    assert set(profile.links) == {"node"}
    assert profile.links["node"]["ranks"] == 2
    assert profile.source.endswith("; links in a node by gloo among 2 ranks on 1 node")


def test_ranks_fail_together_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "profile.json"
    line = f"error: rank 0: {path.parent}: no such folder\n"
    assert run_two(["--output", str(path)]) == [(1, "", line)] * 2


@pytest.mark.parametrize(
    ("ranks", "device", "said"),
    [
        (1, "cpu", "torchrun has started one rank, and links are between several: give --nproc-per-node 2 or more"),
        (2, "cuda:1", "under torchrun each rank takes the GPU of its own number: --device cuda, not cuda:1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_meet(
    ranks: int, device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched(0, ranks).items():
        monkeypatch.setenv(name, value)
    assert said in run("calibrate", "--device", device, code=1).stderr
