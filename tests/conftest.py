"""What every test may rely on."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.tiers import mark_thorough

# A run that was started in the background (nohup, some CI runners) inherits an ignored Ctrl-C, which tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("COLUMNS", None)  # pytest's workers have 80, which would be somebody's screen
BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="begin no test after so many seconds: the rest is skipped")
    parser.addoption("--shuffle", help="run tests in an order made of this word, the same for the same word")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the second tier. Where time may end before the tests do, another part of them is left out every time."""
    mark_thorough(items)
    if config.getoption("--shuffle"):
        random.Random(config.getoption("--shuffle")).shuffle(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--seconds")
    if limit is not None and time.monotonic() - BEGUN > limit:
        pytest.skip("no time left for it in this run")


@pytest.fixture(autouse=True, scope="session")
def a_cache_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that tests measure is kept in the user's cache folder, and nothing is read from there.

    The folder is named in the environment, and so holds in the processes that tests start; all workers have one.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_lines_of_progress() -> Iterator[None]:
    """Planning is slow on a busy machine, and then says so: no test is to depend on it, but those of the lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROAMC_PROGRESS", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def no_plans_of_other_tests() -> Iterator[None]:
    """On a busy machine any plan takes long enough to be kept: no test is to take one of another's, but those of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roamc.planning.kept_plans.WORTH", math.inf)
        yield


@pytest.fixture(autouse=True)
def an_import_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of files that the command line has run, which stay on the path of its process, end with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def arenas_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few hundred bytes get an arena, too, so that programs over arenas can be tested with them.

    Without this, the allocator has everything where the arena's alignment alone, or what operators take
    beside the arena, would be above eager's peak.
    """
    allow_arenas_of_any_size(monkeypatch)


def allow_arenas_of_any_size(patch: pytest.MonkeyPatch) -> None:
    """What the fixture does, for a process of its own."""
    from roamc.passes import layout
    from roamc.passes.layout import EFFORT, choose, placement
    from roamc.planning import search

    patch.setattr(layout, "EFFORT", dataclasses.replace(EFFORT, small_graph=0))
    patch.setattr(search, "above_eager", lambda planned, maker: 0)
    for module in (choose, placement):
        patch.setattr(
            module, "is_above", lambda peak, eager: eager is not None and peak > eager + EFFORT.allocator_call
        )
