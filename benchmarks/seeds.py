"""Tempo and CompAct: as published, beside what roamc makes of the model as it is.

    python -m benchmarks.seeds [--models bert,llama] [--rounds N] [--quick]
    python -m benchmarks.seeds --loss [--steps N] [--seeds N]

Every program trains the same model with AdamW, or with CompAct's form of it: eager, torch.compile, the layers of the
two papers by hand (:mod:`benchmarks.rivals.tempo`, :mod:`benchmarks.rivals.compact`), and ``roamc.train_step``, exact,
with ``codecs="tempo"``, with ``roamc.optim.CompAct``, and with both. Peaks are those of the third step, counted under
malloc in a fresh process above parameters, optimizer state and batch. The error is that of all gradients that are not
projected, in the first step, as a share of eager's; the projected ones have that of their P by design. Times are
processor seconds of whole steps, program after program in turn, as a ratio to eager's of the same round.

With ``--loss``, a language model of three layers on the bytes of Python's own library: the loss on held-out text of
dense AdamW and of CompAct at three ranks, the rates of the projected layers and of all others tuned for each of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._measure import Heap, fresh, interleaved, ratio, save

RANK = 1 / 4
LR, EVERY, SCALE = 1e-4, 50, 0.25
DENSE = ("embed", "head", "o_proj", "cls")
"""Parts of the names of weights that are not projected: embeddings, heads, and the projection of attention's output."""

ROWS = {
    "bert": (
        *("eager", "inductor", "tempo by hand"),
        *("train_step", "train_step tempo", "train_step compact", "train_step both"),
        *("train_step@light", "train_step tempo@light", "train_step compact@light", "train_step both@light"),
    ),
    "llama": (
        *("eager", "inductor", "compact by hand", "train_step", "train_step compact", "train_step both"),
        *("train_step@light", "train_step compact@light", "train_step both@light"),
    ),
}


@dataclass(frozen=True)
class Program:
    """One way to train one model: a step, and what it changes."""

    step: Callable[[], Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def build(name: str, row: str, *, quick: bool) -> Program:
    """The program called ``row`` over the model called ``name``."""
    import roamc
    from benchmarks.blocks import make
    from benchmarks.rivals import compact, tempo

    work = make(name, quick=quick)
    model, (how, _, budget) = work.model, row.partition("@")
    optimizer: torch.optim.Optimizer
    if how == "tempo by hand":
        tempo.rewrite(model)
    if how == "compact by hand":
        compact.rewrite(model, RANK, DENSE)
        optimizer = compact.Adam(model, LR, SCALE, EVERY)
    elif how.endswith(("compact", "both")):
        named = model.named_parameters()
        optimizer = roamc.optim.CompAct(named, lr=LR, rank=RANK, every=EVERY, scale=SCALE, dense=DENSE)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    if how.startswith("train_step"):
        options: dict[str, Any] = {"memory_budget": budget or "+0%", "profile": "cpu", "strict": True}
        if how.endswith(("tempo", "both")):
            options["codecs"] = "tempo"
        whole = roamc.train_step(model, lambda net, *batch: net(*batch), optimizer, **options)
        return Program(lambda: whole(*work.batch), model, optimizer)
    if how == "inductor":
        model.compile(dynamic=False)

    def step() -> None:
        model(*work.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, model, optimizer)


def peak_worker(name: str, row: str, quick: bool, gradients: Path) -> dict[str, Any]:
    """Measure the peak of one program in this process, and write its first gradients to ``gradients``."""
    from roamc.runtime import blocks

    program = build(name, row, quick=quick)
    torch.manual_seed(0)
    program.step()
    names = {parameter: label for label, parameter in program.model.named_parameters()}
    states = program.optimizer.state.items()
    torch.save({names[parameter]: state["exp_avg"].clone() for parameter, state in states}, gradients)
    program.step()
    heap = Heap()
    before = heap.live() - blocks.held()
    heap.reset()
    program.step()
    tensors = (value for state in program.optimizer.state.values() for value in state.values())
    held = sum(value.nbytes for value in tensors if isinstance(value, Tensor))
    return {"measured": heap.peak() - before, "states": held}


def error(mine: Path, eagers: Path) -> float:
    """How far the gradients of one program are from eager's, as a share of them, where both have the same shape."""
    one, other = torch.load(mine), torch.load(eagers)
    same = [label for label in one if one[label].shape == other[label].shape]
    squares = sum(float((one[label] - other[label]).double().norm() ** 2) for label in same)
    return math.sqrt(squares / sum(float(other[label].double().norm() ** 2) for label in same))


def time_worker(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Time all programs of one model, step by step in turn."""
    torch.set_num_threads(1)
    steps = {row: build(name, row, quick=quick).step for row in ROWS[name]}
    times = interleaved(steps, rounds, time.process_time)
    return {row: {"time": ratio(times, row, "eager"), "seconds": statistics.median(times[row])} for row in steps}


def measured(name: str, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """All rows of one model."""
    times = fresh(__file__, "time", name, str(rounds), str(int(quick)), threads=1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {row: Path(folder) / f"{number}.pt" for number, row in enumerate(ROWS[name])}
        for row in ROWS[name]:
            one = fresh(__file__, "peak", name, row, str(int(quick)), str(files[row]), count_heap=True, threads=1)
            one |= {"model": name, "kind": row, "error": error(files[row], files["eager"]), **times[row]}
            rows.append(one)
            print(
                f"{name:<6}{row:<26} peak {one['measured'] / 1e6:7.1f} MB  states {one['states'] / 1e6:6.1f} MB  time "
                f"{one['time']:.3f}  error {one['error']:.1e}",
                flush=True,
            )
    return rows


# -- the loss of CompAct --------------------------------------------------------------------------

RANKS = {"dense": None, "n/2": 1 / 2, "n/4": 1 / 4, "n/8": 1 / 8}
RATES = {"dense": (1e-3, 2.5e-3, 5e-3), "projected": (5e-3, 1e-2, 2e-2)}
"""Rates that are tried for the linear layers, of AdamW and of CompAct, which scales its own by :data:`SCALE`."""

REST = (5e-3, 1e-2)
"""Rates that are tried for embedding, head and norms."""

WIDTH, HEADS, HIDDEN, LAYERS, LENGTH, BATCH = 128, 4, 344, 3, 64, 16


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """The bytes of Python's own library, and of one in twenty of its files, which are held out."""
    files = sorted(Path(statistics.__file__).parent.glob("*.py"))
    parts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files if file.stat().st_size]
    return torch.cat([p for at, p in enumerate(parts) if at % 20]).long(), torch.cat(parts[::20]).long()


def batches(data: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """``count`` batches of ``data``, [batch, length + 1] each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        begin = torch.randint(0, len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        yield data[begin + torch.arange(LENGTH + 1)]


def language_model() -> nn.Module:
    """A LLaMA of three layers on bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def optimizer_of(model: nn.Module, scheme: str, rate: float, rest: float) -> torch.optim.Optimizer:
    """AdamW, or CompAct of one rank; attention's output has half the rate of projected layers, as in the paper."""
    import roamc

    betas = (0.9, 0.95)
    named = dict(model.named_parameters())
    attended = {label for label in named if "o_proj" in label}
    others = {label for label in named if named[label].dim() == 1 or any(part in label for part in ("embed", "head"))}
    if RANKS[scheme] is None:
        linears = [named[label] for label in named if label not in others]
        groups = [{"params": linears, "lr": rate}, {"params": [named[label] for label in others], "lr": rest}]
        return torch.optim.AdamW(groups, betas=betas, weight_decay=0.0)
    kind = functools.partial(roamc.optim.CompAct, rank=RANKS[scheme], every=EVERY, scale=SCALE, betas=betas)
    projected = [(label, value) for label, value in named.items() if label not in others | attended]
    groups = [
        {"params": projected, "lr": rate},
        {"params": [(label, named[label]) for label in attended], "lr": rate * SCALE / 2},
        {"params": [(label, named[label]) for label in others], "lr": rest},
    ]
    return kind(groups, dense=DENSE)


def trained(scheme: str, rate: float, rest: float, seed: int, steps: int) -> float:
    """Train, and return the loss on the held-out text in nats, from 64 batches."""
    torch.manual_seed(seed)
    model = language_model()
    optimizer = optimizer_of(model, scheme, rate, rest)
    warm = max(1, steps // 10)
    shape = lambda at: min((at + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * min(at / steps, 1.0))))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    training, held_out = text()

    def loss(batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    for batch in batches(training, steps, seed):
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    with torch.no_grad():
        return statistics.fmean(float(loss(batch)) for batch in batches(held_out, 64, 0))


def losses(steps: int, seeds: int) -> list[dict[str, Any]]:
    """A row for each scheme: the best pair of rates with the first seed, and the losses with all of them."""
    rows = []
    for scheme, rank in RANKS.items():
        pairs = [(rate, rest) for rate in RATES["dense" if rank is None else "projected"] for rest in REST]
        tried = {pair: _trained(scheme, *pair, 0, steps) for pair in pairs}
        best = min(tried, key=tried.__getitem__)
        reached = [tried[best], *(_trained(scheme, *best, seed, steps) for seed in range(1, seeds))]
        row = {"model": "bytes", "kind": scheme, "rate": best[0], "rest": best[1], "losses": reached, "steps": steps}
        rows.append(row | {"gap": statistics.fmean(reached) - statistics.fmean(rows[0]["losses"] if rows else reached)})
        print(f"{scheme:<6} {statistics.fmean(reached):.3f}  {rows[-1]['gap']:+.3f}  rates {best}", flush=True)
    return rows


def _trained(scheme: str, rate: float, rest: float, seed: int, steps: int) -> float:
    loss: float = fresh(__file__, "loss", scheme, str(rate), str(rest), str(seed), str(steps), threads=1)
    return loss


def _worker(kind: str, *arguments: str) -> None:
    result: Any
    torch.set_num_threads(1)
    if kind == "peak":
        name, row, quick, path = arguments
        result = peak_worker(name, row, bool(int(quick)), Path(path))
    elif kind == "time":
        name, rounds, quick = arguments
        result = time_worker(name, int(rounds), bool(int(quick)))
    else:
        scheme, rate, rest, seed, steps = arguments
        result = trained(scheme, float(rate), float(rest), int(seed), int(steps))
    print(json.dumps(result))


def main() -> None:
    """Measure every program, or the loss; print lines; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny models; nothing is written")
    parser.add_argument("--loss", action="store_true", help="train a language model with every rank")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(*options.worker)
        return
    if options.loss:
        rows = losses(options.steps, options.seeds)
    else:
        rows = [row for name in options.models.split(",") for row in measured(name, options.rounds, options.quick)]
    if not options.quick:
        print(save("seeds_loss" if options.loss else "seeds", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
