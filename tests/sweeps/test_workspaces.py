"""A sample of torch's operators on the heap, beside what is counted for them; `make sweep-workspace` runs all."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from benchmarks._measure import counter_library
from tests.sweeps import pool
from tests.sweeps.databases import entries
from tests.sweeps.enlarged import FORMS, enlarged
from tests.sweeps.run_workspaces import BAD, table, work
from tests.sweeps.workspaces import NEAR, OBJECTS, Measured

SAMPLE = (
    *("nn_functional_bilinear", "nn_functional_group_norm", "nn_functional_interpolate_bilinear"),
    *("median", "log_softmax", "linalg_solve_triangular"),
)


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="the heap counter needs a C compiler")
def test_operators_take_no_more_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(counter_library()))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    chosen = [entry for entry in entries() if entry.database == "op" and entry.dtype is torch.float32]
    jobs = [(entry, 1) for entry in chosen if entry.name in SAMPLE]
    rows = [row for *_, row in pool.run(work, jobs, 1)]
    assert [row["text"] for row in rows if row["outcome"] in ("crash", *BAD)] == []
    operators = {call["operator"] for row in rows for call in row["calls"]}
    assert {
        "aten._trilinear.default",
        "aten.native_group_norm_backward.default",
        "aten.upsample_bilinear2d.default",
    } <= operators


def test_a_call_is_above_where_it_takes_more_and_over_where_too_much_is_counted() -> None:
    def verdict(operator: str, taken: int, counted: int, threads: int = 1) -> str:
        return Measured(operator, "", "program", threads, taken, counted).verdict

    assert verdict("aten.add.Tensor", OBJECTS, 0) == "within"
    assert verdict("aten.add.Tensor", OBJECTS + 1, 0) == "above"
    assert verdict("aten.add.Tensor", 0, NEAR + 1) == "over"
    assert verdict("aten.add.Tensor", 0, NEAR + 1, threads=2) == "within"
    assert verdict("aten.convolution.default", OBJECTS + 1, 0) == "above"
    assert verdict("aten.convolution.default", 0, NEAR + 1) == "named"
    assert verdict("torch_nn._linear_cross_entropy_batch_chunked.default", OBJECTS + 1, 0) == "named"


@pytest.mark.parametrize("form", FORMS)
def test_samples_grow_with_their_order_in_memory_and_their_indices(form: str) -> None:
    rows, indices = torch.randn(5, 4).t(), torch.tensor([0, 3, 1, 2])
    (larger, taller), numbers = next(enlarged(((rows, indices), {"size": 4}), form))
    assert larger.numel() > 1000
    assert larger.stride(0) == 1
    assert taller.max() == 3
    assert numbers == {"size": 4}


def test_images_grow_and_windows_do_not() -> None:
    image, weight = next(enlarged((torch.randn(2, 3, 8, 8), torch.randn(64, 3, 3, 3)), "rows"))
    assert image.shape[1:] == (3, 8, 8)
    assert weight.shape == (64, 3, 3, 3)


def test_small_or_sparse_samples_do_not_grow() -> None:
    assert list(enlarged((torch.ones(()), 3), "rows")) == []
    assert list(enlarged((torch.eye(3).to_sparse(),), "large")) == []


def test_table_has_a_line_for_every_operator_that_is_not_as_it_should_be() -> None:
    calls = [{"operator": "a", "verdict": "above"}, {"operator": "a", "verdict": "within"}]
    lines = table([{"calls": calls}, {"calls": [{"operator": "b", "verdict": "named"}]}])
    assert lines[0].split() == ["a", "2", "calls", "1", "above", "0", "over"]
    assert lines[1:] == ["2 operators, 3 calls: 1 above, 0 over, 1 named"]
