"""Settings of the process around a train step: those that a trace in another thread changes are not the user's."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import roamc
from roamc.frontends import train_step
from roamc.locks import CAPTURE
from tests.end_to_end.helpers import noise, sgd, square


def test_what_a_trace_in_another_thread_sets_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    step = roamc.train_step(model := nn.Linear(8, 8), square, sgd(model), strict=True)
    traced, looked = threading.Event(), threading.Event()

    def trace() -> None:
        with CAPTURE.now, torch.autograd.set_detect_anomaly(True):
            traced.set()
            looked.wait(60)
            time.sleep(0.2)

    thread = threading.Thread(target=trace)
    thread.start()
    traced.wait(60)
    check = train_step.check_around
    monkeypatch.setattr(train_step, "check_around", lambda model: looked.set() or check(model))
    step(noise(4, 8))
    thread.join()
