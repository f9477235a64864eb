"""The operator table: what its rows say is what the operators do."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import roamc.operators.prod_backward  # noqa: F401  its operators are there once it is imported
from roamc.operators import ops
from roamc.operators.collectives import NAMESPACE
from roamc.operators.costs import linear_algebra
from roamc.operators.costs.cost import Cost
from roamc.operators.costs.kinds import KINDS, UNKNOWN
from roamc.operators.costs.rows import COSTS, ONLY_KIND, ROWS
from roamc.operators.table import OutForm
from tests.operator_calls import rows_with

aten = torch.ops.aten
X = torch.randn(4, 6)
VIEWS: dict[Any, tuple[Any, ...]] = {
    aten.slice_scatter.default: (1, 1, 6, 2),
    aten.select_scatter.default: (1, 3),
    aten.diagonal_scatter.default: (1,),
    aten.as_strided_scatter.default: ([2, 3], [1, 4], 2),
}
"""Operators with a part, to the arguments that name the part."""


@pytest.mark.parametrize("target", rows_with("part"), ids=str)
def test_the_part_is_what_the_second_argument_replaces(target: Any) -> None:
    view: Any = ops.rule(target).part
    wanted = X.clone()
    replaced = torch.randn_like(view(X, *VIEWS[target]))
    view(wanted, *VIEWS[target]).copy_(replaced)
    assert torch.equal(target(X, replaced, *VIEWS[target]), wanted)
    assert set(VIEWS) == set(rows_with("part"))


@pytest.mark.parametrize("target", rows_with("renames"), ids=str)
def test_another_name_has_the_elements_and_the_memory_of_its_argument(target: Any) -> None:
    result = target(X)
    assert result.data_ptr() == X.data_ptr()
    assert (result.shape, result.stride()) == (X.shape, X.stride())
    assert ops.is_view(target)


@pytest.mark.parametrize("target", rows_with("broadcasts"), ids=str)
def test_a_broadcast_has_the_elements_of_its_second_argument(target: Any) -> None:
    number = torch.tensor(-0.0)
    assert torch.equal(target(X, number).view(torch.int32), number.expand(4, 6).contiguous().view(torch.int32))


@pytest.mark.parametrize("target", rows_with("nonnegative"), ids=str)
def test_no_element_is_below_zero(target: Any) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, -2.0, 3.0])
    result = target(odd)
    assert not bool((result < 0).any())
    assert torch.equal(result != 0, (odd > 0) | odd.isnan())


@pytest.mark.parametrize("target", rows_with("absolute"), ids=str)
def test_what_goes_by_offsets_reads_what_lies_around_its_argument(target: Any) -> None:
    storage = torch.arange(24.0)
    inside = storage[6:12].view(2, 3)
    if target is aten.as_strided_copy.default:
        assert torch.equal(target(inside, [2], [1], 0), storage[:2])
    else:
        replaced = target(inside, torch.zeros(2), [2], [1], 6)
        assert torch.equal(replaced, torch.tensor([[0.0, 0, 8], [9, 10, 11]]))
    assert ops.rule(target).whole_storage


def test_forms_that_do_not_write_where_they_are_told_are_in_the_table() -> None:
    forms = {
        form: [str(target) for target in rows_with("out_form") if ops.rule(target).out_form is form] for form in OutForm
    }
    assert forms[OutForm.ASKS] == ["aten.linalg_qr.default"]
    assert len(forms[OutForm.COPIES]) == 3
    assert "aten._native_batch_norm_legit.no_stats" in forms[OutForm.IN_ROWS]


def test_rows_on_costs_name_operators_that_torch_has() -> None:
    ours = {f"{space}::{name}" for space in ("roamc", NAMESPACE) for name in getattr(torch.ops, space)}
    gone = [name for name in COSTS if not hasattr(aten, name) and not hasattr(aten, f"{name}_") and name not in ours]
    assert set(gone) <= {"flex_attention", "flex_attention_backward"}, "these are higher-order operators"
    assert {cost.kind for cost in COSTS.values()} <= {*KINDS, ""}


def test_an_operator_has_one_row_on_costs() -> None:
    alone = [name for names in ONLY_KIND.values() for name in names.split()]
    assert len(set(alone)) == len(alone)
    assert set(alone).isdisjoint(ROWS)
    assert [name for name, cost in ROWS.items() if cost == Cost(cost.kind)] == []


def test_what_a_row_on_costs_leaves_open_is_read_off_tags() -> None:
    assert ops.rule(aten.sin_.default).cost == Cost("tanh")
    assert ops.rule(aten.bitwise_xor.Tensor).cost == Cost("pointwise")
    assert ops.rule(aten.view.default).cost == Cost("view")
    assert ops.rule(aten.linalg_qr.default).cost.kind == UNKNOWN
    assert ops.rule(aten.linalg_qr.default).cost.workspace is linear_algebra.reflectors
    assert ops.rule(print).cost == Cost(UNKNOWN)


ROOT = Path(__file__).parent.parent.parent
SUBJECTS = {
    "passes/normalize.py": "dropout",
    "roamc/rewriting/rerun_variants.py": "batch norm",
    "roamc/capture/caller_writes.py": "copies to the caller's tensors",
    "roamc/capture/dump/build.py": "sizes of a tensor",
    "roamc/capture/dump/calls.py": "copies",
    "roamc/capture/dump/phases.py": "copies to the caller's tensors",
    "roamc/capture/dump/writes.py": "writes in place",
    "roamc/capture/cuda_attention.py": "attention",
    "roamc/capture/dropouts.py": "dropout, as eager computes it",
    "roamc/capture/questions.py": "operators that read a value",
    "roamc/graph/eager_memory.py": "masks and losses that are larger in eager, sums behind a formula",
    "roamc/capture/gather_judge.py": "what may stand between a part and its gather, for the judge",
    "roamc/capture/in_place_values.py": "clones that autograd keeps",
    "roamc/capture/in_place_views.py": "views in place",
    "roamc/capture/projected.py": "products that make gradients of weights",
    "roamc/capture/recurrent.py": "recurrent layers",
    "roamc/capture/repeats.py": "sums of gradients",
    "roamc/capture/returned_inputs.py": "copies to the caller's tensors",
    "roamc/capture/step_trace.py": "detach",
    "roamc/capture/torch_faults.py": "what torch computes wrongly in a dispatch mode",
    "roamc/compat.py": "what fake tensors cannot tell, and what torch's cache of them tells wrongly",
    "roamc/compat_aot.py": "the backward of batch norm",
    "roamc/codegen/triton_stand_in.py": "sums and maxima of Triton",
    "roamc/graph/fingerprint.py": "parts of which each rank takes its own",
    "roamc/graph/reader_kinds.py": "products that make gradients of weights",
    "roamc/graph/same_values.py": "dropout, batch norm, losses and clone, for the judge",
    "roamc/runtime/fallback.py": "as_strided",
    "passes/masks.py": "dropout",
    "passes/project.py": "products that make gradients of weights",
    "passes/retain/codecs/norms.py": "layer norm and RMS norm",
    "passes/retain/codecs/projections.py": "products with projections",
    "passes/retain/codecs/tempo.py": "GELU and SiLU",
    "passes/scores.py": "losses of rows of classes",
    "roamc/rewriting/dropouts.py": "dropout",
    "roamc/graph/mask_judge.py": "dropout, for the judge",
    "passes/async_tp.py": "matrix products",
    "passes/shard/choose.py": "sums of several all-reduces",
    "passes/shard/classes.py": "softmax and losses over the classes of a rank",
    "passes/shard/rules.py": "what operators make of a part of the rows",
    "passes/shard/varying.py": "products of parts, and what looks values up",
    "passes/shard/write.py": "dropout, and views of the tokens",
    "roamc/graph/shard_classes.py": "softmax and losses over the classes of a rank, for the judge",
    "roamc/graph/shard_indices.py": "look-ups and losses, for the judge",
    "roamc/graph/shard_states.py": "what operators make of a part of the rows, for the judge",
    "roamc/graph/shard_terms.py": "products and moved dimensions, for the judge",
}
"""Files that compare the names of operators, to the operators that they are about."""


def compared_operators(source: str) -> list[str]:
    """The operators that a file compares with, or looks up: not those that it calls, or puts into a graph."""
    tree = ast.parse(source)
    about: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                for side in (node.left, *node.comparators):
                    about += side.elts if isinstance(side, ast.Tuple) else [side]
            case ast.Dict():
                about += [key for key in node.keys if key is not None]
            case ast.Set() | ast.List() | ast.Assign(targets=[ast.Name()], value=ast.Tuple()):
                about += node.value.elts if isinstance(node, ast.Assign) else node.elts  # type: ignore[attr-defined]
    names = [ast.unparse(one) for one in about]
    return [name for name in names if name.startswith(("aten.", "torch.ops.", "'aten::"))] + bare_names(tree)


def bare_names(tree: ast.Module) -> list[str]:
    """The names of operators, without a namespace, in tables and sets of two or more that have nothing else."""
    bare: list[str] = []
    for node in ast.walk(tree):
        keys = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        if len(names) > 1 and len(names) == len(keys) and all(name in COSTS and name not in KINDS for name in names):
            bare += names
    return bare


def test_only_rewritings_compare_operators_and_only_their_subject() -> None:
    files = [path for folder in ("roamc", "passes") for path in sorted((ROOT / folder).rglob("*.py"))]
    outside = [path for path in files if ROOT / "roamc" / "operators" not in path.parents]
    compared = {str(path.relative_to(ROOT)): compared_operators(path.read_text(encoding="utf-8")) for path in outside}
    assert {name: targets for name, targets in compared.items() if targets and name not in SUBJECTS} == {}
    assert [name for name in SUBJECTS if not compared[name]] == []


def test_nobody_else_asks_for_the_bare_name_of_an_operator() -> None:
    files = [path for folder in ("roamc", "passes") for path in sorted((ROOT / folder).rglob("*.py"))]
    outside = [path for path in files if ROOT / "roamc" / "operators" not in path.parents]
    asking = [str(path.relative_to(ROOT)) for path in outside if re.search(r"import stem\b", path.read_text("utf-8"))]
    assert asking == ["roamc/codegen/triton_stand_in.py"], "a judge knows by itself which operators round numbers"


def test_a_comparison_is_found_and_a_call_is_not() -> None:
    assert compared_operators("if node.target is aten.mm.default: pass") == ["aten.mm.default"]
    assert compared_operators("ROWS = {torch.ops.aten.mm.default: 1, 'aten::mm': 2}") != []
    assert compared_operators("RULES = {'bmm': 1, 'baddbmm': 2}") == ["bmm", "baddbmm"]
    assert compared_operators("if name in ('bmm', 'baddbmm'): pass") == ["bmm", "baddbmm"]
    assert compared_operators("KINDS = {'sum': 1, 'other': 2}") == []
    assert compared_operators("y = w.call(aten.mm.default, x, x)") == []
