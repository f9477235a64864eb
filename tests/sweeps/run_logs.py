"""Plans from logs of random modules that write in place, beside those that torch.compile made live.

    python -m tests.sweeps.run_logs [--first N] [--count N] [--workers N] [--log FILE]

Writes one JSON line per model and prints those whose plans differ. A plan is the same but for its notes; or has the
same peak, and a note that says what may be other ("noted"); or is of another graph, and a note says that the log lacks
operators ("unlogged"). ``--first 17 --count 1`` is model 17 again, which ``run_models --family in-place --show 17``
prints. Exits with 1 if there are any.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roamc.capture.dump import files, graphs, trace_log
from roamc.errors import RoamcError
from roamc.frontends import backend
from roamc.options import parse_options
from roamc.planning import search
from tests.capture.dump import logged
from tests.sweeps import command, pool

FOLDER = "TORCH_TRACE"
"""The environment variable with the folder of logs: torch reads it when a worker imports it."""

GOOD = ("same", "noted", "unlogged", "left out")

UNLOGGED = graphs.LEFT_OUT
"""In a note: the log lacks operators that the model has, and no plan of it can be that of the model."""

NOTED = ("estimated", "eager's peak may be lower", "each peak may be wrong", UNLOGGED)
"""In notes that say what may be other than live."""


def work(seed: int, first: int) -> Iterator[pool.Row]:
    """The verdict of one model."""
    del first
    warnings.simplefilter("ignore")
    backend.LATEST.clear()
    before = _written()
    try:
        logged.run(f"in-place:{seed}", None)
    except Exception as error:  # of torch or of the model: run_models judges it
        yield {"outcome": "left out", "text": f"{type(error).__name__}: {error}"[:400]}
        return
    live = [plan.to_json() for plan in backend.LATEST]
    try:
        outcome, text = _verdict(live, _written()[len(before) :])
    except RoamcError as error:
        outcome, text = "raises", str(error)[:400]
    yield {"outcome": outcome, "text": text}


def _written() -> str:
    """What this process has written to its log."""
    mine = f" {os.getpid()} "
    logs = (path.read_text("utf-8") for path in Path(os.environ[FOLDER]).glob("*.log"))
    return next((text for text in logs if mine in text[:200]), "")


def _verdict(live: list[str], log: str) -> tuple[str, str]:
    pieces = trace_log.read(log, Path("log")) if live else ()
    if not live:
        return "left out", "no plan was made"
    if len(pieces) != len(live):
        return "differs", f"{len(live)} plans were made live, and the log has {len(pieces)} graphs"
    outcomes = []
    for text, piece in zip(live, pieces, strict=True):
        wanted = json.loads(text)
        graph = graphs.train_graph(files.of_piece(Path("log"), piece), wanted["name"], {})
        read = json.loads(search.run(graph, parse_options({})).plan.to_json())
        fields = {name for name in wanted if wanted[name] != read[name]} - {"notes"}
        notes = "; ".join(graph.notes)
        numbers = {name: (wanted[name], read[name]) for name in sorted(fields - {"decisions"})}
        same_peak = wanted["peak_bytes"] == read["peak_bytes"] and any(each in notes for each in NOTED)
        unlogged = UNLOGGED in notes and "fingerprint" in fields
        other = "noted" if same_peak else "unlogged" if unlogged else "differs"
        outcomes.append((other if fields else "same", f"{numbers}; {notes}"[:800]))
    order = ("differs", "unlogged", "noted", "same")
    return min(outcomes, key=lambda pair: order.index(pair[0]))


def main() -> int:
    """Run the sweep; 1 if a plan differs."""
    options = _options()
    seeds = range(options.first, options.first + options.count)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        rows = ((f"model {seed}", {"seed": seed}, row) for seed, _, row in pool.run(work, seeds, options.workers))
        return command.judged(rows, options.log, GOOD)


def _options() -> Any:
    parser = command.parser("plans from logs of random modules", "build/logs.jsonl")
    parser.add_argument("--first", type=int, default=0, help="number of the first model (default: %(default)s)")
    parser.add_argument("--count", type=int, default=200, help="models (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
