"""The judge of values: what every operator reads has the value that it had in the captured graph.

A graph is run once with numbers in the place of tensors. A storage has the number of what lies in it; an operator has
the number of (what it calls, its literal arguments, the numbers that it reads, for a random operator the state of the
generator); what it makes or writes has a number made of that. Two equal numbers are the same bits:

    captured                                 a rerun in the wrong place
    h  = mul(x, s)          7 = mul(1, 2)    h   = mul(x, s)          7 = mul(1, 2)
    s += 1                  s: 2 -> 8        s  += 1                  s: 2 -> 8
    dx = mm(h, g)           9 = mm(7, 3)     h_1 = mul(x, s)         10 = mul(1, 8)
                                             dx  = mm(h_1, g)        11 = mm(10, 3), and 9 is wanted

Views need no number: they are places in a storage, and a reader reads (number of the storage, place). That a view lies
where its operator and arguments put it is derived anew, once for all views that are alike. A rerun has the
number of its original, a replay that of the draw that it repeats, a result written over an argument that of the result.
What a codec has decoded counts as the value that was encoded, for readers that need no more of it than the codec keeps.

Shares no code with the passes: their rewritings that change operators and not values stand here a second time, as
:data:`EQUAL`.
"""

from __future__ import annotations

import contextlib
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc import ops
from roamc.compat import fake_mode_of
from roamc.errors import VerifyError, way_out
from roamc.graph import Encoding, Phase, Port, TrainGraph, output_values, placeholders, tensors_of
from roamc.memory import identity
from roamc.ops import Need
from roamc.rewrite import derived
from roamc.runtime.random import dropout_mask, replay, save_rng_state

aten = torch.ops.aten

Number = int
Key = tuple[Any, ...]


class Numbers:
    """Numbers of values: equal for equal keys. One object for all graphs that are to be compared."""

    def __init__(self) -> None:
        self._known: dict[Key, Number] = {}
        self._keys: list[Key] = []
        self._tensors: dict[int, tuple[object, tuple[_Place, ...]]] = {}
        self._targets: dict[int, _Target] = {}
        self._views: dict[Key, tuple[Number, ...]] = {}

    def of(self, *key: Any) -> Number:
        """The number of ``key``, whose first part says what it is."""
        number = self._known.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        return number

    def key(self, number: Number) -> Key:
        """What has this number."""
        return self._keys[number]

    def target(self, target: Any) -> _Target:
        """What is known of an operator, which is asked for by identity: hashing one is slow."""
        known = self._targets.get(id(target))
        if known is None:
            rule = ops.rule(target)
            known = _Target(target, self.of("target", target), rule, ops.is_view(target))
            self._targets[id(target)] = known
        return known

    def places(self, node: fx.Node) -> tuple[_Place, ...]:
        """Where the tensors that ``node`` stands for lie."""
        value = node.meta.get("val")
        known = self._tensors.get(id(value))
        if known is None or known[0] is not value:
            known = self._tensors[id(value)] = value, tuple(self._place(at, t) for at, t in tensors_of(node))
        return known[1]

    def view(self, node: fx.Node, key: Key) -> tuple[Number, ...]:
        """Geometries of the results of a view, derived from ``node`` the first time that a view has this ``key``."""
        known = self._views.get(key)
        if known is None:
            # A codec's operators were traced under a fake mode of their own, which need not be the active one.
            modes = [fake_mode_of(tensor) for _, tensor in tensors_of(node)]
            with torch.no_grad():
                made = derived(node, modes[0] or contextlib.nullcontext())
            many = made if isinstance(made, list | tuple) else [made]
            known = self._views[key] = tuple(self._place(at, tensor).geometry for at, tensor in enumerate(many))
        return known

    def _place(self, position: int, tensor: torch.Tensor) -> _Place:
        shape = tuple(map(int, tensor.shape))
        lies = (shape, tuple(map(int, tensor.stride())), int(tensor.storage_offset()))
        bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return _Place(position, identity(tensor), self.of("place", *lies, *bits), self.of("shape", shape))


@dataclass(frozen=True)
class _Place:
    """One tensor: position among the results of its node, storage, number of its geometry, number of its shape."""

    position: int
    storage: int
    geometry: Number
    shape: Number


@dataclass(frozen=True)
class _Target:
    """An operator, its number, its row of the operator table, and whether it makes views alone."""

    target: Any
    number: Number
    rule: ops.OpRule
    is_view: bool


@dataclass(frozen=True)
class Flow:
    """The values of one graph, as numbers.

    Attributes:
        numbers: what they stand for.
        operators: operator to its number.
        effects: numbers of what has an effect beside results and writes, in order.
        finals: what the step leaves behind, under words for a message, to its number: outputs, caller's tensors.
        makers: number to the first operator of this graph that has it.
    """

    numbers: Numbers = field(repr=False)
    operators: Mapping[str, Number]
    effects: tuple[tuple[Number, str], ...]
    finals: Mapping[str, Number]
    makers: Mapping[Number, str]


def read(graph: TrainGraph, numbers: Numbers, after: str = "capture") -> Flow:
    """Number the values of ``graph``, which pass ``after`` left, in its present order.

    Raises:
        VerifyError: a view does not lie in what it is a view of, or elsewhere in it than its arguments say.
    """
    walk = _Walk(numbers, graph.encodings, graph.donated)
    fed = zip(placeholders(graph.graph), graph.inputs, strict=True)
    callers = {node: port.name for node, port in fed}
    given = [node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
    returned = list(zip(output_values(graph.graph), graph.outputs, strict=True))
    finals: dict[str, Number] = {}
    crossed = not graph.boundary
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            walk.feed(node, numbers.of("given", node.op, str(node.target)))
        elif node.op == "call_function":
            if not crossed and graph.phase[node.name] is not Phase.FORWARD and not ops.is_view(node.target):
                crossed = True
                early = [(made, port) for made, port in returned if port.phase is Phase.FORWARD]
                finals |= walk.results(early, "forward")
                walk.hand_over(given)
            odd = walk.call(node)
            if odd is not None:
                raise VerifyError(f"after pass {after!r}: {node.name} is a view {odd}")
    finals |= walk.results(returned, "step")
    for node in given:
        finals |= walk.left(node, callers.get(node, node.name))
    finals["the random generator"] = walk.state
    return Flow(numbers, walk.operators, tuple(walk.effects), finals, walk.makers)


def check(graph: TrainGraph, before: Flow, after: str, lossy: Sequence[str] = ()) -> Flow:
    """Compare the values of ``graph`` with those that it had before a pass.

    Args:
        graph: what the pass left.
        before: of the graph before the pass.
        after: name of the pass, for the message.
        lossy: names of the codecs with an error that may be used.

    Returns:
        The values of ``graph``.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller gets another value, or a codec is not exact;
            names the reader, what it would read and who wrote it.
    """
    for encoding in graph.encodings:
        if encoding.error and encoding.codec not in lossy:
            raise VerifyError(
                f"after pass {after!r}: {encoding.storage} is kept by codec {encoding.codec!r}, which errs by up to "
                f"{encoding.error:g}: allow it with options={{'codecs': {encoding.codec!r}}}, or plan again"
            )
    now = read(graph, before.numbers, after)
    for name, number in now.operators.items():
        if before.operators.get(name, number) != number:
            _fail(now, before, after, name, before.operators[name], number)
    if [number for number, _ in now.effects] != [number for number, _ in before.effects]:
        _fail_effects(now, before, after)
    for what in {**before.finals, **now.finals}:
        if before.finals.get(what) != now.finals.get(what):
            _fail(now, before, after, what, before.finals.get(what), now.finals.get(what))
    return now


class _Walk:
    """Runs operators on numbers."""

    def __init__(
        self, numbers: Numbers, encodings: Sequence[Encoding] = (), donated: Mapping[str, int] | None = None
    ) -> None:
        self.numbers = numbers
        self.encodings: dict[str, list[Encoding]] = {}
        for encoding in encodings:
            self.encodings.setdefault(encoding.storage, []).append(encoding)
        self.donated = donated or {}
        self.state = numbers.of("generator")
        self.operators: dict[str, Number] = {}
        self.effects: list[tuple[Number, str]] = []
        self.makers: dict[Number, str] = {}
        self._content: dict[int, Number] = {}
        self._other: dict[fx.Node, Number] = {}
        self._decoded: dict[Number, tuple[Need, Number]] = {}

    def feed(self, node: fx.Node, number: Number) -> None:
        """What ``node`` stands for comes from outside."""
        self._other[node] = number
        self.makers.setdefault(number, node.name)
        for place in self.numbers.places(node):
            self._content.setdefault(place.storage, self.numbers.of("part", number, place.position))

    def call(self, node: fx.Node) -> str | None:
        """Run ``node``: number what it reads, then what it makes and writes.

        Returns:
            What is wrong with ``node`` if it is a view and does not lie where it should; else None.
        """
        places = self.numbers.places(node)
        fresh = [place for place in places if place.storage not in self._content]
        target = self.numbers.target(node.target)
        if not fresh and target.is_view and node.name not in self.donated:
            return self._misplaced(node, target, places)
        if node.target is save_rng_state:
            self._make(node, fresh, {place.position: self.numbers.of("saved", self.state) for place in fresh})
            return None
        number, made = self._run(node)
        self.operators[node.name] = self._other[node] = number
        self.makers.setdefault(number, node.name)
        if target.rule.ordered or target.rule.collective:
            self.effects.append((number, node.name))
        for position, argument in enumerate(ops.mutated_arguments(node) if target.rule.mutates else ()):
            for place in self.numbers.places(argument):
                self._content[place.storage] = self._note("written", number, position, by=node.name)
        self._make(node, places if node.name in self.donated else fresh, made)
        return None

    def results(self, returned: Sequence[tuple[fx.Node | None, Port]], part: str) -> dict[str, Number]:
        """Numbers of what lies now in the tensors that are returned, under words for a message."""
        return {
            f"output {position} ({port.name}) of the {part}": self.numbers.of("output", self._read(node))
            for position, (node, port) in enumerate(returned)
            if node is not None
        }

    def hand_over(self, nodes: Iterable[fx.Node]) -> None:
        """Forward has ended. Until backward begins, another forward may write again what this one wrote to the caller's
        tensors; what lies there now has no known value."""
        for place in (place for node in nodes for place in self.numbers.places(node)):
            content = self._content[place.storage]
            if self.numbers.key(content)[0] == "written":
                self._content[place.storage] = self.numbers.of("handed", content)

    def left(self, node: fx.Node, name: str) -> dict[str, Number]:
        """Numbers of what was written to the tensors of ``node``, which are not the step's own."""
        found = {}
        for place in self.numbers.places(node):
            content = self._content[place.storage]
            if self.numbers.key(content)[0] in ("written", "handed"):
                found[f"{name} ({node.name})"] = content
        return found

    def _run(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        """The number of an operator, and of each result; a random one moves the generator."""
        target: Any = node.target
        args, kwargs, state = node.args, dict(node.kwargs), self.state
        if target is replay:
            saved = self.numbers.key(self._read(args[0])[1])  # type: ignore[arg-type]
            target, args, state = args[1], args[2:], saved[1] if saved[0] == "saved" else self.numbers.of("no", saved)
        rule = self.numbers.target(target).rule
        keys = self.keys(target, args, kwargs)
        once = node.name if not (rule.recomputable or rule.random) else None
        call = _Call(node, target, args, keys, state if rule.random else None, once)
        number, made = self._equal(call) or (self.number(call), {})
        if rule.random and node.target is not replay:
            self.state = self._note("after", number, by=node.name)
        return number, made

    def number(self, call: _Call) -> Number:
        """The number of a call."""
        return self.called(call.target, call.keys, call.state, call.once)

    def called(
        self, target: Any, keys: tuple[Key, Key], state: Number | None = None, once: str | None = None
    ) -> Number:
        """The number of a call of ``target`` with the arguments that have ``keys``."""
        return self.numbers.of("call", self.numbers.target(target).number, *keys, state, once)

    def _equal(self, call: _Call) -> tuple[Number, dict[int, Number]] | None:
        rule = EQUAL.get(call.target)
        return rule(self, call) if rule is not None else None

    def _misplaced(self, node: fx.Node, target: _Target, places: Sequence[_Place]) -> str | None:
        if target.target is operator.getitem:
            picked = [place for place in self.numbers.places(node.args[0]) if place.position == node.args[1]]  # type: ignore[arg-type]
            same = [(place.storage, place.geometry) for place in picked] == [
                (place.storage, place.geometry) for place in places
            ]
            return None if same else f"of {node.args[0]}, and is not its result {node.args[1]}"
        bases = [node.args[position] for position in target.rule.view_of if position < len(node.args)]
        known = [base for base in bases if isinstance(base, fx.Node)]
        within = [place.storage for base in known for place in self.numbers.places(base)]
        if within and any(place.storage not in within for place in places):
            return f"of {known[0]}, and lies in another storage"
        arguments = (
            tuple(map(self._where, node.args)),
            tuple((name, self._where(node.kwargs[name])) for name in node.kwargs),
        )
        wanted = self.numbers.view(node, (target.number, *arguments))
        if wanted == tuple(place.geometry for place in places):
            return None
        return f"of {known[0]}, and lies elsewhere in it than its arguments say"

    def _where(self, value: Any) -> Any:
        """An argument of a view: of a tensor the geometry, whatever lies in it."""
        places = self.numbers.places(value) if isinstance(value, fx.Node) else ()
        return ("at", *[place.geometry for place in places]) if places else self._key(value)

    def _make(self, node: fx.Node, fresh: Sequence[_Place], made: Mapping[int, Number]) -> None:
        number = self._other.get(node, -1)
        for place in fresh:
            found = made.get(place.position)
            if found is None:
                found = self.numbers.of("part", number, place.position)
            self.makers.setdefault(found, node.name)
            self._content[place.storage] = found
            if self.encodings:
                single = isinstance(node.meta.get("val"), torch.Tensor)
                for encoding in self.encodings.get(node.name if single else f"{node.name}#{place.position}", ()):
                    self._decoded[self._coded(encoding, found)] = encoding.keeps, found

    def _note(self, *key: Any, by: str) -> Number:
        number = self.numbers.of(*key)
        self.makers.setdefault(number, by)
        return number

    def _coded(self, encoding: Encoding, value: Number) -> Number:
        """The number of a value that was encoded and decoded."""
        for graph in (encoding.encode, encoding.decode):
            walk = _Walk(self.numbers)
            for node in graph.nodes:
                if node.op == "placeholder":
                    for place in self.numbers.places(node):
                        walk._content[place.storage] = value
                elif node.op == "call_function":
                    walk.call(node)
                elif node.op == "output":
                    (place,) = self.numbers.places(node.args[0])
                    value = walk._content[place.storage]
        return value

    # -- arguments ------------------------------------------------------------------------------

    def keys(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, Key]:
        """Positional and keyword arguments of a call of ``target``, with numbers for tensors."""
        rule = self.numbers.target(target).rule
        named = tuple((name, self._key(kwargs[name])) for name in sorted(kwargs)) if kwargs else ()
        if not rule.shape_of and rule.compares is None:
            return tuple(map(self._key, args)), named
        needs = ops.needs(target, args)
        return tuple(self._key(argument, needs.get(at, Need.ELEMENTS)) for at, argument in enumerate(args)), named

    def _key(self, value: Any, need: Need = Need.ELEMENTS) -> Any:
        """An argument with numbers for tensors; literals with their types: 1 is not True, and not 1.0."""
        if isinstance(value, fx.Node):
            return self._read(value, need)
        if isinstance(value, list | tuple):
            return ("list", *[self._key(item) for item in value])
        if isinstance(value, dict):
            return ("dict", *[(key, self._key(item)) for key, item in value.items()])
        if isinstance(value, slice):
            return ("slice", self._key(value.start), self._key(value.stop), self._key(value.step))
        if isinstance(value, float):
            return ("float", value.hex())
        return (type(value), value)

    def _read(self, node: fx.Node, need: Need = Need.ELEMENTS) -> Key:
        """What ``node`` stands for now, as far as it is needed."""
        places = self.numbers.places(node)
        if not places:
            return ("other", self._other_of(node))
        if need is Need.SHAPE:
            return ("shape", *[place.shape for place in places])
        if len(places) == 1 and not self._decoded:
            return ("read", self._content[places[0].storage], places[0].geometry)
        found: list[Number] = []
        for place in places:
            content = self._content[place.storage]
            keeps, value = self._decoded.get(content, (None, content))
            found += (value if keeps in (Need.ELEMENTS, need) else content, place.geometry)
        return ("read", *found)

    def _other_of(self, node: fx.Node) -> Number:
        """The number of a result that is no tensor, such as a number, or one that was picked."""
        if node not in self._other:
            base = node.args[0]
            self._other[node] = self.numbers.of("pick", self._other_of(base), self._key(node.args[1:]))  # type: ignore[arg-type]
        return self._other[node]


@dataclass(frozen=True)
class _Call:
    """One call: its node; what is called with which arguments; their keys; state of the generator; name if it may
    give other bits the next time."""

    node: fx.Node
    target: Any
    args: Sequence[Any]
    keys: tuple[Key, Key]
    state: Number | None
    once: str | None


# -- operators with other names and the same values ----------------------------------------------------


def _dropout(walk: _Walk, call: _Call) -> tuple[Number, dict[int, Number]] | None:
    """On a CPU a dropout draws its mask, whatever the input, and multiplies by it and by the scale, rounded to the
    input's dtype; ``native_dropout_backward`` is that product."""
    if len(call.args) != 3 or call.args[2] is False or not call.args[1]:
        return None
    tensors = dict(tensors_of(call.node))
    (x,) = (tensor for _, tensor in tensors_of(call.args[0]))
    dropped, mask = tensors[0], tensors[1]
    if x.device.type != "cpu" or not x.is_contiguous() or not mask.is_contiguous() or dropped.stride() != x.stride():
        return None
    keep = 1.0 - float(call.args[1])
    drawn = list(map(int, mask.shape)), list(map(int, mask.stride())), keep
    keys = walk.keys(dropout_mask, drawn, {"device": mask.device})
    number = walk.called(dropout_mask, keys, call.state)
    drops = walk.numbers.of("part", number, 0)
    (place,) = (place for place in walk.numbers.places(call.node) if place.position == 1)
    (scale,), _ = walk.keys(dropout_mask, [_held(1.0 / keep if keep else 0.0, x.dtype)], {})
    product = call.keys[0][0], ("read", drops, place.geometry), scale
    kept = walk.called(aten.native_dropout_backward.default, (product, ()))
    return number, {0: walk.numbers.of("part", kept, 0), 1: drops}


def _batch_norm(walk: _Walk, call: _Call) -> tuple[Number, dict[int, Number]] | None:
    """In training the running statistics change nothing of what is normalised: as if there were none."""
    (x, weight, bias, _, _, training, momentum, epsilon), keywords = call.keys
    if keywords or call.args[5] is not True:
        return None
    plain = x, weight, bias, training, momentum, epsilon
    same = walk.called(aten._native_batch_norm_legit.no_stats, (plain, ()))
    return walk.number(call), {position: walk.numbers.of("part", same, position) for position in range(3)}


EQUAL: dict[object, Callable[[_Walk, _Call], tuple[Number, dict[int, Number]] | None]] = {
    aten.native_dropout.default: _dropout,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
}
"""Operator to the number of a call, and of those of its results that another operator makes as well."""


def _held(value: float, dtype: torch.dtype) -> float:
    """``value`` as an element of ``dtype`` holds it, rounded to float32 on the way if that is narrower."""
    if dtype is torch.float64:
        return value
    (bits,) = struct.unpack("I", struct.pack("f", value))
    if dtype is torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (single,) = struct.unpack("f", struct.pack("I", bits))
    if dtype is not torch.float16:
        return float(single)
    try:
        return float(struct.unpack("e", struct.pack("e", single))[0])
    except OverflowError:
        return float("inf")


# -- messages ------------------------------------------------------------------------------------------


def _fail(now: Flow, before: Flow, after: str, reader: str, wanted: Number | None, found: Number | None) -> None:
    """Follow two numbers down to where they begin to differ, and say what is read there."""
    path = list(_path(now.numbers, wanted, found))
    calls = [number for _, number in path if now.numbers.key(number)[0] == "call"]
    via = next((now.makers[number] for number in reversed(calls) if number in now.makers), reader)
    wanted, found = path[-1] if path else (wanted, found)
    said = f"would read {_words(now, found)} and not {_words(before, wanted)}, as in the captured graph"
    if wanted is not None and found is not None and _is_same_call(now.numbers, wanted, found):
        said = "would run with other arguments than in the captured graph"
        if now.numbers.key(wanted)[:-1] == now.numbers.key(found)[:-1]:
            said = "would run an operator again that may give other bits each time"
    through = f" through {via}, which" if via != reader else ""
    raise VerifyError(f"after pass {after!r}: {reader}{through} {said}; {way_out(after)}")


def _fail_effects(now: Flow, before: Flow, after: str) -> None:
    for (number, name), (wanted, first) in zip(now.effects, before.effects, strict=False):
        if number != wanted:
            raise VerifyError(f"after pass {after!r}: {name} runs where {first} ran in the captured graph")
    raise VerifyError(
        f"after pass {after!r}: {len(now.effects)} operators with an effect, {len(before.effects)} before"
    )


WORDS = {
    "part": "the result of {}",
    "call": "what {} computes",
    "written": "what {} has written",
    "handed": "what another forward may have written since",
    "after": "a generator that {} has drawn from",
    "saved": "the generator's state that {} keeps",
    "generator": "a generator that has drawn nothing",
    "given": "what the caller gives",
    "output": "another value",
    "pick": "a result that is no tensor",
    "no": "no state of a generator",
    "target": "another operator",
}
"""Kind of key to what it stands for."""


def _path(numbers: Numbers, wanted: Number | None, found: Number | None) -> Iterator[tuple[Number, Number]]:
    """Two numbers that differ, then pairs of numbers that differ and that they are made of, as far as operators are
    the same."""
    pair = (wanted, found) if wanted is not None and found is not None else None
    while pair is not None:
        yield pair
        pair = _inside(numbers.key(pair[0]), numbers.key(pair[1]))
        calls = pair is not None and numbers.key(pair[1])[0] == "call"
        if calls and not _is_same_call(numbers, *pair):  # type: ignore[misc]
            return


def _is_same_call(numbers: Numbers, wanted: Number, found: Number) -> bool:
    """Whether both are calls of one operator."""
    return numbers.key(wanted)[:2] == numbers.key(found)[:2] and numbers.key(found)[0] == "call"


NUMBERED = {"part": (1,), "written": (1,), "handed": (1,), "after": (1,), "saved": (1,), "call": (4,)}
"""Kind of key to the places in it at which there are numbers; in "read" and "other" at all."""


def _inside(wanted: Any, found: Any) -> tuple[Number, Number] | None:
    """The first two numbers that differ in keys that are otherwise alike; None where more than numbers differs."""
    if not (isinstance(wanted, tuple) and isinstance(found, tuple)) or len(wanted) != len(found):
        return None
    everywhere = range(len(wanted)) if wanted and wanted[0] in ("read", "other") else ()
    numbered = NUMBERED.get(wanted[0], everywhere) if wanted and isinstance(wanted[0], str) else ()
    for at, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if one == other:
            continue
        if at in numbered and type(one) is type(other) is int:
            return one, other
        return _inside(one, other)
    return None


def _words(flow: Flow, number: Number | None) -> str:
    """What a number stands for in a graph, in words."""
    if number is None:
        return "nothing"
    key, maker = flow.numbers.key(number), flow.makers.get(number)
    kind = key[0]
    if kind == "part" and flow.numbers.key(key[1])[0] == "given":
        return f"{flow.numbers.key(key[1])[2]} as the caller gives it"
    if kind in ("place", "shape"):
        return f"a tensor that lies as {key[1:]}"
    return WORDS[kind].format(maker or "another operator")
