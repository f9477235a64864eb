"""Models of repeated blocks that return their loss, plain or with every block under torch's checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.models import class_loss, language_loss, next_token

HOW = ("block", "select")
"""What checkpointing keeps: a block's inputs only, or also its matrix products and attention."""

aten = torch.ops.aten

PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)
"""What selective checkpointing keeps."""


class Training(nn.Module):
    """A model and its loss as one module, so that one compiled graph owns forward and backward."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, *batch: Tensor) -> Tensor:
        """The loss."""
        return self.loss(self.net, *batch)


@dataclass(frozen=True)
class Blocked:
    """A model and its batch.

    Attributes:
        model: in training mode; returns its loss.
        batch: its arguments.
        blocks: names of lists of modules; each module in them is a block.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    blocks: tuple[str, ...]


class Checkpointed(nn.Module):
    """A block whose activations are made again in backward."""

    def __init__(self, block: nn.Module, how: str) -> None:
        super().__init__()
        self.block = block
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        self.kept: dict[str, Any] = {"context_fn": contexts} if how == "select" else {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives."""
        return checkpoint(self.block, *args, use_reentrant=False, **self.kept, **kwargs)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def wrap(work: Blocked, how: str) -> None:
    """Put every block under checkpointing, in place."""
    for name in work.blocks:
        held = work.model.get_submodule(name)
        for key, block in list(held.named_children()):
            held.add_module(key, Checkpointed(block, how))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _tokens(batch: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=_generator())


def _labels(net: nn.Module, idx: Tensor) -> Tensor:
    loss: Tensor = net(input_ids=idx, labels=idx, use_cache=False).loss
    return loss


def _gpt(quick: bool, sizes: Sequence[int] = (6, 384, 6, 16, 256, 128)) -> Blocked:
    from tests.models import NanoGPT

    layers, width, heads, batch, length, vocab = (2, 48, 6, 2, 32, 128) if quick else sizes
    net = NanoGPT(vocab=vocab, width=width, heads=heads, layers=layers)
    net.places = nn.Embedding(length, width)
    return Blocked(Training(net, next_token), (_tokens(batch, length, vocab),), ("net.blocks",))


def _bert(quick: bool) -> Blocked:
    from transformers import BertConfig, BertForMaskedLM

    layers, width, batch, length, vocab = (2, 48, 2, 32, 64) if quick else (4, 384, 16, 128, 8192)
    config = BertConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=6,
        intermediate_size=4 * width, attn_implementation="eager",
    )  # fmt: skip
    return Blocked(
        Training(BertForMaskedLM(config), language_loss), (_tokens(batch, length, vocab),), ("net.bert.encoder.layer",)
    )


def _llama(quick: bool, sizes: Sequence[int] = (4, 384, 16, 128, 8192)) -> Blocked:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, batch, length, vocab = (2, 48, 2, 32, 64) if quick else sizes
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip
    return Blocked(Training(LlamaForCausalLM(config), _labels), (_tokens(batch, length, vocab),), ("net.model.layers",))


def _resnet50(quick: bool) -> Blocked:
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, side = (2, 32) if quick else (16, 112)
    config = ResNetConfig(num_labels=10, depths=[1, 1, 1, 1] if quick else [3, 4, 6, 3])
    pixels = torch.randn(batch, 3, side, side, generator=_generator())
    labels = torch.randint(0, 10, (batch,), generator=_generator())
    stages = tuple(f"net.resnet.encoder.stages.{stage}.layers" for stage in range(4))
    return Blocked(Training(ResNetForImageClassification(config), class_loss), (pixels, labels), stages)


BLOCKED: dict[str, Callable[[bool], Blocked]] = {
    "gpt": _gpt,
    "bert": _bert,
    "llama": _llama,
    "resnet50": _resnet50,
    "llama-long": functools.partial(_llama, sizes=(6, 384, 16, 256, 8192)),
    "gpt-vocabulary": functools.partial(_gpt, sizes=(4, 256, 4, 8, 256, 32768)),
}


def make(name: str, *, quick: bool = False) -> Blocked:
    """The model called ``name`` in training mode, with the same weights at every call; tiny if ``quick``."""
    torch.manual_seed(0)
    blocked = BLOCKED[name](quick)
    blocked.model.train()
    return blocked
