"""Whoever reads the output may leave early, as ``| head -1`` does: a command then ends without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roamc.cli import commands, request

SMALL = ["gpt", "--batch", "2", "--seq", "8", "--layers", "1", "--width", "16", "--heads", "2", "--vocab", "32"]


@pytest.fixture
def storages(tmp_path: Path) -> str:
    path = tmp_path / "storages.csv"
    path.write_text("id,lower,upper,size\na,0,2,64\n")
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["models"], ["models", "--json"], ["plan", *SMALL], ["plan", *SMALL, "--json"],
     ["explain", *SMALL], ["explain", *SMALL, "--source"], ["explain", *SMALL, "--graph"],
     ["max-batch", *SMALL[:1], *SMALL[3:], "--memory-budget", "1MB", "--largest", "1"], ["layout", "FILE"]],
    ids=lambda arguments: " ".join(part for part in arguments if part not in SMALL[1:]),
)  # fmt: skip
def test_a_command_whose_reader_is_gone_ends_quietly(
    arguments: list[str], storages: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [storages if argument == "FILE" else argument for argument in arguments]
    with open(writer, "w") as stdout:
        monkeypatch.setenv("ROAMC_PROGRESS", "0")
        monkeypatch.setattr(sys, "argv", ["roamc", *arguments])
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # typer wraps both, and they stay so
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(request, "trace", lambda *_: pytest.fail("nobody reads the curve"))
        with pytest.raises(SystemExit) as end:
            commands.app(prog_name="roamc")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what a buffer may hold still
    assert end.value.code == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("closed", [False, True], ids=["nobody reads", "closed"])
def test_a_whole_process_ends_quietly(closed: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = f"exec {sys.executable} -m roamc models" + (" >&-" if closed else "")
    environment = {**os.environ, "ROAMC_PROGRESS": "0"}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0 if closed else 141, "")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "roamc", "models"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"
