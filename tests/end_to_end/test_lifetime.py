"""What roamc keeps alive: a program goes with the model, and the step, that it was made for."""

import gc
import linecache
import weakref

import torch

import roamc
from tests.models import make


def test_arenas_and_source_go_with_the_optimized_model() -> None:
    torch._dynamo.reset()
    model, batch, loss = make("nanogpt")
    roamc.optimize(model, strict=True)
    loss(model, *batch).backward()
    (program,) = roamc.optimize.__globals__["_RECORDS"][model].programs
    arena = weakref.ref(program.executable.pool.free[0])
    del model, program
    torch._dynamo.reset()
    gc.collect()
    assert arena() is None
    assert roamc.plans()[-1].name == "NanoGPT", "the plan stays, the memory does not"


def test_arenas_and_source_go_with_the_train_step() -> None:
    model, batch, loss = make("nanogpt")
    step = roamc.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    step(*batch)
    arena = weakref.ref(step.latest.executable.pool.free[0])
    sources = {name for name in linecache.cache if name.startswith("<roamc")}
    del step
    gc.collect()
    assert arena() is None
    assert len({name for name in linecache.cache if name.startswith("<roamc")}) < len(sources)
