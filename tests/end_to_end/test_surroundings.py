"""What a training script does around a model between two steps, and with parts that the model does not own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.cases import SMALL, Layers
from tests.end_to_end.helpers import (
    aot_eager,
    assert_same,
    eager_step,
    noise,
    optimized,
    run_backward,
    seeded,
    sgd,
    square,
    state_of,
    tensors_of,
)

X = noise(4, 8)
Change = Callable[[nn.Module], object]


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def net() -> nn.Module:
    return Layers(nn.Embedding(10, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh())


def test_frozen_teacher_that_follows_the_student() -> None:
    model = Layers(nn.Linear(8, 8), nn.BatchNorm1d(8))
    twin = copy.deepcopy(model)

    def train(student: nn.Module, use: str) -> list[Tensor]:
        teacher = copy.deepcopy(student).requires_grad_(False)

        def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
            return ((m(x) - teacher(x + 1)) ** 2).mean()

        optimizer = sgd(student)
        step = roamc.train_step(student, loss_fn, optimizer, strict=True)
        losses = []
        for seed in range(4):
            x = noise(4, 8, seed=seed)
            losses.append(step(x) if use == "roamc" else eager_step(student, loss_fn, optimizer, x))
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                    old.lerp_(new, 0.5)
        return [*losses, *tensors_of(teacher).values()]

    assert_same(train(model, "roamc"), train(twin, "eager"))
    assert_same(tensors_of(model), tensors_of(twin))


CHANGES: dict[str, Change] = {
    "weights loaded": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
    "weights assigned": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}, assign=False),
    "weight written": lambda m: m[2].weight.data.mul_(0.5),
    "weight's data exchanged": lambda m: setattr(m[2].weight, "data", noise(8, 8)),
    "weight's data of other strides": lambda m: setattr(m[2].weight, "data", noise(8, 8).t()),
    "another dtype": lambda m: m.to(torch.bfloat16),
    "dropout": lambda m: setattr(m[1], "p", 0.9),
    "evaluation": lambda m: m.eval(),
    "part of it in evaluation": lambda m: m[1].eval(),
    "part of it frozen": lambda m: m[0].requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_between_two_train_steps(change: Change) -> None:
    model = net()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, plain_sgd(model), strict=True), plain_sgd(twin)
    idx = torch.tensor([[1, 2, 2, 9]])
    for number in range(4):
        if number == 2:
            change(model)
            change(twin)
        loss = seeded(step, idx, seed=number)
        assert_same(loss, seeded(eager_step, twin, square, reference, idx, seed=number))
        assert_same(tensors_of(model), tensors_of(twin))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_between_two_calls_of_an_optimized_module(change: Change) -> None:
    model = net()
    twin = aot_eager(model)
    model = optimized(model)
    batch = (torch.tensor([[1, 2, 2, 9]]),)
    for number in range(4):
        if number == 2:
            change(model)
            change(twin)
            model.zero_grad()
            twin.zero_grad()
        try:
            results = run_backward(model, square, batch, seed=number)
        except roamc.StaleError:
            assert number == 2
            assert change is CHANGES["another dtype"]
            assert torch.__version__ < "2.13", "this torch compiles again"
            return
        assert_same(results, run_backward(twin, square, batch, seed=number))


def test_buffer_of_another_shape_or_dtype_between_two_train_steps() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = Scaled()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, plain_sgd(model), strict=True), plain_sgd(twin)
    for scale in (noise(8), noise(8, seed=5), noise(4, 8), noise(8).double(), noise(8)):
        model.scale = scale
        twin.scale = scale.clone()
        assert_same(step(X), eager_step(twin, square, reference, X))
    assert_same(tensors_of(model), tensors_of(twin))


def test_train_step_of_a_model_that_is_compiled_already() -> None:
    model = SMALL["dropout"].build()
    twin = copy.deepcopy(model)
    optimized(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for seed in range(2):
        loss = seeded(step, X, seed=seed)
        assert_same(loss, seeded(eager_step, twin, square, reference, X, seed=seed))
    run_backward(model, square, (X,))
    assert len(roamc.plans(model)) == 1, "the model itself is still compiled"


def test_optimized_part_of_an_optimized_module() -> None:
    model = SMALL["dropout"].build()
    twin = aot_eager(model)
    optimized(model[0])
    optimized(model)
    for seed in range(2):
        results = run_backward(model, square, (X,), seed=seed)
        assert_same(results, run_backward(twin, square, (X,), seed=seed))


def test_optimized_parts_of_a_model() -> None:
    model = SMALL["dropout"].build()
    twin = copy.deepcopy(model)
    for part in (0, 2):
        model[part] = optimized(Layers(model[part]))
    for seed in range(2):
        results, wanted = (run_backward(m, square, (X,), seed=seed) for m in (model, twin))
        assert_same([*results["grad"].values()], [*wanted["grad"].values()])


def test_optimizing_twice_is_as_good_as_once() -> None:
    model = SMALL["dropout"].build()
    twin = aot_eager(model)
    model = optimized(optimized(model))
    assert_same(run_backward(model, square, (X,)), run_backward(twin, square, (X,)))
    assert len(roamc.plans(model)) == 1


def test_train_step_inside_of_grad_modes() -> None:
    model = SMALL["batch norm"].build()
    twin = copy.deepcopy(model)
    x = noise(2, 3, 8, 8)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for _ in range(2):
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            with pytest.raises(roamc.CaptureError, match=r"under torch.no_grad\(\).*enable_grad"):
                step(x)
            assert_same(model.state_dict(), before)
            with torch.enable_grad():
                loss = step(x)
        assert_same(loss, eager_step(twin, square, reference, x))
    assert_same(state_of(step.optimizer), state_of(reference))


def test_loss_function_that_calls_a_method_of_the_model() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

        def score(self, x: Tensor) -> Tensor:
            return self.used(self.body(x).tanh())

    model = TwoHeads()
    twin = copy.deepcopy(model)
    loss_fn = lambda m, x: (m.score(x) ** 2).mean()  # noqa: E731
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for _ in range(3):
        assert_same(step(X), eager_step(twin, loss_fn, reference, X))
    assert_same(state_of(step.optimizer), state_of(reference))


def test_optional_parts_of_a_batch() -> None:
    def loss_fn(m: nn.Module, x: Tensor, mask: Tensor | None, flip: bool) -> Tensor:
        y = m(x.flip(1) if flip else x)
        return (y if mask is None else y * mask).mean()

    model = Layers(nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for batch in ((X, None, False), (X, X > 0, False), (X, None, True), (X, None, False)):
        assert_same(step(*batch), eager_step(twin, loss_fn, reference, *batch))
    assert len(step.plans) == 3


def test_loss_that_is_a_parameter() -> None:
    model = nn.Module()
    model.level = nn.Parameter(torch.tensor(3.0))
    step = roamc.train_step(model, lambda m, x: m.level, torch.optim.SGD(model.parameters(), lr=1.0), strict=True)
    for wanted in (2.0, 1.0):
        step(X)
        assert model.level.item() == wanted


def test_two_batch_tensors_that_are_one() -> None:
    model = Layers(nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    loss_fn = lambda m, x, y: ((m(x) - y) ** 2).mean()  # noqa: E731
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for batch in ((X, X), (X, X + 1), (X, X)):
        assert_same(step(*batch), eager_step(twin, loss_fn, reference, *batch))


def test_sparse_gradients_are_refused_by_train_step() -> None:
    model = Layers(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(roamc.CaptureError, match="sparse"):
        roamc.train_step(model, square, plain_sgd(model))(torch.tensor([[1, 2, 2, 9]]))


@pytest.mark.parametrize("way", ["optimize", "compile"])
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_fall_back_with_one_line(layer: type[nn.Module], way: str) -> None:
    model = Layers(layer(10, 8, sparse=True), nn.Linear(8, 8))
    idx = torch.tensor([[1, 2, 2, 9]])
    twin = aot_eager(model)
    square(twin, idx).backward()
    torch._dynamo.reset()
    model = roamc.optimize(model) if way == "optimize" else model
    compiled = model if way == "optimize" else torch.compile(model, backend="roamc")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        square(compiled, idx).backward()
    ours = [str(warning.message) for warning in caught if "roamc" in str(warning.message)]
    assert len(ours) == 1
    assert "makes a tensor of layout torch.sparse_coo, and roamc plans dense ones only; embeddings need" in ours[0]
    for parameter, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad.layout == wanted.grad.layout
        assert_same(parameter.grad.to_dense(), wanted.grad.to_dense())


def test_generator_made_inside_the_loss_function() -> None:
    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return square(m, x + torch.rand(8, generator=torch.Generator().manual_seed(4)))

    model = Layers(nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for _ in range(3):
        try:
            loss = step(X)
        except roamc.CaptureError as error:
            assert "generator" in str(error)  # noqa: PT017
            return
        assert_same(loss, eager_step(twin, loss_fn, reference, X))


@pytest.mark.parametrize("shape", [(), (1,), (8,)], ids=str)
def test_tensor_outside_the_model_that_changes_between_steps(shape: tuple[int, ...]) -> None:
    outside = torch.full(shape, 0.5)
    loss_fn = lambda m, x: square(m, x * outside)  # noqa: E731
    model = Layers(nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for _ in range(3):
        assert_same(step(X), eager_step(twin, loss_fn, reference, X))
        outside.mul_(2)


class Trunk(nn.Module):
    """Its first operator belongs to a part."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.down(x))


@pytest.mark.parametrize("breaks", [False, True])
def test_plan_of_torch_compile_has_the_name_of_the_model(breaks: bool) -> None:
    for compiled in (
        torch.compile(Trunk(breaks), backend="roamc"),
        torch.compile(Trunk(breaks).forward, backend="roamc"),
    ):
        torch.compiler.reset()
        compiled(noise(4, 8)).sum().backward()
        assert {plan.name for plan in roamc.plans()[-1 - breaks :]} == {"Trunk"}


def test_plan_of_a_function_has_the_name_of_its_model() -> None:
    model = Trunk(False)
    torch.compile(lambda x: model(x).sum(), backend="roamc")(noise(4, 8)).backward()
    assert roamc.plans()[-1].name == "Trunk"


def ready_step() -> tuple[nn.Module, torch.optim.Optimizer, roamc.TrainStep]:
    model = seeded(lambda: nn.Linear(8, 8))
    optimizer = plain_sgd(model)
    return model, optimizer, roamc.train_step(model, square, optimizer, strict=True)


def test_compiled_step_is_the_step_itself() -> None:
    (model, _, step), (twin, optimizer, _) = ready_step(), ready_step()
    compiled = torch.compile(step)
    for seed in range(3):
        x = noise(4, 8, seed=seed)
        assert torch.equal(compiled(x), eager_step(twin, square, optimizer, x))
    assert_same(tensors_of(model), tensors_of(twin))


def test_loss_function_that_runs_backward_is_told_to_return_the_loss() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x)
        loss.backward()
        return loss

    model = nn.Linear(8, 8)
    with pytest.raises(roamc.RoamcError, match="loss_fn runs backward itself: let it return the loss alone"):
        roamc.train_step(model, loss_fn, plain_sgd(model))(X)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_from_before_are_left_alone_with_one_warning() -> None:
    (model, _, step), (twin, _, other) = ready_step(), ready_step()
    square(model, X).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match=r"neither adds to \.grad nor uses it"):
        step(X)
    for each, x in ((other, X), (step, noise(2, 8)), (other, noise(2, 8))):
        each(x)
    assert_same(tensors_of(model), tensors_of(twin))
    assert all(torch.equal(old, later.grad) for old, later in zip(before, model.parameters(), strict=True))
