"""Which torch is tested, and what is said to users of another."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from roamc.version import TESTED_TORCH, warn_of_untested_torch

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("installed", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.14.0a0+git1234567"])
def test_a_tested_torch_is_not_worth_a_word(installed: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested_torch(installed)


@pytest.mark.parametrize("installed", ["2.15.0+cpu", "3.0.0", "2.20.1"])
def test_a_newer_torch_gets_one_warning_that_names_the_tested_range(installed: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"tested with torch 2\.11 to 2\.14, and this is torch {re.escape(installed)}"
    ):
        warn_of_untested_torch(installed)


def test_this_torch_is_tested() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert TESTED_TORCH[0] <= (major, minor) <= TESTED_TORCH[1]


@pytest.mark.parametrize("name", ["README.md", "roamc/compat.py"])
def test_the_range_is_the_same_wherever_it_is_named(name: str) -> None:
    oldest, newest = (".".join(map(str, release)) for release in TESTED_TORCH)
    ranges = re.findall(r"torch (2\.\d+) to (2\.\d+)", (ROOT / name).read_text("utf-8"))
    assert set(ranges) == {(oldest, newest)}


def test_installation_takes_any_newer_torch() -> None:
    oldest = ".".join(map(str, TESTED_TORCH[0]))
    assert f'"torch>={oldest}",' in (ROOT / "setup.py").read_text("utf-8")
