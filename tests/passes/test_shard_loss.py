"""The head and its loss on shards of the tokens: loss and gradients are those of the whole batch on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators, tensors_of
from roamc.graph.shard_judge import check
from roamc.graph.verify import check_graph
from roamc.operators.shards import check_indices
from roamc.options import Options
from roamc.passes import shard
from roamc.passes.shard import choose, classes
from tests.parallel import BOUND, worst_error
from tests.shards import Classes, counted, joined, normal_form, run_ranks, split

aten = torch.ops.aten
VOCABULARY, WIDTH, BATCH, LENGTH = 20, 16, 4, 6
IGNORED = -100

Loss = Callable[[Tensor, Tensor, Tensor], Any]


def shifted(labels: Tensor) -> Tensor:
    """The label of each token is the next token; the last of a sequence has none."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **options)


def of_valid_tokens(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The mean, by hand: of the losses of single tokens that have a label."""
    valid = (labels != IGNORED).view(-1)
    return (entropy(logits, labels, reduction="none") * valid).sum() / valid.sum()


def of_sequences(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The mean over the sequences of what the tokens of each have: a shard may have parts of two."""
    return entropy(logits, labels, reduction="none").view(labels.shape).mean(1).square().mean()


def twice(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """A mean and a sum, and a penalty of large logits."""
    large = logits.logsumexp(-1).square().sum()
    return entropy(logits, labels) + 0.1 * entropy(logits, shifted(labels), reduction="sum") + 0.01 * large


LOSSES: dict[str, Loss] = {
    "mean": lambda logits, labels, weights: entropy(logits, labels),
    "shifted": lambda logits, labels, weights: entropy(logits, shifted(labels)),
    "sum over a number of tokens": lambda logits, labels, weights: entropy(logits, labels, reduction="sum") / 17,
    "by hand": of_valid_tokens,
    "of sequences": of_sequences,
    "class weights": lambda logits, labels, weights: entropy(logits, shifted(labels), weight=weights),
    "smoothed": lambda logits, labels, weights: entropy(logits, shifted(labels), label_smoothing=0.1),
    "smoothed, weights": lambda logits, labels, weights: entropy(logits, labels, weight=weights, label_smoothing=0.1),
    "smoothed sum": lambda logits, labels, weights: entropy(logits, labels, label_smoothing=0.1, reduction="sum"),
    "twice": twice,
    "scores by class": lambda logits, labels, weights: entropy(logits * weights * weights.mean(), labels),
    "in double precision": lambda logits, labels, weights: entropy(logits.double(), labels),
}
"""On shards from the head to the loss."""

QUICK = ("shifted", "of sequences", "by hand", "class weights", "smoothed", "scores by class")

GATHERED = ("twice", "smoothed, weights")
"""Those that need more than sums and maxima over the classes."""

ELSEWHERE: dict[str, Loss] = {
    "logits cut": lambda logits, labels, weights: F.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
    ),
    "classes in front": lambda logits, labels, weights: F.cross_entropy(logits.transpose(1, 2), labels),
    "along the tokens": lambda logits, labels, weights: (logits.softmax(1) * logits).square().mean(),
}
"""The whole of the logits is read, and every rank has it, as without shards."""


class Model(nn.Module):
    """Embedding, a layer, norm, head and loss."""

    def __init__(self, loss: Loss, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.tokens, self.norm = loss, nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("weights", torch.rand(VOCABULARY) + 0.5)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.tokens(tokens)
        return self.loss(self.head(self.norm(x + self.down(F.gelu(self.up(x))))), labels, self.weights)


def part(model: Model, rank: int, ranks: int, *, by_class: bool = False) -> Model:
    """The part of a model that a rank has, with the whole of the head or its classes."""
    if by_class:
        model.head = Classes(model.head, rank, ranks)  # type: ignore[assignment]
    split(model, rank, ranks)
    return model


def tokens_and_labels(ignored: str) -> tuple[Tensor, Tensor]:
    """A batch whose tokens partly have no label: at borders of shards, in whole shards, or all of them."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=drawn)
    labels = tokens.clone()
    flat = labels.view(-1)
    places = {"none": [], "borders": [0, 5, 6, 11, 12, 13, 18, 23], "shards": [*range(12), 17], "all": range(24)}
    flat[list(places[ignored])] = IGNORED
    return tokens, labels


def on_shards(graph: TrainGraph, ranks: int) -> TrainGraph:
    """The graph behind the pass, checked by all judges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "ranks_in", lambda group: ranks)
        sharded = shard.apply(graph, shard.decide(graph, Options(shard="sequence")))
    check_graph(sharded, "shard", deep=True)
    check(graph, sharded, "shard")
    return sharded


def assert_as_on_one_rank(
    name: str,
    ranks: int,
    ignored: Sequence[str] = ("borders", "shards"),
    *,
    tied: bool = False,
    bias: bool = False,
    by_class: bool = False,
) -> TrainGraph:
    """Compare loss and gradients of all ranks with eager's on one rank, and return the graph on shards."""
    make = functools.partial(Model, (LOSSES | ELSEWHERE)[name], tied=tied, bias=bias)
    sharded = on_shards(captured(make, ranks, by_class=by_class), ranks)
    for places in ignored:
        assert_same(sharded, make, ranks, places, by_class=by_class)
    return sharded


def captured(make: Callable[[], Model], ranks: int, *, by_class: bool = False) -> TrainGraph:
    """The graph of the first rank."""
    return normal_form(part(make(), 0, ranks, by_class=by_class), tokens_and_labels("none"))


def assert_same(sharded: TrainGraph, make: Callable[[], Model], ranks: int, ignored: str, *, by_class: bool) -> None:
    batch = tokens_and_labels(ignored)
    models = [part(make(), rank, ranks, by_class=by_class) for rank in range(ranks)]
    state = [[*(p.detach() for p in model.parameters()), model.weights] for model in models]
    one = make()
    loss = one(*batch)
    results = run_ranks(sharded, [[*tensors, *batch, torch.ones_like(loss)] for tensors in state])
    loss.backward()
    wanted = {key: p.grad for key, p in one.named_parameters() if p.grad is not None}
    assert all(torch.allclose(loss, each[0], rtol=BOUND, atol=0, equal_nan=True) for each in results)
    gradients = [dict(zip(wanted, each[1:], strict=False)) for each in results]
    whole = {key: joined([each[key] for each in gradients], grad.shape) for key, grad in wanted.items()}
    if loss.isfinite():
        assert worst_error(whole, wanted) <= BOUND
    else:
        assert all(torch.allclose(whole[key], grad, equal_nan=True) for key, grad in wanted.items())


def largest_logits(graph: TrainGraph) -> int:
    """The most elements of a value that has one entry for each class in its last dimension, weights left out."""
    sizes = [
        tensor.numel()
        for node in operators(graph.graph)
        for _, tensor in tensors_of(node)
        if tensor.dim() and tensor.shape[-1] == VOCABULARY and WIDTH not in tensor.shape and tensor.stride(0)
    ]
    return max(sizes, default=0)


@pytest.mark.parametrize("name", QUICK)
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str) -> None:
    sharded = assert_as_on_one_rank(name, 2)
    assert largest_logits(sharded) == BATCH * LENGTH // 2 * VOCABULARY


@pytest.mark.parametrize("name", QUICK[3:])
def test_scores_split_by_class_are_never_whole(name: str) -> None:
    sharded = assert_as_on_one_rank(name, 2, by_class=True)
    assert largest_logits(sharded) == 0, "nothing has all classes"


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_the_whole_batch(name: str, ranks: int) -> None:
    sharded = assert_as_on_one_rank(name, ranks)
    assert largest_logits(sharded) == BATCH * LENGTH // ranks * VOCABULARY
    if name not in GATHERED:
        assert largest_logits(assert_as_on_one_rank(name, ranks, by_class=True)) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*ELSEWHERE, *GATHERED])
def test_scores_that_are_read_as_a_whole_are_gathered(name: str) -> None:
    graph = captured(functools.partial(Model, (LOSSES | ELSEWHERE)[name]), 2, by_class=True)
    sharded = on_shards(graph, 2)
    assert largest_logits(sharded) == BATCH * LENGTH * VOCABULARY


@pytest.mark.parametrize(
    "name", ["logits cut", *(pytest.param(name, marks=pytest.mark.thorough) for name in [*ELSEWHERE][1:])]
)
def test_logits_that_are_read_as_a_whole_are_made_as_a_whole(name: str) -> None:
    sharded = assert_as_on_one_rank(name, 2)
    gathered = [node for node in operators(sharded.graph) if "all_gather" in str(node.target)]
    assert all(node.meta["val"].shape[-1] != VOCABULARY for node in gathered)


@pytest.mark.parametrize("tied", [False, True])
def test_heads_with_a_bias_and_tied_ones(tied: bool) -> None:
    assert_as_on_one_rank("shifted", 2, tied=tied, bias=True)


def test_logits_that_are_returned_leave_backward_on_shards() -> None:
    class Both(Model):
        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            x = self.tokens(tokens)
            logits = self.head(self.norm(x + self.down(F.gelu(self.up(x)))))
            return self.loss(logits, labels, self.weights), logits

    batch = tokens_and_labels("borders")
    graph = normal_form(split(Both(LOSSES["mean"]), 0, 2), batch)
    sharded = on_shards(graph, 2)
    assert counted(sharded).get(("FORWARD", "all_gather_into_tensor")) == 2, "of the layer and of the head"
    late = [node for node in operators(sharded.graph) if sharded.phase[node.name].name == "BACKWARD"]
    wide = [node for node in late if node.target is aten._log_softmax_backward_data.default]
    assert [tuple(node.meta["val"].shape) for node in wide] == [(BATCH * LENGTH // 2, VOCABULARY)]


@pytest.mark.thorough
@pytest.mark.parametrize("by_class", [False, True])
def test_sums_over_tokens_have_room(by_class: bool) -> None:
    """The mean of a loss in half precision is left whole; that in bfloat16 is not."""
    for dtype, wide in ((torch.float16, VOCABULARY), (torch.bfloat16, 0 if by_class else VOCABULARY // 2)):
        graph = captured(lambda dtype=dtype: Model(LOSSES["mean"]).to(dtype), 2, by_class=by_class)  # type: ignore[misc]
        assert largest_logits(on_shards(graph, 2)) == BATCH * LENGTH * wide


def test_a_batch_without_labels_gives_what_eager_gives() -> None:
    assert_as_on_one_rank("mean", 2, ("all",))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("number", [20, 156, -1, -100])
def test_numbers_out_of_range_raise_what_eager_raises(number: int, dtype: torch.dtype) -> None:
    if number < 0 and dtype is torch.uint8:
        return
    labels = torch.tensor([3, number, 19, number], dtype=dtype)

    def said(call: Callable[[], Any]) -> str:
        try:
            call()
        except IndexError as error:
            return str(error)
        return ""

    by_loss = said(lambda: F.nll_loss(torch.zeros(4, VOCABULARY), labels))
    assert bool(by_loss) == (number != IGNORED)
    assert said(lambda: check_indices(labels, VOCABULARY, IGNORED)) == by_loss
    tokens = labels.long()
    by_table = said(lambda: F.embedding(tokens, torch.zeros(VOCABULARY, 2)))
    assert said(lambda: check_indices(tokens, VOCABULARY, None)) == by_table != ""
    check_indices(labels.clamp(0, 19), VOCABULARY, None)


READ_AS_A_WHOLE: dict[str, Loss] = {
    "classes in front": ELSEWHERE["classes in front"],
    "probabilities as labels": lambda logits, labels, weights: F.cross_entropy(
        logits.view(-1, VOCABULARY), weights.outer(weights).repeat(2, 1)[: BATCH * LENGTH].softmax(-1)
    ),
    "the score of a label": lambda logits, labels, weights: (
        entropy(logits, labels) - logits.gather(-1, labels.clamp(0).unsqueeze(-1)).mean()
    ),
    "the best class": lambda logits, labels, weights: entropy(logits, labels) + logits.amax(-1).mean(),
    "the classes of all tokens": lambda logits, labels, weights: (
        entropy(logits, labels) + logits.sum(0).square().mean()
    ),
    "all but one class": lambda logits, labels, weights: F.cross_entropy(
        logits[..., 1:].reshape(-1, VOCABULARY - 1), (labels - 1).clamp(0).view(-1)
    ),
    "a bias for each class and token": lambda logits, labels, weights: entropy(
        logits + weights.outer(weights)[:LENGTH], labels
    ),
    "labels of a grid": lambda logits, labels, weights: F.cross_entropy(
        logits.view(2, -1, VOCABULARY).permute(0, 2, 1), labels.view(2, -1)
    ),
    "classes turned round": lambda logits, labels, weights: entropy(logits.flip(-1), labels),
    "halves of tokens side by side": lambda logits, labels, weights: F.cross_entropy(
        torch.cat(logits.view(-1, VOCABULARY).split(BATCH * LENGTH // 2), -1), labels.view(-1)[: BATCH * LENGTH // 2]
    ),
    "another width": lambda logits, labels, weights: F.cross_entropy(
        logits.view(-1, VOCABULARY // 2), (labels % (VOCABULARY // 2)).view(-1).repeat(2)
    ),
}
"""Losses that need the scores of other ranks' classes for more than a sum or a maximum over all of a token's."""


@pytest.mark.parametrize("name", READ_AS_A_WHOLE)
def test_scores_whose_readers_need_all_classes_are_not_split_by_class(name: str) -> None:
    model = part(Model(READ_AS_A_WHOLE[name]), 0, 2, by_class=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "ranks_in", lambda group: 2)
        assert classes.heads(normal_form(model, tokens_and_labels("none"))) == ()


def test_a_head_that_is_not_the_graphs_is_refused() -> None:
    graph = captured(functools.partial(Model, LOSSES["mean"]), 2, by_class=True)
    (head,) = classes.heads(graph)
    assert classes.gather_of(graph, head)
    for changed in (head._replace(gathered="nothing"), head._replace(ranks=4)):
        with pytest.raises(PlanError, match="does not gather the scores"):
            classes.by_class(graph, changed)
    with pytest.raises(PlanError, match="are not those that the plan splits by class"):
        classes.by_class(graph, head._replace(values=head.values[1:]))
