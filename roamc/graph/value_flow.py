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
:mod:`roamc.graph.same_values`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roamc.errors import VerifyError
from roamc.graph import Encoding, Phase, Port, TrainGraph, output_values, placeholders, storage_name, tensors_of
from roamc.graph.rewrite import derived
from roamc.graph.same_values import Call, equal_of
from roamc.graph.value_messages import fail, fail_effects
from roamc.graph.value_numbers import Flow, Key, Number, Numbers, Place, Target
from roamc.operators import ops
from roamc.operators.ops import Need
from roamc.operators.random import replay, save_rng_state

aten = torch.ops.aten


def read(graph: TrainGraph, numbers: Numbers, after: str = "capture") -> Flow:
    """Number the values of ``graph``, which pass ``after`` left, in its present order.

    Raises:
        VerifyError: a view does not lie in what it is a view of, or elsewhere in it than its arguments say.
    """
    walk = Walk(numbers, graph.encodings, graph.reuse)
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
    return Flow(numbers, walk.operators, tuple(walk.effects), finals, walk.makers, walk.writers)


def check(graph: TrainGraph, before: Flow, after: str, lossy: Sequence[str] = (), *, handed_over: bool = False) -> Flow:
    """Compare the values of ``graph`` with those that it had before a pass.

    Args:
        graph: what the pass left.
        before: of the graph before the pass.
        after: name of the pass, for the message.
        lossy: names of the codecs with an error that may be used.
        handed_over: compare outputs of forward where the caller gets them, and not once more at the end of the step:
            they may have become views of tensors that are the caller's to write.

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
            fail(now, before, after, name, before.operators[name], number)
    if [number for number, _ in now.effects] != [number for number, _ in before.effects]:
        fail_effects(now, before, after)
    early = enumerate(graph.outputs) if handed_over and graph.boundary else ()
    again = {_output(position, port, "step") for position, port in early if port.phase is Phase.FORWARD}
    for what in {**before.finals, **now.finals}:
        if what not in again and before.finals.get(what) != now.finals.get(what):
            fail(now, before, after, what, before.finals.get(what), now.finals.get(what))
    return now


def _output(position: int, port: Port, part: str) -> str:
    """An output at the end of a part of the step, in words for a message."""
    return f"output {position} ({port.name}) of the {part}"


class Walk:
    """Runs operators on numbers."""

    def __init__(
        self, numbers: Numbers, encodings: Sequence[Encoding] = (), reuse: Mapping[str, int] | None = None
    ) -> None:
        self.numbers = numbers
        self.encodings: dict[str, list[Encoding]] = {}
        for encoding in encodings:
            self.encodings.setdefault(encoding.storage, []).append(encoding)
        self.reuse = reuse or {}
        self.state = numbers.of("generator")
        self.operators: dict[str, Number] = {}
        self.effects: list[tuple[Number, str]] = []
        self.makers: dict[Number, str] = {}
        self.writers: dict[Number, str] = {}
        self._content: dict[int, Number] = {}
        self._reused: dict[int, int] = {}
        self._other: dict[fx.Node, Number] = {}
        self._decoded: dict[Number, tuple[Need, Number]] = {}
        self._written: set[int] = set()

    def feed(self, node: fx.Node, number: Number) -> None:
        """What ``node`` stands for comes from outside."""
        self._other[node] = number
        self.makers.setdefault(number, node.name)
        for place in self.numbers.places(node):
            if self._memory(place) not in self._content:
                self._content[self._memory(place)] = content = self.numbers.of("part", number, place.position)
                self.numbers.born(content, place.geometry)

    def call(self, node: fx.Node) -> str | None:
        """Run ``node``: number what it reads, then what it makes and writes.

        Returns:
            What is wrong with ``node`` if it is a view and does not lie where it should; else None.
        """
        places = self.numbers.places(node)
        fresh = [place for place in places if self._memory(place) not in self._content]
        target = self.numbers.target(node.target)
        if target.is_view and places and not self._makes_anew(node, target, fresh):
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
                self._write(node, place, target, number, made.get(position), position)
        if node.name in self.reuse:
            self._write_over(node.args[self.reuse[node.name]], places)
        self._make(node, fresh, made)
        return None

    def _memory(self, place: Place) -> int:
        """The storage in which a tensor really lies: that of an argument, where it is written over one."""
        return self._reused.get(place.storage, place.storage)

    def _write_over(self, argument: Any, results: Sequence[Place]) -> None:
        """The results lie in the memory of ``argument`` from now on."""
        over = self._memory(self.numbers.places(argument)[0])
        self._reused.update((place.storage, over) for place in results)
        self._written.add(over)

    def results(self, returned: Sequence[tuple[fx.Node | None, Port]], part: str) -> dict[str, Number]:
        """Numbers of what lies now in the tensors that are returned, under words for a message."""
        return {
            _output(position, port, part): self.numbers.of("output", self._read(node))
            for position, (node, port) in enumerate(returned)
            if node is not None
        }

    def hand_over(self, nodes: Iterable[fx.Node]) -> None:
        """Forward has ended. Until backward begins, another forward may write again what this one wrote to the caller's
        tensors; what lies there now has no known value."""
        for place in (place for node in nodes for place in self.numbers.places(node)):
            if self._memory(place) in self._written:
                self._content[self._memory(place)] = self.numbers.of("handed", self._content[self._memory(place)])

    def left(self, node: fx.Node, name: str) -> dict[str, Number]:
        """Numbers of what was written to the tensors of ``node``, which are not the step's own."""
        lies = [self._memory(place) for place in self.numbers.places(node)]
        written = [storage for storage in lies if storage in self._written]
        return {f"{name} ({node.name})": self._content[storage] for storage in written}

    def _write(
        self, node: fx.Node, place: Place, target: Target, number: Number, made: Number | None, position: int
    ) -> None:
        """``node``, the call with this ``number``, writes to ``place``; ``made`` is the result of its twin."""
        content = self._note("written", number, position, by=node.name)
        if target.twin is not None:
            result = made if made is not None else self._note("part", number, 0, by=node.name)
            content = self.numbers.patched(self._content[self._memory(place)], place, self.uncopied(result))
        self.writers.setdefault(content, node.name)
        self._content[self._memory(place)] = content
        self._written.add(self._memory(place))

    def _run(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        """The number of an operator, and of each result; a random one moves the generator."""
        target: Any = node.target
        args, kwargs, state = node.args, dict(node.kwargs), self.state
        if target is replay:
            saved = self.numbers.key(self._read(args[0])[1])  # type: ignore[arg-type]
            target, args, state = args[1], args[2:], saved[1] if saved[0] == "saved" else self.numbers.of("no", saved)
        known = self.numbers.target(target)
        rule = known.rule if known.twin is None else self.numbers.target(known.twin).rule
        keys = self.keys(target, args, kwargs)
        once = node.name if not (rule.recomputable or rule.random) else None
        call = Call(node, known.twin or target, args, keys, state if rule.may_draw else None, once)
        number, made = self._equal(call) or (self.number(call), {})
        if rule.may_draw and node.target is not replay:
            self.state = self._note("after", number, by=node.name)
        return number, made

    def content(self, place: Place) -> Number:
        """What lies in the storage of ``place`` now; what a codec has decoded without error counts as what it was."""
        content = self._content[self._memory(place)]
        keeps, value = self._decoded.get(content, (None, content))
        return value if keeps is Need.ELEMENTS else content

    def elements(self, node: fx.Node) -> Number:
        """The elements of the one tensor that ``node`` stands for, wherever they may lie."""
        (place,) = self.numbers.places(node)
        return self.uncopied(self.numbers.elements(self.content(place), place.geometry))

    def uncopied(self, elements: Number) -> Number:
        """Of elements that have been copied from elsewhere, perhaps more than once, those."""
        kind, *said = self.numbers.key(elements)
        if kind == "filled":
            return self.uncopied(int(said[1]))
        return self.uncopied(self.numbers.elements(*said)) if kind == "copied" else elements

    def number(self, call: Call) -> Number:
        """The number of a call."""
        return self.called(call.target, call.keys, call.state, call.once)

    def called(
        self, target: Any, keys: tuple[Key, Key], state: Number | None = None, once: str | None = None
    ) -> Number:
        """The number of a call of ``target`` with the arguments that have ``keys``."""
        return self.numbers.of("call", self.numbers.target(target).number, *keys, state, once)

    def _equal(self, call: Call) -> tuple[Number, dict[int, Number]] | None:
        equal = equal_of(call.target, self.numbers.target(call.target).rule)
        return equal(self, call) if equal is not None else None

    def _misplaced(self, node: fx.Node, target: Target, places: Sequence[Place]) -> str | None:
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
        wanted = self._viewed(node, target)
        if [place.geometry for place in wanted] == [place.geometry for place in places]:
            return None
        return f"of {known[0]}, and lies elsewhere in it than its arguments say"

    def _makes_anew(self, node: fx.Node, target: Target, fresh: Sequence[Place]) -> bool:
        """Whether ``node``, of an operator that makes views, makes other tensors: not those of its argument."""
        if not fresh or target.target is not operator.getitem:
            return bool(fresh) and not self._viewed(node, target)
        return all(place.position != node.args[1] for place in self.numbers.places(node.args[0]))  # type: ignore[arg-type]

    def _viewed(self, node: fx.Node, target: Target) -> tuple[Place, ...]:
        """Where the views that ``node`` makes lie by its operator and its arguments."""
        base = next(tensor for argument in node.all_input_nodes for _, tensor in tensors_of(argument))
        named = tuple((name, self._where(node.kwargs[name])) for name in node.kwargs)
        key = target.number, tuple(map(self._where, node.args)), named
        return self.numbers.lies(key, base, lambda: derived(node, contextlib.nullcontext()))

    def _where(self, value: Any) -> Any:
        """An argument of a view: of a tensor the geometry, whatever lies in it."""
        places = self.numbers.places(value) if isinstance(value, fx.Node) else ()
        return ("at", *[place.geometry for place in places]) if places else self._key(value)

    def _make(self, node: fx.Node, fresh: Sequence[Place], made: Mapping[int, Number]) -> None:
        number = self._other.get(node, -1)
        for place in fresh:
            found = made.get(place.position)
            if found is None:
                found = self.numbers.of("part", number, place.position)
            self.makers.setdefault(found, node.name)
            self.numbers.born(found, place.geometry)
            self._content[self._memory(place)] = found
            if self.encodings:
                for encoding in self.encodings.get(storage_name(node, place.position), ()):
                    self._decoded[self._coded(encoding, found)] = encoding.keeps, found

    def _note(self, *key: Any, by: str) -> Number:
        number = self.numbers.of(*key)
        self.makers.setdefault(number, by)
        return number

    def _coded(self, encoding: Encoding, value: Number) -> Number:
        """The number of a value that was encoded and decoded."""
        for graph in (encoding.encode, encoding.decode):
            walk = Walk(self.numbers)
            for node in graph.nodes:
                if node.op == "placeholder":
                    for place in self.numbers.places(node):
                        walk._content[walk._memory(place)] = value
                elif node.op == "call_function":
                    walk.call(node)
                elif node.op == "output":
                    (place,) = self.numbers.places(node.args[0])
                    value = walk._content[walk._memory(place)]
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
            return ("read", self._content[self._memory(places[0])], places[0].geometry)
        found: list[Number] = []
        for place in places:
            content = self._content[self._memory(place)]
            keeps, value = self._decoded.get(content, (None, content))
            found += (value if keeps in (Need.ELEMENTS, need) else content, place.geometry)
        return ("read", *found)

    def _other_of(self, node: fx.Node) -> Number:
        """The number of a result that is no tensor, such as a number, or one that was picked."""
        if node not in self._other:
            base = node.args[0]
            self._other[node] = self.numbers.of("pick", self._other_of(base), self._key(node.args[1:]))  # type: ignore[arg-type]
        return self._other[node]
