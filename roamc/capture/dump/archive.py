"""``.pt2``, torch.export's archive of a forward, as plain data. No torch, no pickle; weights are not opened.

Two members are read, both JSON: the program, and the index that says in which file each weight lies. Weights in one
file at one place are tied. Archives of torch 2.0 to 2.5 have the program alone.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from roamc.capture.dump.text import MOST_STATEMENTS, Dotted, Name, Value
from roamc.errors import DumpError, nearest

MOST_BYTES = 1 << 25
"""Most bytes of a member that is read."""

MOST_MEMBERS = 100_000

MOST_NESTING = 8
"""Most graphs within one another."""

SCHEMA = 8
"""The newest major version of the program's form that can be read."""

_PROGRAM = re.compile(r"^(?P<root>(?:[^/]+/)?)models/(?P<name>[^/]+)\.json$")
_OLD_PROGRAM = re.compile(r"^(?P<root>(?:[^/]+/)?)serialized_(?P<name>exported_program)\.json$")
_INDICES = ("data/weights/{}_weights_config.json", "data/constants/{}_constants_config.json")

DTYPES: Mapping[int, str] = {
    **{1: "torch.uint8", 2: "torch.int8", 3: "torch.int16", 4: "torch.int32", 5: "torch.int64", 6: "torch.float16"},
    **{7: "torch.float32", 8: "torch.float64", 9: "torch.complex32", 10: "torch.complex64", 11: "torch.complex128"},
    **{12: "torch.bool", 13: "torch.bfloat16", 28: "torch.uint16", 29: "torch.float8_e4m3fn"},
    **{30: "torch.float8_e5m2", 31: "torch.float8_e4m3fnuz", 32: "torch.float8_e5m2fnuz", 34: "torch.uint32"},
    **{35: "torch.uint64"},
}
_FORMATS = {1: "torch.contiguous_format", 2: "torch.channels_last", 3: "torch.channels_last_3d"}
_FORMATS |= {4: "torch.preserve_format"}
_LAYOUTS = {1: "torch.sparse_coo", 7: "torch.strided"}

DEVICE = Dotted("device")
"""Stands for every device that is an argument: that of the step."""

_EVALUATED = {"torch.ops.aten.dropout.default": "train", "torch.ops.aten.batch_norm.default": "training"}
"""Operators that do something else in training, and the argument that says so."""


@dataclass(frozen=True)
class Geometry:
    """A tensor: its dtype as torch writes it, and sizes that are numbers or expressions of symbols."""

    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    offset: int | str
    requires_grad: bool


@dataclass(frozen=True)
class State:
    """A parameter, a buffer or a constant.

    Attributes:
        path: as the user reaches it, such as ``blocks.0.weight``.
        name: in the graph.
        geometry: of the tensor.
        kind: "parameter", "buffer" or "constant".
        persistent: whether a buffer belongs to the model's state.
        storage: what names its memory; two with one name share it. "" where the file does not say.
    """

    path: str
    name: str
    geometry: Geometry
    kind: str
    persistent: bool
    storage: str


@dataclass(frozen=True)
class Operator:
    """One call.

    Attributes:
        target: path of what is called, such as ``torch.ops.aten.mm.default``.
        args: constants, lists, :class:`Name`, :class:`Dotted` and :class:`Graph`.
        kwargs: the same by keyword.
        results: names of the results, in lists as they are returned; None for what nobody reads.
        trace: lines of the user's code, as Python prints them.
        module: path and class of the module that calls it.
    """

    target: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    results: Value
    trace: str
    module: tuple[str, str]


@dataclass(frozen=True)
class Graph:
    """Operators; within a graph, such as for ``torch.no_grad()``, its inputs are arguments of that call."""

    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Program:
    """A forward.

    Attributes:
        path: the file.
        name: of the model in the archive.
        state: parameters, buffers and constants.
        batch: names and geometries of the tensors that the user hands in.
        numbers: names of numbers that the user hands in, to their sizes.
        graph: its results are what the user gets.
        written: (input, value that it has at the end) for each input that the forward writes, but those in place.
        losses: how many of the results are floating-point scalars.
        exported: values of symbols at the export.
        ranges: smallest and largest value of symbols; None for no limit.
        on_cuda: whether a tensor lies on a GPU.
        notes: what the file lacks or has otherwise.
    """

    path: str
    name: str
    state: tuple[State, ...]
    batch: tuple[tuple[str, Geometry], ...]
    numbers: Mapping[str, int | str]
    graph: Graph
    written: tuple[tuple[str, str], ...]
    losses: int
    exported: Mapping[str, int]
    ranges: Mapping[str, tuple[int | None, int | None]]
    on_cuda: bool
    notes: tuple[str, ...]

    def described(self, symbol: str) -> str:
        """Return a symbol with the first place where an input has it, such as ``s77 (dimension 0 of x)``."""
        sizes = ((name, at, str(size)) for name, each in self.batch for at, size in enumerate(each.shape))
        alone = re.compile(rf"{re.escape(symbol)}|Symbol\('{re.escape(symbol)}'[^()]*\)")
        place = next((f" (dimension {at} of {name})" for name, at, size in sizes if alone.fullmatch(size)), "")
        return f"{symbol}{place}"


def read(path: str, piece: str | None = None) -> Program:
    """Return the forward in an archive.

    Args:
        path: of the archive.
        piece: name of a model in it; None for the only one.

    Raises:
        DumpError: it has none that can be read, or several and none is named; says what to do.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _of(archive, path, piece)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise DumpError(f"{path}: no archive that can be read: {reason}. Save it again by torch.export.save") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, DumpError):
            raise
        reason = f"{type(error).__name__} {str(error)[:80]}".replace("\n", " ")
        raise DumpError(f"{path}: the program is not as torch.export writes it: {reason}") from None


def _of(archive: zipfile.ZipFile, path: str, piece: str | None) -> Program:
    names = [member.filename for member in archive.infolist()]
    if len(names) > MOST_MEMBERS:
        raise DumpError(f"{path}: more than {MOST_MEMBERS} members in an archive")
    outside = next((name for name in names if name.startswith("/") or ".." in re.split(r"[/\\]", name)), None)
    if outside is not None or len(set(names)) < len(names):
        what = "two members with one name" if outside is None else f"a member that would lie outside: {outside[:80]!r}"
        raise DumpError(f"{path}: {what}. torch.export.save writes no such archive")
    programs = {match["name"]: match for name in names if (match := _PROGRAM.match(name))} or {
        match["name"]: match for name in names if (match := _OLD_PROGRAM.match(name))
    }
    if not programs:
        saved = any(name.endswith("data.pkl") for name in names)
        what = "weights of torch.save, and no model" if saved else "no model of torch.export"
        raise DumpError(f"{path}: {what}. Write one: torch.export.save(torch.export.export(model, batch), 'model.pt2')")
    if piece is None and len(programs) > 1:
        raise DumpError(f"{path}: {len(programs)} models: --piece names one of {', '.join(sorted(programs))}")
    match = programs.get(piece or next(iter(programs)))
    if match is None:
        names = sorted(programs)
        raise DumpError(f"{path}: no model {piece!r}{nearest(str(piece), names)} Models: {', '.join(names)}")
    program = _json(archive, path, match[0])
    index: dict[str, Any] | None = None
    if match.re is _PROGRAM:
        members = (match["root"] + each.format(match["name"]) for each in _INDICES)
        index = {}
        for number, member in enumerate(members):
            if member not in names:
                raise DumpError(f"{path}: {member} is missing, which says what is tied: the archive was changed")
            index |= {key: (number, value) for key, value in _json(archive, path, member)["config"].items()}
    return _Reader(path, match["name"], program, index).program()


def _json(archive: zipfile.ZipFile, path: str, member: str) -> Any:
    info = archive.getinfo(member)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DumpError(f"{path}: {member} is packed in a way that torch does not write")
    with archive.open(info) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise DumpError(f"{path}: {member} has more than {MOST_BYTES >> 20} MB, about 14,000 operators")

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(items := dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return items

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:80] or type(error).__name__
        raise DumpError(f"{path}: {member} is no JSON: {reason}. Save it again by torch.export.save") from None


class _Reader:
    """Reads one program; ``index`` has, for each weight, which index it is from and its entry; None without index."""

    def __init__(self, path: str, name: str, data: Any, index: Mapping[str, Any] | None) -> None:
        self.path, self.name, self.data, self.index = path, name, data, index
        self.whole = data["graph_module"]["graph"]
        self.tensors: Mapping[str, Any] = self.whole["tensor_values"]
        self.exported: dict[str, int] = {}
        self.count = 0
        self.idle: set[str] = set()

    def fail(self, reason: str) -> NoReturn:
        raise DumpError(f"{self.path}: {reason}")

    def program(self) -> Program:
        major = self.data["schema_version"]["major"]
        if not isinstance(major, int) or major > SCHEMA:
            self.fail(
                f"written by a newer torch, in schema {major!r}; roamc reads up to {SCHEMA}: export it by torch 2.14"
            )
        signature = self.data["graph_module"]["signature"]
        written, results = self._results(signature["output_specs"])
        state, batch, numbers = self._inputs(signature["input_specs"])
        graph = self._graph(self.whole, 0)
        values = [self.tensors[each.name] for each in results if isinstance(each, Name) and each.name in self.tensors]
        scalars = [
            not each["sizes"] and DTYPES.get(each["dtype"], "").startswith(("torch.f", "torch.bf")) for each in values
        ]
        return Program(
            self.path,
            self.name,
            state,
            batch,
            numbers,
            Graph(graph.inputs, graph.operators, results),
            written,
            sum(scalars),
            self.exported,
            dict(self._ranges()),
            any(each["device"]["type"] == "cuda" for each in self.tensors.values()),
            tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        if self.index is None:
            yield "an archive of torch 2.5 or older does not say which weights are tied: all of them count"
        if self.idle:
            yield (
                f"exported in eval(): {' and '.join(sorted(self.idle))} as there. For a training step export "
                "model.train()"
            )
        if "TRAINING" not in self.data.get("verifiers", ["TRAINING"]):
            yield (
                "the operators are decomposed: eager's peak is that of these operators; save what torch.export.export "
                "returns, without run_decompositions()"
            )

    def _ranges(self) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
        for symbol, each in self.data["range_constraints"].items():
            limits = [None if each[key] is None else _integer(each[key]) for key in ("min_val", "max_val")]
            if re.fullmatch(r"[su]\d+", symbol):  # and no expression of others
                yield symbol, (limits[0], limits[1])

    def _inputs(
        self, specs: Sequence[Any]
    ) -> tuple[tuple[State, ...], tuple[tuple[str, Geometry], ...], dict[str, int | str]]:
        """Parameters, buffers and constants; tensors that the user hands in; and numbers."""
        state, batch, numbers = [], [], dict[str, int | str]()
        for spec in specs:
            ((kind, said),) = spec.items()
            if kind in ("parameter", "buffer", "tensor_constant"):
                state.append(self._state(kind, said))
            elif kind == "user_input":
                value = self._value(said["arg"])
                if not isinstance(value, Name):
                    continue  # a constant, which the graph has at its place
                if value.name in self.tensors:
                    batch.append((value.name, self._geometry(self.tensors[value.name])))
                else:
                    numbers[value.name] = self._size(self.whole["sym_int_values"][value.name])
            elif kind != "constant_input":
                self.fail(f"an input of the kind {kind[:40]!r}, which roamc does not plan")
        return tuple(state), tuple(batch), numbers

    def _state(self, kind: str, said: Any) -> State:
        path, name = said[f"{kind}_name"], said["arg"]["name"]
        geometry, storage = self._geometry(self.tensors[name]), ""
        if self.index is not None:
            if path not in self.index:
                what = kind.removeprefix("tensor_")
                self.fail(f"the {what} {path[:80]!r} is missing from the archive's index: it was cut or changed")
            number, entry = self.index[path]
            storage = f"{number}/{entry['path_name']}"
            if entry["tensor_meta"] is not None:
                geometry = self._geometry(entry["tensor_meta"])
        return State(
            path,
            name,
            geometry,
            kind.removeprefix("tensor_"),
            kind == "buffer" and bool(said.get("persistent", True)),
            storage,
        )

    def _results(self, specs: Sequence[Any]) -> tuple[tuple[tuple[str, str], ...], tuple[Value, ...]]:
        """(input, value) of each write at the end, and the values that the user gets."""
        written, results = [], []
        inputs = {}
        for spec in self.data["graph_module"]["signature"]["input_specs"]:
            ((kind, said),) = spec.items()
            if f"{kind}_name" in said:
                inputs[said[f"{kind}_name"]] = said["arg"]["name"]
        for spec in specs:
            ((kind, said),) = spec.items()
            match kind:
                case "user_output":
                    results.append(self._value(said["arg"]))
                case "buffer_mutation" | "parameter_mutation":
                    written.append((inputs[said[f"{kind.removesuffix('_mutation')}_name"]], said["arg"]["name"]))
                case "user_input_mutation":
                    written.append((said["user_input_name"], said["arg"]["name"]))
                case "loss_output" | "gradient_to_parameter" | "gradient_to_user_input":
                    self.fail("forward and backward in one; roamc adds backward: save what torch.export.export returns")
                case _:
                    self.fail(f"an output of the kind {kind[:40]!r}, which roamc does not plan")
        return tuple(written), tuple(results)

    def _graph(self, data: Any, depth: int) -> Graph:
        if depth > MOST_NESTING:
            self.fail(f"more than {MOST_NESTING} graphs within one another")
        self.count += len(data["nodes"])
        if self.count > MOST_STATEMENTS:
            self.fail(f"more than {MOST_STATEMENTS} operators")
        inputs = tuple(each.name for each in map(self._value, data["inputs"]) if isinstance(each, Name))
        return Graph(
            inputs,
            tuple(self._operator(each, depth) for each in data["nodes"]),
            tuple(map(self._value, data["outputs"])),
        )

    def _operator(self, node: Any, depth: int) -> Operator:
        target, metadata = _text(node["target"]), node["metadata"]
        args, kwargs = [], {}
        for each in node["inputs"]:
            value = self._value(each["arg"], depth)
            if each.get("kind") == 2:
                kwargs[_text(each["name"])] = value
            else:
                args.append(value)
            if value is False and _EVALUATED.get(target) == each["name"]:
                self.idle.add(f"{target.split('.')[3]}s")
        outputs = [self._value(each) for each in node["outputs"]]
        stack = str(metadata.get("nn_module_stack", "")).rpartition(";")[2].split(",")
        return Operator(
            target,
            tuple(args),
            kwargs,
            outputs[0] if len(outputs) == 1 else outputs or None,
            str(metadata.get("stack_trace", "")),
            (stack[1].partition("@")[0], stack[2]) if len(stack) == 3 else ("", ""),
        )

    def _value(self, argument: Any, depth: int = 0) -> Value:
        """What an argument is."""
        ((kind, value),) = argument.items()
        match kind:
            case "as_none":
                return None
            case "as_tensor":
                return Name(_text(value["name"]))
            case "as_graph":
                return self._graph(value["graph"], depth + 1)
            case "as_optional_tensor" | "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return self._value(value)
            case "as_name":
                return Name(_text(value))
            case "as_tensors":
                return [Name(_text(each["name"])) for each in value]
            case "as_nested_tensors":
                return [[Name(_text(each["name"])) for each in part] for part in value]
            case "as_optional_tensors" | "as_sym_ints" | "as_sym_floats" | "as_sym_bools":
                return [self._value(each) for each in value]
            case "as_scalar_type":
                return Dotted(DTYPES[value])
            case "as_memory_format":
                return Dotted(_FORMATS[value])
            case "as_layout":
                return Dotted(_LAYOUTS[value])
            case "as_device":
                return DEVICE
            case "as_complex":
                return complex(_number(value["real"]), _number(value["imag"]))
            case "as_string" | "as_strings" | "as_int" | "as_bool" | "as_ints" | "as_bools" | "as_int_lists":
                return _constant(value)
            case "as_float" | "as_floats" | "as_float_lists":
                return _number(value)
        self.fail(f"an argument of the kind {kind[:40]!r}, which roamc does not plan")

    def _geometry(self, data: Any) -> Geometry:
        dtype, layout = DTYPES.get(data["dtype"]), data.get("layout", 7)
        if dtype is None or layout != 7:
            self.fail(f"a tensor of a dtype or layout that roamc does not plan: {data['dtype']!r}, {layout!r}")
        shape, stride = (tuple(map(self._size, data[key])) for key in ("sizes", "strides"))
        if len(shape) != len(stride):
            self.fail("a tensor with other numbers of sizes and strides")
        return Geometry(dtype, shape, stride, self._size(data["storage_offset"]), bool(data["requires_grad"]))

    def _size(self, size: Any) -> int | str:
        ((kind, value),) = size.items()
        if kind == "as_int":
            return _integer(value)
        text, hint = _text(value["expr_str"]), value.get("hint")
        if (symbol := re.fullmatch(r"(?:Symbol\(')?([su]\d+)(?:',.*\))?", text)) and isinstance(hint, dict):
            self.exported[symbol[1]] = _integer(hint["as_int"])
        return text


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return value


def _constant(value: Any) -> Any:
    """A text, number or truth value, or a list of them."""
    if isinstance(value, list):
        return [_constant(each) for each in value]
    if not isinstance(value, str | bool | float) and not (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        raise ValueError("a number above 2**63, or none")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or value is not _constant(value):
        raise ValueError("no whole number")
    return value


def _number(value: Any) -> Any:
    """A number with a point; torch writes infinity as a text."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(_constant(value))
