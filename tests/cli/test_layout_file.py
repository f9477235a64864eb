"""``roamc layout``: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from roamc.cli.commands import app

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"
# at most 4 bytes are live at once, and no layout has fewer than 5
ABOVE = "id,lower,upper,size\na,1,5,1\nb,4,6,2\nc,0,3,2\nd,3,5,1\ne,5,6,2\nf,1,4,1\ng,0,1,2\n"


def run(*arguments: str, code: int = 0) -> Result:
    """The result of ``roamc layout``; it must end with ``code``."""
    result = CliRunner().invoke(app, ["layout", *arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "example.csv"
    path.write_text(EXAMPLE)
    return str(path)


def test_json_has_arena_bound_status_and_seconds(file: str) -> None:
    data = json.loads(run(file, "--json").stdout)
    assert (data["arena_bytes"], data["bound_bytes"], data["status"]) == (12, 12, "optimal")
    assert (data["storages"], data["fragmentation"], data["fits"]) == (5, 0.0, True)
    assert data["seconds"] >= 0


def test_text_names_the_file_and_the_arena(file: str) -> None:
    shown = run(file).stdout
    assert "example.csv" in shown
    assert "12" in shown
    assert "optimal" in shown


def test_offsets_are_written(file: str, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    run(file, "--output", str(output))
    lines = output.read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[0] for line in lines] == EXAMPLE.splitlines()
    again = json.loads(run(str(output), "--json").stdout)
    assert again["arena_bytes"] == 12


def test_a_capacity_that_is_met_ends_with_0(file: str) -> None:
    assert json.loads(run(file, "--capacity", "12", "--json").stdout)["capacity"] == 12


def test_a_capacity_below_the_live_bytes_ends_with_2(file: str) -> None:
    result = run(file, "--capacity", "11", "--json", code=2)
    assert json.loads(result.stdout)["status"] == "infeasible"
    assert result.stderr == "does not fit: 12 bytes are live at once, the capacity is 11\n"


def test_a_capacity_that_is_refuted_by_search_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "above.csv"
    path.write_text(ABOVE)
    result = run(str(path), "--capacity", "4B", "--json", code=2)
    data = json.loads(result.stdout)
    assert (data["status"], data["fits"], data["arena_bytes"], data["bound_bytes"]) == ("infeasible", False, 5, 4)
    assert "no layout is lower" in result.stderr


def test_no_time_still_gives_a_layout(tmp_path: Path) -> None:
    path = tmp_path / "above.csv"
    path.write_text(ABOVE)
    assert json.loads(run(str(path), "--seconds", "0", "--json").stdout)["status"] == "limit"


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "marked.csv"
    path.write_text("id,lower,upper,size\na,1,2,8\n", encoding="utf-8-sig")
    assert json.loads(run(str(path), "--json").stdout)["arena_bytes"] == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,lower,upper,size\na,1,2,x\n", "bad.csv:2: size is 'x', not a whole number\n"),
        ("", "bad.csv: empty, expected a header with id, lower, upper, size\n"),
    ],
)
def test_a_bad_file_is_one_line_and_ends_with_1(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    result = run(str(path), code=1)
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith(said)
    assert result.stderr.count("\n") == 1


def test_a_missing_file_and_a_bad_capacity_are_one_line(file: str) -> None:
    assert "nowhere.csv: no such file" in run("nowhere.csv", code=1).stderr
    result = run(file, "--capacity", "much", code=1)
    assert "'much' is not a size" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_module_is_the_same_command(file: str) -> None:
    command = [sys.executable, "-m", "roamc", "layout", file, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["arena_bytes"] == 12
