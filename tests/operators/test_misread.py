"""Operators that take elements from memory whatever the strides: they get arguments that lie as they read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.errors import VerifyError
from roamc.graph import TrainGraph, operators, verify
from roamc.graph.storage_ids import number
from roamc.operators import ops
from roamc.operators.corrections import correct
from tests.graphs import run_real, traced

aten = torch.ops.aten
Made = tuple[Callable[..., Any], list[Tensor], int]
"""A call, its tensors, and the position among them of the one that is moved."""


def group_norm_backward(moved: int) -> Made:
    x, grad, weight = torch.randn(2, 4, 6), torch.randn(2, 4, 6), torch.randn(4)
    _, mean, rstd = aten.native_group_norm(x, weight, None, 2, 4, 6, 2, 1e-5)
    return (
        lambda *tensors: aten.native_group_norm_backward(*tensors, 2, 4, 6, 2, [True, True, True]),
        [grad, x, mean, rstd, weight],
        moved,
    )


def layer_norm_backward(moved: int) -> Made:
    x, grad = torch.randn(4, 3, 6), torch.randn(4, 3, 6)
    _, mean, rstd = aten.native_layer_norm(x, [6], None, None, 1e-5)
    return (
        lambda grad, x, mean, rstd: aten.native_layer_norm_backward(
            grad, x, [6], mean, rstd, None, None, [True, False, False]
        ),
        [grad, x, mean, rstd],
        moved,
    )


def attention(moved: int) -> Made:
    return (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
        [torch.randn(2, 2, 5, 8) for _ in range(3)],
        moved,
    )


def bags(moved: int) -> Made:
    return (
        lambda weight, indices, offsets: aten._embedding_bag(weight, indices, offsets)[0],
        [torch.randn(7, 5), torch.randint(0, 7, (6,)), torch.tensor([0, 2])],
        moved,
    )


def image_loss_backward(moved: int) -> Made:
    scores, target = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    loss, total = aten.nll_loss2d_forward(scores, target, None, 1, -100)
    return (
        lambda loss, scores, target, total: aten.nll_loss2d_backward(loss, scores, target, None, 1, -100, total),
        [loss, scores, target, total],
        moved,
    )


CALLS: dict[str, Made] = {
    **{f"group norm's backward, {at}": group_norm_backward(at) for at in range(4)},
    **{f"layer norm's backward, {at}": layer_norm_backward(at) for at in (2, 3)},
    **{f"attention, {at}": attention(at) for at in range(3)},
    "bags": bags(0),
    "image loss's backward": image_loss_backward(1),
}


def moved(tensor: Tensor) -> Tensor:
    """The same elements, with the dimensions in the opposite order in memory."""
    backwards = list(range(tensor.dim()))[::-1]
    return tensor.permute(backwards).contiguous().permute(backwards)


def misreading(name: str) -> tuple[TrainGraph, list[Tensor]]:
    """A graph in which torch thinks an operator's argument contiguous that is not, and inputs for it."""
    call, tensors, at = CALLS[name]
    inputs = [moved(tensor) if number == at else tensor for number, tensor in enumerate(tensors)]

    def function(*inputs: Tensor) -> Any:
        return call(*(aten.maximum(value, value) if number == at else value for number, value in enumerate(inputs)))

    graph = traced(function, *inputs)
    (node,) = (node for node in operators(graph.graph) if node.target is aten.maximum.default)
    node.meta["val"] = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
    return graph, inputs


@pytest.mark.parametrize("name", CALLS)
def test_a_copy_lies_as_the_kernel_reads(name: str) -> None:
    call, tensors, _ = CALLS[name]
    graph, inputs = misreading(name)
    correct(graph.graph)
    graph.module.recompile()
    results = call(*tensors)
    expected = [results] if isinstance(results, Tensor) else list(results)
    for one, other in zip(graph.module(*inputs), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_the_judge_refuses_what_a_kernel_would_misread(name: str) -> None:
    graph, _ = misreading(name)
    copies = correct(graph.graph)
    for node in [node for node in operators(graph.graph) if node.name in copies]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.graph.erase_node(node)
    assert copies
    number(graph.graph)
    with pytest.raises(VerifyError, match=r"would read maximum, .* as if it were contiguous"):
        verify.check_graph(graph, "capture")


def test_images_in_channels_last_are_normed_as_they_lie() -> None:
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    graph = traced(
        lambda x, weight: aten.native_group_norm(aten.maximum(x, x), weight, None, 2, 4, 9, 2, 1e-5)[0],
        x,
        torch.ones(4),
    )
    assert not correct(graph.graph)
    assert not [node for node in operators(graph.graph) if ops.misread(node)]


def test_heads_of_width_one_are_attended_to_as_they_lie() -> None:
    def attention(x: Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]

    heads = torch.randn(2, 8, 4).view(2, 8, 4, 1).transpose(1, 2)
    far = heads.as_strided(heads.shape, (32, 1, 4, 4))  # the stride of a dimension of one element says nothing
    graph = traced(attention, far)
    assert not correct(graph.graph)
    number(graph.graph)
    verify.check_graph(graph, "capture")
    (result,), _ = run_real(graph, [far])
    assert torch.equal(result, attention(heads.contiguous()))
