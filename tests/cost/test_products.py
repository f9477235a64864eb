"""The choice between two libraries for matrix products: forms, the file of measured times, and its faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from roamc.cost import products
from roamc.cost.products import Form, faster_by_onednn, form_of

FEW = Form(0, 8, 8, 8, False, False)
MANY = Form(0, 512, 512, 512, False, True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Form]:
    """Every form that is measured; oneDNN is faster from 64 rows on."""
    asked: list[Form] = []

    def times(form: Form) -> tuple[float, float]:
        asked.append(form)
        return (2.0, 1.0) if form.rows >= 64 else (1.0, 2.0)

    monkeypatch.setattr(products, "_measured", times)
    monkeypatch.setattr(products, "measured_folder", lambda: tmp_path / "profiles")
    return asked


def test_sizes_of_a_form_are_powers_of_two() -> None:
    assert form_of(torch.empty(100, 24), torch.empty(24, 5000)) == Form(0, 128, 32, 1024, False, False)
    assert form_of(torch.empty(24, 90).t(), torch.empty(7, 24).t()) == Form(0, 64, 32, 8, True, True)
    assert form_of(torch.empty(12, 1, 1), torch.empty(12, 1, 3)) == Form(8, 1, 1, 4, False, False)


def test_forms_are_measured_once(measured: list[Form]) -> None:
    assert faster_by_onednn([FEW, MANY, MANY]) == {MANY}
    assert measured == [FEW, MANY]
    assert faster_by_onednn([MANY, FEW]) == {MANY}
    assert measured == [FEW, MANY]


@pytest.mark.parametrize("change", ["model", "torch", "threads"])
def test_times_of_another_machine_do_not_count(measured: list[Form], tmp_path: Path, change: str) -> None:
    faster_by_onednn([MANY])
    (path,) = (tmp_path / "profiles").glob("products-*.json")
    data = json.loads(path.read_text())
    data["machine"][change] = "another"
    path.write_text(json.dumps(data))
    assert faster_by_onednn([MANY]) == {MANY}
    assert measured == [MANY, MANY]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}', "\x00", '{"machine": {}, "forms": [[1]]}'])
def test_a_file_that_is_none_is_measured_anew(
    measured: list[Form], tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    faster_by_onednn([MANY])
    (path,) = (tmp_path / "profiles").glob("products-*.json")
    if '"forms"' in text:
        text = json.dumps({"machine": json.loads(path.read_text())["machine"], "forms": [[1]]})
    path.write_text(text)
    assert faster_by_onednn([MANY]) == {MANY}
    assert measured == [MANY, MANY]
    assert faster_by_onednn([MANY]) == {MANY}
    assert measured == [MANY, MANY]


def test_a_folder_that_cannot_be_written_is_said(
    measured: list[Form], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file")
    assert faster_by_onednn([MANY]) == {MANY}
    assert "are not kept" in caplog.text


def test_measuring_ends(measured: list[Form], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PATIENCE", 0.0)
    assert faster_by_onednn([MANY]) == frozenset()
    assert measured == []


def test_a_form_takes_time() -> None:
    assert min(products._measured(Form(2, 64, 64, 64, True, False))) > 0 or products.product_into() is None
