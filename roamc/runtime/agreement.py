"""Ranks compare what they must have the same of, before the first step of a program on shards.

A program on shards gives the numbers of the captured graph if all ranks of the group have the same batch, the same
values of the parameters that are no parts, and the same states of random generators; see
:class:`roamc.graph.Agreement`. Nothing in a graph says whether they do: each rank hashes what it has, and the hashes
are compared, once for each program and each of its functions. Every rank of the group gets the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roamc.codegen.source import Entry
from roamc.compat_groups import numbers_in
from roamc.errors import RanksError
from roamc.exchange import in_words, texts_of
from roamc.graph import Agreement, Phase, TrainGraph, attribute, placeholders
from roamc.graph.ranks import collectives_of
from roamc.operators.random import save_rng_state

CHUNK = 1 << 24
"""Bytes of a tensor that are copied to the CPU and hashed at a time."""

PLAN = "plan (sizes of the batch, model or options)"

Hashes = dict[str, str]
"""What is compared, in words, to the hash of it."""


def check(graph: TrainGraph, entry: Entry, args: Sequence[Any]) -> None:
    """Compare what the ranks have, before a function of the program of ``graph`` runs for the first time.

    Args:
        graph: the planned graph.
        entry: the function.
        args: what it is called with, one value for each parameter.

    Raises:
        RanksError: the ranks of a group have other values, or a rank does not come to compare them.
    """
    for agreement in graph.agreements:
        mine = _hashes(graph, agreement, entry, args)
        if not mine:
            continue
        brief = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
        if len(set(_of_all(graph, agreement, brief))) > 1:
            all_hashes = [json.loads(text) for text in _of_all(graph, agreement, json.dumps(mine))]
            raise RanksError(_said(graph, agreement, all_hashes))


def _of_all(graph: TrainGraph, agreement: Agreement, text: str) -> list[str]:
    return texts_of(agreement.group, text, graph.name, "compare its batch", compiling=False)


def _said(graph: TrainGraph, agreement: Agreement, all_hashes: Sequence[Mapping[str, str]]) -> str:
    """The error for ranks that have other hashes than the first of their group."""
    numbers = numbers_in(agreement.group)
    first, parts = all_hashes[0], []
    by_difference: dict[tuple[str, ...], list[int]] = {}
    for number, other in zip(numbers, all_hashes, strict=True):
        differ = tuple(name for name in dict.fromkeys((*first, *other)) if first.get(name) != other.get(name))
        by_difference.setdefault((PLAN,) if PLAN in differ else differ, []).append(number)
    for names, ranks in by_difference.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            difference = f"another {', '.join(names[:3])}{more} than rank {numbers[0]}"
            parts.append(f"{in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {difference}")
    return (
        f"{graph.name} is on several ranks, and {'; '.join(parts)}: give all ranks of the group the same "
        "batch, parameters, optimizer settings and seed (torch.manual_seed), or set shard='off'"
    )


def _hashes(graph: TrainGraph, agreement: Agreement, entry: Entry, args: Sequence[Any]) -> Hashes:
    """What this rank has, for one function of the program; empty if there is nothing to compare."""
    ports = {node.name: port for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True)}
    hashes: Hashes = {}
    if Phase.FORWARD in entry.phases:
        hashes[PLAN] = hashlib.sha256(
            "\n".join((agreement.digest, *collectives_of(graph, agreement.group))).encode()
        ).hexdigest()
        for name in agreement.held:
            hashes[f"constant {name!r}"] = _hash(attribute(graph.module, name))
    for node, value in zip(entry.parameters, args, strict=True):
        port = ports.get(node.name)
        if port is not None and node.name in agreement.inputs and port.phase in entry.phases:
            hashes[f"{port.role.value} {port.name}{_kind(value)}"] = _hash(value)
    for phase, device in agreement.draws:
        if phase in entry.phases:
            hashes[f"state of random numbers on {device.type}"] = _hash(save_rng_state(device))
    return hashes


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f" ({str(value.dtype).removeprefix('torch.')} {list(value.shape)})"


def _hash(value: Any) -> str:
    """A hash of a tensor's bytes, dtype and shape, of a generator's state, or of a number's text."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    with torch.no_grad():
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        for part in dense.view(-1).view(torch.uint8).split(CHUNK):
            copy = part.to("cpu", copy=True)  # numpy() forbids to resize a storage, as fully_shard does
            digest.update(copy.numpy())
    return digest.hexdigest()
