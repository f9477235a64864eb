"""``.pt2``: the plan is that of the model, with any optimizer, at any size; and what is wrong is said."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc.capture.dump import archive
from roamc.capture.dump.exported import Exported, sizes_of
from roamc.errors import CaptureError, DumpError, OptionError
from roamc.frontends.workload import OPTIMIZERS, Workload, capture
from roamc.graph.origin import module_of, source_line
from roamc.options import parse_options
from roamc.planning import search
from tests.capture.dump import archives
from tests.capture.dump.archives import Mixed, Small, save, tokens, workload

EXPORTED_OTHERWISE = ("gpt2", "bert", "llama", "t5", "vit")
"""Models of transformers, which take other branches while they are exported."""


def bytes_of(each: Workload) -> tuple[object, ...]:
    plan = search.run(capture(each), parse_options({})).plan
    return plan.peak_bytes, plan.baseline_bytes, plan.bound_bytes, dict(plan.fixed_bytes)


def loss(model: torch.nn.Module, *batch: Any) -> Any:
    return model(*batch)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(
    "name", ["mixed", "nanogpt", "nanogpt-dropout", "lstm", "frozen", "gated", "written", "resnet50", "mobilenetv2"]
)
def test_an_archive_gives_the_plan_of_its_model(name: str, optimizer: str, tmp_path: Path) -> None:
    model, batch = archives.make(name)
    path = save(tmp_path / "model.pt2", model, batch)
    make = OPTIMIZERS[optimizer]
    assert bytes_of(workload(path, make)) == bytes_of(Workload("model", model, batch, loss, make))


@pytest.mark.parametrize("optimizer", [None, "sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", EXPORTED_OTHERWISE)
def test_an_archive_gives_the_plan_of_the_program_that_was_exported(
    name: str, optimizer: str | None, tmp_path: Path
) -> None:
    model, batch = archives.make(name)
    path = save(tmp_path / "model.pt2", model, batch)
    program = torch.export.export(model, batch).module()
    make = OPTIMIZERS[optimizer] if optimizer else None
    assert bytes_of(workload(path, make)) == bytes_of(Workload("model", program, batch, loss, make))


def test_sizes_are_those_that_are_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt2", Mixed(), (tokens(4),), dynamic_shapes=({0: torch.export.Dim("b", min=2)},))
    (size,) = archive.read(str(path)).exported
    for batch in (2, 4, 7, 32):
        live = Workload("model", Mixed(), (tokens(batch),), loss)
        assert bytes_of(workload(path, **{size: batch})) == bytes_of(live)
    for wrong, message in (({"batch": 4}, f"no size 'batch'.*Sizes: {size}"), ({size: 1}, "2 and more for")):
        with pytest.raises(OptionError, match=message):
            workload(path, **wrong)


def test_lines_and_modules_are_the_users(tmp_path: Path) -> None:
    graph = capture(workload(save(tmp_path / "model.pt2", Mixed(), (tokens(4),))))
    places = {(module_of(node), source_line(node).partition(":")[0]) for node in graph.graph.nodes if node.args}
    assert {("both", "archives.py"), ("norm", "archives.py"), ("Mixed", "archives.py")} <= places


def test_a_forward_without_a_loss_is_planned_with_a_gradient_handed_in(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pt2", Small(), (torch.randn(4, 8),))
    assert bytes_of(workload(path)) == bytes_of(Workload("model", Small(), (torch.randn(4, 8),)))
    assert "said" in capture(Workload("model", Small(), (torch.randn(4, 8),), notes=("said",))).notes
    with pytest.raises(CaptureError, match="has no loss_fn"):
        capture(workload(path, OPTIMIZERS["sgd"]))


def test_what_the_file_lacks_or_has_otherwise_is_a_note(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pt2", Mixed().eval(), (tokens(4),), decomposed=True)
    assert "operators are decomposed" in "; ".join(archive.read(str(path)).notes)
    path = save(tmp_path / "eval.pt2", Mixed().eval(), (tokens(4),))
    assert "exported in eval(): batch_norms" in "; ".join(archive.read(str(path)).notes)


def test_decomposed_writes_are_made_at_the_end(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pt2", Mixed(), (tokens(4),), decomposed=True)
    assert len(archive.read(str(path)).written) == 3
    live = bytes_of(Workload("model", Mixed(), (tokens(4),), loss))
    assert bytes_of(workload(path))[-1] == live[-1]


def test_an_archive_of_torch_2_5_is_read_without_its_ties(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pt2", Mixed(), (tokens(4),))
    with zipfile.ZipFile(path) as file:
        data = file.read("model/models/model.json")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("serialized_exported_program.json", data)
    assert "which weights are tied" in "; ".join(capture(workload(path)).notes)


def test_a_member_of_an_old_archive_changes_nothing_of_a_new_one(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt2", Mixed(), (tokens(4),))
    archives.changed(path, **{"h/serialized_exported_program.json": b"{}"})
    assert "which weights are tied" not in "; ".join(capture(workload(path)).notes)


def test_a_truth_value_is_no_loss(tmp_path: Path) -> None:
    class Checked(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.exp(), (x > 0).all()

    assert archive.read(str(save(tmp_path / "m.pt2", Checked(), (torch.randn(4, 8),)))).losses == 0


def _second_model(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        data = file.read("m/models/model.json")
    archives.changed(path, **{"m/models/other.json": data})


def _joint(data: dict[str, Any]) -> None:
    specs = data["graph_module"]["signature"]["output_specs"]
    specs[0] = {"loss_output": {"arg": specs[0]["user_output"]["arg"]["as_tensor"]}}


def _target(name: str) -> Any:
    return lambda data: data["graph_module"]["graph"]["nodes"][-1].update(target=name)


def _of_tensors(**said: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        for each in data["graph_module"]["graph"]["tensor_values"].values():
            each.update(said)

    return change


INDEX = "m/data/weights/model_weights_config.json"
CONSTANTS = "m/data/constants/model_constants_config.json"

WRONG: dict[str, tuple[Any, str]] = {
    "two models": (_second_model, "2 models: --piece names one of model, other"),
    "outside": (lambda path: archives.changed(path, **{"m/../../x": b""}), "a member that would lie outside"),
    "no index": (lambda path: archives.changed(path, **{INDEX: None}), "is missing, which says what is tied"),
    "a constant is missing": (
        lambda path: archives.changed(path, **{CONSTANTS: b'{"config": {}}'}),
        "the buffer 'mask' is missing from the archive's index",
    ),
    "newer": (
        lambda path: archives.changed(path, lambda data: data["schema_version"].update(major=9)),
        "written by a newer torch, in schema 9",
    ),
    "backward": (lambda path: archives.changed(path, _joint), "forward and backward in one"),
    "no zip": (lambda path: path.write_bytes(b"PK\x03\x04 cut"), "no archive that can be read"),
    "a library": (lambda path: archives.changed(path, _target("torch.ops.load_library")), "unknown operator"),
    "an import": (lambda path: archives.changed(path, _target("__import__('os').system")), "unknown operator"),
    "a file": (lambda path: archives.changed(path, _target("torch.ops.aten.from_file.default")), "unknown operator"),
    "another operator": (lambda path: archives.changed(path, _target("torch.ops.aten.mm.default")), "refuses its"),
    "no program": (lambda path: archives.changed(path, lambda data: data.pop("graph_module")), "not as torch.export"),
    "an infinite size": (
        lambda path: archives.changed(path, _of_tensors(sizes=[{"as_int": 1e999}], strides=[{"as_int": 1}])),
        "no whole number",
    ),
    "a negative offset": (
        lambda path: archives.changed(
            path,
            **{
                INDEX: archives.member(path, INDEX).replace(
                    b'"storage_offset": {"as_int": 0', b'"storage_offset": {"as_int": -4'
                )
            },
        ),
        "no tensor that can exist",
    ),
    "a huge number": (
        lambda path: archives.changed(path, lambda data: data["range_constraints"].update(s1={"min_val": 10**30})),
        "above 2\\*\\*63",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line(what: str, tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt2", Mixed(), (tokens(4),))
    change, message = WRONG[what]
    change(path)
    with pytest.raises(DumpError, match=message) as caught:
        capture(workload(path))
    assert "\n" not in str(caught.value)


def test_a_model_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt2", Mixed(), (tokens(4),))
    _second_model(path)
    with zipfile.ZipFile(path) as file:
        members = {name.replace("model_", "other_"): file.read(name) for name in (INDEX, CONSTANTS)}
    program = archive.read(str(archives.changed(path, **members)), "other")
    assert Exported(program, sizes_of(program, {})).batch[0].shape == (4, 8)
    with pytest.raises(DumpError, match="no model 'third'"):
        archive.read(str(path), "third")
