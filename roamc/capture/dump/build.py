"""From the plain data of a printed graph to an FX graph of fake tensors, as AOTAutograd has them."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx, nn

from roamc import compat_aot, compat_operators
from roamc.capture.collectives import WAIT, is_wait
from roamc.capture.dump import names
from roamc.capture.dump.annotations import Number, Sizes, TensorType, parsed
from roamc.capture.dump.text import Call, Dotted, GraphText, Input, Item, Name, Origin, Result, Statement, Value
from roamc.capture.dump.unknown import HIGHER_ORDER, Unknown, picks, unknown_of, without_operators
from roamc.compat import DynamicShapeError, FakeTensorMode, OpOverload, lazy_module, quiet_meta
from roamc.errors import DumpError, nearest, printable
from roamc.graph.rewrite import placed_in
from roamc.operators import ops
from roamc.operators.random import state_bytes
from roamc.operators.schemas import name_of

MOST_COMPARED = 3
"""Differences between a file and what torch derives here that a note names."""

_STATE = re.compile(r"(?:fwd|bwd)_rng_state_\d+|rng_state_output_\d+")
"""Names of generators' states that are handed to halves, for dropouts that backward runs again."""

_SIZES = ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset")
"""Operators of ATen that give numbers."""


_AND_SAVE, _WITH_STATE = "run_and_save_rng_state", "run_with_rng_state"
_GRAPH_SAFE = "graphsafe_run_with_rng_state"
_REPLAYS = (_AND_SAVE, _WITH_STATE, _GRAPH_SAFE)
"""Higher-order operators with which torch runs a random operator again."""

_LOOK_UP = "torch.ops.prims.inductor_lookup_seed.default"
"""Picks one element, by Python's index, which asks for the GPU of a fake tensor; ``select_copy`` does not."""

_WAIT = f"torch.ops.{WAIT.replace('::', '.')}.default"


@dataclass(frozen=True)
class _Unsaid:
    """A result of an unknown ``operator`` of which the file says nothing."""

    operator: str


@dataclass
class Findings:
    """What is said of a graph beside it.

    Attributes:
        compared: how many results have an annotation, and a derived tensor to compare it with.
        differences: where the two differ: "NAME is X in the file, Y by torch 2.13.0".
        dense: how many tensors have no strides in the file, and are taken to be dense.
        devices: whether some tensor has a device.
        foreign: kinds of devices that roamc does not plan for.
        unknown: path of each operator that roamc does not know to how often it is called.
        waits: how many waits there are for what no collective of the graph has started.
    """

    compared: int = 0
    differences: list[str] = field(default_factory=list)
    dense: int = 0
    devices: bool = False
    foreign: dict[str, None] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    waits: int = 0

    def notes(self) -> Iterator[str]:
        """Yield them as a plan's notes."""
        if self.dense:
            yield f"the file says no strides: {self.dense} tensors are taken to be dense"
        if not self.devices:
            yield "the file says no devices: those of its constants count, else the CPU"
        if self.foreign:
            kinds = ", ".join(self.foreign)
            yield f"the file's tensors are on {kinds}: planned as on a CPU, with its kernels and times"
        if self.unknown:
            calls = ", ".join(f"{count} of {path}" for path, count in self.unknown.most_common(MOST_COMPARED))
            yield (
                f"{self.unknown.total()} calls of operators that roamc does not know ({calls}): their results are as "
                "the file says, in memory of their own; what they take while they run is not known, and none runs again"
            )
        if self.waits:
            yield f"{self.waits} waits for what no collective of the graph has started: they take no memory"
        if self.differences:
            more = len(self.differences) - MOST_COMPARED
            shown = "; ".join(self.differences[:MOST_COMPARED]) + (f"; and {more} more" if more > 0 else "")
            yield f"{len(self.differences)} of {self.compared} results differ, and count as the file has them: {shown}"


class Builder:
    """Builds one graph after another in one fake mode, so that values of both halves of a step lie in one place.

    Args:
        sizes: values of symbolic sizes.
        file: its name, for messages.
        device: of all tensors; None for those that the file says.
    """

    def __init__(self, sizes: Sizes, file: str, device: torch.device | None = None) -> None:
        self.sizes, self.file, self.device = sizes, file, device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        self.findings = Findings()

    def module(
        self,
        text: GraphText,
        shared: Mapping[int, object] | None = None,
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> fx.GraphModule:
        """Return the graph of ``text``, with fake tensors in ``meta["val"]``.

        Args:
            text: a graph.
            shared: position of an input to what names its storage; inputs with one name share it. None: none do.
            values: name of an input to the tensor that it is; None for new ones.

        Raises:
            DumpError: the graph names what is not known or not allowed, or an operator refuses its arguments.
        """
        return _Graph(self, text, shared or {}, values or {}).built()


class _Graph:
    """One graph that is being built: ``env`` has a node or a number for each name of the text."""

    def __init__(
        self, builder: Builder, text: GraphText, shared: Mapping[int, object], values: Mapping[str, torch.Tensor]
    ) -> None:
        self.text, self.shared, self.values = text, shared, values
        self.sizes, self.mode, self.findings, self.file = builder.sizes, builder.mode, builder.findings, builder.file
        self.graph, self.root = fx.Graph(), nn.Module()
        self.env: dict[str, Any] = {}
        self.moved, self.own = builder.device, device_of(text)
        self.first: dict[object, torch.Tensor] = {}
        self.line = text.line
        self.picks = picks(text.statements)

    def built(self) -> fx.GraphModule:
        for position, each in enumerate(self.text.inputs):
            self.feed(position, each)
        for statement in self.text.statements:
            self.line = statement.line
            self.run(statement)
        results = tuple(map(self._returned, self.text.results))
        end = self.graph.output(results)
        end.meta["desc"] = tuple(compat_aot.described(result.comment) for result in self.text.results)
        return lazy_module(self.root, self.graph)

    def _returned(self, result: Result) -> fx.Node | None:
        """What the graph returns at one place: None for a size, which takes no memory."""
        value = self.low(result.value)
        return value if isinstance(value, fx.Node) else None

    def fail(self, reason: str) -> NoReturn:
        raise DumpError(f"{self.file}:{self.line}: {reason}")

    def feed(self, position: int, each: Input) -> None:
        self._new_name(each.name)
        if _STATE.fullmatch(each.name):
            said: Number | TensorType | None = TensorType("u8", (state_bytes(self.moved or self.own),), (1,), "cpu")
        else:
            said = parsed(each.annotation, self.sizes, self.line)
        if isinstance(said, Number):
            self.env[each.name] = said.value
            return
        if said is None:
            self.fail(f"input {each.name} has no shape" + (f": {each.annotation[:60]!r}" if each.annotation else ""))
        value = self.values.get(each.name)
        if value is None:
            value = self._shared(self.shared.get(position), self.tensor(said))
        node = self.graph.create_node("placeholder", each.name, name=each.name)
        node.meta |= {"val": value, "desc": compat_aot.described(each.comment)}
        self.env[each.name] = node

    def _shared(self, storage: object, value: torch.Tensor) -> torch.Tensor:
        """``value``, in the storage of the first input with the same ``storage``."""
        if storage is None:
            return value
        first = self.first.setdefault(storage, value)
        if first is value or value.untyped_storage().nbytes() > first.untyped_storage().nbytes():
            return value
        with self.mode:
            return placed_in(value, first.untyped_storage(), value.device)

    def run(self, statement: Statement) -> None:
        if statement.name:
            self._new_name(statement.name)
        match statement.value:
            case Call(path=path, args=args, kwargs=kwargs) if path in names.NUMBERS and not kwargs:
                self.env[statement.name] = self._number(path, args)
                return
        said = None if self._is_state(statement.value) else parsed(statement.annotation, self.sizes, self.line)
        if isinstance(said, Number):
            self.env[statement.name] = said.value
            return
        match statement.value:
            case Item(value=Name(name=source), index=index):
                node = self.pick(source, index)
            case Call(path=path, args=(Name(name=source),)) if path == _WAIT and not self._starts(source):
                self.findings.waits += 1
                self.env[statement.name] = self.low(Name(source))
                return
            case Call() as call:
                node = self.call(call, statement.name, said)
            case Dotted(path=path) if path.startswith("self."):
                node = self.constant(path, said)
            case Name() | int() | float() | bool() as value:
                self.env[statement.name] = self.low(value)
                return
            case _:
                self.fail("no operator, result or constant")
        if isinstance(node, fx.Node):
            self.finish(node, statement, said)
        else:
            self.env[statement.name] = node

    def _is_state(self, value: Value) -> bool:
        """Whether ``value`` is the state that a generator had: torch prints a symbol for its size, which is fixed."""
        match value:
            case Item(value=Name(name=source), index=0):
                node = self.env.get(source)
                return isinstance(node, fx.Node) and node.target is compat_operators.replays()[_AND_SAVE]
        return False

    def _new_name(self, name: str) -> None:
        if name in self.env:
            self.fail(f"{name} is there twice: one line of the file is doubled, or two graphs are mixed")

    def _placed(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, with the line in front of its error."""
        try:
            return function(*args)
        except DumpError as error:
            self.fail(str(error))

    def _number(self, path: str, args: Sequence[Value]) -> Any:
        return self._placed(names.number, path, [self.low(arg) for arg in args])

    def pick(self, source: str, index: int) -> Any:
        several = self.low(Name(source))
        results = several.meta["val"] if isinstance(several, fx.Node) else None
        if not isinstance(results, tuple | list) or not -len(results) <= index < len(results):
            self.fail(f"{source} has no result {index}")
        if results[index] is None and isinstance(several.target, Unknown):
            return _Unsaid(name_of(several.target))
        if not isinstance(results[index], torch.Tensor | tuple):
            return results[index]
        node = self.graph.call_function(operator.getitem, (several, index))
        node.meta["val"] = results[index]
        return node

    def constant(self, path: str, said: TensorType | None) -> fx.Node:
        """A tensor of the graph, whose value is not in the file; one without an annotation is a number in float32."""
        name = "".join(letter if letter.isalnum() else "_" for letter in path.removeprefix("self."))
        value = self.tensor(said or TensorType("f32", (), ()))
        self.root.register_buffer(
            name, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        )
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node

    def call(self, call: Call, name: str, said: TensorType | None) -> Any:
        if call.path.startswith(HIGHER_ORDER) and call.path.removeprefix(HIGHER_ORDER) in _REPLAYS:
            return self._replayed(call)
        target = names.operator_of(call.path)
        if target is None:
            return self._unknown(call, name, said)
        args, kwargs = self.low(tuple(call.args)), self.low(dict(call.kwargs))
        if call.path == _LOOK_UP and len(args) == 2:
            target, args = torch.ops.aten.select_copy.int, (args[0], 0, args[1])
        fakes, named = (fx.map_arg(each, lambda node: node.meta["val"]) for each in (args, kwargs))
        if target.namespace == "aten" and target._opname in _SIZES:
            return self._derived(target, fakes, named)
        self._placed(names.check_results, target, fakes, named)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._derived(target, fakes, named, said)
        return node

    def _unknown(self, call: Call, name: str, said: TensorType | None) -> Any:
        """A call of an operator that no table has: its results are what the file says of them."""
        target = unknown_of(call)
        if target is None:
            self.fail(f"unknown operator {call.path[:80]!r}: torch {torch.__version__} has none of this name")
        self.findings.unknown[name_of(target)] += 1
        args, kwargs = (self.low(without_operators(each)) for each in (tuple(call.args), dict(call.kwargs)))
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._declared(name, said)
        return _Unsaid(name_of(target)) if node.meta["val"] is None else node

    def _declared(self, name: str, said: TensorType | None) -> Any:
        """A tensor as ``said``; else the results that are picked, None for one of which nothing is said."""
        if said is not None:
            return self.tensor(said)
        picked = self.picks.get(name, {})
        if not all(0 <= index < names.MOST_RESULTS for index in picked):
            self.fail(f"{name} has more than {names.MOST_RESULTS} results")
        parts = {index: parsed(each.annotation, self.sizes, self.line) for index, each in picked.items()}
        results = [parts.get(index) for index in range(max(parts, default=-1) + 1)]
        values = [each.value if isinstance(each, Number) else each and self.tensor(each) for each in results]
        return tuple(values) or None

    def _replayed(self, call: Call) -> Any:
        """A random operator whose generator's state is kept, or that runs again with one."""
        kind, args, kwargs = call.path.removeprefix(HIGHER_ORDER), list(call.args), dict(call.kwargs)
        state = kwargs.pop("rng_state", None) if kind == _GRAPH_SAFE else args.pop(0) if kind == _WITH_STATE else None
        inner = args.pop(0) if args else None
        path = inner.path if isinstance(inner, Dotted) else ""
        target = names.operator_of(path)
        if target is None:
            self.fail(f"{call.path} without an operator that roamc knows")
        if kind == _GRAPH_SAFE and isinstance(state, Name) and state.name.startswith("fwd"):
            return self.call(Call(path, tuple(args), kwargs), "", None)
        lowered, named = self.low(tuple(args)), self.low(kwargs)
        value = self._derived(target, *(fx.map_arg(each, lambda node: node.meta["val"]) for each in (lowered, named)))
        replays = compat_operators.replays()
        if state is not None:
            node = self.graph.call_function(replays[_WITH_STATE], (self.low(state), target, *lowered), named)
            node.meta["val"] = value
            return node
        node = self.graph.call_function(replays[_AND_SAVE], (target, *lowered), named)
        with self.mode:
            node.meta["val"] = torch.empty(state_bytes(self.moved or self.own), dtype=torch.uint8), value
        return node

    def _starts(self, source: str) -> bool:
        """Whether a value is what a collective of the graph has started."""
        node = self.env.get(source)
        if isinstance(node, fx.Node) and node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return isinstance(node, fx.Node) and not is_wait(node) and ops.rule(node.target).collective

    def _derived(self, target: OpOverload, args: Any, kwargs: Any, said: TensorType | None = None) -> Any:
        """The result by torch, or as ``said`` where its size depends on data, or torch has no code for it here."""
        try:
            with self.mode, torch.no_grad(), quiet_meta():
                return target(*args, **kwargs)
        except Exception as error:  # whatever a kernel on fake tensors raises
            if said is not None and (isinstance(error, DynamicShapeError) or target.namespace != "aten"):
                return self.tensor(said)
            reason = str(error).partition("\n")[0][:200]
            self.fail(f"{target} refuses its arguments: {reason or type(error).__name__}")

    def low(self, value: Value) -> Any:
        """What a value of the text is in the graph."""
        match value:
            case Name(name=name):
                if name not in self.env:
                    self.fail(f"{name} was never made: lines are missing in front{nearest(name, self.env, 0.9)}")
                if isinstance(self.env[name], _Unsaid):
                    self.fail(f"the file does not say which shape {name} has, a result of {self.env[name].operator}")
                return self.env[name]
            case Dotted(path=path):
                if path not in names.CONSTANTS:
                    self.fail(f"unknown constant {path[:80]!r}")
                return names.CONSTANTS[path]
            case Call(path="device", args=args, kwargs=kwargs) | Call(path="torch.device", args=args, kwargs=kwargs):
                return self._device(*map(self.low, args), **{key: self.low(each) for key, each in kwargs.items()})
            case Call(path="complex", args=(int() | float() as real, int() | float() as imaginary)):
                return complex(real, imaginary)
            case Call(path=path, args=args, kwargs=kwargs) if path in names.NUMBERS and not kwargs:
                return self._number(path, args)
            case list():
                return [self.low(each) for each in value]
            case tuple():
                return tuple(self.low(each) for each in value)
            case dict():
                return {key: self.low(each) for key, each in value.items()}
            case Call() | Item():
                self.fail("a call within a call")
        return value

    def _device(self, type: object = "cpu", index: object = None) -> torch.device:
        if self.moved is not None:
            return self.moved
        kind = type if isinstance(type, str) and type in ("cpu", "cuda", "meta") else "cpu"
        if isinstance(type, str) and type != kind:
            self.findings.foreign[printable(type[:20])] = None
        number = index if isinstance(index, int) and 0 <= index < 1024 else 0
        return torch.device(kind, number) if kind == "cuda" else torch.device(kind)

    def finish(self, node: fx.Node, statement: Statement, said: TensorType | None) -> None:
        if statement.name:
            node.name = statement.name
            self.env[statement.name] = node
        _note_origin(node, statement.origin)
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, tuple | list | None):
                self.env[statement.name] = value
                self.graph.erase_node(node)
            return
        if said is not None:
            node.meta["val"] = self._compared(node.name, value, said)

    def _compared(self, name: str, value: torch.Tensor, said: TensorType) -> torch.Tensor:
        """``value``, or the tensor that the file says where the two differ in anything it says."""
        self.findings.compared += 1
        dtype = names.DTYPES.get(said.dtype)
        device = said.device and self._device(*_parts(said.device))
        spans = zip(value.shape, value.stride(), said.stride or value.stride(), strict=False)
        same = (
            value.dtype == dtype
            and tuple(value.shape) == said.shape
            and all(size <= 1 or have == want for size, have, want in spans)
            and (device is None or value.device == device)
        )
        self.findings.devices |= device is not None
        if same:
            return value
        here = f"{value.dtype} {tuple(value.shape)} strides {value.stride()} on {value.device}"
        there = f"{said.dtype}{list(said.shape)}" + (f" strides {said.stride}" if said.stride else "")
        self.findings.differences.append(f"{name} is {there} in the file, {here} by torch {torch.__version__}")
        return self.tensor(said)

    def tensor(self, said: TensorType) -> torch.Tensor:
        dtype = names.DTYPES.get(said.dtype)
        if dtype is None:
            self.fail(f"unknown dtype {said.dtype!r}{nearest(said.dtype, names.DTYPES)}")
        stride = said.stride
        if stride is None:
            self.findings.dense += 1
            stride = tuple(math.prod(max(1, size) for size in said.shape[at + 1 :]) for at in range(len(said.shape)))
        self.findings.devices |= said.device is not None
        device = self._device(*_parts(said.device)) if said.device else self.moved or self.own
        with self.mode:
            return torch.empty_strided(said.shape, stride, dtype=dtype, device=device)


def _parts(device: str) -> tuple[str, int | None]:
    kind, _, index = device.partition(":")
    return kind, int(index) if index else None


def device_of(text: GraphText) -> torch.device:
    """Return the device that a graph names, in annotations of inputs or in calls; the CPU if it names none."""
    kinds = {"cuda" for each in text.inputs if each.annotation and "cuda" in each.annotation}
    for statement in text.statements:
        call = statement.value
        device = call.kwargs.get("device") if isinstance(call, Call) else None
        if isinstance(device, Call) and "cuda" in (*device.args, *device.kwargs.values()):
            kinds.add("cuda")
    return torch.device("cuda", 0) if kinds else torch.device("cpu")


def _note_origin(node: fx.Node, origin: Origin) -> None:
    """Note in ``node.meta`` what the comments say, under the keys that torch has for it."""
    if origin.file:
        place = f'  File "{origin.file}", line {origin.line}, in {origin.function}'
        node.meta["stack_trace"] = f"{place}\n    {origin.code}"
    if origin.policy:
        policy = compat_aot.checkpoint_policy(origin.policy)
        if policy is not None:
            node.meta["recompute"] = policy
    if origin.checkpoint and origin.checkpoint.isdecimal():
        node.meta["ac_graph_id"] = int(origin.checkpoint)
    if origin.annotation:
        try:
            custom = ast.literal_eval(origin.annotation)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return  # a value that has no literal: of no use to a plan
        if isinstance(custom, dict):
            node.meta["custom"] = custom
