"""The longest time that a command says nothing on stderr, from the start of its process to its end; stderr is a pipe.

    python -m benchmarks.silence                      # each of COMMANDS
    python -m benchmarks.silence -- plan gpt2 --batch 8 --memory-budget 50%
    python -m benchmarks.silence --python script.py   # a program that uses roamc from Python

The seconds are those of a clock: on a busy machine they are longer.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

COMMANDS = (
    "plan gpt",
    "plan gpt --memory-budget 50%",
    "plan gpt2 --batch 8 --memory-budget 50%",
    "plan gpt2 --memory-budget +1%",
    "plan gpt2 --memory-budget 80% --memory-budget min",
    "plan gpt2-xl --batch 4 --memory-budget 50%",
    "plan gpt2-xl --device cuda --memory-budget 40GiB",
    "plan bert --memory-budget min",
    "plan llama --memory-budget 50% --device cuda",
    "plan t5 --memory-budget 60%",
    "plan vit --memory-budget 70%",
    "plan resnet50 --memory-budget 50%",
    "plan mobilenetv2",
    "plan gpt --mesh pp=2 --stage all",
    "explain gpt",
    "explain gpt2 --memory-budget 50%",
    "explain gpt2 --device cuda --source",
    "max-batch gpt2 --device cuda --memory-budget 38GB",
    "calibrate --output /dev/null",
    "demo --steps 5",
    "models",
    "warm-up",
)
"""The targets: every command that takes longer than a moment, over the built-in models."""


@dataclass(frozen=True)
class Silence:
    """What a process has said.

    Attributes:
        longest: seconds of its longest silence.
        at: when that began, in seconds from its start.
        total: seconds that it took.
        lines: number of its lines on stderr.
        code: its exit code.
    """

    longest: float
    at: float
    total: float
    lines: int
    code: int


def measure(command: Sequence[str]) -> Silence:
    """Run a command and time its lines on stderr; its stdout is read by nobody."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:  # without plans of earlier runs
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env) as process:
            assert process.stderr is not None
            times = [0.0, *(time.monotonic() - begun for _ in process.stderr)]
            code = process.wait()
    times.append(time.monotonic() - begun)
    longest, at = max((after - before, before) for before, after in pairwise(times))
    return Silence(longest, at, times[-1], len(times) - 2, code)


def main() -> None:
    """Measure the commands that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a program in the place of roamc")
    parser.add_argument("command", nargs="*", help="arguments of roamc")
    asked = parser.parse_args()
    roamc = [sys.executable, "-m", "roamc"]
    named = [[sys.executable, asked.python]] if asked.python else [[*roamc, *asked.command]] if asked.command else []
    for command in named or [[*roamc, *shlex.split(line)] for line in COMMANDS]:
        said = measure(command)
        when = f"{said.longest:6.1f} s silent from {said.at:6.1f} s on, of {said.total:6.1f} s"
        print(
            f"{when}, {said.lines:3} lines, exit code {said.code}: {shlex.join(command[1:])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
