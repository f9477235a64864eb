"""A model far larger than memory is planned without a byte of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import roamc
from tests.end_to_end.test_determinism import ROOT, environment
from tests.models import make

LIMIT = 1e9
"""Most bytes that planning may add to the process; the smallest of the models has a hundred times that."""

SCRIPT = """
import resource, sys, torch, roamc
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from tests.models import hf_labels, next_token, NanoGPT

def llama():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=128256, hidden_size=65536, intermediate_size=4 * 65536, num_hidden_layers=2,
        num_attention_heads=512, num_key_value_heads=64, max_position_embeddings=8192,
    ))

def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

name = sys.argv[1]
with torch.device("meta"):
    model = llama() if name == "llama" else NanoGPT(vocab=50257, width=32768, heads=64, layers=2)
    idx = torch.zeros(8, 64 if name == "nanogpt" else 4096, dtype=torch.int64)
    roamc.plan(nn.Linear(4, 4), torch.zeros(2, 4))  # what a first plan loads is not counted
model = model.to(torch.bfloat16).train()
weights = sum(p.numel() * p.element_size() for p in model.parameters())
before = rss()
loss = hf_labels if name == "llama" else next_token
plans = [
    roamc.plan(model, idx, loss_fn=loss, optimizer=torch.optim.AdamW(model.parameters()), clip_grad_norm=1.0),
    roamc.plan(model, idx),
]
assert all(p.device.type == "meta" for p in model.parameters())
for plan in plans:
    print(weights, plan.peak_bytes, plan.arena_bytes, plan.fixed_bytes["parameter"], rss() - before)
"""


@pytest.mark.parametrize("name", ["nanogpt", "llama"])
def test_planning_allocates_nothing_of_the_model(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        weights, peak, arena, parameters, grown = map(int, line.split())
        assert weights > 50 * LIMIT
        assert weights <= parameters < weights + 10_000, "in the graph of a module buffers count as parameters"
        assert peak > 10 * LIMIT
        assert arena <= peak
        assert grown < LIMIT


@pytest.mark.parametrize("way", ["step", "module"])
def test_plan_on_the_meta_device_is_that_of_the_real_model(way: str) -> None:
    plans = []
    for device in ("cpu", "meta"):
        model, (idx,), loss_fn = make("llama")
        model, idx = model.to(device), idx.to(device)
        step = {"loss_fn": loss_fn, "optimizer": torch.optim.AdamW(model.parameters())} if way == "step" else {}
        plans.append(roamc.plan(model, idx, **step))
    assert plans[0].to_json() == plans[1].to_json()
