"""``train_step`` of models that ``fully_shard`` holds in parts: the steps of eager on these ranks, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from roamc.capture import gather_judge
from roamc.errors import CaptureError, RanksError, VerifyError
from tests.end_to_end.helpers import assert_same
from tests.end_to_end.ranks import run_ranks

SCRIPT = """
from tests.end_to_end import test_fully_sharded as tests
for name in tests.CHOICES[sys.argv[4]]:
    tests.compare_steps(name, rank)
if sys.argv[4] == "quick":
    tests.check_faults_are_named()
    tests.check_disagreement(rank)
    tests.check_budget_of_one_rank(rank)
"""
VOCAB = 11


class Net(nn.Module):
    """Rows that ranks do not share evenly, an empty part, tied weights, a frozen and an unused layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first, self.norm = nn.Embedding(VOCAB, 8), nn.Linear(8, 5), nn.LayerNorm(5)
        self.narrow, self.wide = nn.Linear(5, 1), nn.Linear(6, 8)
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(2, 2)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.norm(self.first(self.tokens(tokens)).relu()))
        x = torch.cat((x, self.narrow(x)), -1)
        return F.cross_entropy(self.head(self.frozen(self.wide(x))), tokens)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


def net(mesh: Any = None, dtypes: MixedPrecisionPolicy | None = None, **settings: Any) -> nn.Module:
    """The model, each layer by itself, then what is left."""
    torch.manual_seed(0)
    model, mesh = Net(), mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    dtypes = dtypes or MixedPrecisionPolicy()
    for layer in (model.first, model.norm, model.narrow, model.wide):
        fully_shard(layer, mesh=mesh, mp_policy=dataclasses.replace(dtypes, output_dtype=None), **settings)
    return fully_shard(model, mesh=mesh, mp_policy=dtypes, **settings)


def on_columns() -> nn.Module:
    """Parts along the last dimension, gathered once; what is left is not shared evenly."""
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.wide, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1), reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def with_copies() -> nn.Module:
    return net(init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("copy", "part")))


class Layers(nn.Module):
    """Two layers for tensor parallelism and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCAB, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.body(self.tokens(tokens))).square().mean()


def on_two_meshes() -> nn.Module:
    """Parts of the parts that tensor parallelism leaves."""
    torch.manual_seed(0)
    half = torch.distributed.get_world_size() // 2
    model, mesh = Layers(), init_device_mesh("cpu", (half, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model.body, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model.body, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
FP16 = MixedPrecisionPolicy(torch.float32, torch.float16)
Made = tuple[Callable[[], nn.Module], dict[str, Any]]
CASES: dict[str, Made] = {
    "uneven": (net, {"clip_grad_norm": 0.05}),
    "least memory": (net, {"memory_budget": "min"}),
    "mixed precision": (lambda: net(dtypes=BF16), {}),
    "columns": (on_columns, {}),
    "reduced in fp16": (lambda: net(dtypes=FP16, reshard_after_forward=False), {}),
    "copies": (with_copies, {}),
    "two meshes": (on_two_meshes, {"memory_budget": "min"}),
}
CHOICES = {
    "quick": ("uneven",),
    "others": tuple(name for name in CASES if name != "uneven"),
    "pairs": ("copies", "two meshes"),  # sums of two ranks, which have no other order
}


def compare_steps(name: str, rank: int) -> None:
    """In each of the ranks: planned steps are those of eager, with an evaluation in between; DTensors stay."""
    import roamc

    make, settings = CASES[name]
    model, twin = make(), make()
    optimizer, reference = (torch.optim.AdamW(one.parameters(), 0.01) for one in (model, twin))
    step = roamc.train_step(model, loss_of, optimizer, strict=True, **settings)
    several = name == "two meshes"  # ranks of tensor parallelism have the same batch
    for number in range(2):
        tokens = torch.arange(6 if several else 6 + rank) * 7 % VOCAB
        seed = number if several else 10 * rank + number
        torch.manual_seed(seed)
        loss = step(tokens)
        torch.manual_seed(seed)
        wanted = eager_step(twin, reference, tokens, settings.get("clip_grad_norm"))
        assert_same(loss, wanted, f"{name}: loss of step {number}")
        with torch.no_grad():  # leaves the outermost module whole
            assert_same(loss_of(model.eval(), tokens), loss_of(twin.eval(), tokens), f"{name}: evaluation {number}")
        model.train(), twin.train()
        assert_same(all_of(model, optimizer), all_of(twin, reference), f"{name}: after step {number}")
    assert all(isinstance(tensor, DTensor) for key, tensor in model.state_dict().items() if key != "calls")
    assert len(step.plans) == 1


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, clip: float | None) -> Tensor:
    loss = loss_of(model, tokens)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parts of parameters and of optimizer state, and buffers."""
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()
    states = [(f"{name}: {key}", t) for name, p in model.named_parameters() for key, t in optimizer.state[p].items()]
    return {key: t.to_local() if isinstance(t, DTensor) else t for key, t in (*model.state_dict().items(), *states)}


def judged(step: Any, *batch: Tensor) -> tuple[fx.Graph, tuple[Any, ...]]:
    """What the judge is called with for a step."""
    calls: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_judge, "check", lambda *args: calls.append((copied(args[0]), *args[1:])))
        step.plan(*batch)
    ((graph, *rest),) = calls
    return graph, tuple(rest)


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def nodes(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def set_argument(graph: fx.Graph, target: Any, at: int, value: Any) -> None:
    node = nodes(graph, target)[-1]
    node.args = (*node.args[:at], value, *node.args[at + 1 :])


def read_part(graph: fx.Graph) -> None:
    gather = nodes(graph, gather_judge.GATHER)[0]
    next(iter(gather.users)).replace_input_with(gather, gather.all_input_nodes[0])


def leave_out(graph: fx.Graph, target: Any) -> None:
    node = nodes(graph, target)[-1]
    node.replace_all_uses_with(node.all_input_nodes[0])


def read_first_gather(graph: fx.Graph) -> None:
    *_, second = nodes(graph, gather_judge.GATHER)
    first = next(
        n for n in nodes(graph, gather_judge.GATHER) if n.args[0].all_input_nodes == second.args[0].all_input_nodes
    )  # type: ignore[union-attr]
    assert first is not second
    second.replace_all_uses_with(first)


FAULTS: dict[str, Callable[[fx.Graph], object]] = {
    "gathers over group another": lambda graph: set_argument(graph, gather_judge.GATHER, 2, "another"),
    "joins 3 parts of 2": lambda graph: set_argument(graph, gather_judge.GATHER, 1, 3),
    "reads a part as if it were the whole": read_part,
    "that the ranks have not added up|has not the shape": lambda graph: leave_out(graph, gather_judge.SCATTER),
    "gives 4 parts to 2 ranks": lambda graph: set_argument(graph, gather_judge.SCATTER, 2, 4),
    "is 1.0 times the sum over the ranks, not 0.5": lambda graph: set_argument(graph, gather_judge.SCATTER, 1, "sum"),
    "reduces by max": lambda graph: set_argument(graph, gather_judge.SCATTER, 1, "max"),
    "reduces over group another": lambda graph: set_argument(graph, gather_judge.SCATTER, 3, "another"),
    "reads in backward what forward has gathered": read_first_gather,
}


def check_faults_are_named() -> None:
    """In each of the ranks: what is wrong with a gather or a reduction is said before anything is planned."""
    import roamc

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu()).sum()

    model = Small()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    step = roamc.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1))
    graph, rest = judged(step, torch.ones(2, 4))
    gather_judge.check(copied(graph), *rest)
    for said, change in FAULTS.items():
        wrong = copied(graph)
        change(wrong)
        with pytest.raises(VerifyError, match=said):
            gather_judge.check(wrong, *rest)


def check_disagreement(rank: int) -> None:
    """In each of the ranks: ways through the model that differ are an error on all, before anything has run."""
    import roamc

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a if rank else self.b)(x).sum()

    model = fully_shard(Fork(), mesh=init_device_mesh("cpu", (2,)))
    step = roamc.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CaptureError, match=r"first rank 'gather b\.weight', rank 1 'gather a\.weight'; let all take"):
        step(torch.ones(2, 4))


def check_budget_of_one_rank(rank: int) -> None:
    """In each of the ranks: a budget that one rank asks for and the other does not is an error on both."""
    import roamc

    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (2,)))
    step = roamc.train_step(
        model,
        lambda model, x: model(x).sum(),
        torch.optim.SGD(model.parameters(), 0.1),
        memory_budget=("10 B", 1 << 30)[rank],
    )
    with pytest.raises(RanksError, match=r"rank 1 plans it with memory_budget=.*, rank 0 with .*: give all ranks"):
        step(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("which", "ranks"),
    [
        ("quick", 2),
        pytest.param("others", 2, marks=pytest.mark.thorough),
        pytest.param("pairs", 4, marks=pytest.mark.thorough),
    ],
)
def test_steps_are_those_of_eager(which: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT, ranks, [which])
