"""The models of ROAM's evaluation as graphs to plan: built on the meta device, captured by roamc, no weights.

    python -m benchmarks.planning_models --dump FOLDER [--models alexnet,vgg16] [--batches 1,32]

writes every graph as the ordering problem that the reorder pass sees, ``FOLDER/MODEL-bBATCH-KIND.npz`` with
the fields of ``OrderProblem``. KIND is the optimizer of a whole step, or ``compiled`` for the forward and
backward of ``torch.compile``. SGD is plain, without momentum: it keeps no state. Attention is written out
(``eager``) in the language models, and dropout is on where the model's default has it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.classic_nets import VGG16, AlexNet, MNASNet
from benchmarks.models import class_loss
from roamc.frontends.workload import OPTIMIZERS, Workload, capture
from roamc.graph import TrainGraph
from roamc.graph.memory import MemoryModel, build_memory, input_bytes
from roamc.options import Options
from roamc.passes import normalize
from roamc.rewriting.in_place import all_reuses
from roamc.rewriting.order_problem import order_problem
from roamc.solvers.order import OrderProblem, evaluate

IMAGE, CLASSES = 224, 1000
COMPILED = "compiled"
KINDS = ("sgd", "adam", COMPILED)


@dataclass(frozen=True)
class Recipe:
    """A model and its batch.

    Attributes:
        build: the model, on whatever device torch makes tensors at the moment.
        batch: number of samples to the arguments of ``loss`` behind the model.
        loss: ``loss(model, *batch)``.
        batches: the batch sizes that are planned.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    batches: tuple[int, ...] = (1, 32)


def _images(batch: int) -> tuple[Tensor, ...]:
    return torch.zeros(batch, 3, IMAGE, IMAGE), torch.zeros(batch, dtype=torch.long)


def _tokens(length: int) -> Callable[[int], tuple[Tensor, ...]]:
    def make(batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch, length, dtype=torch.long) for _ in range(2))

    return make


def _plain(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels), labels)


def _language(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    # Padding and dropout of the paper's PyTorch form, not of TensorFlow's.
    config = MobileNetV2Config(tf_padding=False, classifier_dropout_prob=0.2, num_labels=CLASSES)
    return MobileNetV2ForImageClassification(config)


def _efficientnet() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=IMAGE, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2,
        num_labels=CLASSES,
    )  # fmt: skip
    return EfficientNetForImageClassification(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=CLASSES))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(attn_implementation="eager"))


def _gpt2(**sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager", **sizes))

    return make


_XL = _gpt2(n_layer=48, n_embd=1600, n_head=25)

MODELS: dict[str, Recipe] = {
    "alexnet": Recipe(AlexNet, _images, _plain),
    "vgg16": Recipe(VGG16, _images, _plain),
    "mnasnet": Recipe(MNASNet, _images, _plain),
    "mobilenet": Recipe(_mobilenet, _images, class_loss),
    "efficientnet": Recipe(_efficientnet, _images, class_loss),
    "vit": Recipe(_vit, _images, class_loss),
    "bert": Recipe(_bert, _tokens(512), _language),
    "gpt2": Recipe(_gpt2(), _tokens(1024), _language),
    "gpt2-xl-s128": Recipe(_XL, _tokens(128), _language),
    "gpt2-xl-s1024": Recipe(_XL, _tokens(1024), _language),
}
"""Name to model; the small ones first."""


def graph(name: str, batch: int, kind: str) -> TrainGraph:
    """The captured graph of one model.

    Args:
        name: a key of :data:`MODELS`.
        batch: number of samples.
        kind: ``"sgd"`` or ``"adam"`` for the whole step, ``"compiled"`` for forward and backward alone.
    """
    recipe = MODELS[name]
    with torch.device("meta"):
        model = recipe.build().train()
        samples = recipe.batch(batch)
    workload = Workload(f"{name}-b{batch}-{kind}", model, samples, recipe.loss, OPTIMIZERS.get(kind))
    return capture(workload, forward_backward=kind == COMPILED)


def normalized(captured: TrainGraph) -> tuple[TrainGraph, MemoryModel]:
    """The graph as the reorder pass gets it, and its memory. The nodes of ``captured`` are erased in place."""
    clean = normalize.apply(captured, normalize.decide(captured, Options()))
    return clean, build_memory(clean)


def save(problem: OrderProblem, path: Path) -> None:
    """Write the problem's fields as ``.npz``; the file appears under its name when it is whole."""
    draft = path.with_suffix(".part")
    with draft.open("wb") as file:
        np.savez_compressed(file, **{field.name: getattr(problem, field.name) for field in fields(problem)})
    draft.rename(path)


def load(path: Path) -> OrderProblem:
    """Read what :func:`save` wrote."""
    with np.load(path) as stored:
        return OrderProblem(**stored)


def choices(names: list[str], batches: list[int]) -> Iterator[tuple[str, int, str]]:
    """Every (model, batch, kind), the small models first."""
    for name in MODELS:
        if name in names:
            for batch in MODELS[name].batches:
                yield from ((name, batch, kind) for kind in KINDS if batch in batches)


def dump(folder: Path, name: str, batch: int, kind: str) -> dict[str, Any]:
    """Capture and write one graph; returns what is known of it."""
    start = time.perf_counter()
    captured = graph(name, batch, kind)
    seconds = time.perf_counter() - start
    clean, memory = normalized(captured)
    problem, _ = order_problem(clean, memory, all_reuses(memory))
    save(problem, folder / f"{name}-b{batch}-{kind}.npz")
    return {
        "graph": clean.name,
        "operators": problem.num_ops,
        "buffers": problem.num_buffers,
        "peak": evaluate.peak_bytes(problem, np.arange(problem.num_ops, dtype=np.int32)),
        "fixed": sum(input_bytes(clean).values()),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Write the asked-for graphs, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,32")
    options = parser.parse_args()
    options.dump.mkdir(parents=True, exist_ok=True)
    for choice in choices(options.models.split(","), [int(batch) for batch in options.batches.split(",")]):
        facts = dump(options.dump, *choice)
        print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)


if __name__ == "__main__":
    main()
