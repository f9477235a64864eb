"""The operator table: what is read off schemas and tags, and the rows that correct them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from roamc.graph import operators, placeholders
from roamc.operators import ops
from roamc.operators.collectives import FINISHED
from roamc.operators.costs.cost import Cost
from roamc.operators.ops import OpRule, is_view, mutated_arguments, rule
from roamc.operators.random import replay, save_rng_state
from roamc.operators.schemas import name_of
from roamc.operators.table import ROWS
from tests.graphs import traced

aten = torch.ops.aten
X = torch.randn(4, 4)


@pytest.mark.parametrize(
    "target",
    [
        *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
        *(
            aten.slice.Tensor,
            aten.select.int,
            aten.split.Tensor,
            aten.unbind.int,
            aten.squeeze.dim,
            aten.unsqueeze.default,
        ),
        *(aten.detach.default, aten.alias.default, aten.as_strided.default, aten.unsqueeze.default),
        *(aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, operator.getitem),
        *(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.lift.default),
    ],
    ids=str,
)
def test_view_shares_its_first_argument(target: Any) -> None:
    assert rule(target).view_of == (0,)
    assert is_view(target)
    assert not rule(target).mutates
    assert not rule(target).random


@pytest.mark.parametrize(
    ("target", "mutates"),
    [
        (aten.add_.Tensor, (0,)),
        (aten.relu_.default, (0,)),
        (aten.copy_.default, (0,)),
        (aten.mul.out, ("out",)),
        (aten.max.dim_max, ("max", "max_values")),
        (aten._fused_adamw_.default, (0, 1, 2, 3, 4)),
        (aten.index_put_.default, (0,)),
        (aten.native_batch_norm.default, ()),
        (aten._native_batch_norm_legit.default, (3, 4)),
        (aten.add.Tensor, ()),
    ],
    ids=str,
)
def test_written_arguments_are_those_of_the_schema(target: Any, mutates: tuple[int | str, ...]) -> None:
    assert rule(target).mutates == mutates


@pytest.mark.parametrize("target", [aten.add_.Tensor, aten.copy_.default, aten.mul.out, aten.mm.default], ids=str)
def test_what_writes_or_computes_is_no_view(target: Any) -> None:
    assert not is_view(target)


@pytest.mark.parametrize(
    "target",
    [
        *(aten.native_dropout.default, aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli_.float),
        *(aten.rand_like.default, aten.randn_like.default, aten.uniform_.default, aten.normal_.default),
        *(aten.randn.default, aten.rand.default, aten.randperm.default, aten.randint.low, aten.multinomial.default),
        *(aten.exponential_.default, aten.rrelu_with_noise.default, aten.normal.Tensor_Tensor),
        *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default),
    ],
    ids=str,
)
def test_random_operator_keeps_its_place_and_is_never_recomputed(target: Any) -> None:
    assert rule(target).random
    assert not rule(target).recomputable


ATTENTION = aten._scaled_dot_product_flash_attention.default


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "draws"),
    [
        (ATTENTION, ("q", "k", "v", 0.0), {}, False),
        (ATTENTION, ("q", "k", "v"), {}, False),
        (ATTENTION, ("q", "k", "v", 0.1), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, ("q", "k", "v", None, True), {"dropout_p": 0.1}, True),
        (aten.rand_like.default, ("x",), {}, True),
        (save_rng_state, (torch.device("cpu"),), {}, True),
        (aten.mm.default, ("x", "y"), {}, False),
    ],
    ids=lambda value: name_of(value) if callable(value) else str(value),
)
def test_attention_draws_if_it_drops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draws: bool) -> None:
    assert ops.draws(target, args, kwargs) == draws


@pytest.mark.parametrize(
    "target",
    [
        *(aten.add.Tensor, aten.mm.default, aten.convolution.default, aten.native_dropout_backward.default),
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ],
    ids=str,
)
def test_plain_operator_has_no_effect_and_may_run_again(target: Any) -> None:
    op_rule = rule(target)
    free = ("overwrites", "rounds_once", "strides", "unit_stride", "rowwise", "carries", "multiplies", "cost")
    assert op_rule == OpRule(**{name: getattr(op_rule, name) for name in free})
    assert op_rule.recomputable
    assert not ops.has_effect(target)


@pytest.mark.parametrize(
    "target",
    [
        *(
            aten.index_put.default,
            aten.scatter_add.default,
            aten.scatter.src,
            aten.scatter_reduce.two,
            aten.put.default,
        ),
        *(aten.embedding_dense_backward.default, aten.upsample_bicubic2d_backward.default, aten.cumsum.default),
        *(aten.reflection_pad2d_backward.default, aten._adaptive_avg_pool2d_backward.default, aten.kthvalue.default),
    ],
    ids=str,
)
def test_what_may_give_other_bits_is_not_recomputed(target: Any) -> None:
    assert not rule(target).recomputable
    assert not rule(target).random


def test_a_row_of_an_overload_goes_before_that_of_the_operator() -> None:
    assert rule(aten.scatter.value).recomputable
    assert not rule(aten.scatter.src).recomputable
    assert rule(aten.scatter.src).overwrites == rule(aten.scatter.value).overwrites == (0,)


@pytest.mark.parametrize(
    "target",
    [
        *(aten._assert_async.msg, aten._assert_scalar.default, aten._assert_tensor_metadata.default),
        *(aten.sym_constrain_range.default, aten._linalg_check_errors.default, aten._print.default),
    ],
    ids=str,
)
def test_what_gives_and_writes_nothing_keeps_its_place(target: Any) -> None:
    assert rule(target).ordered


def test_every_row_names_an_operator_that_exists() -> None:
    for name in ROWS:
        namespace, _, operator = name.partition("::")
        operator, _, overload = operator.partition(".")
        overloads = getattr(getattr(torch.ops, namespace), operator).overloads()
        assert overloads, name
        assert not overload or overload in overloads, name


def test_collectives_keep_their_order_and_are_not_recomputed() -> None:
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        op_rule = rule(getattr(torch.ops._c10d_functional, name).default)
        assert op_rule.collective, name
        assert not op_rule.recomputable, name


@pytest.mark.parametrize(
    "target",
    [
        *(torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default),
        torch.ops._c10d_functional.all_reduce_.default,
        *(
            [torch.ops._c10d_functional.isend.default] if hasattr(torch.ops._c10d_functional, "isend") else []
        ),  # 2.12 on
        *(torch.ops.c10d.allreduce_.default, torch.ops.c10d._allgather_base_.default),
        *(torch.ops.fsdp.all_gather_copy_in.default, torch.ops.symm_mem.one_shot_all_reduce.default),
    ],
    ids=str,
)
def test_operators_of_collective_namespaces_are_not_finished_when_they_return(target: Any) -> None:
    assert rule(target).collective
    assert rule(target).asynchronous


@pytest.mark.parametrize("target", [*FINISHED.values(), torch.ops._dtensor.shard_dim_alltoall.default], ids=str)
def test_collective_that_waits_is_finished_but_keeps_its_order(target: Any) -> None:
    assert rule(target).collective
    assert not rule(target).asynchronous
    assert not rule(target).recomputable
    assert ops.has_effect(target)


def test_saving_the_random_state_keeps_its_place_and_replaying_is_free() -> None:
    assert rule(save_rng_state) == OpRule(random=True, recomputable=False, cost=Cost("pointwise"))
    assert rule(replay) == OpRule(recomputable=False), "it leaves the generator as it finds it"


def test_unknown_higher_order_operator_keeps_its_place() -> None:
    assert rule(torch.ops.higher_order.cond) == OpRule(unknown=True, ordered=True, recomputable=False)


def test_custom_operator_is_read_off_its_schema() -> None:
    with torch.library._scoped_library("roamc_test_ops", "FRAGMENT") as library:
        library.define("scale_(Tensor(a!) x, Tensor y, *, Tensor(b!) z) -> ()")
        library.define("part(Tensor x, Tensor(a) y) -> Tensor(a)")
        library.define("draw(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        namespace = torch.ops.roamc_test_ops
        assert rule(namespace.scale_.default).mutates == (0, "z")
        assert rule(namespace.part.default).view_of == (1,)
        assert rule(namespace.draw.default).random
        assert not rule(namespace.draw.default).unknown
        library.define("plain(Tensor x) -> Tensor")
        assert rule(namespace.plain.default) == OpRule(unknown=True, recomputable=False)
        assert ops.has_effect(namespace.plain.default), "it may draw"


def written_by(function: Any, *inputs: torch.Tensor) -> list[int]:
    """Positions of the inputs that the last operator writes."""
    graph = traced(function, *inputs).graph
    fed = placeholders(graph)
    return [fed.index(node) for node in mutated_arguments(operators(graph)[-1])]


def test_mutated_arguments_are_nodes_in_schema_order() -> None:
    assert written_by(lambda a, b: a.add_(b), X, X.clone()) == [0]
    assert written_by(lambda a, b: aten.copy_.default(self=a, src=b), X, X.clone()) == [0]


def test_mutated_arguments_of_lists_are_flattened() -> None:
    def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        aten._fused_adamw_.default(
            [p], [g], [m], [v], [], [step],
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return p

    # The schema says that a gradient may be written too (grad_scale unscales it).
    assert written_by(update, *(X.clone() for _ in range(4)), torch.ones(())) == [0, 1, 2, 3]


def test_mutated_keyword_argument_is_found() -> None:
    assert written_by(lambda a, o: torch.ops.aten.mul.out(a, a, out=o), X, X.clone()) == [1]


def test_names_of_inputs_and_constants_have_one_rule_and_stay_in_no_table() -> None:
    """Each graph has its own strings: rules kept for them would leak a kilobyte for each input of each trace."""
    size = len(ops.RULES)
    for number in range(3):
        assert rule("".join(["arg", str(number)])).unknown
    assert len(ops.RULES) == size
