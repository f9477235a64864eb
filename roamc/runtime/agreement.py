"""Ranks compare what they must have the same of, before the first step of a program on shards; later, what they run.

    a step        its first exchange                         where ranks differ
    planned       plans, options, sizes of the batch         one plans and another runs: an error on all
    first run     runs, hash of all that must be the same    all hashes are compared, for the message
    later runs    runs, hash of the plan                     the same

So no rank begins a collective that another will not join, whatever batch it gets. Texts go by the store of the process
group: no rank waits for its device.

A program on shards gives the numbers of the captured graph if all ranks of the group have the same batch, the same
values of the parameters that are no parts, and the same states of random generators; see
:class:`roamc.graph.Agreement`. Nothing in a graph says whether they do: each rank hashes what it has, and the hashes
are compared, once for each program and each of its functions. Every rank of the group gets the same error.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roamc.codegen.source import Entry
from roamc.compat_groups import numbers_in
from roamc.errors import RanksError
from roamc.exchange import RUNS, Opening, in_words, openings, other_batch, texts_of
from roamc.graph import Agreement, Phase, TrainGraph, attribute, placeholders
from roamc.graph.ranks import batch_of, collectives_of
from roamc.operators.random import save_rng_state

CHUNK = 1 << 24
"""Bytes of a tensor that are copied to the CPU and hashed at a time."""

PLAN = "plan (sizes of the batch, model or options)"

Hashes = dict[str, str]
"""What is compared, in words, to the hash of it."""


class Meetings:
    """What the ranks of a program compare at each call of one of its functions.

    Args:
        graph: the planned graph.
        entries: the functions of the program, by name.
    """

    def __init__(self, graph: TrainGraph, entries: Mapping[str, Entry]) -> None:
        self._graph = graph
        self._entries = entries
        self._done: set[str] = set()

    @functools.cached_property
    def _batch(self) -> dict[str, str]:
        return batch_of(self._graph)

    @functools.cached_property
    def _plans(self) -> dict[Agreement, str]:
        """Hash of the plan, by agreement."""
        return {
            each: hashlib.sha256(
                "\n".join((each.digest, *collectives_of(self._graph, each.group))).encode()
            ).hexdigest()
            for each in self._graph.agreements
        }

    def check(self, name: str, args: Sequence[Any]) -> None:
        """Compare what the ranks have, before function ``name`` runs, in the first call or in any call of a step.

        Args:
            name: of the function.
            args: what it is called with, one value for each parameter.

        Raises:
            RanksError: the ranks of a group have other values, or a rank does not come to compare them. They compare
                all again in the next call.
            OtherStepError: another rank plans this step.
        """
        entry, first = self._entries[name], name not in self._done
        if first or Phase.FORWARD in entry.phases:
            for agreement in self._graph.agreements:
                self._compare(agreement, entry, args, first=first)
            self._done.add(name)

    def _compare(self, agreement: Agreement, entry: Entry, args: Sequence[Any], *, first: bool) -> None:
        mine = self._hashes(agreement, entry, args) if first else {PLAN: self._plans[agreement]}
        if not mine:
            return
        group, text = agreement.group, hashlib.sha256(json.dumps(mine).encode()).hexdigest()
        batches: list[Mapping[str, str]] = []
        if Phase.FORWARD in entry.phases:
            ranks = openings(group, Opening(RUNS, text, self._batch), self._graph.name)
            briefs, batches = {rank.text for rank in ranks}, [rank.batch for rank in ranks]
        else:
            briefs = set(self._of_all(agreement, text))
        if len(briefs) > 1:
            all_hashes = [json.loads(text) for text in self._of_all(agreement, json.dumps(mine))]
            raise RanksError(_said(self._graph.name, group, all_hashes, batches))

    def _of_all(self, agreement: Agreement, text: str) -> list[str]:
        return texts_of(agreement.group, text, self._graph.name, "compare its batch", compiling=False)

    def _hashes(self, agreement: Agreement, entry: Entry, args: Sequence[Any]) -> Hashes:
        """What this rank has, for one function of the program; empty if there is nothing to compare."""
        graph = self._graph
        ports = {node.name: port for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True)}
        hashes: Hashes = {}
        if Phase.FORWARD in entry.phases:
            hashes[PLAN] = self._plans[agreement]
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


def _said(
    name: str, group: object, all_hashes: Sequence[Mapping[str, str]], batches: Sequence[Mapping[str, str]]
) -> str:
    """The error for ranks of graph ``name`` that have other hashes than the first of their group.

    ``batches`` are those of the ranks, to say in which tensor they differ; empty if they are not known.
    """
    numbers = numbers_in(group)
    first, parts, who = all_hashes[0], [], in_words(numbers[:1])
    by_difference: dict[tuple[str, ...], list[int]] = {}
    for position, other in enumerate(all_hashes):
        differ = tuple(each for each in dict.fromkeys((*first, *other)) if first.get(each) != other.get(each))
        if PLAN in differ:
            sizes = other_batch(batches[0], batches[position], who) if batches else ""
            differ = (f"plan ({sizes})" if sizes else PLAN,)
        by_difference.setdefault(differ, []).append(numbers[position])
    for names, ranks in by_difference.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            difference = f"another {', '.join(names[:3])}{more} than {who}"
            parts.append(f"{in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {difference}")
    return (
        f"{name} is on several ranks, and {'; '.join(parts)}: give all ranks of the group the same "
        "batch, parameters, optimizer settings and seed (torch.manual_seed), or set shard='off'"
    )


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
