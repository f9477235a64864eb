"""The plan that the README begins with, as the command line prints it: ``python -m benchmarks.example``."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks._measure import machine, save

COMMAND = "roamc plan gpt2 --batch 8 --memory-budget 50%"


def main() -> None:
    """Run the command in a fresh process; print and keep its lines."""
    program = "from roamc.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMAND.split()[1:]], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "400"},
    )  # fmt: skip
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    print(*lines, sep="\n")
    save("example", [{"model": "gpt2", "command": COMMAND, "lines": lines}], f"one run on {machine()['cores']} cores")


if __name__ == "__main__":
    main()
