"""How operators fill planned memory: the overload with ``out=``, a kernel of ours, in place, or allocate and copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from torch import Tensor, fx
from torch.nn import functional as F

from roamc.graph import operators
from roamc.graph.memory import build_memory
from roamc.operators.kernels import KERNELS
from roamc.operators.out_variants import ALLOCATE, CPU_ALONE, CUDA_ALONE, Form, FormKind, form_of, out_overload, runs_on
from tests.graphs import joint_graph, traced

aten = torch.ops.aten
X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("target", "overload", "arguments"),
    [
        (aten.add.Tensor, aten.add.out, ("out",)),
        (aten.mm.default, aten.mm.out, ("out",)),
        (aten.addmm.default, aten.addmm.out, ("out",)),
        (aten.bmm.default, aten.bmm.out, ("out",)),
        (aten.gelu.default, aten.gelu.out, ("out",)),
        (aten.gelu_backward.default, aten.gelu_backward.grad_input, ("grad_input",)),
        (aten.threshold_backward.default, aten.threshold_backward.grad_input, ("grad_input",)),
        (aten._softmax.default, aten._softmax.out, ("out",)),
        (aten._log_softmax_backward_data.default, aten._log_softmax_backward_data.out, ("out",)),
        (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices.out, ("out", "indices")),
        (aten.nll_loss_forward.default, aten.nll_loss_forward.output, ("output", "total_weight")),
        (aten.nll_loss_backward.default, aten.nll_loss_backward.grad_input, ("grad_input",)),
        (aten.max.dim, aten.max.dim_max, ("max", "max_values")),
        (aten.topk.default, aten.topk.values, ("values", "indices")),
        (aten.sum.dim_IntList, aten.sum.IntList_out, ("out",)),
        (aten.where.self, aten.where.self_out, ("out",)),
        (aten.native_layer_norm.default, aten.native_layer_norm.out, ("out0", "out1", "out2")),
        (aten.cat.default, aten.cat.out, ("out",)),
        (aten.pow.Tensor_Scalar, aten.pow.Tensor_Scalar_out, ("out",)),
    ],
    ids=str,
)
def test_out_overload_is_the_one_with_the_same_arguments(
    target: Any, overload: Any, arguments: tuple[str, ...]
) -> None:
    assert out_overload(target) == (overload, arguments)


@pytest.mark.parametrize(
    "target", [aten.native_layer_norm_backward.default, aten.add_.Tensor, aten.view.default], ids=str
)
def test_out_overload_found_has_one_keyword_per_result(target: Any) -> None:
    variant = out_overload(target)
    assert variant is None or len(variant[1]) == len(target._schema.returns)


def forms(function: Any, *inputs: Tensor) -> dict[str, Form]:
    """Node name to form, for every operator of a traced function."""
    return {op.node.name: form_of(op.node, len(op.births)) for op in build_memory(traced(function, *inputs)).operators}


def test_operator_with_a_kernel_of_its_own_for_out_uses_it() -> None:
    node_forms = forms(lambda x: F.gelu(x @ x + x).sum(1), X)
    assert [form.kind for form in node_forms.values()] == [FormKind.OUT] * 4
    assert node_forms["mm"] == Form(FormKind.OUT, aten.mm.out, ("out",))
    assert node_forms["add"].overload is aten.add.out
    assert node_forms["sum_1"] == Form(FormKind.OUT, aten.sum.IntList_out, ("out",))


def test_several_results_go_to_several_keywords() -> None:
    node_forms = forms(lambda x: x.topk(2), X)
    assert node_forms["topk"] == Form(FormKind.OUT, aten.topk.values, ("values", "indices"))


def test_fourier_transforms_would_copy_a_result_of_their_own() -> None:
    node_forms = forms(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=4), X)
    assert node_forms["_fft_r2c"] == node_forms["_fft_c2r"] == ALLOCATE


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: F.layer_norm(x, (4,)), "native_layer_norm"),
        (lambda x: F.conv1d(x[None], x[None]), "convolution"),
        (lambda x: aten._scaled_dot_product_flash_attention_for_cpu.default(*[x.view(1, 1, 4, 4)] * 3), "_scaled_dot"),
    ],
)
def test_out_overload_that_torch_generates_counts_as_allocating(function: Any, name: str) -> None:
    node_forms = [form for node, form in forms(function, X).items() if node.startswith(name)]
    assert node_forms == [ALLOCATE]


@pytest.mark.parametrize("function", [lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.copy_(x.t()), F.relu_])
def test_write_in_place_makes_nothing(function: Any) -> None:
    assert list(forms(function, X).values()) == [Form(FormKind.IN_PLACE)]


def test_kernel_of_ours_goes_before_an_overload() -> None:
    node_forms = forms(lambda x: (x.clone(), torch.zeros_like(x), x.sum(), torch.stack([x, x])), X)
    assert [form.kind for form in node_forms.values()] == [FormKind.KERNEL] * 4
    assert out_overload(aten.stack.default) is not None  # there is one, and it is not used


def test_kernel_is_used_only_on_the_devices_it_serves() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        drop = aten.native_dropout.default
        return drop(x.clone(), 0.5, True)[0], drop(torch.zeros(4, 4, device="cuda"), 0.5, True)[0]

    node_forms = forms(function, X)
    assert node_forms["clone"].kind is node_forms["native_dropout"].kind is FormKind.KERNEL
    assert node_forms["native_dropout_1"].kind is FormKind.ALLOCATE


def test_result_that_shares_a_storage_allocates() -> None:
    # A list of two views of one new storage, as unsafe_split gives when a backend runs it.
    node_forms = forms(lambda x: aten.split_with_sizes_copy.default(x, [1, 3]), X)
    assert node_forms["split_with_sizes_copy"].kind is FormKind.ALLOCATE


def node_with(target: Any, value: Any) -> fx.Node:
    node = fx.Graph().call_function(target, ())
    node.meta["val"] = value
    return node


def test_results_on_two_devices_allocate() -> None:
    values = (torch.empty(2), torch.empty(2, device="meta"))
    assert form_of(node_with(aten.topk.default, values), 2) == ALLOCATE


def test_fewer_births_than_tensors_allocate() -> None:
    assert form_of(node_with(aten.topk.default, (torch.empty(2), torch.empty(2))), 1) == ALLOCATE


def test_list_of_results_allocates() -> None:
    node = node_with(aten._foreach_add.Scalar, [torch.empty(2), torch.empty(2)])
    assert form_of(node, 2) == ALLOCATE


def test_target_that_is_no_operator_allocates() -> None:
    assert form_of(node_with(torch.ops.higher_order.cond, torch.empty(2)), 1) == ALLOCATE


def test_forms_of_a_real_model_are_all_four() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Dropout(0.5), torch.nn.GELU())

    kinds = {form_of(op.node, len(op.births)).kind for op in build_memory(joint_graph(model(), (X,))).operators}
    assert kinds == {FormKind.OUT, FormKind.KERNEL, FormKind.ALLOCATE}


def test_no_kernel_stands_for_an_operator_that_writes_or_views() -> None:
    from roamc.operators.ops import rule

    assert [str(overload) for overload in KERNELS if rule(overload).mutates or rule(overload).view_of] == []


def test_every_operator_of_a_graph_has_a_form() -> None:
    graph = joint_graph(torch.nn.LSTM(4, 4), (torch.randn(3, 2, 4),))
    assert all(isinstance(form_of(node, 1), Form) for node in operators(graph.graph))


def test_overloads_of_one_device_alone_are_those_of_torch() -> None:
    """torch's own list of kernels comes with it."""
    yaml = pytest.importorskip("yaml")
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    kernels: dict[str, set[str]] = {"CPU": set(), "CUDA": set()}
    overloads: set[str] = set()
    for entry in yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        name, _, arguments = entry["func"].partition("(")
        overloads.add(f"aten::{name}")
        keys = {key.strip() for keys in entry.get("dispatch") or () for key in keys.split(",")}
        written = "!)" in arguments.partition("*")[2].partition("->")[0]  # a keyword
        for device in keys & kernels.keys() if written else ():
            kernels[device].add(f"aten::{name}")
    assert kernels["CPU"] - kernels["CUDA"] == CPU_ALONE & overloads  # an older torch has fewer
    on_cpu_since_2_13 = {"aten::_scaled_mm_v2.out"}
    assert kernels["CUDA"] - kernels["CPU"] - on_cpu_since_2_13 == CUDA_ALONE & overloads


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch knows CUDA's kernels")
@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("aten::mm.out", True),
        ("aten::_stack.out", False),
        ("aten::mm.dtype_out", True),
        ("aten::native_dropout.out", False),
        ("aten::gelu_backward.grad_input", True),
    ],
)
def test_kernels_of_cuda_are_known_where_torch_has_none(name: str, there: bool) -> None:
    assert runs_on(name, "cuda") is there
