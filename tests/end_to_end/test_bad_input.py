"""What roamc cannot do it says in one line, as an error of its own, before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint

import roamc
from tests.end_to_end.helpers import (
    assert_backward_equal,
    assert_same,
    eager_step,
    noise,
    sgd,
    square,
    state_of,
    tensors_of,
)

X = noise(4, 8)
Body = Callable[[nn.Module, Tensor], Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def refused(run: Callable[[], Any], kind: type[roamc.RoamcError], *parts: str) -> None:
    """``run`` raises ``kind`` in one line that holds every part."""
    with pytest.raises(kind) as caught:
        run()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message
    assert len(message) < 400


def branch_on_data(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y.sum() if y.sum() > 0 else y.mean()


def item(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() * x.sum().item()


def nonzero(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[x.sum(1) > 0].sum()


def unique(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() * x.unique().numel()


def alignment(model: nn.Module, x: Tensor) -> Tensor:
    scores, targets = model(x)[:, None].log_softmax(-1), torch.ones(1, 2, dtype=torch.int64)
    return nn.functional.ctc_loss(scores, targets, (4,), (2,))


LOSSES: dict[str, tuple[Body, tuple[str, ...]]] = {
    "a vector": (lambda m, x: m(x).sum(1), ("scalar", "(4,)", ".mean()")),
    "one element in a vector": (lambda m, x: m(x).sum().view(1), ("scalar", "(1,)")),
    "a number": (lambda m, x: 3.0, ("scalar tensor", "float")),
    "nothing": (lambda m, x: None, ("scalar tensor", "NoneType")),
    "a pair": (lambda m, x: (m(x).sum(), m(x)), ("scalar tensor", "tuple", "return the loss alone")),
    "an output of several parts": (
        lambda m, x: {"loss": m(x).sum()},
        ("scalar tensor", "dict", "return the loss alone"),
    ),
    "an integer": (lambda m, x: m(x).argmax(), ("floating-point", "int64")),
    "without gradient": (lambda m, x: m(x).sum().detach(), ("does not depend on any parameter",)),
    "of the input alone": (lambda m, x: x.sum(), ("does not depend on any parameter",)),
    "by control flow on data": (branch_on_data, ("value", "torch.where", "torch.compile")),
    "by item": (item, ("value", "torch.compile")),
    "by a mask as index": (nonzero, ("shape", "depends on data", "mask")),
    "by unique": (unique, ("shape", "depends on data")),
    "by sequences of other lengths": (alignment, ("F.ctc_loss", "roamc.optimize")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    loss_fn, parts = LOSSES[name]
    model = net()
    optimizer = sgd(model)
    before, random = tensors_of(model), torch.get_rng_state()
    refused(lambda: roamc.train_step(model, loss_fn, optimizer)(X), roamc.CaptureError, *parts)
    assert_same(tensors_of(model), before)
    assert_same(torch.get_rng_state(), random)
    assert state_of(optimizer) == {}


def test_an_array_in_the_batch_is_told_from_a_tensor() -> None:
    model = net()
    step = roamc.train_step(model, lambda m, x: m(x).sum(), sgd(model))
    refused(lambda: step(X.numpy()), roamc.CaptureError, "ndarray", "torch.as_tensor")


@pytest.mark.parametrize("loss_fn", [branch_on_data, nonzero], ids=lambda f: f.__name__)
def test_what_train_step_refuses_torch_compile_can_do(loss_fn: Body) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return loss_fn(self.inner, x)

    assert_backward_equal(Whole(), lambda m, x: m(x), [(X,), (-X,)])


@pytest.mark.parametrize(
    ("body", "said"),
    [(item, "reads a tensor's value"), (branch_on_data, "reads a tensor's value"), (nonzero, "depends on data")],
)
def test_model_that_is_planned_without_a_loss_has_the_users_line(body: Body, said: str) -> None:
    class Whole(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return body(super().forward, x)

    line = f"test_bad_input.py:{body.__code__.co_firstlineno + 1 + (body is branch_on_data)}: "
    refused(lambda: roamc.plan(Whole(8, 8), X), roamc.CaptureError, line, said, "torch.compile")


@pytest.mark.parametrize("whole", [True, False])
def test_reentrant_checkpoint_is_named(whole: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            function = self.second if whole else lambda y: self.second(y).sin()
            return checkpoint(function, self.first(x), use_reentrant=True)

    model = Inner()
    where = "Linear has use_reentrant=True" if whole else "test_bad_input.py:"
    parts = (where, "pass use_reentrant=False", "roamc.optimize")
    refused(lambda: roamc.train_step(model, square, sgd(model))(X), roamc.CaptureError, *parts)
    refused(lambda: roamc.plan(model, X), roamc.CaptureError, *parts)
    assert_backward_equal(model, square, [(X,)])


def test_errors_of_the_loss_function_arrive_as_they_are() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("mine")

    model = net()
    with pytest.raises(KeyError, match="mine"):
        roamc.train_step(model, broken, sgd(model))(X)
    with pytest.raises(RuntimeError, match="dim"):
        roamc.train_step(model, square, sgd(model))(noise(4, 9))
    assert type(model[0].weight) is nn.Parameter
    roamc.train_step(model, square, sgd(model), strict=True)(X)


def test_optimizer_that_is_not_supported() -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters())
    names = ("RMSprop", "torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
    refused(lambda: roamc.train_step(model, square, optimizer), roamc.CaptureError, *names)


def test_subclass_of_an_optimizer_is_another_optimizer() -> None:
    class Mine(torch.optim.SGD):
        pass

    model = net()
    refused(lambda: roamc.train_step(model, square, Mine(model.parameters(), lr=1)), roamc.CaptureError, "Mine")


@pytest.mark.parametrize("setting", ["capturable", "differentiable"])
def test_setting_of_an_optimizer_that_is_not_supported(setting: str) -> None:
    model = net()
    # The constructor refuses some of them without a GPU: a checkpoint can bring them in.
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.param_groups[0][setting] = True
    refused(lambda: roamc.train_step(model, square, optimizer), roamc.CaptureError, setting)


def test_optimizer_of_another_model() -> None:
    model = net()
    optimizer = sgd(copy.deepcopy(model))
    refused(
        lambda: roamc.train_step(model, square, optimizer)(X), roamc.CaptureError, "optimizer", "model.parameters()"
    )


def test_parameter_replaced_after_the_first_step() -> None:
    model = net()
    step = roamc.train_step(model, square, sgd(model))
    step(X)
    model[0].weight = nn.Parameter(torch.ones(8, 8))
    before = tensors_of(model)
    refused(lambda: step(X), roamc.CaptureError, "optimizer", "model.parameters()")
    assert_same(tensors_of(model), before)


def test_complex_parameter() -> None:
    model = net()
    model.register_parameter("extra", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    refused(lambda: roamc.train_step(model, square, sgd(model))(X), roamc.CaptureError, "extra", "complex")


def test_input_on_another_device() -> None:
    model = net()
    step = roamc.train_step(model, square, sgd(model))
    refused(lambda: step(X.to("meta")), roamc.CaptureError, "meta", "cpu", ".to()")
    step(X)
    refused(lambda: step(X.to("meta")), roamc.CaptureError, "meta", "cpu", ".to()")


@pytest.mark.parametrize(("frozen", "said"), [(True, "frozen parameters only"), (False, "no parameters")])
def test_optimizer_that_would_change_nothing(frozen: bool, said: str) -> None:
    model = net()
    optimizer = sgd(model[0].requires_grad_(not frozen))
    if not frozen:
        optimizer.param_groups[0]["params"].clear()
    step = roamc.train_step(model, square, optimizer)
    refused(lambda: step(X), roamc.CaptureError, said, "model.parameters()")
    model.requires_grad_(True)
    if frozen:
        step(X)


def test_batch_of_things_that_cannot_be_compared() -> None:
    class Thing:
        __hash__ = None  # type: ignore[assignment]

    model = net()
    step = roamc.train_step(model, lambda m, x, thing: square(m, x), sgd(model))
    refused(lambda: step(X, Thing()), roamc.CaptureError, "Thing", "tensors, numbers, strings")


def test_buffer_that_changes_its_shape() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(0, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, x])
            return self.linear(x)

    model = Growing()
    refused(lambda: roamc.train_step(model, square, sgd(model))(X), roamc.CaptureError, "seen", "shape")
    assert model.seen.shape == (0, 8)


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown": ({"memroy_limit": 1}, ("'memroy_limit'", "did you mean 'memory_budget'", "strict")),
    "unknown and unlike any": ({"qqq": 1}, ("'qqq'", "memory_budget")),
    "alignment not a power of two": ({"alignment": 48}, ("alignment", "power of two", "48")),
    "alignment negative": ({"alignment": -64}, ("alignment", "-64")),
    "alignment not a number": ({"alignment": "big"}, ("alignment", "big")),
    "layout_nodes negative": ({"layout_nodes": -1}, ("layout_nodes", "-1")),
    "max_plans zero": ({"max_plans": 0}, ("max_plans", "0")),
    "strict not a bool": ({"strict": "yes"}, ("strict", "True or False", "yes")),
    "memory_budget without sense": ({"memory_budget": "6 apples"}, ("6 apples",)),
    "memory_budget without a unit": ({"memory_budget": "50"}, ("'50' is 50 bytes; did you mean '50GB' or '50%'?",)),
    "memory_budget above all": ({"memory_budget": "500%"}, ("'500%' is above 100% of what eager needs",)),
    "memory_budget negative": ({"memory_budget": -5}, ("-5",)),
    "memory_budget not a number": ({"memory_budget": [1]}, ("[1]",)),
    "order not a name": ({"order": 3}, ("order", "3")),
    "disable not names": ({"disable": 3}, ("disable", "3")),
    "codecs unknown": ({"codecs": "int8"}, ("codecs", "'int8'", "there are tempo", "bits, signs, integers")),
    "order unknown": ({"order": "bset"}, ("bset", "best")),
    "disable unknown": ({"disable": "reorderr"}, ("reorderr", "reorder")),
    "disable a required pass": ({"disable": ["layout"]}, ("layout", "reorder")),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_checked_at_once(name: str) -> None:
    options, parts = OPTIONS[name]
    model = net()
    refused(lambda: roamc.optimize(model, **options), roamc.OptionError, *parts)
    refused(lambda: roamc.train_step(model, square, sgd(model), **options), roamc.OptionError, *parts)
    refused(lambda: roamc.plan(model, X, **options), roamc.OptionError, *parts)
    with pytest.raises(Exception, match="OptionError"):
        torch.compile(lambda x: model(x), backend="roamc", options=options)(X)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "a", True, [1.0]])
def test_clip_grad_norm_out_of_range(limit: float) -> None:
    model = net()
    refused(
        lambda: roamc.train_step(model, square, sgd(model), clip_grad_norm=limit), roamc.OptionError, "clip_grad_norm"
    )


@pytest.mark.parametrize("way", ["train_step", "optimize", "plan"])
def test_model_that_is_no_module(way: str) -> None:
    def run(model: Any) -> Callable[[], Any]:
        if way == "train_step":
            return lambda: roamc.train_step(model, square, sgd(net()))
        return lambda: roamc.plan(model, X) if way == "plan" else roamc.optimize(model)

    torch_compile = "torch.compile(function, backend='roamc')"
    refused(run(square), roamc.CaptureError, f"roamc.{way} takes a torch.nn.Module", "not a function", torch_compile)
    refused(run(None), roamc.CaptureError, f"roamc.{way} takes a torch.nn.Module as its model, not NoneType")
    refused(run(nn.Linear), roamc.CaptureError, "not its class; write Linear(...)")


def test_optimizer_that_is_none() -> None:
    model = net()

    def run(optimizer: Any) -> Callable[[], Any]:
        return lambda: roamc.train_step(model, square, optimizer)

    refused(run(torch.optim.AdamW), roamc.CaptureError, "not its class: torch.optim.AdamW(model.parameters(), lr=...)")
    refused(
        run(None), roamc.CaptureError, "takes an optimizer, such as torch.optim.AdamW(model.parameters()), not None"
    )
    refused(run("adam"), roamc.CaptureError, "takes an optimizer", "not 'adam'")
    schedule = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    refused(run(schedule), roamc.CaptureError, "takes an optimizer", "not StepLR")


def test_loss_function_that_is_none() -> None:
    model = net()
    wanted = "loss_fn must be a function of (model, *batch) that returns the loss, not"
    refused(lambda: roamc.train_step(model, None, sgd(model)), roamc.CaptureError, wanted, "NoneType")  # type: ignore[arg-type]
    refused(lambda: roamc.train_step(model, sgd(model), square), roamc.CaptureError, wanted, "SGD")  # type: ignore[arg-type]


def test_loss_function_that_takes_other_arguments() -> None:
    model = net()
    criterion = roamc.train_step(model, nn.MSELoss(), sgd(model))
    wanted = (
        "MSELoss(model, ..., ...)",
        "too many positional arguments",
        "write lambda model, x, y: MSELoss()(model(x), y)",
    )
    refused(lambda: criterion(X, X), roamc.CaptureError, *wanted)
    step = roamc.train_step(model, square_of_difference, sgd(model))
    refused(lambda: step(X), roamc.CaptureError, "square_of_difference(model, ...)", "missing a required argument: 'y'")
    refused(lambda: step.plan(X, z=X), roamc.CaptureError, "square_of_difference(model, ..., z=...)")
    step(X, y=X)


def square_of_difference(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


class Branches(nn.Module):
    """torch.cond, or a while loop."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.linear, self.loop = nn.Linear(8, 8), loop

    def forward(self, x: Tensor) -> Any:
        if self.loop:
            count = torch.zeros((), dtype=torch.int64)
            return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (count, self.linear(x)))[1]
        return torch.cond(x.sum() > 0, lambda y: self.linear(y), lambda y: -self.linear(y), (x,))


@pytest.mark.parametrize("loop", [False, True])
def test_branches_that_are_graphs(loop: bool) -> None:
    model = Branches(loop)
    name = "while_loop" if loop else "cond"
    parts = (f"cannot plan torch's {name},", "torch.where", "torch.compile or roamc.optimize")
    refused(lambda: roamc.train_step(model, square, sgd(model))(X), roamc.CaptureError, *parts)


def twice(y: Tensor) -> Tensor:
    return y.sin() * 2


@pytest.mark.parametrize("where", ["whole", "part", "part in place", "function"])
def test_what_torch_compile_has_wrapped_is_traced_as_plain(where: str) -> None:
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    function: Callable[[Tensor], Tensor] = twice
    wrapped: Any = model
    if where == "whole":
        wrapped = torch.compile(model, backend="aot_eager")
    elif where == "part":
        model[0] = torch.compile(model[0], backend="aot_eager")
    elif where == "part in place":
        model[0].compile(backend="aot_eager")
    else:
        function = torch.compile(twice, backend="aot_eager")
    step = roamc.train_step(wrapped, lambda m, x: function(m(x)).mean(), sgd(model), strict=True)
    reference = sgd(twin)
    for _ in range(2):
        assert_same(step(X), eager_step(twin, lambda m, x: twice(m(x)).mean(), reference, X))
    assert_same(list(tensors_of(model).values()), list(tensors_of(twin).values()))
    assert "OptimizedModule" not in str(step.plans[0])


def test_refusal_has_a_note_with_the_users_line() -> None:
    model = net()
    with pytest.raises(roamc.CaptureError) as caught:
        roamc.train_step(model, branch_on_data, sgd(model))(X)
    assert caught.value.__notes__[0].endswith("in branch_on_data: return y.sum() if y.sum() > 0 else y.mean()")


def test_refusal_names_the_module_of_torch_that_reads_a_value() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(roamc.CaptureError) as caught:
        roamc.train_step(model, square, sgd(model))(X)
    assert "(in BatchNorm1d(8, eps=1e-05, momentum=None" in caught.value.__notes__[0]


def test_lazy_parameters() -> None:
    model = nn.LazyLinear(8)
    step = roamc.train_step(model, square, sgd(model))
    refused(lambda: step(X), roamc.CaptureError, "lazy parameters", "call it once", "torch.no_grad()")
    with torch.no_grad():
        model(X)
    step(X)


def test_step_that_goes_through_numpy() -> None:
    model = net()
    step = roamc.train_step(model, lambda m, x: m(torch.from_numpy(x.numpy())).sum(), sgd(model))
    refused(lambda: step(X), roamc.CaptureError, "numpy", "torch's operators", "roamc.optimize")


def test_optimize_of_what_torch_compile_has_wrapped() -> None:
    wrapped = torch.compile(net(), backend="aot_eager")
    refused(lambda: roamc.optimize(wrapped), roamc.CaptureError, "before torch.compile", "backend='roamc'")


class Misfit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # misfit


def test_wrong_shape_is_the_operators_error_with_the_models_line_and_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    model = Misfit()
    step = roamc.train_step(model, square, sgd(model))
    for run in (step, step.plan, lambda x: roamc.plan(model, x)):
        with pytest.raises(RuntimeError, match=r"4, 9.*8, 8|4x9 and 8x8") as caught:
            run(noise(4, 9))
        note = caught.value.__notes__[0]
        assert "test_bad_input.py:" in note
        assert "in forward: return self.linear(x)  # misfit (in Linear(in_features=8, out_features=8" in note
    assert capfd.readouterr() == ("", "")


def test_mode_of_torch_compile() -> None:
    with pytest.raises(Exception, match="roamc has no modes"):
        torch.compile(lambda x: x + 1, backend="roamc", mode="max-autotune")(X)


def test_plan_with_a_loss_but_no_optimizer() -> None:
    refused(lambda: roamc.plan(net(), X, loss_fn=square), roamc.RoamcError, "loss_fn and optimizer together")


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return square_of_difference(self.linear, x, y)


class Unchecked(Difference):
    """Gives forward other arguments than it is called with."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x, x)


MISFITS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "too few": ((X,), {}, ("Difference(...)", "missing a required argument: 'y'")),
    "too many": ((X, X, X), {}, ("Difference(..., ..., ...)", "too many positional arguments")),
    "a tuple": (((X, X),), {}, ("Difference(...)", "missing a required argument: 'y'", "*inputs are as many")),
    "an unknown name": ((X, X), {"z": X}, ("Difference(..., ..., z=...)", "unexpected keyword argument 'z'")),
}


@pytest.mark.parametrize("name", MISFITS)
def test_plan_of_inputs_that_the_model_does_not_take(name: str) -> None:
    inputs, named, wanted = MISFITS[name]
    refused(lambda: roamc.plan(Difference(), *inputs, **named), roamc.CaptureError, "does not fit", *wanted)


def test_plan_of_inputs_that_reach_forward_by_another_way() -> None:
    hooked = Difference()
    hooked.register_forward_pre_hook(lambda _, args: (*args, *args))
    asked = [roamc.plan(model, X).fingerprint for model in (hooked, Unchecked())]
    assert asked[0] == asked[1]


def test_plans_of_something_else() -> None:
    refused(lambda: roamc.plans(net()), roamc.RoamcError, "was not made by", "roamc.plans()")
    shallow = copy.copy(roamc.optimize(net()))
    refused(lambda: roamc.plans(shallow), roamc.RoamcError, "a shallow copy", "call roamc.optimize on the copy")


def test_anomaly_detection_around_a_step_is_refused_and_a_plan_needs_none() -> None:
    step = roamc.train_step(model := net(), square, sgd(model), strict=True)
    with torch.autograd.set_detect_anomaly(True):
        refused(lambda: step(X), roamc.CaptureError, "detect_anomaly()", "roamc.optimize")
        assert step.plan(X).peak_bytes > 0
    step(X)
    with torch.autograd.set_detect_anomaly(True):
        refused(lambda: step(X), roamc.CaptureError, "detect_anomaly()")


def test_state_of_another_dtype_than_the_model_is_named_with_what_helps() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = roamc.train_step(model, square, optimizer, strict=True)
    step(X)
    model.double()
    twin = copy.deepcopy((model, optimizer))
    refused(lambda: step(X.double()), roamc.CaptureError, "exp_avg of 0.weight", "float32", "load_state_dict")
    for one in (optimizer, twin[1]):
        one.load_state_dict(one.state_dict())
    loss, wanted = step(X.double()), eager_step(twin[0], square, twin[1], X.double())
    assert_same((loss, tensors_of(model)), (wanted, tensors_of(twin[0])))


class _Wrong(torch.autograd.Function):
    """Its gradient has another shape than its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(3, 3)


def test_an_error_in_backward_has_the_line_of_the_forward_call() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return _Wrong.apply(model(x))

    step = roamc.train_step(model := net(), loss, sgd(model), strict=True)
    with pytest.raises(RuntimeError, match="invalid gradient") as caught:
        step(X)
    line = _Wrong.forward.__code__.co_firstlineno + 2
    assert f"in the backward of test_bad_input.py:{line}" in caught.value.__notes__


class _SharedByData(nn.Module):
    """Two buffers, one of them over the memory of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("a", torch.zeros(8))
        self.register_buffer("b", torch.zeros(8))
        self.b.data = self.a.data

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1)
        return self.inner(x) + self.b


@pytest.mark.parametrize("way", ["torch.compile", "optimize"])
def test_buffers_that_share_memory_by_data_run_in_eager_with_one_warning(way: str) -> None:
    model = _SharedByData()
    twin = copy.deepcopy(model)

    def compiled(**options: Any) -> nn.Module:
        if way == "optimize":
            return roamc.optimize(copy.deepcopy(model), **options)
        return torch.compile(copy.deepcopy(model), backend="roamc", options=options, dynamic=False)

    called = compiled()
    with pytest.warns(
        UserWarning, match=r"eager PyTorch: .*('a'.* and .*'b'|two inputs).* share memory .*module.b = module.a"
    ):
        losses = [square(called, X), square(called, X)]
    assert_same(losses, [square(twin, X), square(twin, X)])
    losses[1].backward()
    with pytest.raises(Exception, match="share memory") as caught:
        compiled(strict=True)(X)
    refused(lambda: raised(caught.value.inner_exception), roamc.CaptureError, "share memory")


def raised(error: Exception) -> None:
    raise error


def test_a_replaced_call_of_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step, whole = roamc.train_step(model := net(), square, sgd(model), strict=True), nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda module, *args: whole(module, *args) * 2)
    refused(lambda: step(X), roamc.CaptureError, "nn.Module.__call__ was replaced", "roamc.optimize")
