"""What the sweeps have in common as commands: options, a log, and a line for every case that fails."""

from __future__ import annotations

import argparse
import collections
import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.sweeps import pool
from tests.sweeps.databases import Entry
from tests.sweeps.pool import Row


def parser(about: str, log: str) -> argparse.ArgumentParser:
    """The options of every sweep; ``log`` is where it writes by default."""
    argument_parser = argparse.ArgumentParser(description=about)
    argument_parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    argument_parser.add_argument("--log", type=Path, default=log, help="one JSON line per case (default: %(default)s)")
    return argument_parser


def rows_in(log: Path) -> list[Row]:
    """The rows of a log, none if there is no such file; a last line that was cut off is left out."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def by_entry(work: pool.Work, jobs: Sequence[pool.Job], workers: int) -> Iterator[tuple[str, dict[str, Any], Row]]:
    """What :func:`record` takes, of jobs that begin with an entry of torch's databases."""
    for (entry, *_), number, row in pool.run(work, jobs, workers):
        yield f"{entry} [{row.get('sample', '?')}]", {"entry": str(entry), "case": number}, row


def record(
    rows: Iterable[tuple[str, dict[str, Any], Row]],
    log: Path,
    before: Iterable[Row] = (),
    good: Container[str] = ("same", "left out"),
) -> collections.Counter[str]:
    """Write every row to ``log`` as it comes, print those that fail, and count outcomes.

    Args:
        rows: name of the case for the printed line, what the log says of the case, and its row.
        log: its folder is made if need be.
        before: rows of an earlier run, which the log begins with; they count.
        good: outcomes that are not printed.
    """
    counts = collections.Counter(row["outcome"] for row in before)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in before)
        for name, case, row in rows:
            file.write(json.dumps({**case, **row}) + "\n")
            file.flush()
            counts[row["outcome"]] += 1
            if row["outcome"] not in good:
                print(f"{row['outcome']}: {name}: {row['text']}", flush=True)
    return counts


def judged(
    rows: Iterable[tuple[str, dict[str, Any], Row]], log: Path, good: Container[str] = ("same", "left out")
) -> int:
    """As :func:`record`; print how many outcomes are ``good``, and return what the command exits with: 0 if all are."""
    counts = record(rows, log, good=good)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    count_good = sum(count for outcome, count in counts.items() if outcome in good)
    print(f"{count_good} of {counts.total()} as they should be: {said}")
    return int(count_good < counts.total())


def by_operator(about: str, log: str, entries: Iterable[Entry], work: pool.Work, good: Container[str]) -> int:
    """The whole of a command that judges samples of operators of torch's database; as :func:`judged`.

    Args:
        about: what the command does.
        log: where it writes by default.
        entries: the operators, of which the option ``--only`` chooses.
        work: judges a job, an entry and the number of its samples.
        good: outcomes that are as they should be.
    """
    argument_parser = parser(about, log)
    argument_parser.add_argument("--samples", type=int, default=2, help="of each entry, evenly spread (default: 2)")
    argument_parser.add_argument("--only", default="", help="regular expression on e.g. 'op add float32'")
    options = argument_parser.parse_args()
    jobs = [(entry, options.samples) for entry in entries if re.search(options.only, str(entry))]
    return judged(by_entry(work, jobs, options.workers), options.log, good)
