"""FLOPs are the textbook's, bytes exact, every operator of the models has a price; profiles are data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from roamc.compat_onednn import product_into
from roamc.cost import (
    DeviceProfile,
    flops,
    kind_of,
    load_profile,
    read_profile,
    seconds,
    shipped_names,
    step_seconds,
    store_profile,
    traffic,
    workspace_bytes,
)
from roamc.cost.kind import is_light
from roamc.cost.measure import calibrate
from roamc.cost.probes import ELEMENTS
from roamc.cost.probes import PRODUCTS as PRODUCT_PROBES
from roamc.errors import ProfileError
from roamc.graph import operators
from roamc.operators import ops
from roamc.operators.costs.kinds import KINDS, PRODUCTS, UNKNOWN, VIEW
from roamc.operators.random import replay, save_rng_state
from tests.graphs import model_graph, traced
from tests.models import MODELS, Block

aten = torch.ops.aten
CPU = load_profile(profile="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setattr("roamc.cost.profile.measured_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def node_of(function: Callable[..., Any], *inputs: Tensor) -> fx.Node:
    """The last operator of a trace that is no view."""
    nodes = operators(traced(function, *inputs).graph)
    return [node for node in nodes if not ops.is_view(node.target)][-1]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# -- FLOPs ----------------------------------------------------------------------------------------

HEADS = [floats(2, 3, 16, 8)] * 3
GROUPED = [floats(2, 4, 16, 8), floats(2, 2, 12, 8), floats(2, 2, 12, 8)]
"""Two heads of the query read one head of keys and values each."""


@pytest.mark.parametrize(
    ("function", "inputs", "count"),
    [
        (torch.mm, [floats(3, 5), floats(5, 7)], 2 * 3 * 5 * 7),
        (torch.addmm, [floats(7), floats(3, 5), floats(5, 7)], 2 * 3 * 5 * 7),
        (torch.bmm, [floats(4, 3, 5), floats(4, 5, 7)], 2 * 4 * 3 * 5 * 7),
        (torch.baddbmm, [floats(4, 3, 7), floats(4, 3, 5), floats(4, 5, 7)], 2 * 4 * 3 * 5 * 7),
        (aten.addbmm, [floats(3, 7), floats(4, 3, 5), floats(4, 5, 7)], 2 * 4 * 3 * 5 * 7),
        (aten.mv, [floats(3, 5), floats(5)], 2 * 3 * 5),
        (aten.dot, [floats(5), floats(5)], 2 * 5),
        (lambda x, w: F.conv2d(x, w), [floats(2, 3, 8, 8), floats(5, 3, 3, 3)], 2 * 2 * 6 * 6 * 5 * 3 * 3 * 3),
        (lambda x, w: F.conv2d(x, w, groups=4), [floats(2, 4, 8, 8), floats(4, 1, 3, 3)], 2 * 2 * 6 * 6 * 4 * 9),
        (lambda x, w: F.conv1d(x, w, stride=2), [floats(2, 3, 9), floats(5, 3, 3)], 2 * 2 * 4 * 5 * 3 * 3),
        (aten._scaled_dot_product_flash_attention_for_cpu, HEADS, 2 * (2 * 2 * 3 * 16 * 16 * 8)),
        (aten._scaled_dot_product_flash_attention_for_cpu, GROUPED, 2 * (2 * 2 * 4 * 16 * 12 * 8)),
        (torch.relu, [floats(3)], 0),
    ],
)
def test_flops_are_the_textbooks(function: Callable[..., Any], inputs: list[Tensor], count: int) -> None:
    node = node_of(function, *inputs)
    assert flops(node) == count
    assert (kind_of(node) in PRODUCTS) == (count > 0)


def backward_of_convolution(mask: list[bool]) -> fx.Node:
    grad, x, weight = floats(2, 5, 6, 6), floats(2, 3, 8, 8), floats(5, 3, 3, 3)
    rest = ([5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    return node_of(lambda *t: [r for r in aten.convolution_backward(*t, *rest) if r is not None], grad, x, weight)


@pytest.mark.parametrize(("mask", "products"), [([True, True, False], 2), ([False, True, True], 1)])
def test_flops_of_convolution_backward_follow_its_mask(mask: list[bool], products: int) -> None:
    node = backward_of_convolution(mask)
    assert node.target is aten.convolution_backward.default
    assert flops(node) == products * 2 * 2 * 6 * 6 * 5 * 3 * 3 * 3
    assert kind_of(node) == "convolution_backward"


@pytest.mark.parametrize(("heads", "one"), [(HEADS, 2 * 2 * 3 * 16 * 16 * 8), (GROUPED, 2 * 2 * 4 * 16 * 12 * 8)])
def test_flops_of_attention_backward_are_five_products(heads: list[Tensor], one: int) -> None:
    q, k, v = heads
    saved = [torch.empty_like(q), torch.empty(q.shape[:-1])]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    node = node_of(lambda g, q, k, v, o, s: backward(g, q, k, v, o, s, 0.0, False), q, q, k, v, *saved)
    assert flops(node) == 5 * one


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_flops_of_attention_on_a_gpu_are_the_same(kernel: str) -> None:
    attend = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node, tensor in zip(inputs, GROUPED, strict=True):
        node.meta["val"] = tensor
    assert flops(graph.call_function(attend, tuple(inputs))) == 2 * (2 * 2 * 4 * 16 * 12 * 8)


@pytest.mark.parametrize(("length", "share"), [(256, 1.0), (512, 1.0), (1024, 0.75), (2048, 0.625)])
def test_causal_attention_leaves_out_whole_blocks_of_512_keys(length: int, share: float) -> None:
    large = [floats(2, 4, length, 64)] * 3
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def backward(causal: bool) -> fx.Node:
        sums = floats(2, length, 4).transpose(1, 2)
        return node_of(lambda g, q, k, v, o, s: back(g, q, k, v, o, s, 0.0, causal), *large, *large[:2], sums)

    for full, causal in (
        (
            node_of(lambda q, k, v: attend(q, k, v, 0.0, False), *large),
            node_of(lambda *t: attend(*t, 0.0, True), *large),
        ),
        (backward(False), backward(True)),
    ):
        assert seconds(causal, CPU) == pytest.approx(seconds(full, CPU) * share, rel=0.01)


def test_block_of_gpt2_has_the_flops_of_the_papers() -> None:
    b, s, h = 2, 16, 32
    block = Block(h, 4, 0.0).eval()
    names, values = zip(*block.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    graph = traced(run, floats(b, s, h), *(value.detach() for value in values)).graph
    assert sum(flops(node) for node in operators(graph)) == 24 * b * s * h**2 + 4 * b * s**2 * h


def replayed(node: fx.Node) -> fx.Node:
    """``node`` as roamc runs it again."""
    with node.graph.inserting_before(node):
        state = node.graph.call_function(save_rng_state, (torch.device("cpu"),))
        again = node.graph.call_function(replay, (state, node.target, *node.args), dict(node.kwargs))
    state.meta["val"], again.meta = floats(5056, dtype=torch.uint8), node.meta
    return again


def test_replayed_operator_costs_what_it_replays() -> None:
    node = node_of(lambda x: aten.native_dropout(x, 0.5, True), floats(64, 64))
    again = replayed(node)
    assert (kind_of(again), traffic(again)) == (kind_of(node), traffic(node)) == ("random", traffic(node))
    assert seconds(again, CPU) == seconds(node, CPU)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "inputs", "read", "written"),
    [
        (torch.add, [floats(3, 5), floats(3, 5)], 120, 60),
        (lambda x: x * x, [floats(3, 5)], 60, 60),
        (torch.add, [floats(3, 5), floats(5)], 80, 60),
        (lambda x, y: x + y.expand(3, 5), [floats(3, 5), floats(1, 5)], 80, 60),
        (torch.mm, [floats(3, 5), floats(5, 7)], 200, 84),
        (lambda x: x.to(torch.bfloat16), [floats(4, 4)], 64, 32),
        (lambda x: aten.mul_(x, 2.0), [floats(3, 5)], 60, 60),
        (lambda x, y: aten.copy_(x, y), [floats(3, 5), floats(3, 5)], 60, 60),
        (torch.zeros_like, [floats(3, 5)], 0, 60),
        (lambda x: torch.empty_like(x) + x, [floats(3, 5)], 120, 60),
        (lambda t, i: aten.embedding(t, i), [floats(100, 4), torch.zeros(3, dtype=torch.int64)], 48 + 24, 48),
        (lambda x: aten.native_dropout(x, 0.5, True), [floats(3, 5)], 60, 60 + 15),
        (lambda x: x.t().clone(memory_format=torch.contiguous_format), [floats(3, 5)], 60, 60),
    ],
)  # fmt: skip
def test_bytes_are_exact(function: Callable[..., Any], inputs: list[Tensor], read: int, written: int) -> None:
    moved = traffic(node_of(function, *inputs))
    assert (moved.read, moved.written, moved.total) == (read, written, read + written)


def test_views_and_empty_tensors_move_nothing() -> None:
    nodes = operators(traced(lambda x: (x.t(), torch.empty_like(x)), floats(3, 5)).graph)
    assert [traffic(node).total for node in nodes] == [0, 0]
    assert seconds(nodes[0], CPU) == 0
    assert seconds(nodes[1], CPU) == CPU.overhead


# -- kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "inputs", "kind"),
    [
        (torch.add, [floats(4, 4), floats(4, 4)], "pointwise"),
        (torch.mul, [floats(4, 4), torch.zeros(4, 4, dtype=torch.bool)], "mixed"),
        (lambda x, y: x.t() + y, [floats(4, 4), floats(4, 4)], "strided"),
        (lambda x: x.to(torch.float64), [floats(4, 4)], "pointwise"),
        (lambda x: x**2, [floats(4)], "pointwise"),
        (lambda x: x**0.5, [floats(4)], "root"),
        (lambda x: x**3.7, [floats(4)], "tanh"),
        (F.gelu, [floats(4)], "exponential"),
        (lambda x: x.sum(0), [floats(4, 4)], "reduction"),
        (torch.rand_like, [floats(4)], "random"),
        (lambda x, w: F.conv2d(x, w), [floats(1, 4, 4, 4), floats(4, 4, 1, 1)], "convolution_1x1"),
        (lambda x, w: F.conv2d(x, w, groups=4), [floats(1, 4, 4, 4), floats(4, 1, 3, 3)], "convolution_grouped"),
    ],
)
def test_kind_of(function: Callable[..., Any], inputs: list[Tensor], kind: str) -> None:
    assert kind_of(node_of(function, *inputs)) == kind


def test_everything_that_is_measured_is_a_kind() -> None:
    assert set(PRODUCT_PROBES) == set(PRODUCTS)
    assert set(ELEMENTS) < set(KINDS)


@pytest.mark.parametrize(
    ("function", "inputs", "light"),
    [
        (torch.mm, [floats(4, 4), floats(4, 4)], False),
        (lambda x: F.conv1d(x, x), [floats(2, 2, 2)], False),
        (torch.rand_like, [floats(4)], False),
        (lambda x: x.sort()[0], [floats(4)], False),
        (lambda x: F.gelu(x), [floats(4)], True),
        (lambda x: x.softmax(0), [floats(4)], True),
        (lambda x: F.layer_norm(x, [4]), [floats(4, 4)], True),
        (lambda x: x.t().contiguous(), [floats(4, 3)], True),
    ],
)
def test_light_is_what_does_little_for_an_element(
    function: Callable[..., Any], inputs: list[Tensor], light: bool
) -> None:
    assert is_light(node_of(function, *inputs)) is light


def test_unknown_operator_is_expensive() -> None:
    with torch.library._scoped_library("roamc_test_cost", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        x = floats(256, 256)
        strange, plain = node_of(torch.ops.roamc_test_cost.mystery, x), node_of(torch.neg, x)
    assert kind_of(strange) == UNKNOWN
    assert flops(strange) == 0
    assert seconds(strange, CPU) > 10 * (seconds(plain, CPU) - CPU.overhead)


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_of_the_models_has_a_price(name: str) -> None:
    graph, _ = model_graph(name, "step")
    nodes = operators(graph.graph)
    assert {str(node.target) for node in nodes if kind_of(node) == UNKNOWN} == set()
    for profile in (CPU, load_profile(profile="h100")):
        prices = [seconds(node, profile) for node in nodes]
        assert all(
            price == 0 if kind_of(node) == VIEW else 0 < price < 1 for node, price in zip(nodes, prices, strict=True)
        )
        assert step_seconds(graph, profile) == pytest.approx(sum(prices))


@pytest.mark.parametrize(
    "function",
    [F.gelu, torch.add, torch.sqrt, torch.tanh, torch.cumsum, aten._softmax, aten.native_dropout, torch.mm, torch.sum],
)
def test_larger_takes_longer(function: Callable[..., Any]) -> None:
    rest: dict[Any, tuple[Any, ...]] = {
        torch.cumsum: (0,), aten._softmax: (0, False), aten.native_dropout: (0.5, True), torch.sum: (0,)
    }  # fmt: skip
    more = (torch.add, torch.mm)
    sizes = (8, 64, 512, 1024, 2048, 4096)
    nodes = [
        node_of(lambda x: function(x, x) if function in more else function(x, *rest.get(function, ())), floats(n, n))
        for n in sizes
    ]
    for profile in (CPU, load_profile(profile="a100")):
        prices = [seconds(node, profile) for node in nodes]
        assert prices == sorted(prices)
        assert prices[0] < prices[-1]


# -- profiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_profile_survives_json(name: str) -> None:
    profile = load_profile(profile=name)
    assert profile.name == name
    assert profile.source
    assert DeviceProfile.from_json(profile.to_json()) == profile


def refused() -> Iterator[tuple[str, str]]:
    data = json.loads(CPU.to_json())
    yield "", "not JSON"
    yield "[" * 100_000, "not JSON"
    yield CPU.to_json().replace('"name": "cpu"', f'"name": {"[" * 900}{"]" * 900}'), "not JSON: it has more than 64"
    yield "[]", "format is 'list'"
    yield json.dumps({**data, "format": 99}), "format is 99, this roamc reads"
    yield json.dumps({key: value for key, value in data.items() if key != "bandwidth"}), "must have the fields"
    yield json.dumps({**data, "more": 1}), "must have the fields"
    yield json.dumps({**data, "bandwidth": "fast"}), "bandwidth must be float from 0 on"
    yield json.dumps({**data, "bandwidth": 0}), "bandwidth must be a number from"
    yield json.dumps({**data, "overhead": float("inf")}), "overhead must be a number from"
    yield json.dumps({**data, "overhead": float("nan")}), "overhead must be float from 0 on"
    yield json.dumps({**data, "flops": {}}), "a rate for matmul"
    yield json.dumps({**data, "elements": {"random": {"float32": 0}}}), "elements of random in float32 must be"
    yield json.dumps({**data, "elements": {"random": 1e9}}), "elements must be"


@pytest.mark.parametrize(("text", "says"), list(refused()))
def test_bad_profile_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=says) as caught:
        load_profile(profile=str(path))
    assert str(path) in str(caught.value)


def test_unknown_name_of_a_profile_lists_the_shipped_ones() -> None:
    with pytest.raises(ProfileError, match=r"neither a file nor a shipped profile \(a100, .*cpu.*\)"):
        load_profile(profile="tpu")


def test_named_profile_comes_before_the_stored_one_and_that_before_the_shipped_one() -> None:
    assert load_profile("cpu") == CPU
    stored = dataclasses.replace(CPU, name="measured", threads=torch.get_num_threads())
    store_profile(stored)
    assert load_profile("cpu") == stored
    assert load_profile("cpu", "cpu") == CPU


def test_stored_profile_of_the_nearest_number_of_threads_is_taken() -> None:
    here = torch.get_num_threads()
    for threads in (here + 1, here + 7):
        store_profile(dataclasses.replace(CPU, threads=threads))
    assert load_profile("cpu").threads == here + 1


def test_stored_profile_that_cannot_be_read_says_what_to_do(cache: Path) -> None:
    store_profile(CPU).write_text("{}")
    with pytest.raises(ProfileError, match="measure again with: roamc calibrate --device cpu"):
        load_profile("cpu")


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_devices_without_a_profile_of_their_own_get_one(device: str) -> None:
    assert load_profile(device).device == "cuda"


def test_a_device_that_no_profile_describes_is_refused() -> None:
    with pytest.raises(ProfileError, match="no shipped profile describes a device of type 'mps'"):
        load_profile("mps")
    assert load_profile("mps", "h100").device == "cuda"


@pytest.mark.parametrize(("device", "says"), [("gpu", "no device is called"), ("meta", "cannot be measured")])
def test_device_that_cannot_be_measured_is_refused(device: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        calibrate(device, quick=True)


def test_calibration_makes_a_readable_profile() -> None:
    said = []
    profile = calibrate("cpu", quick=True, say=lambda text, done: said.append((text, done)))
    path = store_profile(profile)
    assert read_profile(path) == load_profile("cpu") == profile
    kinds = {kind for kind in PRODUCTS if product_into() is not None or not kind.startswith("onednn")}
    assert set(profile.flops) == kinds
    assert set(profile.elements) == {*ELEMENTS, "convolution_weights"}
    assert {"float32", "bfloat16"} <= set(profile.flops["matmul"])
    assert [done for _, done in said] == [0, 1]
    assert torch.is_grad_enabled()


# -- workspace ------------------------------------------------------------------------------------


def _image(channels: int, side: int, *, last: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    image = floats(4, channels, side, side, dtype=dtype)
    return image.contiguous(memory_format=torch.channels_last) if last else image


def _convolved(stride: int = 1, groups: int = 1) -> Callable[..., Tensor]:
    def run(image: Tensor, weight: Tensor) -> Tensor:
        half = weight.shape[-1] // 2
        return F.conv2d(image, weight, stride=stride, padding=half, groups=groups)

    return run


MB = 2**20
WORKSPACES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "a mask times floats converts the mask": (torch.mul, (floats(512, 512), floats(512, 512).bool()), MB),
    "two dtypes convert the narrower": (torch.add, (floats(512, 512, dtype=torch.bfloat16), floats(512, 512)), MB),
    "one dtype converts nothing": (torch.mul, (floats(512, 512), floats(512, 512)), 0),
    "a condition is not converted": (torch.where, (floats(512, 512).bool(), floats(512, 512), floats(512, 512)), 0),
    "numbers are not tensors": (lambda x: x * 2.5, (floats(512, 512),), 0),
    "whole numbers times a fraction": (lambda x: x * 2.5, (floats(512, 512).int(),), MB),
    "dropout takes its mask in parts on the way back": (
        lambda grad: aten.native_dropout_backward(grad, grad > 0, 2.0),
        (floats(4, 1024, 1024),),
        MB,
    ),
    "copies convert on the way": (lambda x: x.to(torch.float32), (floats(512, 512, dtype=torch.bfloat16),), 0),
    "the mean of halves": (lambda x: x.mean(1), (floats(512, 512, dtype=torch.bfloat16),), MB + 4 * 512),
    "a sum of halves over scattered dimensions": (
        lambda x: x.sum((0, 2)),
        (floats(2, 256, 512, dtype=torch.bfloat16),),
        MB,
    ),
    "a sum of halves over neighbours": (lambda x: x.sum((1, 2)), (floats(2, 256, 512, dtype=torch.bfloat16),), 0),
    "a sum of one half": (lambda x: aten.sum.dim_IntList(x, [0]), (floats(dtype=torch.bfloat16),), 0),
    "a softmax of one half": (lambda x: x.softmax(0), (floats(dtype=torch.bfloat16),), 0),
    "a sum of floats": (lambda x: x.sum((0, 2)), (floats(2, 256, 512),), 0),
    "a roll of one dimension": (lambda x: x.roll(1, 0), (floats(512, 512),), 0),
    "a roll of three, one after the other": (
        lambda x: torch.roll(x, (1, 2, 1), (0, 1, 2)),
        (floats(2, 256, 512),),
        2 * MB,
    ),
    "a softmax in order": (lambda x: x.softmax(-1), (floats(512, 512),), 0),
    "a softmax of what is transposed copies it": (lambda x: x.t().softmax(-1), (floats(512, 512),), MB),
    "layer norm of what is transposed copies it": (lambda x: F.layer_norm(x.t(), (512,)), (floats(512, 512),), MB),
    "a product reads columns as well as rows": (lambda a, b: a.t() @ b, (floats(512, 512), floats(512, 512)), 0),
    "a product copies what has neither": (lambda a, b: a[:, ::2] @ b, (floats(512, 1024), floats(512, 8)), MB),
    "pooling copies what has other strides": (
        lambda x: F.avg_pool2d(x.transpose(0, 1), 2),
        (floats(8, 4, 64, 128),),
        MB,
    ),
    "pooling reads channels last": (
        lambda x: F.avg_pool2d(x, 2),
        (floats(4, 8, 64, 128).contiguous(memory_format=torch.channels_last),),
        0,
    ),
    "half precision is gathered in floats": (
        lambda x, at: x.gather(0, at),
        (floats(512, 512, dtype=torch.bfloat16), torch.zeros(512, 512, dtype=torch.int64)),
        MB,
    ),
    "the mean of floats": (lambda x: x.mean(1), (floats(512, 512),), 0),
    "matrix products": (torch.mm, (floats(512, 512), floats(512, 512)), 0),
    "bfloat16, in order": (  # by thread: 512 x 64 of the second, 256 x 64 sums
        torch.mm,
        (floats(512, 512, dtype=torch.bfloat16), floats(512, 512, dtype=torch.bfloat16)),
        2 * (2 * 512 * 64 + 4 * 256 * 64) + 28 * 1024,
    ),
    "bfloat16, transposed": (  # and 256 x 512 of the first, with 32 columns more
        lambda a, b: torch.mm(a.t(), b),
        (floats(512, 512, dtype=torch.bfloat16), floats(512, 512, dtype=torch.bfloat16)),
        2 * (2 * 512 * 64 + 4 * 256 * 64 + 2 * 256 * 544) + 28 * 1024,
    ),
    "bfloat16, transposed and deep": (  # sums of all rounds: 256 x 1024
        lambda a, b: torch.addmm(b[0], a.t(), b),
        (floats(1024, 512, dtype=torch.bfloat16), floats(1024, 1024, dtype=torch.bfloat16)),
        2 * (2 * 512 * 64 + 4 * 256 * 1024 + 2 * 256 * 544) + 28 * 1024,
    ),
    "bfloat16, few rows and columns": (
        torch.mm,
        (floats(8, 40, dtype=torch.bfloat16), floats(40, 3, dtype=torch.bfloat16)),
        2 * (2 * 64 * 64 + 4 * 8 * 64) + 28 * 1024,
    ),
    "float16, transposed": (
        lambda a, b: torch.mm(a.t(), b),
        (floats(64, 512, dtype=torch.float16), floats(64, 100, dtype=torch.float16)),
        4 * 512 * 100,
    ),
    "attention keeps blocks of scores": (
        aten._scaled_dot_product_flash_attention_for_cpu,
        (floats(1, 2, 256, 64), floats(1, 2, 300, 64), floats(1, 2, 300, 64)),
        2 * 4 * 64 * (300 + 64 + 2),
    ),
    "attention backward keeps two": (
        lambda q, k, v, o, s: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            o.transpose(1, 2), q, k, v, o.transpose(1, 2), s, 0.0, False
        ),
        (*(floats(1, 2, length, 64) for length in (256, 300, 300)), floats(1, 256, 2, 64), floats(1, 2, 256)),
        2 * 4 * 2 * 64 * 300,
    ),
    "attention backward copies a gradient of heads behind each other": (
        lambda q, k, v, o, s: aten._scaled_dot_product_flash_attention_for_cpu_backward(o, q, k, v, o, s, 0.0, False),
        (*(floats(1, 2, length, 64) for length in (256, 300, 300, 256)), floats(1, 2, 256)),
        2 * 4 * 2 * 64 * 300 + 4 * 2 * 256 * 64,
    ),
    "convolution": (_convolved(), (_image(64, 32), floats(64, 64, 3, 3)), MB + 4 * 64 * 64 * 9 + 96 * 1024),
    "channels last": (_convolved(), (_image(64, 32, last=True), floats(64, 64, 3, 3)), 8 * 64 * 64 * 9 + 96 * 1024),
    "17 channels take two blocks": (
        _convolved(),
        (_image(17, 32), floats(8, 17, 1, 1)),
        MB * 5 // 8 + 2048 + 96 * 1024,
    ),
    "bfloat16, strided, in groups: the gradient of the image in blocks, twice": (
        lambda gradient, image, weight: aten.convolution_backward(
            gradient, image, weight, [0], [2, 2], [1, 1], [1, 1], False, [0, 0], 32, [True, True, False]
        ),
        (
            _image(32, 16, dtype=torch.bfloat16),
            _image(32, 32, dtype=torch.bfloat16),
            floats(32, 1, 3, 3, dtype=torch.bfloat16),
        ),
        MB // 2 + 3 * 2 * 32 * 9 + 96 * 1024 + 2 * (MB // 4 + MB // 16) // 4,
    ),
    "double precision makes windows": (
        _convolved(),
        (_image(16, 32, dtype=torch.float64), floats(16, 16, 3, 3, dtype=torch.float64)),
        9 * MB // 2 + (4 << 10),
    ),
}


@pytest.mark.parametrize("case", WORKSPACES)
def test_workspace_of_an_operator(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("convolutions", "products"):  # whatever this processor has
        monkeypatch.setattr(f"roamc.operators.costs.{family}.onednn_takes", lambda dtype: True)
    function, inputs, expected = WORKSPACES[case]
    assert workspace_bytes(node_of(function, *inputs), 2) == expected


def test_bfloat16_that_onednn_does_not_multiply_is_summed_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.operators.costs.products.onednn_takes", lambda dtype: False)
    a, b = floats(64, 512, dtype=torch.bfloat16), floats(64, 100, dtype=torch.bfloat16)
    assert workspace_bytes(node_of(lambda a, b: torch.mm(a.t(), b), a, b), 2) == 4 * 512 * 100
    assert workspace_bytes(node_of(lambda a, b: torch.mm(a.t().contiguous(), b), a, b), 2) == 0


def test_eager_dropout_takes_its_mask_at_once() -> None:
    node = node_of(lambda grad: aten.native_dropout_backward(grad, grad > 0, 2.0), floats(3, 1024, 1024))
    assert workspace_bytes(node, 2, eager=True) == 3 * 4 * MB


def test_views_and_picks_take_nothing() -> None:
    graph = model_graph("nanogpt", "step")[0]
    views = [node for node in operators(graph.graph) if ops.is_view(node.target)]
    assert views
    assert not any(workspace_bytes(node, 2) for node in views)
