"""Layout problems as CSV, in the form of minimalloc (github.com/google/minimalloc): one storage in each row.

    id,lower,upper,size,alignment,hint,gaps,offset

Steps are half-open, [lower, upper). `buffer` and `buffer_id` may stand for `id`, `start` and `begin` for `lower`; a
column called `end` instead of `upper` holds the last step itself, one less. Of the last four columns any may be
missing: alignment in bytes; hint, an offset or -1; gaps, separated by blanks, each `lower-upper` for steps at
which no byte is needed or `lower-upper@low:high` where only these bytes of the storage are; offset, where the
storage is fixed, -1 or nothing if it is not. Other columns are not read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.problem import MOST_BYTES, Gap, LayoutProblem, make_problem

_NAMES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower"}
_NEEDED = ("id", "lower", "upper", "size")
_GAP = re.compile(r"(\d+)-(\d+)(?:@(\d+):(\d+))?")


class CsvError(ValueError):
    """A text is no layout problem in minimalloc's form of CSV; the message names the text's source and the line."""


@dataclass(frozen=True, eq=False)
class Instance:
    """A layout problem with a name for each storage: names[i] is the name of storage i of `problem`."""

    names: tuple[str, ...]
    problem: LayoutProblem


@dataclass(frozen=True)
class _Row:
    name: str
    born: int
    dead: int
    size: int
    alignment: int
    hint: int
    fixed: int
    gaps: tuple[tuple[int, int, int, int], ...]


def read_csv(path: Path) -> Instance:
    """Read a layout problem from a CSV file in the form of minimalloc, UTF-8, one storage in each row.

    Raises CsvError, naming file and line, if the file is not of this form, and OSError if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a byte order mark
    except UnicodeDecodeError:
        raise CsvError(f"{path}: not a text file") from None
    return parse_csv(text, str(path))


def parse_csv(text: str, source: str) -> Instance:
    """Read a layout problem from the text of a CSV file in the form of minimalloc.

    text: a header, then one storage in each line.
    source: name of the text in error messages, such as the path of the file.

    Raises CsvError, naming source and line, if the text is not of this form or is no valid problem.
    """
    lines = text.rstrip().splitlines()
    if not lines:
        raise CsvError(f"{source}: empty, expected a header with {', '.join(_NEEDED)}")
    place, inclusive = _columns(lines[0], source)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(_row(line, place, inclusive))
        except ValueError as error:
            raise CsvError(f"{source}:{number}: {error}") from None
    try:
        problem = _problem(rows)
    except ValueError as whole:
        for number, row in enumerate(rows, start=2):
            try:
                _problem([row])
            except ValueError as error:
                message = str(error).replace("storage 0", f"storage {row.name!r}", 1)
                raise CsvError(f"{source}:{number}: {message}") from None
        raise CsvError(f"{source}: {whole}") from None
    return Instance(tuple(row.name for row in rows), problem)


def format_csv(instance: Instance, offset: LongArray) -> str:
    """Return the CSV text, in the form of minimalloc, of an instance and an offset for each storage.

    The columns alignment, hint and gaps are left out if no storage has an entry there.

    offset: int64[n] bytes, written to the column offset. `parse_csv` reads these as fixed offsets.
    """
    problem = instance.problem
    gaps: dict[int, list[str]] = {}
    for gap in problem.gaps:
        window = f"@{gap.low}:{gap.high}" if gap.high > gap.low else ""
        gaps.setdefault(gap.storage, []).append(f"{gap.born}-{gap.dead}{window}")
    columns: dict[str, Sequence[object]] = {
        "id": instance.names,
        "lower": problem.born.tolist(),
        "upper": problem.dead.tolist(),
        "size": problem.size.tolist(),
    }
    if (problem.own_alignment > 1).any():
        columns["alignment"] = problem.own_alignment.tolist()
    if (problem.hint >= 0).any():
        columns["hint"] = problem.hint.tolist()
    if gaps:
        columns["gaps"] = [" ".join(gaps.get(storage, [])) for storage in range(problem.num_storages)]
    columns["offset"] = offset.tolist()
    rows = zip(*columns.values(), strict=True)
    return "".join(",".join(map(str, row)) + "\n" for row in (tuple(columns), *rows))


def _columns(header: str, source: str) -> tuple[dict[str, int], bool]:
    """Where each column stands, and whether the last step is part of a life."""
    columns = [name.strip() for name in header.split(",")]
    inclusive = "end" in columns
    names = ["upper" if name == "end" else _NAMES.get(name, name) for name in columns]
    for name in names:
        if names.count(name) > 1:
            raise CsvError(f"{source}:1: more than one column for {name!r}")
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise CsvError(f"{source}:1: no column for {', '.join(map(repr, missing))}")
    return {name: place for place, name in enumerate(names)}, inclusive


def _row(line: str, place: dict[str, int], inclusive: bool) -> _Row:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(place):
        raise ValueError(f"{len(fields)} fields, the header has {len(place)}")

    def number(column: str, default: int | None = None) -> int:
        text = fields[place[column]] if column in place else ""
        if not text and default is not None:
            return default
        if not re.fullmatch(r"-?\d+", text):
            raise ValueError(f"{column} is {text!r}, not a whole number")
        if abs(value := int(text)) >= MOST_BYTES:
            raise ValueError(f"{column} is {text}, too large")
        return value

    gaps = fields[place["gaps"]].split() if "gaps" in place else []
    return _Row(
        name=fields[place["id"]],
        born=number("lower"),
        dead=number("upper") + inclusive,
        size=number("size"),
        alignment=number("alignment", 1),
        hint=max(number("hint", -1), -1),
        fixed=max(number("offset", -1), -1),
        gaps=tuple(_gap(text, inclusive) for text in gaps),
    )


def _gap(text: str, inclusive: bool) -> tuple[int, int, int, int]:
    match = _GAP.fullmatch(text)
    if match is None:
        raise ValueError(f"gap {text!r} is not of the form lower-upper or lower-upper@low:high")
    born, dead, low, high = (int(number or 0) for number in match.groups())
    return born, dead + inclusive, low, high


def _problem(rows: Sequence[_Row]) -> LayoutProblem:
    return make_problem(
        [row.size for row in rows],
        [row.born for row in rows],
        [row.dead for row in rows],
        1,
        own_alignment=[row.alignment for row in rows],
        fixed=[row.fixed for row in rows],
        hint=[row.hint for row in rows],
        gaps=[Gap(storage, *gap) for storage, row in enumerate(rows) for gap in row.gaps],
    )
