"""Layers that are alike are traced once for plans, and the graph is the one that tracing each of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from roamc.capture import alike, repeats
from roamc.capture.alike import MIN_LAYERS
from roamc.capture.batch import put_together, take_apart
from roamc.capture.step import capture_step
from roamc.capture.step_trace import StepRequest
from roamc.capture.tensor_parallel import check_called
from roamc.cli import zoo
from roamc.compat_repeats import Copies
from roamc.errors import OptionError
from roamc.frontends.mesh import Mesh, on_mesh
from roamc.frontends.workload import Workload, capture
from roamc.graph import Phase, TrainGraph, module_of, operators, source_line
from roamc.graph.fingerprint import fingerprint
from tests.small_models import square

WIDTH, LAYERS = 8, 4
COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
RUNS: list[str] = []
"""A name for every layer's forward that Python has run."""


@pytest.fixture(autouse=True)
def trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of this file count as layers of torch."""
    monkeypatch.setattr(alike, "TRUSTED", (*alike.TRUSTED, __name__.partition(".")[0]))


class Layer(nn.Module):
    """A residual layer with a draw."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(type(self).__name__)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(nn.Module):
    """Layers between others; ``call`` runs one of them."""

    def __init__(
        self, make: Callable[[int], nn.Module] = Layer, call: Callable[[nn.Module, Tensor], Tensor] = lambda f, x: f(x)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make(number) for number in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = self.call(layer, x)
        scores: Tensor = self.last(x)
        return scores


def traced(
    model: nn.Module, loss_fn: Callable[..., Tensor] = square, *, repeated: bool
) -> tuple[TrainGraph, list[str]]:
    """The graph of a step with AdamW, and the layers whose forward has run."""
    RUNS.clear()
    leaves, nest = take_apart((torch.ones(3, 5, WIDTH),))
    optimizer = torch.optim.AdamW(model.parameters())
    rebuild: Any = lambda values: tuple(put_together(values, nest))  # noqa: E731
    graph = capture_step(StepRequest(model, loss_fn, optimizer, tuple(leaves), rebuild, repeated=repeated)).graph
    return graph, list(RUNS)


def text_of(graph: TrainGraph) -> tuple[str, list[tuple[str, str]]]:
    """What plans and reports read of a graph; torch has no line for detached tensors that backward makes."""
    nodes = [node for node in graph.graph.nodes if node.target not in COPIES]
    return fingerprint(graph), [(source_line(node), module_of(node)) for node in nodes]


def assert_same(model: nn.Module, runs: int, **asked: Any) -> None:
    """Both traces give one graph; with copies, Python has run so many layers."""
    whole, _ = traced(model, repeated=False, **asked)
    graph, ran = traced(model, repeated=True, **asked)
    assert text_of(graph) == text_of(whole)
    assert len(ran) == runs


class Numbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


class MaybeNumbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + getattr(self, "number", 0))


class Remembering(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.result = super().forward(x)
        return self.result


class Listing(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.results: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.results.append(1)
        return super().forward(x)


class Normalised(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.over_batch = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.over_batch(x))


class Drawing(Layer):
    """Runs again in backward, with draws."""

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return again


class Dry(Layer):
    """Runs again in backward, without draws."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("Dry")
        again: Tensor = checkpoint(lambda x: self.down(self.up(x).tanh()), x, use_reentrant=False)
        return again


class InPlace(Layer):
    """Writes to what it has made."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("InPlace")
        return x + self.down(F.relu(self.up(x), inplace=True)).mul_(2)


class OnArgument(Layer):
    """Writes to what it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("OnArgument")
        written: Tensor = self.down(self.up(x.add_(2)))
        return written


class Viewing(Layer):
    """Returns a view of its argument when it can."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.view_as(x)


class Reading(Layer):
    """Reads a tensor that all layers have, and that is no buffer."""

    table = torch.full((WIDTH,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table


class Constant(Layer):
    """Makes a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([2.0] * WIDTH)


class Named(Layer):
    """Takes keywords and numbers; returns more than a tensor."""

    def forward(self, x: Tensor, *, scale: float, shift: tuple[Tensor, None]) -> dict[str, Any]:  # type: ignore[override]
        return {"x": super().forward(x) * scale + shift[0], "weights": None}


class Convolutional(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.GroupNorm(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("Convolutional")
        y: Tensor = self.conv(x)
        return y.relu()


def by_name(layer: nn.Module, x: Tensor) -> Tensor:
    returned: dict[str, Tensor] = layer(x, scale=0.5, shift=(x.detach() * 2, None))
    return returned["x"]


def from_a_product(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x * 3)
    return result


@pytest.mark.parametrize(
    ("make", "call"),
    [
        pytest.param(Layer, lambda f, x: f(x), id="plain"),
        pytest.param(Convolutional, lambda f, x: f(x), id="convolutions"),
        pytest.param(Named, by_name, id="keywords, numbers, several results"),
        pytest.param(InPlace, lambda f, x: f(x), id="writes to its own"),
        pytest.param(Layer, lambda f, x: f(x.transpose(0, 1)).transpose(0, 1), id="transposed"),
    ],
)
def test_layers_that_are_alike_are_traced_once(
    make: Callable[[int], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    assert_same(Stack(make, call), runs=1)


class Defaulted(Numbered):
    """Has a number that its class has too, so that nobody notices where it is missing."""

    number = 0


class Counting(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("make", "on_trial"),
    [
        (Numbered, 1),
        (MaybeNumbered, 1),
        (Defaulted, 0),
        (Remembering, 1),
        (Counting, 1),
        (Listing, 1),
        (Normalised, 1),
        (Drawing, 2),
        (Dry, 1),
        (OnArgument, 1),
        (Viewing, 1),
        (Reading, 1),
        (Constant, 1),
    ],
)
def test_a_layer_that_copies_would_not_do_for_is_traced_each_time(
    make: Callable[[int], nn.Module], on_trial: int
) -> None:
    """Besides, a trial traces it; Drawing runs its forward again in backward."""
    whole, ran = traced(Stack(make, from_a_product), repeated=False)
    graph, with_trial = traced(Stack(make, from_a_product), repeated=True)
    assert fingerprint(graph) == fingerprint(whole)
    assert len(with_trial) == len(ran) + on_trial


@pytest.mark.parametrize("make", [Counting, Listing, Numbered, Remembering, Layer])
def test_a_trial_leaves_a_layer_as_it_was(make: Callable[[int], nn.Module]) -> None:
    once, twice = Stack(make), Stack(make)
    traced(once, repeated=False)
    traced(twice, repeated=True)
    for layer, other in zip(once.layers, twice.layers, strict=True):
        held = {name: value for name, value in vars(layer).items() if isinstance(value, int | list)}
        assert list(vars(other)) == list(vars(layer))
        assert {name: vars(other)[name] for name in held} == held


def once(layer: nn.Module, x: Tensor) -> Tensor:
    again: Tensor = checkpoint(layer, x, use_reentrant=False)
    return again


def without_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift: Tensor = layer(x)
    return x * shift


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda f, x: x + f(x), id="gradient is added outside"),
        pytest.param(lambda f, x: f(f(x)), id="called twice"),
        pytest.param(once, id="checkpointed outside"),
        pytest.param(without_gradient, id="no gradient"),
        pytest.param(lambda f, x: f(x[1:].repeat(2, 1, 1)[:3]), id="a view with an offset"),
        pytest.param(lambda f, x: f(x).sum() * x, id="a gradient that is expanded"),
        pytest.param(lambda f, x: f(x).mul_(2), id="written to"),
    ],
)
def test_calls_that_copies_would_not_do_for_are_traced(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    whole, _ = traced(Stack(call=call), repeated=False)
    graph, _ = traced(Stack(call=call), repeated=True)
    assert fingerprint(graph) == fingerprint(whole)


class Tanh(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh()).tanh()


def test_what_autograd_refuses_is_refused() -> None:
    """Backward reads the result of the last tanh, which was written to."""
    for repeated in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            traced(Stack(Tanh, lambda f, x: f(x).mul_(2)), repeated=repeated)


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = square(model, x)
    (gradient,) = torch.autograd.grad(loss, next(model.parameters()), retain_graph=True)
    return loss * gradient.detach().sum()


def with_settings(model: nn.Module, x: Tensor) -> Tensor:
    """Sets what layers go by."""
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        layer.norm.eps = 0.1 * number
    return square(model, x)


@pytest.mark.parametrize("loss_fn", [penalised, twice, with_settings])
def test_a_loss_that_does_more_than_call_the_model_gets_its_own_graph(loss_fn: Callable[..., Tensor]) -> None:
    whole, _ = traced(Stack(), loss_fn, repeated=False)
    graph, _ = traced(Stack(), loss_fn, repeated=True)
    assert fingerprint(graph) == fingerprint(whole)


def _tied(model: Stack) -> None:
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight  # type: ignore[union-attr]


def _hooked(model: Stack) -> None:
    model.layers[1].register_forward_hook(lambda layer, args, result: result * 2)


def _hooked_parameter(model: Stack) -> None:
    model.layers[1].up.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[union-attr]


def _frozen(model: Stack) -> None:
    model.layers[2].requires_grad_(False)


def _set_otherwise(model: Stack) -> None:
    model.layers[1].norm.eps = 0.1  # type: ignore[union-attr]


def _evaluating(model: Stack) -> None:
    model.layers[3].eval()


def _replaced(model: Stack) -> None:
    layer = model.layers[1]
    layer.forward = lambda x: Layer.forward(layer, x) * 2  # type: ignore[method-assign,arg-type]


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (_tied, LAYERS),
        (_hooked, 2),
        (_hooked_parameter, 2 + LAYERS),
        (_frozen, 2 + LAYERS),
        (_set_otherwise, 2 + LAYERS),
        (_evaluating, 2),
        (_replaced, 2),
    ],
)
def test_a_layer_that_differs_is_traced_apart_from_the_others(change: Callable[[Stack], None], runs: int) -> None:
    model = Stack()
    change(model)
    assert_same(model, runs)


KEPT: list[Tensor] = []


class Keeping(Layer):
    """Keeps a result where no attribute of it says so, as auxiliary losses are."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        KEPT.append(x.mean())
        return x


def with_kept(model: nn.Module, x: Tensor) -> Tensor:
    loss = square(model, x) + torch.stack(KEPT).sum()
    KEPT.clear()
    return loss


def test_tensors_that_a_layer_leaves_elsewhere_are_those_of_each_layer() -> None:
    assert_same(Stack(Keeping), 1 + LAYERS, loss_fn=with_kept)


class KeepingAndReading(Keeping):
    """Of which there is no copy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Reading.table


def test_a_trial_that_fails_leaves_no_tensor_elsewhere() -> None:
    whole, _ = traced(Stack(KeepingAndReading), with_kept, repeated=False)
    graph, _ = traced(Stack(KeepingAndReading), with_kept, repeated=True)
    assert fingerprint(graph) == fingerprint(whole)


def in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return square(model, x)


def test_autocast_casts_arguments_as_often_as_in_a_trace_of_every_layer() -> None:
    class Twice(Layer):
        def forward(self, x: Tensor) -> Tensor:
            RUNS.append("Twice")
            return x.float() + self.down(self.up(x) + self.up(x))

    assert_same(Stack(Twice, lambda f, x: f(x.float())), 1, loss_fn=in_bfloat16)


def test_fewer_layers_are_traced_as_they_are() -> None:
    model = Stack()
    model.layers = model.layers[: MIN_LAYERS - 1]
    assert_same(model, MIN_LAYERS - 1)


def test_draws_that_are_repeated_behind_copies_are_those_of_the_first_run() -> None:
    class Again(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = checkpoint(lambda x: F.dropout(x.tanh(), 0.5), self.model(x), use_reentrant=False)
            return dropped

    assert_same(Again(Stack()), 1)


GPT = {"layers": 4, "width": 16, "heads": 2, "seq": 8, "batch": 2, "vocab": 32}


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"),
    [
        ("gpt3-22b", GPT, 1),
        ("gpt3-22b", GPT, 2),
        ("gpt2", GPT, 1),
        ("llama", {**GPT, "kv_heads": 2, "hidden": 32}, 2),
        ("bert", {**GPT, "hidden": 32}, 1),
        ("vit", {"layers": 4, "width": 16, "heads": 2, "hidden": 32, "image": 32, "batch": 2}, 1),
    ],
)
def test_plans_copy_the_layers_of_built_in_models(
    name: str, sizes: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, workload, copies = Mesh(tp=ranks), zoo.make(name, sizes), []
    monkeypatch.setattr(repeats, "Copies", lambda *asked: copies.append(Copies(*asked)) or copies[-1])  # type: ignore[func-returns-value]
    with mesh.planned_for():
        copied = capture(on_mesh(workload, mesh) if ranks > 1 else workload)
        monkeypatch.setattr(repeats, "groups_of", lambda model: [])
        whole = capture(on_mesh(workload, mesh) if ranks > 1 else workload)
    assert text_of(copied) == text_of(whole)
    assert len(copies) == sizes["layers"]


def test_a_part_that_a_layer_does_not_call_is_still_refused() -> None:
    class PastIt(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(F.linear(x, self.up.weight), self.down.weight)

    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    workload = Workload("past", Stack(PastIt), (torch.ones(3, 5, WIDTH),), square, tp_plan=plan)
    with Mesh(tp=2).planned_for(), pytest.raises(OptionError, match=r"layers\.0\.up is split, but the model does not"):
        check_called(captured_model(workload))


def captured_model(workload: Workload) -> nn.Module:
    """One rank's part of the model, after its capture."""
    part = on_mesh(workload, Mesh(tp=2))
    capture(part)
    return part.model


def test_copies_belong_to_the_modules_of_their_own_layer() -> None:
    graph, runs = traced(Stack(), repeated=True)
    assert len(runs) == 1
    of_phase: dict[Phase, list[set[str]]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    for phase, layers in of_phase.items():
        nodes = [node for node in operators(graph.graph) if graph.phase[node.name] is phase]
        modules = [module_of(node) for node in nodes]
        for at in range(LAYERS):
            layers.append({path.partition(f"layers.{at}")[2] for path in modules if f"layers.{at}" in path})
        assert all(layer == layers[0] for layer in layers)
    assert of_phase[Phase.FORWARD][0] == {"", ".norm", ".up", ".down"}
    assert of_phase[Phase.BACKWARD][0] == {"", ".norm", ".up", ".down"}
