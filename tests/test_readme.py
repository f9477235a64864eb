"""The examples of README and guide run, and their tables name what there is."""

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

from roamc.cli.commands import app
from roamc.options import Options

ROOT = Path(__file__).parent.parent
README, GUIDE = ((ROOT / name).read_text("utf-8") for name in ("README.md", "GUIDE.md"))
SHARED, *ALL = re.findall(r"```python\n(.*?)```", README + GUIDE, re.DOTALL)
CHAPTER = re.compile(r"\]\((README\.md|GUIDE\.md|)#([^)]*)\)")
LIBRARIES = ("transformers", "accelerate", "lightning", "torch.distributed")
EXAMPLES = [
    example for example in ALL if not re.search(rf"^(from|import) ({'|'.join(LIBRARIES)})\b", example, re.MULTILINE)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=[re.sub(r"\W+", " ", example)[:20] for example in EXAMPLES])
def test_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    scope: dict[str, Any] = {"__name__": "readme"}
    exec(compile(SHARED, "shared example", "exec"), scope)
    exec(compile(example, "example", "exec"), scope)
    assert "plan of" in capsys.readouterr().out


RUN_ALL = """
import json, sys
import torch

shared, *examples = json.load(sys.stdin)
for example in examples:
    torch.compiler.reset()
    if torch.distributed.is_initialized():  # accelerate leaves its group
        torch.distributed.destroy_process_group()
    scope = {"__name__": "readme"}
    exec(compile(shared, "shared example", "exec"), scope)
    exec(compile(example, "example", "exec"), scope)
    print("=" * 8)
torch.distributed.destroy_process_group()
"""


def test_examples_of_libraries_run(tmp_path: Path) -> None:
    examples = [example for example in ALL if example not in EXAMPLES]
    assert len(examples) == len(LIBRARIES)
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps([SHARED, *examples]), cwd=tmp_path, text=True,
        env={**os.environ, **one_rank, "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.split("=" * 8)[:-1]
    assert [text.count("plan of") >= 1 for text in printed] == [True] * len(examples)
    assert "aot_eager" not in done.stderr, "roamc fell back"


def test_every_option_is_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", README.partition("## Options")[2], re.MULTILINE))
    assert set(rows) == {field.name for field in dataclasses.fields(Options)}
    for field in dataclasses.fields(Options):
        shown = rows[field.name].strip('`"')
        assert shown == ("none" if field.default in (None, ()) else str(field.default).lower())


def test_every_command_line_is_understood() -> None:
    for line in re.findall(r"^roamc (.*?)(?:\s{2,}#.*)?$", README + GUIDE, re.MULTILINE):
        name, *arguments = line.split()
        named = [word for word in arguments if word.startswith("--")]
        text = re.sub(r"\x1b\[[\d;]*m", "", CliRunner().invoke(app, [name, "--help"]).output)
        assert [word for word in named if word not in text] == []


def test_every_row_of_the_plan_is_explained() -> None:
    shown = CliRunner().invoke(app, ["plan", "gpt", "--batch", "1", "--seq", "8", "--layers", "1"]).stdout
    table = GUIDE.partition("## What the plan says")[2].partition("##")[0]
    for row in re.findall(r"^  (\w[\w' ]*?)\s{2,}", shown, re.MULTILINE):
        assert row == "planned in" or f"| {row} |" in table


@pytest.mark.parametrize("page", [README, GUIDE], ids=["README", "GUIDE"])
def test_every_file_that_is_linked_is_there(page: str) -> None:
    assert [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page) if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", [README, GUIDE], ids=["README", "GUIDE"])
def test_every_chapter_that_is_linked_is_there(page: str) -> None:
    linked = {
        (name or "README.md" * (page is README) or "GUIDE.md", chapter) for name, chapter in CHAPTER.findall(page)
    }
    there = {
        (name, re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"))
        for name, text in (("README.md", README), ("GUIDE.md", GUIDE))
        for title in re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    }
    assert linked - there == set()
