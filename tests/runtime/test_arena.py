"""Arenas and their pool: who holds which block when."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from roamc.runtime import huge_pages
from roamc.runtime.arena import Arena, ArenaPool, fill

CPU = torch.device("cpu")


def pool(nbytes: int = 256) -> ArenaPool:
    return ArenaPool(nbytes, CPU, lambda arena: {})


def state(of: ArenaPool) -> tuple[int, int]:
    return len(of.free), len(of.waiting)


def parked(arenas: ArenaPool) -> tuple[Arena, torch.Tensor]:
    """Take an arena, and park it; return it and the token, with which it is freed."""
    arena = arenas.acquire()
    token = arena.view("saved", 0, (4,), (1,), torch.float32).detach()
    arenas.park(arena, token)
    return arena, token


def test_a_view_lies_where_it_was_told() -> None:
    arena = Arena(256, CPU, lambda arena: {})
    view = arena.view("x", 64, (2, 3), (1, 2), torch.float32)
    view.copy_(torch.arange(6.0).view(2, 3))
    assert arena.base[64:88].view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]


def test_views_have_version_counters_of_their_own() -> None:
    arena = Arena(256, CPU, lambda arena: {})
    first, second = (arena.view(name, 0, (4,), (1,), torch.float32) for name in "ab")
    before = second._version
    first.add_(1)
    assert (second._version, second._base) == (before, None)


@pytest.mark.parametrize("how", ["resized", "moved"])
def test_a_view_that_torch_has_changed_is_found(how: str) -> None:
    arena = Arena(256, CPU, lambda arena: {})
    arena.view("good", 0, (4,), (1,), torch.float32)
    bad = arena.view("bad", 64, (4,), (1,), torch.float32)
    assert arena.moved_views() == []
    if how == "resized":
        bad.resize_(2, 2)
    else:
        bad.set_(torch.empty(4).untyped_storage(), 0, (4,), (1,))
    assert arena.moved_views() == ["bad"]


PAGE = 1 << 21
"""Bytes of a large page: memory is given back in these."""

pages = pytest.mark.skipif(not huge_pages.usable(CPU), reason="no pages are given back on this system")


def paged(*trimmed: tuple[int, int]) -> ArenaPool:
    """Arenas of four pages, of which the ranges ``trimmed`` are given back at the beginning of a step."""
    return ArenaPool(4 * PAGE, CPU, lambda arena: {}, trimmed=trimmed)


@pages
def test_a_step_begins_with_the_closed_ranges_of_its_program() -> None:
    of = paged((PAGE, 2 * PAGE))
    arena = of.acquire()
    assert arena._block is not None
    arena.open(PAGE, 2 * PAGE)
    arena.close(2 * PAGE, 3 * PAGE)
    of.release(arena)
    assert of.acquire() is arena
    assert arena._block.trimmed == {(PAGE, 2 * PAGE)}


@pages
def test_a_copy_has_the_bytes_and_the_closed_ranges() -> None:
    of = paged()
    one, other = of.acquire(), of.acquire()
    assert one._block is not None
    one.base.random_()
    one.close(PAGE, 2 * PAGE)
    other.close(2 * PAGE, 3 * PAGE)
    other.copy_from(one)
    assert other._block is not None
    assert other._block.trimmed == {(PAGE, 2 * PAGE)}
    for low, high in ((0, PAGE), (2 * PAGE, 4 * PAGE)):
        assert torch.equal(one.base[low:high], other.base[low:high])


def test_what_is_expanded_is_copied_once() -> None:
    place, tensor = torch.zeros(3, 1, 2).expand(3, 4, 2), torch.arange(6.0).view(3, 1, 2).expand(3, 4, 2)
    fill(place, tensor)
    assert torch.equal(place, tensor)


@pytest.mark.parametrize(("conj", "neg"), [(True, False), (False, True), (True, True)])
def test_lazy_bits_of_complex_views(conj: bool, neg: bool) -> None:
    arena = Arena(256, CPU, lambda arena: {})
    view = arena.view("z", 0, (1,), (1,), torch.complex64, conj=conj, neg=neg)
    arena.base.view(torch.complex64)[0] = 1 + 2j
    assert view.is_conj() is conj
    assert view.is_neg() is neg
    assert view.item() == (-1 if neg else 1) * (1 - 2j if conj else 1 + 2j)


def test_planned_tensors_move_with_the_block() -> None:
    small, large = pool(4096), pool(5000)
    other = large.acquire()
    large.release(other)
    arena = small.acquire()  # takes the idle block
    assert arena.storage.data_ptr() == other.storage.data_ptr()
    plain = arena.view("x", 64, (2, 3), (1, 2), torch.float32)
    lazy = arena.view("z", 128, (2,), (1,), torch.complex64, conj=True, neg=True)
    small.release(arena)
    assert large.acquire() is other
    assert small.acquire() is arena
    assert arena.storage.data_ptr() != other.storage.data_ptr()
    assert arena.moved_views() == []
    arena.base.zero_()
    plain.fill_(2)
    lazy.fill_(1 + 2j)
    assert arena.base[64:88].view(torch.float32).tolist() == [2] * 6
    assert torch.view_as_real(arena.base[128:144].view(torch.complex64)).tolist() == [[-1, 2]] * 2


def test_a_free_arena_is_used_again() -> None:
    arenas = pool()
    first = arenas.acquire()
    arenas.release(first)
    assert arenas.acquire() is first
    assert arenas.acquire() is not first


def test_a_parked_arena_is_freed_with_its_token() -> None:
    arenas = pool()
    _, token = parked(arenas)
    assert state(arenas) == (0, 1)
    del token
    gc.collect()
    assert state(arenas) == (1, 0)


def test_a_taken_arena_is_not_freed_by_the_end_of_its_token() -> None:
    arenas = pool()
    arena, token = parked(arenas)
    taken = arenas.take(token)
    assert taken is not None
    assert taken[1] is arena
    assert arenas.take(token) is None
    del token
    gc.collect()
    assert state(arenas) == (0, 0), "it is in use"
    arenas.release(arena)
    assert state(arenas) == (1, 0)


def test_the_end_of_an_old_token_does_not_free_a_later_step() -> None:
    arenas = pool()
    arena, old = parked(arenas)
    assert arenas.take(old) is not None
    arenas.release(arena)
    _, _new = parked(arenas)
    del old
    gc.collect()
    assert state(arenas) == (0, 1)


def test_an_arena_that_is_put_back_ends_with_its_token() -> None:
    arenas = pool()
    _, token = parked(arenas)
    taken = arenas.take(token)
    assert taken is not None
    arenas.put_back(*taken)
    assert state(arenas) == (0, 1)
    del token
    gc.collect()
    assert state(arenas) == (1, 0)


def test_tensors_of_another_arena_are_not_found() -> None:
    arenas = pool()
    arena, other = arenas.acquire(), arenas.acquire()
    token = arena.view("saved", 0, (4,), (1,), torch.float32).detach()
    arenas.park(arena, token)
    assert arenas.take(other.view("x", 0, (4,), (1,), torch.float32)) is None
    assert arenas.take(torch.empty(4)) is None


def test_threads_never_share_an_arena() -> None:
    arenas = pool()
    busy: set[int] = set()
    clashes: list[int] = []
    gate = threading.Barrier(4)

    def run() -> None:
        gate.wait()
        for _ in range(300):
            arena = arenas.acquire()
            if id(arena) in busy:
                clashes.append(id(arena))
            busy.add(id(arena))
            token = arena.base.view(-1)
            arenas.park(arena, token)
            taken = arenas.take(token)
            assert taken is not None
            busy.discard(id(arena))
            arenas.release(taken[1])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run) for _ in range(4)]:
            done.result()
    assert clashes == []
    assert state(arenas)[1] == 0
    assert 1 <= state(arenas)[0] <= 4


def test_an_arena_of_no_bytes() -> None:
    arenas = pool(0)
    arenas.release(arenas.acquire())
    arena = arenas.acquire()
    view = arena.view("empty", 0, (0, 3), (3, 1), torch.float32)
    assert view.numel() == 0
    assert arena.moved_views() == []


def test_a_lock_held_at_a_fork_does_not_block_the_child() -> None:
    arenas = pool()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with arenas._lock.now:
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        arenas.release(arenas.acquire())
        os._exit(7)
    _, status = os.waitpid(child, 0)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 7
