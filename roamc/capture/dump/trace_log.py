"""What a ``TORCH_TRACE`` log has of each graph: its text, which inputs are parameters, their names and storages.

An entry is a line with a header in JSON, ``V1122 15:24:01.361000 PID FILE:LINE] {...}``, and lines of its payload, each
after a tab. Entries of one graph have the same ``frame_id`` and ``frame_compile_id``; the last ``attempt`` counts.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roamc.capture.dump.prefixes import TODAY
from roamc.errors import DumpError, printable

MOST_BYTES = 1 << 28
"""Most bytes of a log, when it is unpacked."""

_HEAD = re.compile(rf"^{TODAY}(\{{.*)$")
_STATIC = re.compile(r"static_input_indices=\[([\d,\s]*)\]")
_DYNAMO_INPUT = re.compile(r"\b(\w+): \"[^\"]*\"")

GRAPHS = ("aot_joint_graph", "aot_forward_graph", "aot_backward_graph", "aot_inference_graph", "dynamo_output_graph")
"""Keys of the entries whose payloads are graphs."""

_BREAK = re.compile(r"Graph break in user code at (?:.{0,1000}/)?([^/\n]{1,200}:\d{1,9})")

META = re.compile(r"^aot_\w+_fw_metadata$")
"""Names of the artifacts that say which inputs are parameters or buffers."""


@dataclass
class Piece:
    """What a log has of one graph of torch.compile.

    Attributes:
        frame: its number among the functions that were compiled, and among the compilations of one: "0/0".
        texts: key of :data:`GRAPHS` to (the text, the number of its first line in the log).
        static: positions of inputs that are parameters or buffers; None if the log does not say.
        tensors: descriptions of the inputs, in the sequence in which dynamo met them.
        sources: number of a tensor to the expression by which the user reaches it.
        decomposed: whether Inductor compiled it: operators are then no longer those that eager runs.
        function: file, name and line of the user's function that it is of, behind a graph break too; "" if not known.
        breaks: the user's lines at which dynamo broke graphs, anywhere in the log.
    """

    frame: str
    texts: dict[str, tuple[str, int]] = field(default_factory=dict)
    static: tuple[int, ...] | None = None
    tensors: list[Mapping[str, Any]] = field(default_factory=list)
    sources: dict[int, str] = field(default_factory=dict)
    decomposed: bool = False
    function: str = ""
    breaks: tuple[str, ...] = ()

    @property
    def has_graph(self) -> bool:
        """Whether the log has a graph of AOTAutograd for it."""
        return bool(self.texts.keys() - {"dynamo_output_graph"})

    @property
    def dynamo(self) -> str:
        """The text of dynamo's graph; "" if the log has none."""
        return self.texts.get("dynamo_output_graph", ("", 0))[0]

    def inputs(self) -> tuple[tuple[str, int | None], ...]:
        """Return, for each input, the expression by which the user reaches it, and the number of its storage.

        They are found by the names of dynamo's inputs, which it makes from these expressions; "" and None where that
        fails.
        """
        by_name = {_plain(self.sources.get(each["id"], "")): each for each in self.tensors}
        signature = self.dynamo.partition("def forward(")[2].partition("):")[0]
        described = [by_name.get(_plain(name)) for name in _DYNAMO_INPUT.findall(signature)]
        return tuple(
            ("", None) if each is None else (self.sources.get(each["id"], ""), each["storage"]) for each in described
        )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def is_log(text: str) -> bool:
    """Whether a text begins as a log of TORCH_TRACE does."""
    return any(_HEAD.match(line) for line in text.split("\n", 20)[:20])


def read(content: str, path: Path) -> tuple[Piece, ...]:
    """Return the graphs of a log, in the sequence in which they were compiled; ``path`` is for messages.

    Raises:
        DumpError: an entry of the log was changed, or it has no graph.
    """
    pieces: dict[str, Piece] = {}
    earlier: list[Piece] = []
    functions: dict[tuple[str, str], list[int]] = {}
    breaks: dict[str, None] = {}
    for line, head, payload in _entries(content.split("\n"), path):
        if said := _BREAK.match(payload):
            breaks[printable(said[1])] = None
        if isinstance(head.get("frame_id"), int) and isinstance(head.get("frame_compile_id"), int):
            frame = f"{head['frame_id']}/{head['frame_compile_id']}"
            piece = pieces.setdefault(frame, Piece(frame))
            if "dynamo_start" in head:
                if piece.has_graph and not head.get("attempt"):  # dynamo was reset, and counts from 0 again
                    number = sum(other.frame.startswith(f"{frame}.") for other in earlier)
                    earlier.append(replace(piece, frame=f"{frame}.{number}"))
                pieces[frame] = Piece(frame, function=_function(head["dynamo_start"], functions))
            else:
                _note(piece, line, head, payload)
    every = (*earlier, *pieces.values())
    found_pieces = tuple(replace(piece, breaks=tuple(breaks)) for piece in every if piece.has_graph)
    if not found_pieces:
        which = "only dynamo's graphs, which have no backward" if pieces else "no graph"
        raise DumpError(
            f"{path}: the log has {which}: run with a backend that goes through AOTAutograd, such as "
            'torch.compile(model, backend="aot_eager"), and take a step'
        )
    return found_pieces


_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")
"""Name that dynamo gives to what stands behind a graph break."""


def _function(start: Any, functions: dict[tuple[str, str], list[int]]) -> str:
    """The function that is compiled; ``functions`` has the lines of those so far, by file and name."""
    stack = start.get("stack") if isinstance(start, dict) else None
    frame = stack[-1] if isinstance(stack, list) and stack else None
    if not isinstance(frame, dict) or not isinstance(frame.get("line"), int):
        return ""
    file, name, line = str(frame.get("filename")), str(frame.get("name")), frame["line"]
    if resumed := _RESUMED.fullmatch(name):
        name = resumed[1]
        line = max((each for each in functions.get((file, name), ()) if each <= line), default=line)
    functions.setdefault((file, name), []).append(line)
    return f"{file}:{name}:{line}"


def _note(piece: Piece, line: int, head: Mapping[str, Any], payload: str) -> None:
    for key in GRAPHS:
        if key in head and payload:
            piece.texts[key] = payload, line + 1
    if "inductor_post_grad_graph" in head or "inductor_output_code" in head:
        piece.decomposed = True
    artifact = head.get("artifact")
    if isinstance(artifact, dict) and META.match(str(artifact.get("name"))) and (said := _STATIC.search(payload)):
        piece.static = tuple(int(each) for each in said[1].split(",") if 0 < len(each.strip()) < 10)
    tensor, source = head.get("describe_tensor"), head.get("describe_source")
    if isinstance(tensor, dict) and isinstance(tensor.get("id"), int) and isinstance(tensor.get("storage"), int):
        piece.tensors.append(tensor)
    if isinstance(source, dict) and isinstance(source.get("id"), int):
        piece.sources[source["id"]] = str(source.get("source"))


def _entries(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any], str]]:
    """(number of its line, header, payload) of every entry."""
    head: Mapping[str, Any] | None = None
    begun, payload = 0, []
    for number, line in enumerate(lines, 1):
        if line.startswith("\t"):
            payload.append(line[1:])
        elif match := _HEAD.match(line):
            if head is not None:
                yield begun, head, "\n".join(payload)
            head, begun, payload = _json(match[1], path, number), number, []
    if head is not None:
        yield begun, head, "\n".join(payload)


def _json(text: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DumpError(f"{path}:{number}: an entry's header is no JSON: the log was cut or changed") from None
    return value if isinstance(value, dict) else {}


def text_of(path: Path) -> str:
    """Return a file's text; unpacked, if it was packed by gzip.

    Raises:
        DumpError: it cannot be read, is no text in UTF-8, or has more than 256 MiB.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DumpError(f"{path}: cannot be read: {error}") from None
    if len(data) > MOST_BYTES:
        raise DumpError(f"{path}: more than {MOST_BYTES >> 20} MiB of text: give the log of one run")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DumpError(f"{path}: a text in UTF-16: save it as UTF-8")
    if b"\0" in data[:4096]:
        raise DumpError(f"{path}: no text. roamc reads logs of TORCH_TRACE and graphs that torch has printed")
    return data.decode("utf-8-sig", errors="replace")
