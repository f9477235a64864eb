"""Graphs of a file or folder as plain data: the half of reading that a process with limits does. No torch in here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roamc.capture.dump import prefixes, text, trace_log
from roamc.capture.dump.annotations import SYMBOL
from roamc.capture.dump.recognise import logs_in, printed_in
from roamc.capture.dump.text import GraphText, Input
from roamc.errors import DumpError, printable


@dataclass(frozen=True)
class Dump:
    """One graph of a file, as plain data.

    Attributes:
        path: the file.
        piece: which of its graphs, as ``0/0`` in a log or ``1`` in a text.
        joint: forward and backward in one, or forward of a graph without backward; None for two halves.
        forward: the first half.
        backward: the second.
        static: positions of inputs that are parameters or buffers; None if the file does not say.
        inputs: for each input, the expression by which the user reaches it, and what names its storage.
        dynamo: text of dynamo's graph, which has the writes in place of the model; "" if the file has none.
        function: which function of the user's it is of, "" if the file does not say: graphs of one share its names.
        decomposed: whether its operators are Inductor's, and not those that eager runs.
        notes: what the file lacks or has otherwise.
    """

    path: str
    piece: str
    joint: GraphText | None
    forward: GraphText | None = None
    backward: GraphText | None = None
    static: tuple[int, ...] | None = None
    inputs: tuple[tuple[str, int | None], ...] = ()
    dynamo: str = ""
    function: str = ""
    decomposed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[str, ...] | None:
        """Names of the parameters that get a gradient; None if the file does not say which inputs are parameters."""
        if self.static is None:
            return None
        pairs = enumerate(zip(self.primals, self.last.results[-len(self.primals) :], strict=False))
        gets = (each.name for at, (each, result) in pairs if at in self.static and result.value is not None)
        return tuple(gets) if self.last.has_tangents else ()

    @property
    def frame(self) -> str:
        """What it is a compilation of: a number and, in a log, the function. Of several of one frame, one runs."""
        return f"{self.piece.rpartition(':')[2].partition('/')[0]} {self.function}"

    @property
    def first(self) -> GraphText:
        """The graph that begins with the inputs."""
        graph = self.joint or self.forward
        assert graph is not None
        return graph

    @property
    def last(self) -> GraphText:
        """The graph that ends with the gradients, one for each input that is no tangent."""
        graph = self.joint or self.backward
        assert graph is not None
        return graph

    @property
    def primals(self) -> tuple[Input, ...]:
        """The inputs that are no tangents."""
        return tuple(each for each in self.first.inputs if not each.name.startswith(text.TANGENTS))

    def of_tensors(self) -> Dump:
        """The same without gradients and positions of inputs that are sizes, which are numbers in a graph of fakes."""
        kept = [at for at, each in enumerate(self.primals) if not is_size(each)]
        if len(kept) == len(self.primals):
            return self
        place = {at: position for position, at in enumerate(kept)}
        static = None if self.static is None else tuple(place[at] for at in self.static if at in place)
        inputs = tuple(self.inputs[at] for at in kept if at < len(self.inputs))
        without = replace(self, static=static, inputs=inputs)
        if not self.last.has_tangents:
            return without
        begin = len(self.last.results) - len(self.primals)
        results = (*self.last.results[:begin], *(self.last.results[begin + at] for at in kept))
        last = replace(self.last, results=results)
        return replace(without, joint=last) if self.joint is not None else replace(without, backward=last)

    @property
    def texts(self) -> tuple[GraphText, ...]:
        """The printed graphs that it is made of: one, or two halves."""
        return tuple(each for each in (self.joint, self.forward, self.backward) if each is not None)

    @property
    def symbols(self) -> frozenset[str]:
        """Names of its symbolic sizes."""
        said = [each.annotation for graph in self.texts for each in graph.inputs]
        said += [each.annotation for graph in self.texts for each in graph.statements]
        return frozenset(name for annotation in said for name in SYMBOL.findall(annotation or ""))

    @property
    def statements(self) -> int:
        """Operators in all."""
        return sum(len(each.statements) for each in self.texts)


def read(target: str) -> tuple[Dump, ...]:
    """Return all graphs of a file, or of the logs in a folder, the largest first.

    Raises:
        DumpError: there is none that can be read; says what to do.
    """
    path = Path(target)
    if not path.is_dir():
        return _ranked(of_file(path))
    if not (logs := _of_one_rank(logs_in(path))):
        return _ranked(_of_printed(path))
    dumps, refused = list[Dump](), list[DumpError]()
    for each in logs:
        try:
            dumps += of_file(each)
        except DumpError as error:
            refused.append(error)
    if not dumps:
        raise refused[0]
    if refused:
        note = f"{len(refused)} of {len(logs)} logs cannot be read: {printable(str(refused[0]))}"
        dumps = [replace(dump, notes=(*dump.notes, note)) for dump in dumps]
    if len({dump.piece for dump in dumps}) < len(dumps):
        dumps = [
            replace(dump, piece=f"{printable(Path(dump.path).name).partition('.')[0]}:{dump.piece}") for dump in dumps
        ]
    return _ranked(dumps)


_HALF = re.compile(r"_(?:forward|backward|inference)_[\d.]+$")
"""What Inductor puts behind the name of a graph: which half of it a folder has, and numbers of its own."""


def _of_one_rank(logs: Sequence[Path]) -> Sequence[Path]:
    """The logs of rank 0, where there are logs of several ranks; they differ in what the ranks hold alone."""
    ranks = {each: re.search(r"rank_(\d+)_", each.name) for each in logs}
    first = [each for each, rank in ranks.items() if rank is not None and int(rank[1]) == 0]
    return first or logs


def _ranked(dumps: Sequence[Dump]) -> tuple[Dump, ...]:
    return tuple(sorted(dumps, key=lambda dump: -dump.statements))


def of_file(path: Path) -> list[Dump]:
    """Return the graphs of a file, in their sequence there.

    Raises:
        DumpError: there is none that can be read.
    """
    content = trace_log.text_of(path)
    if not content.strip():
        raise DumpError(f"{path}: the file is empty")
    if trace_log.is_log(content):
        return [of_piece(path, piece) for piece in trace_log.read(content, path)]
    dumps = _of_text(path, text.graphs(prefixes.without_prefixes(content), str(path)))
    names = prefixes.frames(content, [dump.first.line for dump in dumps])
    return [replace(dump, piece=name) for dump, name in zip(dumps, names, strict=True)] if names else dumps


def of_piece(path: Path, piece: trace_log.Piece) -> Dump:
    """Return one graph of the log ``path``.

    Raises:
        DumpError: it was cut off, or is not as torch prints graphs.
    """
    graphs = {key: _only(path, *said) for key, said in piece.texts.items() if key != "dynamo_output_graph"}
    whole = graphs.get("aot_joint_graph") or graphs.get("aot_inference_graph")
    dump = Dump(
        str(path),
        piece.frame,
        whole,
        static=piece.static,
        inputs=piece.inputs(),
        dynamo=piece.dynamo,
        function=piece.function,
        decomposed=piece.decomposed,
        notes=(*((DECOMPOSED,) if piece.decomposed else ()), *_breaks(piece)),
    )
    if whole is not None:
        return dump
    return _in_halves(dump, graphs.get("aot_forward_graph"), graphs.get("aot_backward_graph"))


def _breaks(piece: trace_log.Piece) -> Iterator[str]:
    """A note on what ran in eager between graphs."""
    if piece.breaks:
        more = f" and {len(piece.breaks) - MOST_BREAKS} more" if len(piece.breaks) > MOST_BREAKS else ""
        yield (
            f"torch.compile broke the graph at {', '.join(piece.breaks[:MOST_BREAKS])}{more}: what ran there is in no "
            "log, and its parameters and values are not counted"
        )


MOST_BREAKS = 3
"""Lines that a note names."""

DECOMPOSED = (
    "the graph is of operators that Inductor has decomposed: eager's peak is that of these operators in order, and the "
    'plan\'s may be some percent off; backend="aot_eager" logs the operators that eager runs'
)


INDUCTORS = ("torch.ops.prims.convert_element_type.", "torch.ops.prims.fma.", "torch.ops.prims.inductor_")


def _is_decomposed(graph: GraphText) -> bool:
    """Whether operators of a graph are those that only Inductor's decompositions make; eager has some of ``prims``."""
    calls = (each.value for each in graph.statements)
    return any(isinstance(call, text.Call) and call.path.startswith(INDUCTORS) for call in calls)


def _of_printed(folder: Path) -> list[Dump]:
    """The steps whose halves Inductor has printed, each half into a folder of its own."""
    steps: dict[Path, list[GraphText]] = {}
    for file in printed_in(folder):
        lines = prefixes.without_prefixes(trace_log.text_of(file))
        graphs = steps.setdefault(file.parent.parent / _HALF.sub("", file.parent.name), [])
        graphs += text.graphs(lines, str(file))
    whole = {path: graphs for path, graphs in steps.items() if not all(each.has_tangents for each in graphs)}
    dumps = [replace(dump, piece=path.name) for path, graphs in whole.items() for dump in _of_text(path, graphs)]
    if not dumps:
        raise DumpError(f"{folder}: {len(steps)} backwards without the forward that saves their inputs")
    return dumps


def _only(path: Path, content: str, line: int) -> GraphText:
    return text.graphs(prefixes.without_prefixes(content), str(path), line)[0]


def _of_text(path: Path, graphs: Sequence[GraphText]) -> list[Dump]:
    decomposed = any(map(_is_decomposed, graphs))
    dumps = [*map(_with_roles, _with_their_halves(path, graphs))]
    return [replace(each, decomposed=True, notes=(*each.notes, DECOMPOSED)) for each in dumps] if decomposed else dumps


def _with_their_halves(path: Path, graphs: Sequence[GraphText]) -> list[Dump]:
    whole = [each for each in graphs if each.joint]
    halves = [each for each in graphs if not each.joint]
    if whole:
        return [Dump(str(path), str(number), each) for number, each in enumerate(whole)]
    second = [each for each in halves if each.has_tangents]
    first = [each for each in halves if not each.has_tangents]
    if len(first) == len(second) == 1:
        return [_in_halves(Dump(str(path), "0", None), first[0], second[0])]
    if second:
        raise DumpError(
            f"{path}: {'a' if len(second) == 1 else len(second)} backward without the forward that saves its inputs. "
            "Put both into one file, or log the joint graph: TORCH_LOGS=aot_joint_graph"
        )
    return [Dump(str(path), str(number), each, notes=_saves(each)) for number, each in enumerate(first)]


HELD = ("ParamAOTInput(", "BufferAOTInput(")
"""How comments behind inputs begin that are parameters or buffers."""


def _with_roles(dump: Dump) -> Dump:
    """``dump`` with what the comments say of the inputs of its forward; with a note where they say nothing."""
    static = tuple(position for position, each in enumerate(dump.first.inputs) if each.comment.startswith(HELD))
    if static:
        return replace(dump, static=static)
    note = "the file does not say which inputs are parameters: all of them count as inputs"
    return replace(dump, notes=(note, *dump.notes))


def is_size(each: Input) -> bool:
    """Whether an input is a size, and no tensor."""
    return (each.annotation or "").startswith("Sym(")


def _saves(forward: GraphText) -> tuple[str, ...]:
    """A note on a forward whose backward is not in the file."""
    count = sum(result.comment.startswith("SavedForBackwards") for result in forward.results)
    note = f"forward without its backward, for which it saves {count} values: the peak is that of forward"
    return (note,) if count else ()


HALVES = (
    "the file has forward and backward as a backend has cut them, min-cut in most: a joint graph says more. "
    "TORCH_LOGS=aot_joint_graph prints it"
)


def _in_halves(dump: Dump, forward: GraphText | None, backward: GraphText | None) -> Dump:
    if forward is None or backward is None:
        lacks = "forward" if forward is None else "backward"
        raise DumpError(f"{dump.path}: graph {dump.piece} has no {lacks}: the log ended before it, or was cut off")
    return replace(dump, forward=forward, backward=backward, notes=(*dump.notes, HALVES, *_runs_on(backward)))


def _runs_on(backward: GraphText) -> tuple[str, ...]:
    """A note on checkpoints that backward runs again together: min-cut saves no value that is picked of several."""
    lost = [each.name for each in backward.statements if each.origin.policy == "MUST_SAVE"]
    if not lost:
        return ()
    names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    return (
        f"backward computes {len(lost)} results of checkpoints again that torch has marked to be saved ({names}): "
        "min-cut ignores the mark where an operator has several results, as layer_norm has. Each checkpoint then runs "
        "again together with the next, and the peak is above that of the joint graph, which saves them",
    )
