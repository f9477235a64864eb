"""The examples of README and documentation run, and their tables and links name what there is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import roamc
from docs import hooks
from roamc.cli.commands import app
from roamc.options import Options
from roamc.planning.pipeline import PIPELINE

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LIFE = ROOT / "docs" / "life.md"
"""Its blocks build on one another, and say what they print."""

TEXT = {path.name: path.read_text("utf-8") for path in PAGES}
FOR_USERS = [TEXT[path.name] for path in PAGES if path != LIFE and path.name != "CONTRIBUTING.md"]
SHARED, *ALL = re.findall(r"```python\n(.*?)```", "".join(FOR_USERS), re.DOTALL)
LIBRARIES = ("transformers", "accelerate", "lightning", "torch.distributed")
EXAMPLES = [
    example for example in ALL if not re.search(rf"^(from|import) ({'|'.join(LIBRARIES)})\b", example, re.MULTILINE)
]
PRINTS = re.compile(r"(```python\n(.*?)```\n)(\n```text\n(.*?)```\n)?", re.DOTALL)
"""A block of Python, and behind it what it prints, if it prints anything."""


@pytest.mark.parametrize("example", EXAMPLES, ids=[re.sub(r"\W+", " ", example)[:20] for example in EXAMPLES])
def test_example_runs(
    example: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    scope: dict[str, Any] = {"__name__": "readme"}
    exec(compile(SHARED, "shared example", "exec"), scope)
    exec(compile(example, "example", "exec"), scope)
    assert " needs " in capsys.readouterr().out


RUN_ALL = """
import json, sys
import torch

shared, *examples = json.load(sys.stdin)
for example in examples:
    torch.compiler.reset()
    if torch.distributed.is_initialized():  # an example may leave its group
        torch.distributed.destroy_process_group()
    scope = {"__name__": "readme"}
    exec(compile(shared, "shared example", "exec"), scope)
    exec(compile(example, "example", "exec"), scope)
    print("=" * 8)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def test_examples_of_libraries_run(tmp_path: Path) -> None:
    examples = [example for example in ALL if example not in EXAMPLES]
    assert all(any(f" {library}" in example for example in examples) for library in LIBRARIES)
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps([SHARED, *examples]), cwd=tmp_path, text=True,
        env={**os.environ, **one_rank, "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.split("=" * 8)[:-1]
    assert [text.count(" needs ") >= 1 for text in printed] == [True] * len(examples)
    assert "aot_eager" not in done.stderr, "roamc fell back"


def test_a_steps_life_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "life"}

    def run(block: re.Match[str]) -> str:
        exec(compile(block[2], "life.py", "exec"), scope)
        output = capsys.readouterr().out
        return block[1] + (f"\n```text\n{output}```\n" if output else "")

    page = PRINTS.sub(run, TEXT[LIFE.name])
    if "WRITE_DOCS" in os.environ:
        LIFE.write_text(page, "utf-8")
    version = torch.__version__.partition("+")[0]  # others trace operators of other names
    if f"torch=={version}\n" in (ROOT / "constraints.txt").read_text("utf-8"):
        assert page == LIFE.read_text("utf-8")


def test_every_option_is_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S", hooks.options(), re.MULTILINE))
    assert list(rows) == [field.name for field in dataclasses.fields(Options)]
    assert (rows["memory_budget"], rows["order"], rows["strict"], rows["codecs"]) == ("none", '"best"', "False", "none")


def test_every_name_of_the_interface_is_in_the_table_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `roamc\.(\w+)` \| ([A-Z].*\.) \|$", hooks.interface(), re.MULTILINE))
    assert list(rows) == roamc.__all__ == dir(roamc)
    assert rows["progress"].startswith("Whether planning")
    assert not re.search(r":\w+:`|``", "".join(rows.values()))


def test_a_star_imports_the_interface() -> None:
    scope: dict[str, Any] = {}
    exec("from roamc import *", scope)
    assert scope.keys() - {"__builtins__"} == set(roamc.__all__)


def test_every_pass_has_a_section_with_its_checks() -> None:
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", hooks.passes(), re.MULTILINE | re.DOTALL))
    assert list(sections) == [each.name for each in PIPELINE]
    for text in sections.values():
        assert re.search(r"\A[A-Z].*\n\n```text\nrewrite:.*^checks: .*```\s*\Z", text, re.MULTILINE | re.DOTALL)
        assert not re.search(r":\w+:`|``", text.replace("```", ""))


def test_every_mark_of_a_page_can_be_filled() -> None:
    marks = [word for text in TEXT.values() for word in hooks.MARK.findall(text)]
    assert sorted(marks) == sorted(hooks.PARTS)
    assert "](fit.md)" in hooks.filled("<!-- made of: README.md -->")


def test_every_command_line_is_understood() -> None:
    for line in re.findall(r"^roamc (.*?)(?:\s{2,}#.*)?$", "\n".join(TEXT.values()), re.MULTILINE):
        name, *arguments = line.split()
        named = [word for word in arguments if word.startswith("--")]
        text = re.sub(r"\x1b\[[\d;]*m", "", CliRunner().invoke(app, [name, "--help"]).output)
        assert [word for word in named if word not in text] == []


def test_every_command_is_named() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^\| `roamc ([\w-]+)` \|", TEXT["fit.md"], re.MULTILINE)) == commands


@pytest.mark.parametrize("more", ["", "--mesh pp=2", "--memory-budget 80%", "--gpu h100"])
def test_every_row_of_the_plan_is_explained(more: str) -> None:
    words = ["plan", "gpt", "--batch", "1", "--seq", "8", "--layers", "2", *more.split()]
    rows = re.findall(r"^  (\w[\w' ]*?)\s{2,}", CliRunner().invoke(app, words).stdout, re.MULTILINE)
    assert rows
    for row in rows:
        assert row == "planned in" or f"| {row} |" in TEXT["plan.md"]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as of the site when it is built."""
    text = hooks.filled(path.read_text("utf-8"))
    titles = re.findall(r"^##* (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", TEXT[path.name])
    for name, anchor in links:
        target = path.parent / name if name else path
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_the_readme_is_short() -> None:
    assert len(TEXT["README.md"].splitlines()) <= 150
