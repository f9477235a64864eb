"""minimalloc's CSV form is read as its README and converter have it, and written the same way."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from roamc.solvers.layout import solve, validate
from roamc.solvers.layout.csv_form import CsvError, Instance, format_csv, parse_csv, read_csv
from roamc.solvers.layout.problem import Gap, LayoutProblem, make_problem
from tests.solvers.layout.cases import PROPERTY, special_problems

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def test_example_of_the_readme_fits_its_capacity() -> None:
    instance = parse_csv(EXAMPLE, "example")
    assert instance.names == ("b1", "b2", "b3", "b4", "b5")
    solution = solve(instance.problem, capacity=12)
    assert validate(instance.problem, solution).good
    assert solution.arena_bytes == 12


def test_offsets_are_written_behind_the_columns_that_are_used() -> None:
    written = format_csv(parse_csv(EXAMPLE, "example"), np.array([8, 8, 4, 4, 0]))
    assert written.splitlines()[:2] == ["id,lower,upper,size,offset", "b1,0,3,4,8"]


def test_all_columns_are_read_in_any_sequence() -> None:
    text = (
        "note,gaps,hint,size,upper,lower,alignment,offset,buffer\n-,3-4 5-6@2:7,16,9,8,1,4,-1,x\n-,,-1,8,9,2,1,24,y\n"
    )
    problem = parse_csv(text, "text").problem
    assert problem.size.tolist() == [9, 8]
    assert (problem.born.tolist(), problem.dead.tolist()) == ([1, 2], [8, 9])
    assert problem.own_alignment.tolist() == [4, 1]
    assert problem.hint.tolist() == [16, -1]
    assert problem.fixed.tolist() == [-1, 24]
    assert problem.gaps == (Gap(0, 3, 4), Gap(0, 5, 6, 2, 7))


@pytest.mark.parametrize(
    ("header", "dead"), [("id,lower,upper,size", 4), ("buffer,start,end,size", 5), ("buffer_id,begin,upper,size", 4)]
)
def test_a_column_called_end_holds_the_last_step(header: str, dead: int) -> None:
    assert parse_csv(f"{header}\na,1,4,8\n", "text").problem.dead.tolist() == [dead]


def test_gaps_end_as_lives_do() -> None:
    gap = parse_csv("id,lower,end,size,gaps\na,1,9,8,3-4\n", "text").problem.gaps[0]
    assert (gap.born, gap.dead) == (3, 5)


def columns(problem: LayoutProblem) -> list[object]:
    arrays = (problem.size, problem.born, problem.dead, problem.own_alignment, problem.fixed, problem.hint)
    return [*(array.tolist() for array in arrays), [gap for gap in problem.gaps if gap.low < gap.high or not gap.high]]


@PROPERTY
@given(special_problems())
def test_what_is_written_is_read_again(given_problem: LayoutProblem) -> None:
    source = given_problem
    problem = make_problem(
        source.size,
        source.born,
        source.dead,
        1,
        own_alignment=source.own_alignment,
        hint=source.hint,
        gaps=[gap for gap in source.gaps if gap.low < gap.high or not gap.high],
    )
    names = tuple(f"s{number}" for number in range(problem.num_storages))
    solution = solve(problem, node_limit=0)
    again = parse_csv(format_csv(Instance(names, problem), solution.offset), "text")
    fixed = make_problem(
        problem.size,
        problem.born,
        problem.dead,
        1,
        own_alignment=problem.own_alignment,
        fixed=solution.offset,
        hint=problem.hint,
        gaps=problem.gaps,
    )
    assert again.names == names
    assert columns(again.problem) == columns(fixed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.csv: empty"),
        ("\n\n", "f.csv: empty"),
        ("id,lower,size\n", "f.csv:1: no column for 'upper'"),
        ("id,lower,upper,size,size\n", "f.csv:1: more than one column for 'size'"),
        ("id,lower,upper,end,size\n", "f.csv:1: more than one column for 'upper'"),
        ("id,lower,upper,size\na,1,2\n", "f.csv:2: 3 fields, the header has 4"),
        ("id,lower,upper,size\na,1,2,3\n\nb,1,2,3\n", "f.csv:3: 1 fields, the header has 4"),
        ("id,lower,upper,size\na,1,2,3\nb,1,2,x\n", "f.csv:3: size is 'x', not a whole number"),
        ("id,lower,upper,size\na,1,2,\n", "f.csv:2: size is '', not a whole number"),
        ("id,lower,upper,size\na,1,2,99999999999999999999\n", "f.csv:2: size is 99999999999999999999, too large"),
        ("id,lower,upper,size\na,1,2,3\nb,2,2,3\n", "f.csv:3: storage 'b' lives from step 2 to 2"),
        ("id,lower,upper,size\na,1,2,-3\n", "f.csv:2: storage 'a' has a negative size"),
        ("id,lower,upper,size,alignment\na,1,2,3,0\n", "f.csv:2: storage 'a' has an alignment of 0"),
        ("id,lower,upper,size,gaps\na,1,9,3,2_4\n", "f.csv:2: gap '2_4' is not of the form"),
        ("id,lower,upper,size,gaps\na,1,9,3,2-4@1\n", "f.csv:2: gap '2-4@1' is not of the form"),
        ("id,lower,upper,size,gaps\na,1,9,3,0-4\n", "f.csv:2: storage 'a' has a gap from step 0 to 4 outside"),
        ("id,lower,upper,size,offset\na,1,9,3,0\nb,1,9,3,2\n", "f.csv: storages 0 and 1 are fixed over each other"),
    ],
)
def test_bad_files_are_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(CsvError) as caught:
        parse_csv(text, "f.csv")
    assert str(caught.value).startswith(message)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CsvError, match="not a text file"):
        read_csv(path)
