"""Blocks of memory: programs that take turns share one, steps in flight never do."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

import pytest
import torch
from torch import nn

import roamc
from roamc import budget
from roamc.runtime import blocks, huge_pages
from roamc.runtime.blocks import Block, give, held, holds, take

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the blocks that other tests have left."""
    monkeypatch.setattr(blocks, "_BLOCKS", [])


def test_the_block_used_last_comes_back() -> None:
    mine, other = take(100, CPU, None), take(100, CPU, None)
    assert mine is not other
    give(other, keep=True)
    give(mine, keep=True)
    assert take(100, CPU, mine) is mine


def test_the_smallest_of_a_fitting_size_is_taken() -> None:
    taken = [take(size, CPU, None) for size in (400, 100, 200)]
    for block in taken:
        give(block, keep=True)
    assert take(150, CPU, None) is taken[2]
    assert take(210, CPU, taken[1]) is taken[0], "its own is too small now"
    assert held() == 700


def test_a_block_of_more_than_twice_the_need_is_left_alone() -> None:
    large = take(201, CPU, None)
    give(large, keep=True)
    other = take(100, CPU, large)
    assert other is not large
    assert held() == 201 + 100


def test_an_idle_block_that_is_too_small_gives_its_memory_back() -> None:
    small, smaller = take(100, CPU, None), take(50, CPU, None)
    give(small, keep=True)
    give(smaller, keep=True)
    large = take(300, CPU, None)
    assert held() == 300 + 50
    assert small.storage.nbytes() == 0
    assert take(100, CPU, small) is small, "it takes memory again"
    assert large.storage.nbytes() == 300


def test_a_busy_block_is_left_alone() -> None:
    busy = take(300, CPU, None)
    pointer = busy.storage.data_ptr()
    other = take(100, CPU, busy)
    assert other is not busy
    assert (busy.storage.data_ptr(), busy.storage.nbytes()) == (pointer, 300)


def test_memory_goes_back_unless_it_is_kept() -> None:
    block = take(100, CPU, None)
    give(block, keep=False)
    assert held() == 0
    again = take(50, CPU, block)
    assert again is block
    assert held() == 50


def test_a_block_ends_with_the_last_that_refers_to_it() -> None:
    block = take(100, CPU, None)
    give(block, keep=True)
    assert held() == 100
    del block
    assert blocks._blocks() == []


def test_ranges_that_are_given_back_do_not_count() -> None:
    block = take(100, CPU, None)
    block.give_back(0, 64)
    block.give_back(0, 64)
    assert (held(), block.trimmed) == (36, frozenset({(0, 64)}))
    block.reset([(64, 80)])
    assert (held(), block.trimmed) == (84, frozenset({(64, 80)}))
    block.take_again(0, 10)
    assert held() == 84, "no such range is trimmed"
    give(block, keep=False)
    assert (held(), block.trimmed) == (0, frozenset())


def resident(block: Block) -> int:
    """Bytes of the pages that the system has given the block."""
    where, page = block.storage.data_ptr() + block.start, mmap.PAGESIZE
    flags = (ctypes.c_ubyte * (block.nbytes // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(where), ctypes.c_size_t(block.nbytes), flags) == 0
    return page * sum(flag & 1 for flag in flags)


@pytest.mark.skipif(sys.platform != "linux", reason="pages go back on Linux only")
def test_the_system_has_the_pages_that_are_given_back() -> None:
    block = take(4 * huge_pages.SIZE, CPU, None, parts=True)
    assert (block.storage.data_ptr() + block.start) % huge_pages.SIZE == 0
    whole = torch.empty(0, dtype=torch.uint8).set_(block.storage, block.start, (block.nbytes,), (1,))
    whole.fill_(1)
    assert resident(block) == block.nbytes
    block.give_back(huge_pages.SIZE, 3 * huge_pages.SIZE)
    assert resident(block) == held() == 2 * huge_pages.SIZE
    block.take_again(huge_pages.SIZE, 3 * huge_pages.SIZE)
    assert whole.sum() == 2 * huge_pages.SIZE, "what was there is gone, the rest is not"
    whole.fill_(1)
    assert resident(block) == held() == block.nbytes


def test_work_of_another_stream_is_not_overwritten() -> None:
    block = Block(CPU, stream=7)
    block.fill(100, parts=False)
    give(block, keep=True)
    assert take(100, CPU, block) is not block


@pytest.mark.parametrize("keep", [True, False])
def test_tensors_of_a_block_are_known(keep: bool) -> None:
    block = take(64, CPU, None)
    inside = torch.empty(0).set_(block.storage, 4, (4,), (1,))
    assert holds(inside)
    assert not holds(torch.empty(4))
    assert not holds(torch.empty(0))
    give(block, keep=keep)
    assert holds(inside)


def test_a_lock_held_at_a_fork_does_not_block_the_child() -> None:
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with blocks._LOCK.now:
            locked.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(30)
    child = os.fork()
    if child == 0:
        give(take(10, CPU, None), keep=True)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 7


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_batches_of_different_sizes_share_memory() -> None:
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    step = roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    for size in (100, 90, 128, 100, 90, 128):
        step(torch.randn(size, 32))
    sizes = [plan.arena_bytes for plan in step.plans]
    assert len(sizes) == 3
    assert held() <= 2 * max(sizes)
    assert held() < sum(sizes)


@pytest.mark.usefixtures("arenas_of_any_size")
@pytest.mark.parametrize("idle", ["keep", "free"])
def test_idle_arenas_hold_memory_only_where_it_is_kept(idle: str) -> None:
    model, x = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)), torch.randn(2048, 32)
    reference = [torch.autograd.grad(square(model, x), list(model.parameters()))]
    compiled = roamc.optimize(model, strict=True, idle_arena=idle)
    for _ in range(3):
        reference.append(torch.autograd.grad(square(compiled, x), list(model.parameters())))
    (plan,) = roamc.plans(compiled)
    assert plan.arena_bytes > 0
    assert held() == (plan.arena_bytes if idle == "keep" else 0)
    for gradients in reference[1:]:
        torch.testing.assert_close(gradients, reference[0])


@pytest.mark.usefixtures("arenas_of_any_size")
def test_idle_arenas_are_free_for_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    sizes = (2048, 2040, 600, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    needs = roamc.plan(model, torch.randn(max(sizes), 32), loss_fn=square, optimizer=optimizer).peak_bytes
    memory = int(1.5 * needs)
    monkeypatch.setattr(budget, "_free", lambda device: memory - held())
    step = roamc.train_step(model, square, optimizer, strict=True, memory_budget="device")
    for size in sizes:
        step(torch.randn(size, 32))
    assert len({plan.budget_bytes for plan in step.plans}) == 1
    assert held() <= memory
