"""Planning leaves the garbage collector as it was."""

from __future__ import annotations

import gc
import weakref

import pytest

from roamc.planning.collector import older_objects_left_alone


class Ring:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.ring = self


def test_garbage_made_within_is_freed_within_and_older_garbage_behind() -> None:
    before = weakref.ref(Ring())
    with older_objects_left_alone():
        within = weakref.ref(Ring())
        gc.collect()
        assert within() is None
        assert before() is not None
    gc.collect()
    assert before() is None


def test_nothing_is_left_frozen_behind_an_error() -> None:
    with pytest.raises(ValueError, match="planning"), older_objects_left_alone():
        raise ValueError("planning")
    assert not gc.get_freeze_count()


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        later = [Ring()]
        with older_objects_left_alone():
            assert any(each is later[0] for each in gc.get_objects()), "what is frozen is not listed"
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
