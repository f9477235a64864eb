"""Steps that ask, while they run, whether they are traced or what a tensor's value is: they go eager's way."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.fx import _symbolic_trace

import roamc
from tests.end_to_end.helpers import assert_same, assert_steps_equal, eager_step, noise, sgd, tensors_of

Way = Callable[["Asking", Tensor, Tensor], object]
"""What a model asks, of itself, of a value that it has computed, and of its input."""


class Asking(nn.Module):
    """Goes one of two ways, or computes with a number."""

    def __init__(self, asks: Way) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        answer = self.asks(self, h, x)
        return h * answer if type(answer) in (int, float) else (h * 3 if answer else h.sin())


def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch).square().mean()
    return loss


def compared(asks: Way, *batches: Tensor) -> roamc.TrainStep:
    """The step of a model, after one step on each batch, with the bits of eager after each."""
    torch.manual_seed(0)
    return assert_steps_equal(Asking(asks), loss_fn, sgd, [(batch,) for batch in batches or (noise(3, 4),)])


WHETHER_TRACED: dict[str, Way] = {
    "compiler": lambda model, h, x: torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling(),
    "exporting": lambda model, h, x: torch.compiler.is_exporting() or torch._dynamo.is_compiling(),
    "jit": lambda model, h, x: torch.jit.is_tracing() or torch.jit.is_scripting(),
    "fx": lambda model, h, x: _symbolic_trace.is_fx_tracing() or _symbolic_trace.is_fx_symbolic_tracing(),
    "fx, by its flag": lambda model, h, x: getattr(_symbolic_trace, "_is_fx_tracing_flag", False),  # none in torch 2.14
    "proxy": lambda model, h, x: isinstance(h, torch.fx.Proxy),
    "fake, by a global": lambda model, h, x: isinstance(h, FakeTensor) or is_fake(x),
    "fake, by a module": lambda model, h, x: isinstance(model.linear.weight, fake_tensor.FakeTensor),
    "fake, by the package": lambda model, h, x: isinstance(x, torch._subclasses.FakeTensor),
    "fake mode": lambda model, h, x: torch._guards.detect_fake_mode([h]),
    "overridden": lambda model, h, x: torch.overrides.has_torch_function((h, x)),
    "on meta": lambda model, h, x: h.is_meta or h.device.type == "meta",
}


def _imports(model: Asking, h: Tensor, x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor as Imported

    return isinstance(h, Imported)


@pytest.mark.parametrize("asks", [*WHETHER_TRACED.values(), _imports], ids=[*WHETHER_TRACED, "fake, by an import"])
def test_a_step_that_asks_whether_it_is_traced_is_told_no(asks: Way) -> None:
    compared(asks)
    with fake_tensor.FakeTensorMode() as mode:  # and all is as it was
        assert isinstance(torch.ones(1), FakeTensor)
        assert is_fake(torch.ones(1))
        assert torch._guards.detect_fake_mode([torch.ones(1)]) is mode


Compiler = Callable[..., Any]
"""Makes a module or function another, as ``torch.compile`` does."""


def whole(model: nn.Module, compiled: Compiler) -> roamc.TrainStep:
    return roamc.train_step(compiled(model), loss_fn, sgd(model), strict=True)


def in_place(model: nn.Module, compiled: Compiler) -> roamc.TrainStep:
    model.forward = compiled(model.forward)
    return roamc.train_step(model, loss_fn, sgd(model), strict=True)


def a_part(model: nn.Module, compiled: Compiler) -> roamc.TrainStep:
    model.register_module("linear", compiled(model.linear))
    return roamc.train_step(model, loss_fn, sgd(model), strict=True)


def the_loss(model: nn.Module, compiled: Compiler) -> roamc.TrainStep:
    return roamc.train_step(model, compiled(loss_fn), sgd(model), strict=True)


def a_helper(model: nn.Module, compiled: Compiler) -> roamc.TrainStep:
    square = compiled(torch.square)
    return roamc.train_step(model, lambda m, x: square(m(x)).mean(), sgd(model), strict=True)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("prepared", [whole, in_place, a_part, the_loss, a_helper])
def test_what_torch_compile_has_made_runs_plain_inside_a_step(
    prepared: Callable[[nn.Module, Compiler], roamc.TrainStep], fullgraph: bool
) -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Asking(lambda model, h, x: False)
    twin = copy.deepcopy(model)
    step, reference = prepared(model, functools.partial(torch.compile, backend=backend, fullgraph=fullgraph)), sgd(twin)
    for seed in range(2):
        batch = noise(3, 4, seed=seed)
        assert_same(step(batch), eager_step(twin, loss_fn, reference, batch))
        assert_same(list(tensors_of(model).values()), list(tensors_of(twin).values()))
    assert graphs == []


def _written_in_place(model: Asking, h: Tensor, x: Tensor) -> float:
    values = torch.zeros(4)
    values[1] = 3
    values.view(2, 2)[0].add_(1)
    return float(values[1])


def _of_scattered_positions(model: Asking, h: Tensor, x: Tensor) -> object:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[:, torch.arange(2)] = True
    return mask[-1].all()


OF_NUMBERS: dict[str, Way] = {
    "all": lambda model, h, x: (torch.arange(5) < 7).all(),
    "any": lambda model, h, x: (torch.arange(5).diff() != 1).any(),
    "item": lambda model, h, x: torch.arange(5).sum().item(),
    "float": lambda model, h, x: float(torch.linspace(0, 1, 3).exp().sum()),
    "int as an index": lambda model, h, x: range(torch.arange(5).max()).stop,
    "list": lambda model, h, x: sum(torch.arange(4).tolist()),
    "equal": lambda model, h, x: torch.equal(torch.arange(4), torch.tensor([0, 1, 2, 3])),
    "close": lambda model, h, x: torch.allclose(torch.ones(4), torch.ones(4) + 1e-9),
    "of sizes": lambda model, h, x: torch.full((x.shape[0],), x.shape[1]).prod().item(),
    "like the batch": lambda model, h, x: torch.ones_like(x).cumsum(0)[-1, 0].item(),
    "without gradients": lambda model, h, x: torch.eye(3, requires_grad=True).sum().item(),
    "written in place": _written_in_place,
    "scattered": _of_scattered_positions,
}


@pytest.mark.parametrize("asks", OF_NUMBERS.values(), ids=list(OF_NUMBERS))
def test_what_depends_on_no_input_is_known(asks: Way) -> None:
    step = compared(asks, noise(3, 4), noise(3, 4, seed=1))
    assert len(step.plans) == 1
    assert "_local_scalar_dense" not in step.source


def test_another_shape_is_asked_anew() -> None:
    step = compared(lambda model, h, x: (torch.arange(x.shape[0]) < 3).all(), noise(3, 4), noise(5, 4), noise(3, 4))
    assert len(step.plans) == 2


def test_autocast_changes_no_answer() -> None:
    def asks(model: Asking, h: Tensor, x: Tensor) -> float:
        return float((torch.full((2, 2), 1 / 3) @ torch.eye(2))[0, 0])

    with torch.autocast("cpu", torch.bfloat16):
        compared(asks)


def test_a_yes_or_no_of_the_batch_is_asked_at_every_step() -> None:
    padded = torch.cat([noise(2, 4), torch.zeros(1, 4)])
    step = compared(lambda model, h, x: (x != 0).all(), noise(3, 4), padded, noise(3, 4, seed=2), padded + 1, padded)
    assert len(step.plans) == 2


def test_a_yes_or_no_of_a_buffer_is_asked_at_every_step() -> None:
    def begins(model: Asking, h: Tensor, x: Tensor) -> bool:
        if model.seen.any():
            return True
        model.seen.copy_(x.detach().mean(0))
        return False

    step = compared(begins, noise(3, 4), noise(3, 4, seed=1), noise(3, 4, seed=2))
    assert len(step.plans) == 2
    step.model.get_buffer("seen").zero_()
    step(noise(3, 4))
    assert len(step.plans) == 2
    assert step.model.get_buffer("seen").any()


HELD = torch.tensor(False)


OF_HELD: dict[str, Way] = {
    "item": lambda model, h, x: model.held.item(),
    "computed": lambda model, h, x: (model.held * 2).item(),
    "float": lambda model, h, x: float(model.held),
    "text": lambda model, h, x: float(f"{model.held:.1f}"),
    "index": lambda model, h, x: [3, 5, 7, 9][model.held.long()],
    "list": lambda model, h, x: model.held.expand(2).tolist()[1],
    "number as list": lambda model, h, x: model.held.tolist(),
    "size": lambda model, h, x: torch.full((int(model.held) + 1,), model.held.item()).sum(),
    "yes or no": lambda model, h, x: model.held > 1,
    "equal": lambda model, h, x: torch.equal(model.held, torch.tensor(2.0)),
    "close": lambda model, h, x: torch.allclose(model.held, torch.tensor(2.0)),
    "sign of zero": lambda model, h, x: math.copysign(1.0, model.held.item() - 1),
    "with the batch": lambda model, h, x: (x > model.held).any(),
}


@pytest.mark.parametrize("asks", OF_HELD.values(), ids=list(OF_HELD))
def test_what_a_tensor_made_before_the_step_says_is_asked_at_every_step(asks: Way) -> None:
    torch.manual_seed(0)
    model = Asking(asks)
    model.held = torch.tensor(0.0)  # neither a parameter nor a buffer
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for number in (0.0, 1.0, 2.0, 1.0):
        model.held.fill_(number)
        twin.held.fill_(number)
        assert_same(step(noise(3, 4)), eager_step(twin, loss_fn, reference, noise(3, 4)))
        assert_same(tensors_of(model), tensors_of(twin))


def test_a_flag_of_a_closure_is_asked_at_every_step_by_loss_and_hooks() -> None:
    flag = torch.tensor(False)
    models = [Asking(lambda model, h, x: 3 if flag else 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.linear.register_forward_hook(lambda module, args, result: result * 2 if flag else result)
        model.linear.weight.register_hook(lambda gradient: gradient * 5 if flag else gradient * 1)
    step, reference = roamc.train_step(models[0], loss_fn, sgd(models[0]), strict=True), sgd(models[1])
    for says in (False, True, False):
        flag.data = torch.tensor(says)
        assert_same(step(noise(3, 4)), eager_step(models[1], loss_fn, reference, noise(3, 4)))
    assert_same(tensors_of(models[0]), tensors_of(models[1]))
    assert len(step.plans) == 2


def _counts_outside(model: Asking, h: Tensor, x: Tensor) -> Tensor:
    HELD.logical_not_()
    return HELD


def _counts_by_a_view(model: Asking, h: Tensor, x: Tensor) -> Tensor:
    HELD[None][0].logical_not_()
    return HELD


def _counts(model: Asking, h: Tensor, x: Tensor) -> Tensor:
    model.seen.add_(1)
    return model.seen.sum() > 2


OF_DATA: dict[str, tuple[Way, str]] = {
    "parameter": (lambda model, h, x: h.isnan().any(), "parameter 'linear.weight'"),
    "gradient of a parameter": (lambda model, h, x: model.linear.bias.sum() > 0, "parameter 'linear.bias'"),
    "random number": (lambda model, h, x: torch.rand(()) < 0.5, r"random numbers \(aten.rand.default\)"),
    "number of the batch": (lambda model, h, x: x.max().item(), r"batch\[0\]: only yes or no may, no number"),
    "number of a buffer": (lambda model, h, x: model.seen.sum().item(), "seen: only yes or no may, no number"),
    "written before": (_counts, "what the step has written to its batch or buffers"),
    "written before, outside": (_counts_outside, "what the step has written to a tensor made before it"),
    "written before, by a view": (_counts_by_a_view, "what the step has written to a tensor made before it"),
    "address": (lambda model, h, x: h.data_ptr() == x.data_ptr(), "the address of a tensor"),
    "address of a storage": (lambda model, h, x: h.untyped_storage().data_ptr() == 0, "the address of a tensor"),
}


@pytest.mark.parametrize(("asks", "said"), OF_DATA.values(), ids=list(OF_DATA))
def test_what_depends_on_more_is_refused_by_name_and_line(asks: Way, said: str) -> None:
    model = Asking(asks)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(roamc.CaptureError, match=said) as caught:
        roamc.train_step(model, loss_fn, sgd(model))(noise(3, 4))
    assert any("test_questions.py" in note for note in caught.value.__notes__)
    assert_same(model.state_dict(), before)


def test_a_batch_without_values_is_named() -> None:
    model = Asking(lambda model, h, x: x.isnan().any()).to("meta")
    with pytest.raises(roamc.CaptureError, match=r"batch\[0\], of which only the shape is given here"):
        roamc.train_step(model, loss_fn, sgd(model)).plan(torch.empty(3, 4, device="meta"))


def test_masks_of_positions_stay_operators_and_are_not_held() -> None:
    """Only the answer is used at capture: no constant as large as the mask is a part of the graph."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(64)[:, None] >= torch.arange(64)
            if mask[-1].all():
                x = x * mask
            return self.linear(x)

    model = Masked()
    step = roamc.train_step(model, loss_fn, sgd(model), strict=True)
    step(noise(64, 64))
    graph = step.latest.executable.planned.graph.graph
    assert not graph.find_nodes(op="get_attr")
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.ge.Tensor)


@pytest.mark.parametrize("cache", [True, False])
def test_llama_has_the_bits_of_eager_and_the_plan_of_its_step(cache: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=cache,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 128))

    def of_model(model: nn.Module, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    step = assert_steps_equal(LlamaForCausalLM(config), of_model, sgd, [(ids,)])
    assert step.plan(ids).fingerprint == step.plans[0].fingerprint


def test_a_nested_tensor_of_an_encoder_that_eager_takes_a_short_way_through_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)

    def asks(model: Asking, h: Tensor, x: Tensor) -> bool:
        with torch.no_grad():
            teacher(x[None], src_key_padding_mask=torch.tensor([[False, False, True]]))
        return True

    model = Asking(asks)
    with pytest.raises(roamc.CaptureError, match="enable_nested_tensor=False"):
        roamc.train_step(model, loss_fn, sgd(model))(noise(3, 4))
