"""What every test may rely on."""

from __future__ import annotations

import signal

import pytest

# A run that was started in the background (nohup, some CI runners) inherits an ignored Ctrl-C, which tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
    from roamc.passes.layout import choose, held

    patch.setattr(layout, "SMALL", 0)
    for module in (choose, held):
        patch.setattr(module, "is_above", lambda peak, eager: eager is not None and peak > eager + held.LITTLE)
