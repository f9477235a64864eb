"""Korthikanti et al. (arXiv 2205.05198), tables 2, 4 and 5, from planned graphs: no other rank, no GPU, nothing runs.

    python -m benchmarks.shard [MODEL ...] [--ranks 2 4 8] [--layers 4]

Layers of the paper's models with attention of plain operators, in 16 bits, one rank's part of them. Six rows: nothing
split, tensor parallelism (t), with sequence parallelism, with recomputation of attention's core, with both, and
recomputation of whole layers; what runs again is marked by hand with ``torch.utils.checkpoint``, as in the paper. Bytes
and time of a layer are what a graph of three layers has more than one of two, so that the ends of the stack do not
count. Times are those of the shipped profile a100, its links included; nothing in it is fitted to the paper.

Then the solver gets the model without any mark and each row's peak as its budget. In both, collectives are not split:
that is the last table, seconds of collectives that nothing hides with and without pass overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._measure import save
from roamc.budget import NO_TIME, Budget
from roamc.cli.models import MODELS
from roamc.cli.zoo import RECIPES, Block
from roamc.cost import load_profile, prices, step_seconds
from roamc.cost.collectives import exposed_seconds, traffic
from roamc.errors import BudgetError
from roamc.frontends.mesh import TP, Mesh, on_mesh
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph
from roamc.graph.memory import build_memory
from roamc.options import parse_options
from roamc.passes import overlap
from roamc.planning import search
from roamc.planning.planned import Planned

NAMES = ("gpt3-22b", "gpt3-175b", "gpt3-530b", "gpt3-1t")
PROFILE = "a100"
EXPOSED_LAYERS = 4
"""Layers of the stacks whose collectives are split."""


@dataclass(frozen=True)
class Row:
    """A row of table 2.

    Attributes:
        name: its name here.
        split: whether matrices are split.
        shard: option ``shard``.
        again: what runs again in backward: "", "core" (of attention) or "layer".
    """

    name: str
    split: bool
    shard: str
    again: str

    def formula(self, ranks: int, x: float) -> float:
        """Bytes of a layer by the paper, divided by sbh, where ``x`` is 5as/h; a whole layer keeps what it reads."""
        if self.again == "layer":
            return 2.0
        attention = 0.0 if self.again else x
        if self.shard == "sequence":
            return (34 + attention) / ranks
        return 10 + (24 + attention) / ranks


ROWS = (
    Row("none", False, "off", ""),
    Row("t", True, "off", ""),
    Row("t + sequence", True, "sequence", ""),
    Row("t + selective", True, "off", "core"),
    Row("both", True, "sequence", "core"),
    Row("full", True, "off", "layer"),
)


class CoreAgain(Block):
    """A block whose softmax, dropout and products of attention run again in backward."""

    def _core(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        mixed: Tensor = checkpoint(super()._core, query, key, value, hidden, use_reentrant=False)
        return mixed


class Stack(nn.Module):
    """Layers alone, without embedding and head: of the first of ``kinds``, or of the second for attention again."""

    def __init__(
        self,
        sizes: dict[str, Any],
        layers: int,
        again: str,
        kinds: tuple[type[Block], type[Block]] = (Block, CoreAgain),
    ) -> None:
        super().__init__()
        kind = kinds[again == "core"]
        width, heads, dropout = sizes["width"], sizes["heads"], sizes["dropout"]
        self.blocks = nn.ModuleList(kind(width, heads, dropout, fused_attention=False) for _ in range(layers))
        self.whole_again = again == "layer"
        self.register_buffer("hidden", torch.ones(sizes["seq"], sizes["seq"], dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, self.hidden, use_reentrant=False) if self.whole_again else block(x, self.hidden)
        return x


def graph_of(sizes: dict[str, Any], layers: int, row: Row, mesh: Mesh) -> TrainGraph:
    """Forward and backward of one rank's part of ``layers`` layers, for a GPU."""
    shape = (sizes["batch"], sizes["seq"], sizes["width"])
    with torch.device("meta"):
        model = Stack(sizes, layers, row.again).bfloat16()
        model.hidden = model.hidden.bool()
        x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    workload = Workload("layers", model, (x,), tp_plan=RECIPES[NAMES[0]].tp_plan)
    return capture(on_mesh(workload, mesh), device=torch.device("cuda"))


def planned(
    sizes: dict[str, Any], layers: int, row: Row, ranks: int, budget: Budget = NO_TIME, **changes: Any
) -> Planned:
    """The plan of that graph; ``changes`` are options."""
    mesh = Mesh(tp=ranks if row.split else 1)
    options = {"shard": row.shard, "profile": PROFILE, "memory_budget": budget, "disable": (overlap.NAME,), **changes}
    with mesh.planned_for():
        return search.run(graph_of(sizes, layers, row, mesh), parse_options(options))


def saved_bytes(planned_graph: Planned) -> int:
    """Bytes of what forward makes and backward reads."""
    return sum(storage.nbytes for storage in build_memory(planned_graph.graph).saved)


def seconds(planned_graph: Planned, ranks: int) -> float:
    """Predicted seconds of forward and backward, reruns and collectives included."""
    with Mesh(tp=ranks).planned_for():
        return step_seconds(planned_graph.graph, load_profile(profile=PROFILE))


def sizes_of(name: str) -> dict[str, Any]:
    """The settings of a built-in model."""
    return dict(MODELS[name].settings)


def by_hand(name: str, ranks: int, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Bytes, milliseconds and bytes sent of an inner layer of a model, for each of ``rows``."""
    sizes = sizes_of(name)
    unit = sizes["seq"] * sizes["batch"] * sizes["width"]
    x = 5 * sizes["heads"] * sizes["seq"] / sizes["width"]
    for row in rows:
        two, three = (planned(sizes, layers, row, ranks) for layers in (2, 3))
        saved = saved_bytes(three) - saved_bytes(two)
        sent = [traffic(planned_graph.graph, TP, ranks).sent for planned_graph in (two, three)]
        yield {
            "model": name,
            "kind": f"t={ranks} {row.name}",
            "row": row.name,
            "ranks": ranks,
            "saved": saved,
            "saved_of_sbh": saved / unit,
            "formula": row.formula(ranks, x) if row.split else 34 + x,
            "ms": 1e3 * (seconds(three, ranks) - seconds(two, ranks)),
            "sent": sent[1] - sent[0],
        }


def by_solver(name: str, ranks: int, layers: int) -> Iterator[dict[str, Any]]:
    """For each row with reruns: its peak as the budget of the same layers without marks.

    That of "full" is tried on shards as well, and without them with ranks that plan together: collectives run again
    there.
    """
    sizes = sizes_of(name)
    for row in ROWS:
        if not row.again:
            continue
        hand = planned(sizes, layers, row, ranks)
        budget, hand_ms = hand.plan.needed_bytes, 1e3 * seconds(hand, ranks)
        for way in ("whole", "sequence") if row.again == "layer" else (row.shard,):
            free = dataclasses.replace(row, again="", shard=way)
            yield {
                "model": name,
                "kind": f"t={ranks} {row.name}, solver with shard={way}",
                "row": row.name,
                "ranks": ranks,
                "layers": layers,
                "shard": way,
                "budget": budget,
                "hand_ms": hand_ms,
                **_found(sizes, layers, free, ranks, budget),
            }


def _found(sizes: dict[str, Any], layers: int, row: Row, ranks: int, budget: int) -> dict[str, Any]:
    """What the solver finds within ``budget`` bytes; what its lowest plan needs where it finds none."""
    try:
        budgeted = planned(sizes, layers, row, ranks, budget)
    except BudgetError as error:
        if error.plan is None:
            raise
        return {"needed": error.plan.needed_bytes, "refused": True}
    free = planned(sizes, layers, row, ranks)
    return {
        "needed": budgeted.plan.needed_bytes,
        "refused": False,
        "ms": 1e3 * seconds(budgeted, ranks),
        "free_ms": 1e3 * seconds(free, ranks),
    }


def exposed(name: str, ranks: int, layers: int) -> Iterator[dict[str, Any]]:
    """For each split row: milliseconds of collectives, and those exposed, and peaks: program order and pass overlap."""
    sizes, profile = sizes_of(name), load_profile(profile=PROFILE)
    for row in ROWS:
        if not row.split:
            continue
        plain = planned(sizes, layers, row, ranks, order="program")
        ordered, hidden = planned(sizes, layers, row, ranks), planned(sizes, layers, row, ranks, disable=())
        with Mesh(tp=ranks).planned_for():
            waited = [exposed_seconds(one.graph, prices(one.graph, profile)) for one in (plain, ordered, hidden)]
        yield {
            "model": name,
            "kind": f"t={ranks} {row.name}, exposed",
            "row": row.name,
            "ranks": ranks,
            "layers": layers,
            "program_ms": 1e3 * waited[0],
            "exposed_ms": 1e3 * waited[2],
            "bound_ms": 1e3 * hidden.plan.decisions[overlap.NAME]["bound_seconds"],
            "program_peak": plain.plan.peak_bytes,
            "reorder_peak": ordered.plan.peak_bytes,
            "peak": hidden.plan.peak_bytes,
        }


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']:<12}{row['kind']:<28}"
    if "exposed_ms" in row:
        share = row["exposed_ms"] / row["program_ms"]
        peaks = f"{row['peak'] / 1e9:.3f} GB, reorder alone {row['reorder_peak'] / 1e9:.3f} GB"
        return f"{name}{row['exposed_ms']:.2f} of {row['program_ms']:.2f} ms exposed ({share:.0%}), {peaks}"
    if "formula" in row:
        off = row["saved_of_sbh"] / row["formula"] - 1
        return f"{name}{row['saved_of_sbh']:9.4f} sbh, formula {row['formula']:9.4f} ({off:+.2%})  {row['ms']:6.2f} ms"
    budget = f"budget {row['budget'] / 1e9:.3f} GB, by hand {row['hand_ms']:.2f} ms, solver "
    return name + budget + (f"needs {row['needed'] / 1e9:.3f} GB" if row["refused"] else f"{row['ms']:.2f} ms")


def main() -> None:
    """Plan all rows; print a line each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(NAMES), help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--layers", type=int, default=8, help="of the stacks that the solver gets")
    parser.add_argument("--exposed", action="store_true", help="only the seconds of collectives that nothing hides")
    arguments = parser.parse_args()
    for name in arguments.models:
        first = name == NAMES[0]
        for ranks in () if arguments.exposed else arguments.ranks if first else arguments.ranks[-1:]:
            rows = list(by_hand(name, ranks, ROWS if first else ROWS[1:]))
            _keep(rows)
        _keep(list(by_solver(name, arguments.ranks[-1], arguments.layers)) if first and not arguments.exposed else [])
        _keep(list(exposed(name, arguments.ranks[-1], EXPOSED_LAYERS)) if first else [])


def _keep(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(_line(row), flush=True)
    if rows:
        save("shard", rows, "plans for the shipped profile a100; nothing was run", timeless=True)


if __name__ == "__main__":
    main()
