"""What autograd lets a user do around a compiled module: several passes, hooks, modes, shapes, checkpoints."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc.frontends.backend
from tests.end_to_end.cases import SMALL
from tests.end_to_end.helpers import (
    aot_eager,
    arenas_waiting,
    assert_backward_equal,
    assert_same,
    assert_steps_equal,
    eager_step,
    gradients_of,
    noise,
    optimized,
    run_backward,
    seeded,
    sgd,
    square,
    tensors_of,
)
from tests.parallel import some_group


class MLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Checkpointed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) + x


class Breaking(MLP):
    """Two graphs with a print between them."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        print("a graph break")
        return self.down(y)


def both(use: Callable[[nn.Module], Any], model: nn.Module | None = None) -> nn.Module:
    """``use`` of an optimized copy and of an aot_eager copy: results, gradients and buffers are equal."""
    model = model or MLP()
    twin = aot_eager(model)
    model = optimized(model)
    assert_same(seeded(use, model), seeded(use, twin))
    assert_same(gradients_of(model), gradients_of(twin))
    assert_same(tensors_of(model), tensors_of(twin))
    assert arenas_waiting() == 0
    assert roamc.plans(model), "nothing was planned"
    return model


def values(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def test_two_losses_two_backwards() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        first, second = square(model, noise(4, 8)), square(model, noise(4, 8, seed=5))
        second.backward()
        first.backward()
        return values(first, second)

    both(use)


def test_called_twice_before_one_backward() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        loss = (model(noise(4, 8)) * model(model(noise(4, 8, seed=5)))).mean()
        loss.backward()
        return values(loss)

    both(use)


def test_gradient_accumulation() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        losses = [square(model, noise(4, 8, seed=seed)) / 2 for seed in range(2)]
        for loss in losses:
            loss.backward()
        return values(*losses)

    both(use)


def test_retain_graph_twice_then_once_more() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        loss = square(model, noise(4, 8))
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        square(model, noise(4, 8, seed=5)).backward()
        loss.backward(retain_graph=True)
        loss.backward()
        return [*values(loss), *first.values()]

    both(use)


@pytest.mark.parametrize("budget", [None, "min"])
def test_retain_graph_after_steps_without(budget: str | None) -> None:
    """As a penalty every few steps needs it: ``aot_eager`` refuses that, and eager does not."""

    def use(model: nn.Module) -> list[Tensor]:
        for seed in range(2):
            square(model, noise(4, 8, seed=seed)).backward()
        loss = square(model, noise(4, 8, seed=2))
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        loss.backward()
        square(model, noise(4, 8, seed=3)).backward()
        return [*values(loss), *first.values()]

    twin = MLP()
    model = optimized(copy.deepcopy(twin), memory_budget=budget)
    assert_same(seeded(use, model), seeded(use, twin))
    assert_same(gradients_of(model), gradients_of(twin))


def test_second_backward_without_retain_graph_is_an_error() -> None:
    model = optimized(MLP())
    loss = square(model, noise(4, 8))
    loss.backward()
    before = gradients_of(model)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    assert_same(gradients_of(model), before)


def test_gradient_of_an_input() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        x = noise(4, 8).requires_grad_()
        (gradient,) = torch.autograd.grad(square(model, x), x)
        return [gradient]

    both(use)


def test_backward_of_one_output_of_several() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        model(noise(4, 8))["nest"][1][1].sum().backward()
        return []

    both(use, SMALL["several outputs"].build())


class KeepInDouble:
    """A pair of hooks that keep saved tensors in another form, as save_on_cpu does."""

    def __init__(self) -> None:
        self.packed = 0

    def pack(self, tensor: Tensor) -> tuple[torch.dtype, Tensor]:
        self.packed += 1
        return tensor.dtype, tensor.detach().clone().to(torch.float64) if tensor.is_floating_point() else tensor.clone()

    def unpack(self, kept: tuple[torch.dtype, Tensor]) -> Tensor:
        return kept[1].to(kept[0])


def test_saved_tensors_hooks() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        hooks = KeepInDouble()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            loss = square(model, noise(4, 8))
        assert hooks.packed > 0
        square(model, noise(4, 8, seed=5)).backward()
        loss.backward()
        return values(loss)

    both(use)


def test_save_on_cpu() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        with torch.autograd.graph.save_on_cpu():
            loss = square(model, noise(4, 8))
        loss.backward()
        return values(loss)

    both(use)


def test_hooks_on_modules_parameters_and_tensors() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) for p in model.parameters()
        ]
        x = noise(4, 8).requires_grad_()
        x.register_hook(lambda gradient: gradient * 2)
        y = model(x)
        y.register_hook(lambda gradient: gradient * 3)
        (y**2).mean().backward()
        for handle in handles:
            handle.remove()
        return [x.grad, *sorted(seen, key=lambda t: t.numel())]

    both(use)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", ["batch norm", "dropout", "several outputs", "view of an input", "buffers"])
def test_inference(name: str, mode: Callable[[], Any]) -> None:
    case = SMALL[name]

    def use(model: nn.Module) -> list[Tensor]:
        model.eval()
        with mode():
            return [case.loss(model, case.batch()).clone() for _ in range(2)]

    both(use, case.build())


def test_training_and_inference_in_turn() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        losses = []
        for seed in range(2):
            loss = square(model.train(), noise(2, 3, 8, 8, seed=seed))
            with torch.no_grad():
                losses += [square(model, noise(2, 3, 8, 8)), square(model.eval(), noise(2, 3, 8, 8))]
            loss.backward()
        return losses

    both(use, SMALL["batch norm"].build())


def test_autocast_around_an_optimized_module() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model, noise(4, 8))
        loss.backward()
        return values(loss, square(model, noise(4, 8)))

    both(use)


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    return (y.float() ** 2).mean()


def test_autocast_inside_the_loss_function() -> None:
    assert_steps_equal(MLP(), autocast_loss, sgd, [(noise(4, 8, seed=seed),) for seed in range(3)])
    assert_backward_equal(MLP(), autocast_loss, [(noise(4, 8, seed=seed),) for seed in range(2)])


def test_autocast_around_a_train_step() -> None:
    model = MLP()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for cast in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = seeded(step, noise(4, 8))
            wanted = seeded(eager_step, twin, square, reference, noise(4, 8))
        assert_same(loss, wanted)
        assert_same(tensors_of(model), tensors_of(twin))
    assert len(step.plans) == 2


class Thrice(nn.Module):
    """One weight, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.inner(x).tanh()
        with torch.autocast("cpu", enabled=False):
            return self.last(x.float())


@pytest.mark.parametrize("around", [True, False], ids=["around the step", "inside the loss"])
def test_autocast_casts_a_weight_once_per_step_if_its_cache_is_on(around: bool) -> None:
    """As in eager, where gradients of all uses are then added in bfloat16; the step holds one cast."""
    model, x = seeded(Thrice), noise(8, 64)
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)

    def autocast(cache: bool) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)

    def inside(cache: bool) -> Callable[[nn.Module, Tensor], Tensor]:
        def loss(m: nn.Module, x: Tensor) -> Tensor:
            with autocast(cache):
                return square(m, x)

        return loss

    for cache in (True, False, True):
        if around:
            with autocast(cache):
                assert_same(seeded(step, x), seeded(eager_step, twin, square, reference, x))
        else:
            step.loss_fn = inside(cache)
            assert_same(seeded(step, x), seeded(eager_step, twin, inside(cache), reference, x))
        assert_same(tensors_of(model), tensors_of(twin))
    once, thrice = sorted(step.plans, key=lambda plan: plan.baseline_bytes)
    assert thrice.baseline_bytes - once.baseline_bytes > 1.8 * 2 * 64 * 64  # eager takes 45,464 and 29,976 bytes


def test_changed_shapes_of_an_optimized_module() -> None:
    model = assert_backward_equal(MLP(), square, [(noise(rows, 8),) for rows in (4, 2, 4, 6)])
    assert len(roamc.plans(model)) == 3


def test_changed_shapes_of_a_train_step() -> None:
    step = assert_steps_equal(MLP(), square, sgd, [(noise(rows, 8),) for rows in (4, 2, 4, 6)])
    assert len(step.plans) == 3


class Settles(MLP):
    """Forward sets an attribute to what it is from then on, as Swin does with its windows."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)
        return super().forward(x)


class Counts(MLP):
    """Forward counts its calls, and they count."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_an_attribute_that_forward_sets_takes_no_second_plan() -> None:
    step = assert_steps_equal(Settles(), square, sgd, [(noise(4, 8, seed=seed),) for seed in range(3)])
    assert len(step.plans) == 1


def test_an_attribute_that_forward_changes_is_read_at_every_step() -> None:
    assert_steps_equal(Counts(), square, sgd, [(noise(4, 8, seed=seed),) for seed in range(4)])


def test_plans_of_a_train_step_are_bounded() -> None:
    model = MLP()
    step = roamc.train_step(model, square, sgd(model), strict=True, max_plans=2)
    for rows in (1, 2, 1):
        step(noise(rows, 8))
    with pytest.warns(UserWarning, match="max_plans=2"):
        step(noise(3, 8))
    fixed = [sum(plan.fixed_bytes.values()) for plan in step.plans]
    assert len(fixed) == 2
    assert fixed[0] < fixed[1], "the plans used last: one row, then three"


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_that_torch_or_the_user_makes_dynamic(dynamic: bool | None) -> None:
    model = MLP()
    twin = aot_eager(model)
    model.compile(backend="roamc", options={"strict": True}, dynamic=dynamic)
    for rows in (4, 2, 5):
        wanted = run_backward(twin, square, (noise(rows, 8),))
        assert_same(run_backward(model, square, (noise(rows, 8),)), wanted)


def test_checkpoint_inside_the_model() -> None:
    assert_backward_equal(Checkpointed(), square, [(noise(4, 8, seed=seed),) for seed in range(2)])


def test_checkpoint_inside_a_model_that_is_split() -> None:
    """torch saves the generator's state behind the device meshes, where AOTAutograd takes no tensor."""
    with some_group():
        mesh = init_device_mesh("cpu", (1,))
        split = parallelize_module(Checkpointed(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert_backward_equal(split, square, [(noise(4, 8),)], reference=copy.deepcopy)


def test_checkpoint_inside_a_train_step() -> None:
    assert_steps_equal(Checkpointed(), square, sgd, [(noise(4, 8, seed=seed),) for seed in range(2)])


class CheckpointedBuffer(nn.Module):
    """A checkpointed part that updates a buffer and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def part(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.inner(x - self.mean).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)


def test_a_buffer_in_a_checkpoint_is_updated_once_by_a_module_and_twice_by_a_step_as_in_eager() -> None:
    """Gradients of both are eager's; a module's backward leaves the buffer as forward wrote it."""
    eager, x = CheckpointedBuffer(), noise(4, 8)
    module, other = optimized(copy.deepcopy(eager)), copy.deepcopy(eager)
    square(eager, x).backward()
    square(module, x).backward()
    assert_same(gradients_of(module), gradients_of(eager))
    assert torch.equal(module.mean, x.mean(0) * 0.5)
    step = roamc.train_step(other, square, sgd(other), strict=True)
    step(x)
    assert torch.equal(other.mean, eager.mean)
    assert not torch.equal(eager.mean, module.mean)


def test_checkpoint_around_an_optimized_module() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        loss = checkpoint(square, model, noise(4, 8), use_reentrant=False)
        loss.backward()
        return values(loss)

    both(use)


class Pieces(nn.Module):
    """A large piece and a small one, with a graph break in between."""

    def __init__(self, small_first: bool) -> None:
        super().__init__()
        deep = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        self.first, self.last = (nn.Linear(8, 8), deep) if small_first else (deep, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def train_pieces(small_first: bool, way: str, rows: int, **options: Any) -> tuple[list[roamc.Plan], list[str]]:
    """Train :class:`Pieces` for a step; return the plans, and the warnings behind the one that the model is split."""
    torch._dynamo.reset()
    roamc.frontends.backend.LATEST.clear()
    model = Pieces(small_first)
    called = roamc.optimize(model, **options)
    if way == "torch.compile":
        called = torch.compile(Pieces(small_first), backend="roamc", options=options, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        square(called, noise(rows, 8)).backward()
    said = [str(each.message) for each in caught]
    assert "for each piece of 'Pieces'" in said[0]
    return roamc.plans(), said[1:]


@pytest.mark.parametrize("small_first", [True, False])
@pytest.mark.parametrize("way", ["torch.compile", "optimize"])
def test_a_share_that_one_piece_of_a_model_cannot_keep_asks_for_bytes(small_first: bool, way: str) -> None:
    rows = 32_768  # the small piece takes more than 1 MiB
    with pytest.raises(Exception, match="above memory_budget") as caught:
        train_pieces(small_first, way, rows, memory_budget="60%")
    error = caught.value.inner_exception
    assert isinstance(error, roamc.BudgetError)
    assert str(error).endswith("this one cannot keep it: give memory_budget in bytes, which small pieces keep")
    assert "\n" not in str(error)
    assert error.plan is not None
    train_pieces(small_first, way, rows, memory_budget="100MB")


@pytest.mark.parametrize("small_first", [True, False])
@pytest.mark.parametrize("way", ["torch.compile", "optimize"])
@pytest.mark.parametrize("share", ["60%", "0.01%"])
def test_a_share_that_a_small_piece_cannot_keep_is_no_error(small_first: bool, way: str, share: str) -> None:
    plans, said = train_pieces(small_first, way, 32, memory_budget=share)
    assert len(said) == 1
    assert f"memory_budget={share!r} is not kept by this small piece of a split model" in said[0]
    small = plans[0 if small_first else 1]
    assert any("is not kept by this small piece" in note for note in small.notes)
    with pytest.raises(Exception, match="above memory_budget"):
        train_pieces(small_first, way, 32, memory_budget="1kB")


def test_a_piece_is_small_beside_the_largest_before(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = roamc.frontends.backend
    monkeypatch.setattr(backend, "SMALL", backend.Small(nbytes=0, share=0.2))
    _, said = train_pieces(False, "optimize", 32_768, memory_budget="80%")
    assert len(said) == 1
    with pytest.raises(Exception, match="above memory_budget"):
        train_pieces(True, "optimize", 32_768, memory_budget="80%")


def test_a_share_that_a_whole_small_model_cannot_keep_is_an_error() -> None:
    model = roamc.optimize(nn.Linear(8, 8), memory_budget="60%")
    with pytest.raises(Exception, match="above memory_budget"):
        square(model, noise(4, 8)).backward()


def test_graph_break_runs_piecewise(capsys: pytest.CaptureFixture[str]) -> None:
    model = assert_backward_equal(Breaking(), square, [(noise(4, 8, seed=seed),) for seed in range(2)])
    first, last = roamc.plans(model)
    assert first.notes[0].startswith("torch.compile splits the model at test_autograd.py:")
    assert last.notes[-1].startswith("'Breaking' runs in 2 programs and in eager")
    assert capsys.readouterr().out.count("a graph break") == 4


def test_budget_of_a_model_in_pieces_is_not_that_of_the_model() -> None:
    model = roamc.optimize(Breaking(), memory_budget="1GB")
    with pytest.warns(UserWarning, match=r"for each piece of 'Breaking' .*splits the model at test_autograd\.py:\d+"):
        square(model, noise(4, 8)).backward()


def test_a_graph_break_inside_torch_is_named_with_the_line_that_calls_it() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8, momentum=None)  # reads the number of batches so far

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    line = r"splits the model at test_autograd\.py:\d+ \(.*, at torch's batchnorm\.py:\d+\)\. Change"
    with pytest.warns(UserWarning, match=line):
        square(roamc.optimize(Averaged(), memory_budget="1GB"), noise(4, 8)).backward()


def test_pieces_of_a_function_have_its_name() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return (y.cos() * 3).sum()

    roamc.frontends.backend.LATEST.clear()
    torch.compile(function, backend="roamc", options={"strict": True})(noise(4, 8).requires_grad_()).backward()
    assert [plan.name for plan in roamc.plans()] == ["function", "function"]


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
def test_optimize_plans_a_module_of_torch_itself(build: Callable[[], nn.Module]) -> None:
    both(lambda model: square(model, noise(4, 8)).backward(), build())


class Metric(nn.Module):
    """Gives, beside its output, what is to have no gradient, as a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y.detach()[0], y.view(-1).detach(), y.tanh().detach().t()


@pytest.mark.parametrize("way", ["compile", "optimize"])
def test_views_of_detached_tensors_need_no_gradient(way: str) -> None:
    model = Metric()
    wanted = copy.deepcopy(model)(noise(4, 8))
    if way == "compile":
        outputs = torch.compile(model, backend="roamc", options={"strict": True})(noise(4, 8))
    else:
        outputs = roamc.optimize(model, strict=True)(noise(4, 8))
    assert [t.requires_grad for t in outputs] == [t.requires_grad for t in wanted] == [True, False, False, False]
    assert_same([t.detach() for t in outputs], [t.detach() for t in wanted])
    outputs[1].numpy()
    outputs[2].add_(0)
    ((outputs[0] - outputs[1]) ** 2).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
