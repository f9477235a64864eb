"""The judge of sharded graphs: it passes what pass shard writes, and names faults that are planted there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from roamc.errors import VerifyError
from roamc.graph import Phase, TrainGraph, copied, operators, output_node
from roamc.graph.rewrite import derived, mode_of
from roamc.graph.shard_judge import check
from roamc.graph.storage_ids import number_result
from roamc.graph.verify import check_graph
from roamc.operators.random import dropout_mask
from roamc.operators.shards import own_indices, own_part
from roamc.options import Options
from roamc.passes import shard
from roamc.passes.shard import choose
from tests.graphs import traced
from tests.shards import COLLECTIVES, GROUP, captured

aten = torch.ops.aten
GATHER = COLLECTIVES.all_gather_into_tensor.default
SCATTER = COLLECTIVES.reduce_scatter_tensor.default
SUM = COLLECTIVES.all_reduce.default
LOSS = aten.nll_loss_forward.default
BUCKET = COLLECTIVES.all_reduce_coalesced.default

Pair = tuple[TrainGraph, TrainGraph]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A captured graph with dropout, and the same on shards of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "ranks_in", lambda group: 2)
        graph = captured("bert")
        yield graph, shard.apply(graph, shard.decide(graph, Options(shard="sequence")))


class Editor:
    """Changes nodes of a graph; what lies behind is derived again."""

    def __init__(self, graph: TrainGraph) -> None:
        self.train, self.graph = graph, graph.graph
        self.phase = dict(graph.phase)
        self.nodes = {node.name: node for node in graph.graph.nodes}

    def all(self, target: Any, phase: Phase | None = None) -> list[fx.Node]:
        nodes = [node for node in operators(self.graph) if node.target is target]
        return [node for node in nodes if phase is None or self.phase[node.name] is phase]

    def insert(self, before: fx.Node, target: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        self.phase[node.name] = self.phase[(like or before).name]
        self.derive(node)
        return node

    def derive(self, node: fx.Node) -> None:
        mode = mode_of(self.graph)
        assert mode is not None
        node.meta["val"] = derived(node, mode)
        number_result(node)

    def replace(self, old: fx.Node, new: fx.Node, readers: Callable[[fx.Node], bool] = lambda reader: True) -> None:
        old.replace_all_uses_with(new, lambda reader: reader is not new and readers(reader))

    def drop(self, node: fx.Node) -> None:
        node.replace_all_uses_with(node.all_input_nodes[0])
        self.graph.erase_node(node)

    @property
    def result(self) -> TrainGraph:
        names = {node.name for node in operators(self.graph)}
        return self.train.replace(phase={name: phase for name, phase in self.phase.items() if name in names})


def gather_dropped(edit: Editor) -> str:
    """A part of a matrix is multiplied with the rows."""
    node = edit.all(GATHER)[0]
    name = next(iter(node.users)).name
    edit.drop(node)
    return f"{name} .*differs from rank to rank, for the rows of a rank"


def scatter_dropped(edit: Editor) -> str:
    """Every rank keeps its own addend of the first all-reduce."""
    node = edit.all(SCATTER)[0]
    edit.replace(node, edit.insert(node, own_part, node.args[0], 2, GROUP))
    return "own_part.*differs from rank to rank"


def whole_as_rows(edit: Editor) -> str:
    """A gathered value stands in the place of rows."""
    node = edit.all(SCATTER)[1]
    gathered = edit.insert(next(iter(node.users)), GATHER, node, 2, GROUP)
    reader = next(user for user in node.users if user is not gathered)
    edit.replace(node, gathered, lambda user: user is reader)
    return "which is whole, as if it were the rows of a rank"


def sum_missing(edit: Editor) -> str:
    """The gradient of a norm's weight is that of a rank's tokens alone."""
    pick = next(user for user in edit.all(BUCKET, Phase.BACKWARD)[0].users)
    addend = edit.all(BUCKET, Phase.BACKWARD)[0].args[0][0]  # type: ignore[index]
    edit.replace(pick, addend)
    return "is output .*only an addend"


def addend_left_out_of_the_bucket(edit: Editor) -> str:
    """Two gradients of the bucket are exchanged."""
    node = edit.all(BUCKET, Phase.BACKWARD)[0]
    first, second, *rest = node.args[0]  # type: ignore[misc]
    node.args = ([second, first, *rest], *node.args[1:])
    return "is output .*another value"


def mask_drawn_per_rank(edit: Editor) -> str:
    """Each rank draws a mask of the shape of its rows."""
    mask = edit.all(dropout_mask)[1]
    part = next(user for user in edit.all(own_part) if _source(user) is mask)
    with edit.graph.inserting_before(mask):
        own_mask = edit.graph.call_function(dropout_mask, ([24, 32], [32, 1], 0.9), {"device": torch.device("cpu")})
    edit.phase[own_mask.name] = Phase.FORWARD
    edit.derive(own_mask)
    edit.replace(part, own_mask)
    return f"{own_mask.name} .*does not have"


def _source(node: fx.Node) -> fx.Node:
    while node.target in (aten.view.default, own_part):
        node = node.all_input_nodes[0]
    return node


def rows_of_a_fixed_rank(edit: Editor) -> str:
    """A slice that begins at the same row on every rank."""
    node = edit.all(own_part)[1]
    edit.replace(node, edit.insert(node, aten.slice.Tensor, node.args[0], 0, 0, 24))
    return "slice"


def stale_rows(edit: Editor) -> str:
    """Backward gathers the rows of an earlier value."""
    early, *rest = edit.all(GATHER, Phase.BACKWARD)
    late = next(node for node in rest if node.args[0] is not early.args[0])
    late.replace_input_with(late.args[0], early.args[0])  # type: ignore[arg-type]
    return "does not have"


def summed_twice(edit: Editor) -> str:
    """What the bucket has summed is summed again."""
    pick = next(iter(edit.all(BUCKET, Phase.BACKWARD)[0].users))
    again = edit.insert(output_node(edit.graph), SUM, pick, "sum", GROUP, like=pick)
    edit.replace(pick, again)
    return f"{again.name} .*sums over the ranks what the captured graph does not"


def bias_before_the_sum(edit: Editor) -> str:
    """Every rank adds the bias, which is then summed as often as there are ranks."""
    scatter = edit.all(SCATTER)[0]
    add = next(user for user in scatter.users if user.target is aten.add.Tensor)
    early = edit.insert(scatter, aten.add.Tensor, scatter.args[0], add.args[1])
    scatter.replace_input_with(scatter.args[0], early)  # type: ignore[arg-type]
    edit.replace(add, scatter)
    return f"{scatter.name} .*sums over the ranks what the captured graph does not"


def group_of_another_size(edit: Editor) -> str:
    """A gather of four ranks, of rows of two."""
    node = edit.all(GATHER)[0]
    node.args = (node.args[0], 4, GROUP)
    edit.derive(node)
    return f"{node.name} .*not the rows of these 4 ranks"


def another_group(edit: Editor) -> str:
    """A gather among other ranks than those that have the rows."""
    node = edit.all(GATHER)[0]
    node.args = (node.args[0], 2, "5")
    return f"{node.name} .*not the rows of these 2 ranks"


def whole_saved(edit: Editor) -> str:
    """Backward reads what forward has gathered."""
    early = {node.args[0]: node for node in edit.all(GATHER, Phase.FORWARD)}
    late = next(node for node in edit.all(GATHER, Phase.BACKWARD) if node.args[0] in early)
    reader = next(user for user in late.users)
    edit.replace(late, early[late.args[0]])
    return f"{reader.name} .*its rows are to be kept"


def mean_of_a_rank(edit: Editor) -> str:
    """The loss is divided by the number of tokens that a rank has."""
    (loss,) = edit.all(LOSS)
    loss.args = (*loss.args[:3], 1, loss.args[4])
    return f"{loss.name} .*divides by the weights of the tokens of which a rank has its rows"


def count_not_summed(edit: Editor) -> str:
    """The sum of all losses is divided by the number of tokens that a rank has."""
    (bucket,) = edit.all(BUCKET, Phase.FORWARD)
    count = next(user for user in bucket.users if user.args[1] == 1)
    edit.replace(count, bucket.args[0][1])  # type: ignore[index]
    return "an addend"


def loss_of_a_rank(edit: Editor) -> str:
    """The mean is that of the losses of a rank."""
    (bucket,) = edit.all(BUCKET, Phase.FORWARD)
    total = next(user for user in bucket.users if user.args[1] == 0)
    edit.replace(total, bucket.args[0][0])  # type: ignore[index]
    return "an addend"


def labels_shifted_in_a_shard(edit: Editor) -> str:
    """The last token of a rank gets the label of the rank's first one."""
    (loss,) = edit.all(LOSS)
    part = loss.args[1]
    assert isinstance(part, fx.Node)
    early = edit.insert(part, aten.view.default, edit.all(aten.roll.default)[0].args[0], [48])
    own = edit.insert(part, own_part, early, 2, GROUP)
    late = edit.insert(part, aten.roll.default, own, [-1], [0])
    edit.replace(part, late)
    return f"{late.name} .*only its rows"


def another_class_ignored(edit: Editor) -> str:
    (loss,) = edit.all(LOSS)
    loss.args = (*loss.args[:4], 3)
    return f"own_indices.* checks indices below 48, -100 left out, and {loss.name} wants 48, 3"


def another_class_ignored_by_all(edit: Editor) -> str:
    """Where labels are checked, in the loss and in its gradient."""
    (loss,), (gradient,) = edit.all(LOSS), edit.all(aten.nll_loss_backward.default)
    loss.args, gradient.args = (*loss.args[:4], 3), (*gradient.args[:5], 3, *gradient.args[6:])
    for part in edit.all(own_indices):
        part.args = (*part.args[:2], None if part.args[2] is None else 3, *part.args[3:])
    return f"{loss.name} .*does not have"


def labels_checked_by_one_rank(edit: Editor) -> str:
    """A rank looks at its own labels alone."""
    (loss,) = edit.all(LOSS)
    part: Any = loss.args[1]
    edit.replace(part, edit.insert(part, own_part, part.args[0], 2, GROUP))
    return f"{loss.name} .*a rank whose indices are out of range would raise alone"


def look_ups_checked_by_one_rank(edit: Editor) -> str:
    (embedding,) = edit.all(aten.embedding.default)
    part: Any = embedding.args[1]
    edit.replace(part, edit.insert(part, own_part, part.args[0], 2, GROUP))
    return f"{embedding.name} .*a rank whose indices are out of range would raise alone"


def rows_of_another_table(edit: Editor) -> str:
    """Tokens that the table does not have are taken for its rows."""
    (embedding,) = edit.all(aten.embedding.default)
    part: Any = embedding.args[1]
    part.args = (part.args[0], 49, *part.args[2:])
    return f"{part.name} .*checks indices below 49, None left out, and {embedding.name} wants 48, None"


def labels_of_all_ranks(edit: Editor) -> str:
    """The first rows of all labels stand in the place of a rank's own."""
    (loss,) = edit.all(LOSS)
    part = loss.args[1]
    assert isinstance(part, fx.Node)
    edit.replace(part, edit.insert(part, aten.slice.Tensor, part.args[0], 0, 0, 24))
    return "slice.*does not have"


def gradient_divided_by_a_rank(edit: Editor) -> str:
    """Backward divides by the number of tokens that a rank has."""
    (late,) = edit.all(aten.nll_loss_backward.default)
    (bucket,) = edit.all(BUCKET, Phase.FORWARD)
    late.replace_input_with(late.args[6], bucket.args[0][1])  # type: ignore[index, arg-type]
    return f"{late.name} .*only an addend"


def head_of_a_rank(edit: Editor) -> str:
    """The gradient of the head is that of a rank's tokens."""
    node = edit.all(SUM, Phase.BACKWARD)[0]
    edit.replace(node, node.args[0])  # type: ignore[arg-type]
    return "is output .*only an addend"


def other_tokens_multiplied(edit: Editor) -> str:
    """The gradient of the head multiplies rows of scores' gradients with the whole of what the head reads."""
    turn = edit.all(SUM, Phase.BACKWARD)[0].args[0]
    product = _source_of_turns(turn)
    gathered = edit.insert(product, GATHER, product.args[1], 2, GROUP)
    product.args = (product.args[0], gathered)
    return f"{product.name} .*does not have the same rows of"


def _source_of_turns(node: Any) -> fx.Node:
    while node.target is aten.t.default:
        node = node.args[0]
    assert node.target is aten.mm.default
    return node


FAULTS = (
    *(mean_of_a_rank, count_not_summed, loss_of_a_rank, labels_shifted_in_a_shard, another_class_ignored),
    *(labels_of_all_ranks, gradient_divided_by_a_rank, head_of_a_rank, other_tokens_multiplied),
    *(gather_dropped, scatter_dropped, whole_as_rows, sum_missing, addend_left_out_of_the_bucket),
    *(mask_drawn_per_rank, rows_of_a_fixed_rank, stale_rows, summed_twice, bias_before_the_sum),
    *(group_of_another_size, another_group, whole_saved, another_class_ignored_by_all),
    *(labels_checked_by_one_rank, look_ups_checked_by_one_rank, rows_of_another_table),
)


def test_what_the_pass_writes_is_right(pair: Pair) -> None:
    check(*pair, "shard")


def test_a_graph_is_itself(pair: Pair) -> None:
    check(pair[0], copied(pair[0]), "shard")


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_named(pair: Pair, plant: Callable[[Editor], str]) -> None:
    before, after = pair
    edit = Editor(copied(after))
    message = plant(edit)
    with pytest.raises(VerifyError, match=message):
        check(before, edit.result, "shard")


def test_collectives_in_another_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "ranks_in", lambda group: 2)

    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        one, two = (COLLECTIVES.all_reduce(x @ part, "sum", GROUP) for part in (w, v))
        return (one.relu() * two) @ w

    graph = traced(step, torch.zeros(6, 4), torch.zeros(4, 4), torch.zeros(4, 4))
    sharded = shard.apply(graph, shard.decide(graph, Options(shard="sequence")))
    check(graph, sharded, "shard")
    first, second = Editor(sharded).all(SCATTER)
    second.append(first)
    relu = next(node for node in first.users if node.target is aten.relu.default)
    first.append(relu)
    with pytest.raises(VerifyError, match=f"{first.name} .*out of the captured graph's order"):
        check(graph, sharded, "shard")


def test_a_collective_that_nobody_waits_for_is_named(pair: Pair) -> None:
    edit = Editor(copied(pair[1]))
    node = edit.all(GATHER)[0]
    node.target = torch.ops._c10d_functional.all_gather_into_tensor.default
    with pytest.raises(VerifyError, match=f"{node.name} may not be finished when it returns"):
        check_graph(edit.result, "shard")


def test_rows_of_a_value_that_differs_from_rank_to_rank_are_named(pair: Pair) -> None:
    edit = Editor(copied(pair[1]))
    scatter = edit.all(SCATTER)[0]
    edit.insert(scatter, own_part, scatter.args[0], 2, GROUP)
    with pytest.raises(VerifyError, match=r"takes rows of .*which differs from rank to rank"):
        check(pair[0], edit.result, "shard")
