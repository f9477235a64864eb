"""The walk of the judge of values: runs the operators of one graph on numbers, see :mod:`roamc.graph.value_flow`."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from roamc.graph.ranks import runs_together
from roamc.graph.rewrite import derived
from roamc.graph.same_values import Call, equal_of
from roamc.graph.storage_ids import StorageId
from roamc.graph.train_graph import Encoding, Port, SamePlan, output_node, placeholders, storage_name, tensors_of
from roamc.graph.value_numbers import Key, Number, Numbers, Place, Target
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.ops import Need
from roamc.operators.random import replay, save_rng_state
from roamc.operators.schemas import group_of


class Walk:
    """Runs the nodes of a graph, one after the other, on numbers in the place of values.

    The arguments ``encodings``, ``reuse`` and ``same_plan`` are the fields of :class:`roamc.graph.TrainGraph` with
    these names.

    Attributes:
        numbers: gives the numbers.
        encodings: name of a storage, or of an input, to the encodings of it and those that read it beside what they
            decode.
        reuse: name of an operator to the position of the argument that its result is written over.
        state: number of the random generator's present state.
        operators: name of each operator that has run to the number of its call.
        same_plan: the groups whose ranks may run a collective again.
        effects: (number, name) of each operator that has run and has an effect other than results and writes; of a
            collective that may run again, the first run.
        again: group of ranks to the number of its collectives that have run again.
        lossy: reads of what a codec with an error has decoded: reader, argument, the encoding. The output node reads
            what the graph returns.
        strange: encodings, with the end of a sentence that says what is wrong with what they read beside their code.
        makers: number to the name of the first node that has it.
        writers: content of a storage to the name of the first operator that has written it in place.
    """

    def __init__(
        self,
        numbers: Numbers,
        encodings: Sequence[Encoding] = (),
        reuse: Mapping[str, int] | None = None,
        same_plan: Sequence[SamePlan] = (),
    ) -> None:
        self.numbers = numbers
        self.encodings: dict[str, list[Encoding]] = {}
        for encoding in encodings:
            for name in dict.fromkeys((encoding.storage, *encoding.beside)):
                self.encodings.setdefault(name, []).append(encoding)
        self.lossy: list[tuple[fx.Node, fx.Node, Encoding]] = []
        self.strange: list[tuple[Encoding, str]] = []
        self._beside: dict[StorageId, str] = {}
        self._named: dict[str, Number] = {}
        self.reuse = reuse or {}
        self.same_plan = same_plan
        self._sent: set[Number] = set()
        self.again: Counter[object] = Counter()
        self.state = numbers.of("generator")
        self.operators: dict[str, Number] = {}
        self.effects: list[tuple[Number, str]] = []
        self.makers: dict[Number, str] = {}
        self.writers: dict[Number, str] = {}
        self._content: dict[StorageId, Number] = {}
        self._reused: dict[StorageId, StorageId] = {}
        self._other: dict[fx.Node, Number] = {}
        self._decoded: dict[Number, tuple[Need, Number]] = {}
        self._erring: dict[Number, Encoding] = {}
        self._written: set[StorageId] = set()

    def feed(self, node: fx.Node, number: Number) -> None:
        """Let ``number`` stand for the value of ``node``, an input or a constant of the graph."""
        self._other[node] = number
        self.makers.setdefault(number, node.name)
        for place in self.numbers.places(node):
            if self._memory(place) not in self._content:
                self._content[self._memory(place)] = content = self.numbers.of("part", number, place.position)
                self.numbers.born(content, place.geometry)
                self._note_encodings(storage_name(node, place.position), content)

    def call(self, node: fx.Node) -> str | None:
        """Run ``node``: number what it reads, then what it makes and writes.

        Returns:
            None if all is well. For a view that does not lie where it should, the end of a sentence that begins with
            "a view".
        """
        places = self.numbers.places(node)
        fresh = [place for place in places if self._memory(place) not in self._content]
        target = self.numbers.target(node.target)
        if target.is_view and places and not self._makes_anew(node, target, fresh):
            return self._misplaced(node, target, places)
        if node.target is save_rng_state:
            self._make(node, fresh, {place.position: self.numbers.of("saved", self.state) for place in fresh})
            return None
        if self._erring:
            self._note_lossy(node)
        number, results = self._run(node)
        self.operators[node.name] = self._other[node] = number
        self.makers.setdefault(number, node.name)
        if target.rule.ordered or (target.rule.collective and number not in self._sent):
            self.effects.append((number, node.name))
        elif target.rule.collective:
            self.again[group_of(node)] += 1
        if runs_together(node, self.same_plan):
            self._sent.add(number)
        called: Any = node.target
        group = isinstance(called, Composite)
        for position, argument in enumerate(ops.mutated_arguments(node) if target.rule.mutates else ()):
            result = results.get(-1 - position) if group else results.get(position)
            for place in self.numbers.places(argument):
                self._write(node, place, target, number, result, position)
        if node.name in self.reuse:
            self._write_over(node.args[self.reuse[node.name]], places)
        self._make(node, fresh, results)
        return None

    def _note_lossy(self, reader: fx.Node) -> None:
        """Note which arguments of ``reader`` a codec with an error has decoded."""
        for argument in reader.all_input_nodes:
            for place in self.numbers.places(argument):
                encoding = self._erring.get(self._content.get(self._memory(place), -1))
                self.lossy += [(reader, argument, encoding)] if encoding is not None else []

    def _memory(self, place: Place) -> StorageId:
        """The storage in which a tensor really lies: that of an argument, where it is written over one."""
        return self._reused.get(place.storage, place.storage)

    def _write_over(self, argument: Any, results: Sequence[Place]) -> None:
        """The results lie in the memory of ``argument`` from now on."""
        over = self._memory(self.numbers.places(argument)[0])
        self._reused.update((place.storage, over) for place in results)
        self._written.add(over)

    def results(self, returned: Sequence[tuple[fx.Node | None, Port]], part: str) -> dict[str, Number]:
        """Return the present values of outputs.

        Args:
            returned: each node of the output tuple, None where there is no value, and its port.
            part: "forward" or "step", at whose end they are read.

        Returns:
            Words for a message to the number of the output's value; outputs without a value are left out.
        """
        nodes = [node for node, _ in returned if node is not None]
        if self._erring and nodes:
            self._note_lossy(output_node(nodes[0].graph))
        return {
            output_name(position, port, part): self.numbers.of("output", self._read(node))
            for position, (node, port) in enumerate(returned)
            if node is not None
        }

    def hand_over(self, nodes: Iterable[fx.Node], overwritten: Sequence[fx.Node]) -> None:
        """End forward: tensors of the caller that are written before backward begins get unknown values.

        Args:
            nodes: inputs and constants of the graph. What this graph has written, another forward may write too.
            overwritten: inputs and outputs of forward that the caller may write when forward has run.
        """
        late = {self._memory(place) for node in overwritten for place in self.numbers.places(node)}
        changed = late | self._written
        of_caller = (place for node in (*nodes, *overwritten) for place in self.numbers.places(node))
        for memory in dict.fromkeys(map(self._memory, of_caller)):
            if memory in changed:
                kind = "overwritten" if memory in late else "handed"
                self._content[memory] = self.numbers.of(kind, self._content[memory])

    def left(self, node: fx.Node, name: str) -> dict[str, Number]:
        """Return the final values of those tensors of an input or constant ``node`` that the graph has written.

        Args:
            node: the input or constant.
            name: the user's name for it.

        Returns:
            One entry, words for a message to the content of the tensor's storage; empty if nothing was written.
        """
        lies = [self._memory(place) for place in self.numbers.places(node)]
        written = [storage for storage in lies if storage in self._written]
        return {f"{name} ({node.name})": self._content[storage] for storage in written}

    def _write(
        self, node: fx.Node, place: Place, target: Target, number: Number, elements: Number | None, position: int
    ) -> None:
        """Note that ``node``, the call with this ``number``, writes to ``place`` what its twin or a member makes."""
        content = self._note("written", number, position, by=node.name)
        called: Any = node.target
        if target.twin is not None or (isinstance(called, Composite) and elements is not None):
            result = elements if elements is not None else self._note("part", number, 0, by=node.name)
            content = self.numbers.patched(self._content[self._memory(place)], place, self.uncopied(result))
        self.writers.setdefault(content, node.name)
        if (name := self._beside.get(self._memory(place))) is not None:
            others = (encoding for encoding in self.encodings[name] if name in encoding.beside)
            self.strange += [(encoding, f"{name}, which {node.name} writes") for encoding in others]
        self._content[self._memory(place)] = content
        self._written.add(self._memory(place))

    def _run(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        """The number of an operator, and of each result; a random one moves the generator."""
        target: Any = node.target
        args, kwargs, state = node.args, dict(node.kwargs), self.state
        if target is replay:
            saved = self.numbers.key(self._read(args[0])[1])  # type: ignore[arg-type]
            target, args, state = args[1], args[2:], saved[1] if saved[0] == "saved" else self.numbers.of("no", saved)
        entry = self.numbers.target(target)
        rule = entry.rule if entry.twin is None else self.numbers.target(entry.twin).rule
        keys = self.keys(target, args, kwargs)
        repeats = rule.recomputable or rule.random or runs_together(node, self.same_plan)
        once = None if repeats else node.name
        call = Call(node, entry.twin or target, args, keys, state if rule.may_draw else None, once)
        number, results = self._equal(call) or (self.number(call), {})
        if rule.may_draw and node.target is not replay:
            self.state = self._note("after", number, by=node.name)
        return number, results

    def content(self, place: Place) -> Number:
        """Return the number of all bytes that lie in the storage of ``place`` now.

        For a value that was decoded without error, it is the number of the value that was encoded.
        """
        content = self._content[self._memory(place)]
        keeps, value = self._decoded.get(content, (None, content))
        return value if keeps is Need.ELEMENTS else content

    def given(self, node: fx.Node) -> Number:
        """Return the number of what ``node`` hands to a group: all bytes of a tensor's storage, or a plain number."""
        places = self.numbers.places(node)
        return self.content(places[0]) if places else self._other_of(node)

    def elements(self, node: fx.Node) -> Number:
        """Return the number of the elements of the one tensor that ``node`` stands for, the same wherever they lie."""
        (place,) = self.numbers.places(node)
        return self.uncopied(self.numbers.elements(self.content(place), place.geometry))

    def uncopied(self, elements: Number) -> Number:
        """Return the number of the elements that ``elements`` are a copy of, through any number of copies.

        It is ``elements`` itself for elements that are no copy.
        """
        kind, *fields = self.numbers.key(elements)
        if kind == "filled":
            return self.uncopied(int(fields[1]))
        return self.uncopied(self.numbers.elements(*fields[:2])) if kind == "copied" else elements

    def number(self, call: Call) -> Number:
        """Return the number that stands for the value of ``call``, as :meth:`called` gives it."""
        return self.called(call.target, call.keys, call.state, call.once)

    def called(
        self, target: Any, keys: tuple[Key, Key], state: Number | None = None, once: str | None = None
    ) -> Number:
        """Return the number that stands for the value of a call of ``target``.

        Args:
            target: the operator.
            keys: keys of the positional and the keyword arguments, from :meth:`keys`.
            state: number of the generator's state; None if the operator draws nothing.
            once: name of the node if another such call may give other bits; else None.
        """
        return self.numbers.of("call", self.numbers.target(target).number, *keys, state, once)

    def _equal(self, call: Call) -> tuple[Number, dict[int, Number]] | None:
        equal = equal_of(call.target, self.numbers.target(call.target).rule)
        return equal(self, call) if equal is not None else None

    def _misplaced(self, node: fx.Node, target: Target, places: Sequence[Place]) -> str | None:
        if target.target is operator.getitem:
            picked = self.numbers.picked(node)
            same = [(place.storage, place.geometry) for place in picked] == [
                (place.storage, place.geometry) for place in places
            ]
            return None if same else f"of {node.args[0]}, and is not its result {node.args[1]}"
        bases = [node.args[position] for position in target.rule.view_of if position < len(node.args)]
        base_nodes = [base for base in bases if isinstance(base, fx.Node)]
        within = [place.storage for base in base_nodes for place in self.numbers.places(base)]
        if within and any(place.storage not in within for place in places):
            return f"of {base_nodes[0]}, and lies in another storage"
        viewed = self._viewed(node, target)
        if [place.geometry for place in viewed] == [place.geometry for place in places]:
            return None
        return f"of {base_nodes[0]}, and lies elsewhere in it than its arguments say"

    def _makes_anew(self, node: fx.Node, target: Target, fresh: Sequence[Place]) -> bool:
        """Whether ``node``, whose operator makes views, makes new tensors here instead of views of its argument."""
        if not any(any(tensors_of(argument)) for argument in node.all_input_nodes):
            return bool(fresh)  # a view of a number, such as the conjugate of 1j
        if not fresh or target.target is not operator.getitem:
            return bool(fresh) and not self._viewed(node, target)
        return not self.numbers.picked(node)

    def _viewed(self, node: fx.Node, target: Target) -> tuple[Place, ...]:
        """The places of the views that ``node`` makes, derived from its operator and its arguments."""
        base = next(tensor for argument in node.all_input_nodes for _, tensor in tensors_of(argument))
        named = tuple((name, self._where(node.kwargs[name])) for name in node.kwargs)
        key = target.number, tuple(map(self._where, node.args)), named
        return self.numbers.lies(key, base, lambda: derived(node, contextlib.nullcontext()))

    def _where(self, value: Any) -> Any:
        """An argument of a view: of a tensor the geometry, whatever lies in it."""
        places = self.numbers.places(value) if isinstance(value, fx.Node) else ()
        return ("at", *[place.geometry for place in places]) if places else self._key(value)

    def _make(self, node: fx.Node, fresh: Sequence[Place], contents: Mapping[int, Number]) -> None:
        number = self._other.get(node, -1)
        for place in fresh:
            content = contents.get(place.position)
            if content is None:
                content = self.numbers.of("part", number, place.position)
            self.makers.setdefault(content, node.name)
            self.numbers.born(content, place.geometry)
            self._content[self._memory(place)] = content
            if self.encodings:
                name = storage_name(node, place.position)
                if any(name in encoding.beside for encoding in self.encodings.get(name, ())):
                    self._beside[self._memory(place)] = name
                self._note_encodings(name, content)

    def _note(self, *key: Any, by: str) -> Number:
        number = self.numbers.of(*key)
        self.makers.setdefault(number, by)
        return number

    def run(self, body: fx.Graph, arguments: Sequence[Number], name: str = "") -> tuple[Number, list[Number]]:
        """Run a graph of its own, such as the members of a group, on values of this one.

        Args:
            body: its placeholders are tensors or plain numbers, its output node has one tensor or several.
            arguments: one for each placeholder: the content of the tensor's storage, or what :meth:`given` returns for
                a plain number.
            name: the operator of ``body`` that is asked for; "" for the last one.

        Returns:
            (number of that operator, or of the last one if ``body`` has none with that name, content of the storage of
            each result).
        """
        walk, contents = Walk(self.numbers), iter(arguments)
        walk._decoded, walk._erring, walk.lossy = self._decoded, self._erring, self.lossy
        walk.state = self.numbers.of("generator inside")  # no draw outside has it, so that none is repeated inside
        number, contents_made = -1, list[Number]()
        for node in body.nodes:
            if node.op == "placeholder":
                walk._other[node] = given_number = next(contents)
                for place in self.numbers.places(node):
                    walk._content[walk._memory(place)] = given_number
            elif node.op == "call_function":
                walk.call(node)
                number = walk.operators.get(node.name, number)
            elif node.op == "output":
                places = (place for result in node.all_input_nodes for place in self.numbers.places(result))
                contents_made = [walk._content[walk._memory(place)] for place in places]
        return walk.operators.get(name, number), contents_made

    def _note_encodings(self, name: str, content: Number) -> None:
        """Note what is decoded of storages, now that the one called ``name`` is there, with ``content``."""
        for encoding in self.encodings.get(name, ()):
            self._named[name] = content
            names = encoding.storage, *encoding.beside
            if not all(each in self._named for each in names):
                continue
            value, *beside = (self._named[each] for each in names)
            decoded = self._coded(encoding, value, beside)
            if decoded is None or decoded == value:  # what operators of the graph make of what is beside needs no codec
                continue
            own = len(beside) - len(placeholders(encoding.encode)) + 1  # the rest is what encode reads too
            strange = strangers(self.numbers, value, beside[:own])
            self.strange += [(encoding, f"{encoding.beside[at]}, which is not made from it") for at in strange]
            if not strange:
                self._decoded[decoded] = encoding.keeps, value
                self._erring |= {decoded: encoding} if encoding.error else {}

    def _coded(self, encoding: Encoding, value: Number, beside: Sequence[Number]) -> Number | None:
        """The number of the decoded value, where ``value`` was encoded and decoded by ``encoding``.

        None if the encoding does not say all that its ``encode`` or ``decode`` reads.
        """
        shared = len(placeholders(encoding.encode)) - 1
        if shared > len(beside):
            return None
        _, code = self.run(encoding.encode, [value, *beside[len(beside) - shared :]])
        contents = [*code, *beside]
        if len(placeholders(encoding.decode)) != len(contents):
            return None
        _, (decoded,) = self.run(encoding.decode, contents)
        return decoded

    # -- arguments ------------------------------------------------------------------------------

    def keys(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, Key]:
        """Return keys of the positional and of the keyword arguments, with the present numbers in the place of tensors.

        A key is a tuple that is equal for equal values, see :mod:`roamc.graph.value_numbers`. Where ``target`` needs
        only the shape of an argument, the key holds no more. Where it needs only signs, a decoded value with the same
        signs has the key of the original.

        Args:
            target: the operator.
            args: its positional arguments, with nodes in the place of tensors.
            kwargs: its keyword arguments, likewise.
        """
        rule = self.numbers.target(target).rule
        named = tuple((name, self._key(kwargs[name])) for name in sorted(kwargs)) if kwargs else ()
        if rule.absolute:
            return (self._read(args[0], between_rows=True), *map(self._key, args[1:])), named
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

    def _read(self, node: fx.Node, need: Need = Need.ELEMENTS, *, between_rows: bool = False) -> Key:
        """What ``node`` stands for now, as far as it is needed; with what lies between rows if ``between_rows``."""
        places = self.numbers.places(node)
        if not places:
            return ("other", self._other_of(node))
        if need is Need.SHAPE:
            return ("shape", *[place.shape for place in places])
        if len(places) == 1 and not self._decoded:
            lies = self._content[self._memory(places[0])], places[0].geometry
            return ("read", *(lies if between_rows else self.numbers.unpadded(*lies)))
        parts: list[Number] = []
        for place in places:
            content = self._content[self._memory(place)]
            keeps, value = self._decoded.get(content, (None, content))
            lies = (value if keeps in (Need.ELEMENTS, need) else content), place.geometry
            parts += lies if between_rows else self.numbers.unpadded(*lies)
        return ("read", *parts)

    def _other_of(self, node: fx.Node) -> Number:
        """The number of a result that is no tensor, such as a number, or one that was picked."""
        if node not in self._other:
            base = node.args[0]
            self._other[node] = self.numbers.of("pick", self._other_of(base), self._key(node.args[1:]))  # type: ignore[arg-type]
        return self._other[node]


def strangers(numbers: Numbers, value: Number, beside: Sequence[Number]) -> list[int]:
    """Return the positions in ``beside`` of what has nothing to do with ``value``; all are contents of storages.

    The rest was made by an operator that reads ``value``, or read by one that reads ``value`` and makes such another.
    """
    makers = {numbers.key(content)[1] for content in beside if numbers.key(content)[0] == "part"}
    calls = [call for call in makers if _reads(numbers.key(call), value)]
    return [at for at, number in enumerate(beside) if not any(_touches(numbers, call, number) for call in calls)]


def _touches(numbers: Numbers, call: Number, content: Number) -> bool:
    """Whether the operator whose call has the number ``call`` reads or makes a storage with this content."""
    kind, *fields = numbers.key(content)
    return (kind == "part" and fields[0] == call) or _reads(numbers.key(call), content)


def _reads(key: Key, content: Number) -> bool:
    """Whether the key of a call, or of an argument, has a tensor in a storage with this content."""
    if key[:1] == ("read",):
        return content in key[1::2]
    return any(isinstance(part, tuple) and _reads(part, content) for part in key)


def output_name(position: int, port: Port, part: str) -> str:
    """Return the key of an output in :attr:`roamc.graph.value_numbers.Flow.finals`, which is shown in messages.

    Args:
        position: of the output, from 0.
        port: whose name is shown.
        part: "forward" or "step", at whose end it is read.
    """
    return f"output {position} ({port.name}) of the {part}"
