"""The README's examples run, and its tables name what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from roamc.cli import app
from roamc.options import Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SHARED, *EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=[re.sub(r"\W+", " ", example)[:20] for example in EXAMPLES])
def test_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    scope: dict[str, Any] = {"__name__": "readme"}
    exec(compile(SHARED, "shared example", "exec"), scope)
    exec(compile(example, "example", "exec"), scope)
    assert "plan of" in capsys.readouterr().out


def test_every_option_is_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", README.partition("## Options")[2], re.MULTILINE))
    assert set(rows) == {field.name for field in dataclasses.fields(Options)}
    for field in dataclasses.fields(Options):
        shown = rows[field.name].strip('`"')
        assert shown == ("none" if field.default in (None, ()) else str(field.default).lower())


def test_every_command_line_is_understood() -> None:
    for line in re.findall(r"^roamc (.*?)(?:\s{2,}#.*)?$", README, re.MULTILINE):
        name, *arguments = line.split()
        named = [word for word in arguments if word.startswith("--")]
        text = re.sub(r"\x1b\[[\d;]*m", "", CliRunner().invoke(app, [name, "--help"]).output)
        assert [word for word in named if word not in text] == []


def test_every_row_of_the_plan_is_explained() -> None:
    shown = CliRunner().invoke(app, ["plan", "gpt", "--batch", "1", "--seq", "8", "--layers", "1"]).stdout
    table = README.partition("## What the plan says")[2].partition("##")[0]
    for row in re.findall(r"^  (\w[\w' ]*?)\s{2,}", shown, re.MULTILINE):
        assert row == "planned in" or f"| {row} |" in table


def test_every_file_that_is_linked_is_there() -> None:
    assert [link for link in re.findall(r"\]\(([^)#:]+)\)", README) if not (ROOT / link).exists()] == []
