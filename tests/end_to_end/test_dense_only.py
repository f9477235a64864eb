"""Tensors that no plan takes, nested, sparse and quantized ones, and a budget without its unit: one clear line each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import noise, sgd, square
from tests.end_to_end.test_bad_input import X, net, refused


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_model_of_nested_tensors_runs_in_eager(inside: bool) -> None:
    rows, offsets = noise(5, 8), torch.tensor([0, 3, 5])

    class Nested(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.nested.nested_tensor_from_jagged(x, offsets) if inside else x
            return super().forward(x).values()

    batch = rows if inside else torch.nested.nested_tensor_from_jagged(rows, offsets)
    with pytest.raises(Exception, match=r"nested \(jagged\) tensor; pad it, .* a mask") as caught:
        roamc.optimize(Nested(8, 8), strict=True)(batch)
    assert isinstance(caught.value.inner_exception, roamc.CaptureError)
    with pytest.warns(UserWarning, match=r"falls back to eager PyTorch: .*nested \(jagged\)"):
        roamc.optimize(Nested(8, 8))(batch).sum().backward()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_batch() -> None:
    model, batch = net(), torch.quantize_per_tensor(noise(4, 8), 0.1, 0, torch.qint8)
    step = roamc.train_step(model, lambda model, x: square(model, x.dequantize()), sgd(model))
    refused(lambda: step(batch), roamc.CaptureError, "quantized tensor (torch.qint8)", ".dequantize()")


def test_tensors_that_are_not_dense() -> None:
    model = net()
    step = roamc.train_step(model, lambda m, x: m(x).sum(), sgd(model))
    nested = torch.nested.nested_tensor([noise(3, 8), noise(2, 8)], layout=torch.jagged)
    for run in (step, step.plan):
        refused(lambda run=run: run(nested), roamc.CaptureError, "nested (jagged)", "to_padded_tensor", "mask")
    refused(lambda: step(torch.eye(8).to_sparse()), roamc.CaptureError, "layout torch.sparse_coo", ".to_dense()")
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    refused(lambda: step(X), roamc.CaptureError, "layout torch.sparse_coo", ".to_dense()")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR tensor")
def test_tensors_of_the_loss_that_are_not_dense() -> None:
    held = {
        "layout torch.sparse_coo": (torch.eye(4).to_sparse(), ".to_dense()"),
        "layout torch.sparse_csr": (torch.eye(4).to_sparse_csr(), ".to_dense()"),
        "quantized": (torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), ".dequantize()"),
    }
    for words, (other, advice) in held.items():
        model = net()
        step = roamc.train_step(model, lambda m, x, other=other: (other.is_sparse + other @ m(x)).sum(), sgd(model))
        for run in (step, step.plan):
            refused(lambda run=run: run(X), roamc.CaptureError, words, advice)


def test_a_loss_that_makes_a_sparse_tensor() -> None:
    model = net()
    step = roamc.train_step(model, lambda m, x: m(x).to_sparse().to_dense().sum(), sgd(model))
    refused(lambda: step(X), roamc.CaptureError, "makes a tensor of layout torch.sparse_coo", "dense ones only")
