"""A step that was captured on a CPU, as it is on a GPU: every tensor there, and what cannot go there by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from roamc import compat
from roamc.budget import resolve
from roamc.capture.cuda_attention import attend, on_cuda
from roamc.capture.moved import NOTE, device_of, moved, traced_for
from roamc.codegen.source import emit
from roamc.errors import CaptureError, OptionError, PlanError
from roamc.frontends.workload import Workload, capture
from roamc.graph import Role, TrainGraph, operators, placeholders, tensors_of
from roamc.graph.verify import check_graph
from roamc.operators.random import save_rng_state
from roamc.operators.schemas import name_of
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.models import make

aten = torch.ops.aten
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
HALF = torch.bfloat16


def on_gpu(
    model: nn.Module, batch: tuple[Any, ...], loss: Callable[..., Tensor] | None = None, *, step: bool = True
) -> TrainGraph:
    return capture(Workload("moved", model, batch, loss), forward_backward=not step, device=GPU)


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().sum()


class Module(nn.Module):
    """A weight, a buffer that is a part of it, and a function of both and the input."""

    def __init__(self, function: Callable[..., Tensor], width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("part", self.weight.detach()[2:4])
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight, self.part)


def of(function: Callable[..., Tensor], *, step: bool = True) -> TrainGraph:
    return on_gpu(Module(function), (torch.randn(4, 8),), total, step=step)


def targets(graph: TrainGraph) -> list[str]:
    return [name_of(node.target) for node in operators(graph.graph)]


def is_written_number(node: fx.Node) -> bool:
    """Whether a node stands for ``torch.tensor(2.5)``, as in some releases of transformers; it stays on the CPU."""
    return node.target is aten.lift_fresh_copy.default and node.meta["val"].dim() == 0


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", ["nanogpt", "nanogpt-dropout", "gpt2", "llama", "bert", "resnet50", "lstm"])
def test_every_result_is_that_of_its_operator_on_the_gpu(name: str, route: str) -> None:
    model, batch, loss = make(name)
    graph = on_gpu(model, batch, loss, step=route == "step")
    written = {node for node in graph.graph.nodes if is_written_number(node)}
    computed = [
        node
        for node in graph.graph.nodes
        if node not in written and not (node.users and written.issuperset(node.users))
    ]
    devices = {(tensor.device, tensor.dtype) for node in computed for _, tensor in tensors_of(node)}
    assert {device for device, _ in devices} - {CPU} == {GPU}
    assert {dtype for device, dtype in devices if device == CPU} <= {torch.int64, torch.uint64}, "seeds of attention"
    check_graph(graph, "capture", deep=True)
    planned = search.run(graph, Options(profile="h100", numerics="fast"), deep=True)
    assert planned.plan.device == "cuda"
    assert 'device="cuda:0"' in emit(planned.graph).listing or not planned.plan.arena_bytes


@pytest.mark.parametrize("route", ["joint", "step"])
def test_operators_of_a_budget_run_again_on_the_gpu(route: str) -> None:
    model, batch, loss = make("nanogpt-dropout", HALF)
    planned = search.run(
        on_gpu(model, batch, loss, step=route == "step"), Options(profile="h100", memory_budget="min"), deep=True
    )
    states = [node for node in operators(planned.graph.graph) if node.target is save_rng_state]
    assert states
    for node in states:
        assert node.args == (GPU,)
        assert node.meta["val"].device.type == "cpu"
        assert node.meta["val"].shape == (16,)


def test_cpu_leaves_the_graph_as_it_is() -> None:
    model, batch, loss = make("nanogpt")
    graph = capture(Workload("moved", model, batch, loss))
    before = {node.name: node.meta.get("val") for node in graph.graph.nodes}
    with traced_for(device_of("cpu")):
        assert moved(graph, device_of("cpu")) is graph
    assert {node.name: node.meta.get("val") for node in graph.graph.nodes} == before


def test_note_says_what_is_not_known() -> None:
    assert NOTE in of(lambda x, part: x.relu()).notes


def test_inputs_that_share_memory_still_do() -> None:
    graph = of(lambda x, part: x + part.sum())
    ports = zip(placeholders(graph.graph), graph.inputs, strict=True)
    by_role = {port.role: node.meta["val"] for node, port in ports if port.role in (Role.PARAMETER, Role.BUFFER)}
    weight, part = by_role[Role.PARAMETER], by_role[Role.BUFFER]
    assert compat.identity(weight) == compat.identity(part)
    assert (part.storage_offset(), part.stride(), part.shape) == (16, (8, 1), (2, 8))


def test_devices_in_arguments_are_the_gpu() -> None:
    graph = of(lambda x, part: x + torch.arange(8, device=x.device) + torch.ones(8, device=x.device))
    created = [node for node in operators(graph.graph) if name_of(node.target) in ("aten.arange.default", "aten.ones")]
    assert created
    assert all(node.kwargs["device"] == GPU for node in created)


def test_numbers_that_the_step_writes_stay_on_the_cpu_and_tensors_from_outside_go() -> None:
    held = torch.tensor(3.5)
    graph = of(lambda x, part: x * torch.tensor(2.5) + torch.tensor([1.0] * 8) - held)
    read = {
        (value.dim(), value.device.type) for n in graph.graph.find_nodes(op="get_attr") for _, value in tensors_of(n)
    }
    assert read == {(0, "cpu"), (1, "cuda"), (0, "cuda")}
    check_graph(graph, "capture", deep=True)


def test_number_that_is_put_into_a_part_lies_on_the_gpu() -> None:
    """As T5 shifts its labels: a scatter takes no part from the CPU."""

    def shifted(x: Tensor, part: Tensor) -> Tensor:
        y = x.new_zeros(x.shape)
        y[:, 1:] = x[:, :-1].clone()
        y[:, 0] = 2.5
        return y

    graph = of(shifted, step=False)
    assert "aten.select_scatter.default" in targets(graph)
    check_graph(graph, "capture", deep=True)


def test_view_that_the_gpus_strides_do_not_allow_is_of_a_copy() -> None:
    """A GPU's batch norm gives a result with the strides of its input, a CPU's is contiguous."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).view(2, -1)

    image = torch.randn(3, 5, 2, 4).permute(2, 3, 0, 1)
    assert "aten.clone.default" not in targets(capture(Workload("cpu", Strided(), (image,), total)))
    graph = on_gpu(Strided(), (image,), total)
    assert "aten.clone.default" in targets(graph)
    check_graph(graph, "capture", deep=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_has_its_channels_last_as_cudnn_has_them(groups: int) -> None:
    """Of groups torch says it itself, where it is built with cuDNN."""
    model = nn.Conv2d(4, 6, 3, groups=groups).to(memory_format=torch.channels_last)
    graph = on_gpu(model, (torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last),), total)
    output = next(node for node in operators(graph.graph) if node.target is aten.convolution.default).meta["val"]
    assert output.is_contiguous(memory_format=torch.channels_last) is (
        groups == 1 or torch.backends.cudnn.is_available()
    )
    check_graph(graph, "capture", deep=True)


def test_numbers_drawn_in_place_are_drawn_on_the_gpu() -> None:
    def noisy(x: Tensor, part: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_() + torch.empty_like(x).normal_() * torch.rand_like(x)

    graph = of(noisy)
    assert {tensor.device for node in operators(graph.graph) for _, tensor in tensors_of(node)} == {GPU}
    check_graph(graph, "capture", deep=True)


def test_checks_of_linear_algebra_go_along() -> None:
    graph = of(lambda x, part: torch.linalg.inv(x @ x.t() + torch.eye(4, device=x.device)), step=False)
    assert "roamc.operators.effects.with_effect" in targets(graph)
    assert {tensor.device for node in operators(graph.graph) for _, tensor in tensors_of(node)} == {GPU}


def only_a_cpu_has_it(x: Tensor, part: Tensor) -> Tensor:
    heads = x.view(1, 1, 4, 8)
    return aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]


def two_devices(x: Tensor, part: Tensor) -> Tensor:
    return torch.cat([x.sum().view(1), torch.tensor(1.0).view(1)])


def no_fake_kernel(x: Tensor, part: Tensor) -> Tensor:
    return torch.geqrf(x.detach())[0] + x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            only_a_cpu_has_it,
            r"flash_attention_for_cpu.* \(test_moved.py:\d+\) cannot be planned for cuda: only a CPU has",
        ),
        (two_devices, r"aten\.cat.* \(test_moved.py:\d+\) cannot be planned for cuda: .*two (different )?devices"),
        (
            no_fake_kernel,
            r"aten.geqrf.default \(test_moved.py:\d+\) cannot be planned for cuda: torch has no fake kernel",
        ),
    ],
)
def test_what_cannot_go_there_is_refused_by_name(function: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        of(function)


class ByHand(nn.Module):
    """A layer with a norm, whose products are in bfloat16 and the rest in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        up = F.linear(self.norm(x).to(HALF), self.up.weight.to(HALF), self.up.bias.to(HALF))
        down = F.linear(F.gelu(up), self.down.weight.to(HALF), self.down.bias.to(HALF))
        return x + down.float().softmax(-1)


class ByAutocast(ByHand):
    """The same by autocast; ``make`` makes the context manager when it is called with the input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        with self.make(x):
            return x + self.down(F.gelu(self.up(self.norm(x)))).softmax(-1)


@pytest.mark.parametrize("step", [True, False], ids=["step", "joint"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.autocast("cuda", dtype=HALF),
        lambda x: torch.amp.autocast(device_type=x.device.type, dtype=HALF),
    ],
    ids=["cuda", "device of the input"],
)
def test_autocast_is_cudas_and_has_the_peak_of_casts_by_hand(make: Callable[[Tensor], Any], step: bool) -> None:
    """A CPU's leaves softmax in bfloat16 up to its end, and casts no norm."""
    batch = (torch.randn(128, 64),)
    graphs = [on_gpu(model, batch, total, step=step) for model in (ByAutocast(make), ByHand())]
    by_autocast, by_hand = (
        sorted((name_of(n.target), str(t.dtype)) for n in operators(g.graph) for _, t in tensors_of(n)) for g in graphs
    )
    assert by_autocast == by_hand
    plans = [search.run(graph, Options(profile="h100")).plan for graph in graphs]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    assert plans[0].baseline_bytes == plans[1].baseline_bytes
    check_graph(graphs[0], "capture", deep=True)


def test_weight_is_cast_once_while_an_autocast_is_on_and_again_in_the_next() -> None:
    def casts(**settings: Any) -> int:
        def twice(x: Tensor, part: Tensor) -> Tensor:
            for _ in range(2):
                with torch.autocast("cuda", dtype=HALF, **settings):
                    x = x @ model.weight + x @ model.weight
            return x

        model = Module(twice)
        graph = on_gpu(model, (torch.randn(4, 8),), total)
        weights = (n.meta["val"] for n in operators(graph.graph) if n.target is aten._to_copy.default)
        return sum(weight.dtype is HALF and weight.shape == (8, 8) for weight in weights)

    assert (casts(), casts(cache_enabled=False)) == (2, 4)


def test_autocast_says_of_both_devices_what_it_is() -> None:
    """As models of transformers ask before they turn it off for the angles of positions."""

    def off_inside(x: Tensor, part: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=HALF):
            assert torch.is_autocast_enabled(x.device.type)
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype(x.device.type) is HALF
            with torch.autocast(x.device.type, enabled=False):
                assert not torch.is_autocast_enabled("cuda")
                return x @ part.t()

    graph = of(off_inside)
    assert {t.dtype for n in operators(graph.graph) for _, t in tensors_of(n)} == {torch.float32}
    assert not torch.is_autocast_enabled("cuda")


def test_autocast_around_a_plan_is_that_of_the_gpu() -> None:
    def norm(x: Tensor, part: Tensor) -> Tensor:
        return (x @ part.t()).exp()

    with torch.autocast("cpu", dtype=HALF):
        graph = of(norm, step=False)
        assert torch.is_autocast_enabled("cpu")
    exp = next(node for node in operators(graph.graph) if node.target is aten.exp.default)
    assert exp.meta["val"].dtype is torch.float32


def test_autocast_of_other_threads_stays_torchs() -> None:
    def on() -> tuple[bool, bool]:
        with warnings.catch_warnings(action="ignore"), torch.autocast("cuda", dtype=HALF):  # there may be no GPU
            return torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")

    with traced_for(GPU), ThreadPoolExecutor(1) as pool:
        assert pool.submit(on).result() == (torch.cuda.is_available(), False)


def test_device_is_named_in_the_error() -> None:
    with pytest.raises(OptionError, match="--device must be one of cpu, cuda, not 'tpu'"):
        device_of("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the GPU that is here")
def test_free_bytes_of_a_gpu_that_is_not_here() -> None:
    with pytest.raises(OptionError, match='"device" asks a GPU for its free bytes, and none is here; give a size'):
        resolve("device", 10**9, GPU, 0)


def test_plan_for_a_gpu_is_refused_on_a_cpu() -> None:
    model, batch, loss = make("nanogpt")
    plan = search.run(on_gpu(model, batch, loss), Options(profile="h100")).plan
    there = capture(Workload("moved", model, batch, loss))
    said = "the plan of 'moved' was made for cuda, and this step runs on cpu: plan again"
    with pytest.raises(PlanError, match=said):
        search.run(there, Options(), plan=Plan.from_json(plan.to_json()))
    again = search.run(on_gpu(model, batch, loss), Options(profile="h100"), plan=Plan.from_json(plan.to_json()))
    assert again.plan == plan


HEADS, WIDE, ODD, LONG = (2, 4, 16, 8), (2, 4, 16, 264), (2, 4, 16, 5), (2, 4, 24, 8)
FEW = (2, 2, 16, 8)


@pytest.mark.parametrize(
    ("dtype", "shapes", "settings", "kernel"),
    [
        (HALF, (HEADS, HEADS, HEADS), {}, "flash"),
        (torch.float16, (HEADS, HEADS, HEADS), {"is_causal": True, "dropout_p": 0.1}, "flash"),
        (HALF, (ODD, ODD, ODD), {}, "flash"),
        (HALF, (HEADS, FEW, FEW), {"enable_gqa": True}, "flash"),
        (HALF, (HEADS, LONG, LONG), {"is_causal": True}, "efficient"),
        (HALF, (HEADS, HEADS, HEADS), {"attn_mask": (16, 16)}, "efficient"),
        (HALF, (HEADS, HEADS, WIDE), {}, "efficient"),
        (HALF, (WIDE, WIDE, WIDE), {}, "efficient"),
        (torch.float32, (HEADS, HEADS, HEADS), {"dropout_p": 0.1}, "efficient"),
        (torch.float32, (HEADS, LONG, LONG), {"attn_mask": (2, 1, 16, 24)}, "efficient"),
        (torch.float32, (HEADS, FEW, FEW), {"enable_gqa": True}, "math"),
        (torch.float32, (ODD, ODD, ODD), {}, "math"),
        (torch.float64, (HEADS, HEADS, HEADS), {}, "math"),
        (torch.float32, (HEADS[1:], HEADS[1:], HEADS[1:]), {}, "math"),
    ],
)
def test_attention_is_the_kernel_that_cuda_takes(
    dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], settings: Mapping[str, Any], kernel: str
) -> None:
    operands = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    named = {key: torch.ones(v).bool() if key == "attn_mask" else v for key, v in settings.items()}
    mode = compat.CaptureMode()
    fakes = [mode.from_tensor(tensor) for tensor in operands]

    def attention(*parts: Tensor) -> list[Tensor]:
        own = [part.detach().requires_grad_() for part in parts]
        output = F.scaled_dot_product_attention(*own, **named)
        assert output.shape == (*shapes[0][:-1], shapes[2][-1])
        return list(torch.autograd.grad(output.float().sum(), own))

    with on_cuda():
        graph = compat.trace(attention, fakes, mode).graph
    called = {name_of(node.target) for node in graph.nodes if node.op == "call_function"}
    kernels = {name for name in called if "attention" in name}
    if kernel == "math":
        assert not kernels
        assert "aten.bmm.default" in called
    else:
        name = f"aten._scaled_dot_product_{kernel}_attention"
        assert kernels == {f"{name}.default", f"{name}_backward.default"}


class Dropping(nn.Module):
    """Attention with dropout, of projected values."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)


def test_backward_of_attention_finds_its_seed_on_the_cpu() -> None:
    """CUDA's memory-efficient kernel makes seed and offset there, and its backward reads them by their addresses."""
    planned = search.run(on_gpu(Dropping(), (torch.zeros(HEADS),), total), Options(profile="h100"))
    assert planned.graph.layout is not None
    placed = [name for name in planned.graph.layout.offset if "efficient_attention" in name and "backward" not in name]
    by_name = {node.name: node for node in planned.graph.graph.nodes}
    forward = by_name["_scaled_dot_product_efficient_attention"]
    assert [tensor.device.type for tensor in forward.meta["val"]] == ["cuda", "cuda", "cpu", "cpu"]
    assert not {f"{forward.name}#2", f"{forward.name}#3"}.intersection(placed)


def test_mask_rows_begin_where_the_kernel_loads() -> None:
    """As torch's ``pad_bias``: rows of 13 keys are kept 16 apart."""
    mode = compat.CaptureMode()
    with mode:
        query, key = torch.empty(2, 4, 16, 8), torch.empty(2, 4, 13, 8)
        mask = torch.empty(16, 13)
    graph = compat.trace(lambda *operands: attend(*operands[:3], operands[3]), [query, key, key, mask], mode).graph
    read = next(n for n in graph.nodes if n.target is aten._scaled_dot_product_efficient_attention.default).args[3]
    assert read.meta["val"].stride() == (0, 0, 16, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_by_its_parts_has_the_numbers_of_torch(grouped: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 6, 5, dtype=torch.float64), torch.randn(2, 2 if grouped else 4, 6, 5).double()
    settings: dict[str, Any] = {"is_causal": True, "scale": 1 / math.pi, "enable_gqa": grouped}
    torch.testing.assert_close(
        attend(query, key, key, **settings), F.scaled_dot_product_attention(query, key, key, **settings)
    )


def test_kernels_that_the_user_turns_off_are_not_taken() -> None:
    mode = compat.CaptureMode()
    with mode:
        heads = torch.empty(HEADS, dtype=HALF)

    def called() -> set[str]:
        graph = compat.trace(lambda x: attend(x, x, x), [heads], mode).graph
        return {name_of(node.target) for node in graph.nodes if "attention" in name_of(node.target)}

    from torch.nn.attention import SDPBackend, sdpa_kernel

    assert called() == {"aten._scaled_dot_product_flash_attention.default"}
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert called() == {"aten._scaled_dot_product_efficient_attention.default"}
    with sdpa_kernel(SDPBackend.MATH):
        assert called() == set()
