"""What a printed joint graph lacks of what its peaks depend on, as notes: gradients in their places, checkpoints."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from roamc.capture.dump.files import is_size
from roamc.capture.dump.text import TANGENTS, GraphText, Input, Result
from roamc.operators import ops

_GRADIENT = re.compile(r"GradAOTOutput\(grad_of=(.*)\)$")
_TANGENT = re.compile(r"TangentAOTInput\(output=(.*)\)$")
_CHECKPOINT = re.compile(r"\bcheckpoint(?:_sequential)?\(")
"""A call of torch's checkpoint in a user's line."""


def notes(whole: GraphText, joint: fx.Graph, outputs: int, dynamo: str) -> tuple[str, ...]:
    """Return notes on what is missing, or was changed behind torch.

    Args:
        whole: a text of forward and backward.
        joint: the graph of it, with the tags of :mod:`roamc.capture.dump.phases`.
        outputs: how many of its results are taken for forward's.
        dynamo: the text of dynamo's graph, "" for none.
    """
    return (*_results(whole, joint, outputs), *_checkpoints(joint, dynamo))


def _checkpoints(joint: fx.Graph, dynamo: str) -> Iterator[str]:
    """A note on operators that a checkpoint runs, where the comments do not say that backward runs them again."""
    early = [node for node in joint.nodes if node.meta.get("partitioner_tag") == "is_forward" and not _is_part(node)]
    unmarked = [node for node in early if "recompute" not in node.meta]
    lost = [node for node in unmarked if "ac_graph_id" in node.meta or _CHECKPOINT.search(_code(node))]
    if not lost and "tag_activation_checkpoint" in dynamo and len(unmarked) == len(early):
        lost = unmarked
    if lost:
        yield (
            f"{len(lost)} operators of checkpoints ({lost[0].name}, ...) have no comment that they run again, such as "
            "PREFER_RECOMPUTE, which torch 2.13 and later print: they run once here, and their results are kept"
        )
    elif not dynamo and not any(map(_code, early)):
        yield "the file has no source lines: if the model has checkpoints, their results count as kept"


def _is_part(node: fx.Node) -> bool:
    """Whether ``node`` has no memory of its own; torch decides nothing about some of these, such as ``detach``."""
    return node.op != "call_function" or node.target is operator.getitem or ops.is_view(node.target)


def _code(node: fx.Node) -> str:
    """The user's line; "" if the file does not have it."""
    return str(node.meta.get("stack_trace", "")).rpartition("\n")[2].strip()


def _results(whole: GraphText, joint: fx.Graph, outputs: int) -> Iterator[str]:
    """A note on results that do not stand where forward's results and gradients of the inputs do; none if all fit."""
    values = {node.name: node.meta.get("val") for node in joint.nodes}
    dead = [node for node in joint.nodes if node.meta.get("partitioner_tag") == "is_backward" and not node.users]
    unread = [node.meta["val"] for node in dead if isinstance(node.meta.get("val"), torch.Tensor)]
    primals = [each for each in whole.inputs if not each.name.startswith(TANGENTS) and not is_size(each)]
    early, late = whole.results[: max(outputs, 0)], whole.results[max(outputs, 0) :]
    wrong = [
        each.name for each, result in zip(primals, late, strict=False) if not _is_gradient(result, each, values, unread)
    ]
    comments = {each.comment for each in early}
    tangents = [(each.name, _TANGENT.match(each.comment)) for each in whole.inputs]
    wrong += [name for name, said in tangents if said and said[1] not in comments] if any(comments) else []
    if outputs > 0 and not wrong and not any(_GRADIENT.match(comment) for comment in comments):
        return
    names = f" ({', '.join(wrong[:3])})" if wrong else ""
    yield (
        f"the returned values do not fit the inputs{names}: a line of either is missing, was moved or changed. "
        "What is a gradient is guessed by position: each peak may be wrong"
    )


def _is_gradient(result: Result, primal: Input, values: Mapping[str, object], unread: Sequence[torch.Tensor]) -> bool:
    """Whether ``result`` may be the gradient of ``primal``, by what the comments say, shapes and dtypes.

    ``unread`` are results of backward that nobody reads, as those are whose place in the return was cleared.
    """
    said = _GRADIENT.match(result.comment)
    if result.comment.startswith(("PlainAOTOutput", "InputMutationAOTOutput")):
        return False
    if said and primal.comment and said[1] != primal.comment:
        return False
    value, own = values.get(getattr(result.value, "name", "")), values.get(primal.name)
    if said and result.value is None and isinstance(own, torch.Tensor):  # there is none, or its place was cleared
        return not any(each.shape == own.shape and each.dtype == own.dtype for each in unread)
    if (result.comment and not said) or not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor):
        return True  # no gradient, or one of a part of a subclass
    return value.shape == own.shape and value.dtype == own.dtype
