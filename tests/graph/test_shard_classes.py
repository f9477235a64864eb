"""The judge of scores split by class: it passes what pass shard writes, and names faults that are planted there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from roamc.errors import VerifyError
from roamc.graph import Phase, copied
from roamc.graph.shard_judge import check
from roamc.operators.shards import own_classes, own_part
from roamc.options import Options
from roamc.passes import shard
from roamc.passes.shard import choose
from tests.graph.test_shard_judge import BUCKET, GATHER, LOSS, SUM, Editor, Pair
from tests.passes.test_shard_loss import LOSSES, Model, captured

aten = torch.ops.aten


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A captured graph whose scores are gathered, and the same with scores split by class between two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "ranks_in", lambda group: 2)
        graph = captured(lambda: Model(LOSSES["class weights"]), 2, by_class=True)
        yield graph, shard.apply(graph, shard.decide(graph, Options(shard="sequence")))


def reduced(edit: Editor, how: str, phase: Phase) -> fx.Node:
    """The all-reduce of a softmax, or of its gradient: of one number for each token."""
    all_reduces = [node for node in edit.all(SUM, phase) if node.args[1] == how]
    return next(node for node in all_reduces if node.meta["val"].dim() == 1)


def maximum_of_a_rank(edit: Editor) -> str:
    node = reduced(edit, "max", Phase.FORWARD)
    edit.replace(node, node.args[0])  # type: ignore[arg-type]
    return "reads an operand of the maximum of .* with its classes"


def maxima_summed(edit: Editor) -> str:
    node = reduced(edit, "max", Phase.FORWARD)
    node.args = (node.args[0], "sum", *node.args[2:])
    return f"{node.name} .*an operand of the maximum of .* by 'sum'"


def exponentials_of_a_rank(edit: Editor) -> str:
    node = reduced(edit, "sum", Phase.FORWARD)
    edit.replace(node, node.args[0])  # type: ignore[arg-type]
    return "only an addend"


def gradients_sum_of_a_rank(edit: Editor) -> str:
    node = reduced(edit, "sum", Phase.BACKWARD)
    edit.replace(node, node.args[0])  # type: ignore[arg-type]
    return "reads an addend of .* with its classes"


def softmax_of_a_rank(edit: Editor) -> str:
    """The scores of a rank count as all."""
    loss = edit.all(LOSS)[0]
    scores: Any = edit.all(aten.amax.default)[0].args[0]
    alone = edit.insert(loss, aten._log_softmax.default, scores, 1, False)
    loss.replace_input_with(loss.args[0], alone)  # type: ignore[arg-type]
    return f"{alone.name} .*only its classes|{alone.name} .*does not have"


def classes_of_another_rank(edit: Editor) -> str:
    """A rank counts its classes from another number than where its scores begin."""
    (node,) = edit.all(own_classes)
    node.args = (node.args[0], 5, *node.args[2:])
    return "reads targets among 10 classes for scores of"


def targets_as_they_are(edit: Editor) -> str:
    """The numbers of all classes are looked up in the scores of a rank."""
    (node,) = edit.all(own_classes)
    edit.replace(node, node.args[0])  # type: ignore[arg-type]
    return "reads the whole of targets with its classes of scores"


def ignored_class_not_left_out(edit: Editor) -> str:
    (node,) = edit.all(own_classes)
    node.args = (*node.args[:2], 3, *node.args[3:])
    return "nll_loss_forward.* makes a value that the captured graph does not have"


def foreign_classes_counted(edit: Editor) -> str:
    loss = edit.all(LOSS)[0]
    loss.args = (*loss.args[:4], 3)
    return "does not leave -100 out"


def mean_of_a_rank(edit: Editor) -> str:
    loss = edit.all(LOSS)[0]
    loss.args = (*loss.args[:3], 1, loss.args[4])
    return f"{loss.name} .*divides by the weights of the tokens"


def loss_of_a_rank(edit: Editor) -> str:
    (bucket,) = edit.all(BUCKET, Phase.FORWARD)
    first = next(user for user in bucket.users if user.args[1] == 0)
    edit.replace(first, bucket.args[0][0])  # type: ignore[index]
    return "only an addend"


def weights_of_all_classes(edit: Editor) -> str:
    loss = edit.all(LOSS)[0]
    edit.replace(loss.args[2], loss.args[2].args[0])  # type: ignore[arg-type, union-attr]
    return "reads the whole of the weights"


def scores_cut_by_token(edit: Editor) -> str:
    """A rank's rows of its scores: neither its tokens nor its classes."""
    amax = edit.all(aten.amax.default)[0]
    edit.insert(amax, own_part, amax.args[0], 2, edit.all(own_part)[0].args[2])
    return "own_part.* differs from rank to rank"


def classes_gathered_as_rows(edit: Editor) -> str:
    """The gradients of the ranks' classes are put one behind another."""
    exponentials = edit.all(aten.exp.default)[0]
    edit.insert(exponentials, GATHER, exponentials.args[0], 2, edit.all(own_part)[0].args[2])
    return "gathers .* which is not the rows of these 2 ranks"


FAULTS = (
    *(maximum_of_a_rank, maxima_summed, exponentials_of_a_rank, gradients_sum_of_a_rank, softmax_of_a_rank),
    *(classes_of_another_rank, targets_as_they_are, ignored_class_not_left_out, foreign_classes_counted),
    *(mean_of_a_rank, loss_of_a_rank, weights_of_all_classes, scores_cut_by_token),
    classes_gathered_as_rows,
)


def test_what_the_pass_writes_is_right(pair: Pair) -> None:
    check(*pair, "shard")


def test_a_graph_that_gathers_its_scores_is_itself(pair: Pair) -> None:
    check(pair[0], copied(pair[0]), "shard")


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_named(pair: Pair, plant: Callable[[Editor], str]) -> None:
    before, after = pair
    edit = Editor(copied(after))
    message = plant(edit)
    with pytest.raises(VerifyError, match=message):
        check(before, edit.result, "shard")
