"""Where a node comes from in the user's code: the line, and the module of the model that ran there.

``node.meta`` holds both as torch has them: ``"stack_trace"``, and ``"nn_module_stack"``, a dict whose values are (path,
class) of the modules around the node, the innermost last; ``"fwd_nn_module_stack"`` is that of the forward call of a
node of backward.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

from torch import fx

from roamc.errors import printable

ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")
"""Keys of ``node.meta``."""

OUTPUT = "output_of_model"
"""Key in ``node.meta`` of what the model returns; the value is its place there, as ``output['logits']``."""

SUM_OF_GRADIENTS = "is_gradient_acc"
"""Key in a node's ``meta``, set by torch: autograd adds up two gradients of one tensor."""

_CAPTURE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "capture", "")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_ROOT = re.compile(r"[LG]\['(?:(?:self|fn|args'\]\[\d+)'?\](?:\.__closure__\[\d+\]\.cell_contents)?)?")
"""How dynamo begins the path of a module: with the variable that holds it. The name of any other stays."""

_BESIDE = frozenset(("", "_modules", "_parameters", "_buffers", "_orig_mod", "_checkpoint_wrapped_module"))
"""Parts of a path that are no names of the user's modules and tensors."""


def source_line(node: fx.Node) -> str:
    """Return the user's line that made ``node``, as ``file.py:line``; "" if ``node`` has no stack trace.

    It is the innermost line outside torch and roamc's capture; one of torch's where there is no other. "?" stands for
    what cannot be printed in a file's name, since the text goes into comments of programs.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [frame for frame in frames if not frame[0].startswith(_CAPTURE)]
    own = [frame for frame in outside if "/torch/" not in frame[0]] or outside
    return printable(f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}") if own else ""


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module of the model that ran when ``node`` was made, as ``h.0.mlp``.

    For a node of backward it is the module whose forward it belongs to. The model itself has no path: the name of its
    class stands for it. "" if none is known.
    """
    path, kind = innermost(node)
    return path or kind


def innermost(node: fx.Node) -> tuple[str, str]:
    """Return path and class of the module that :func:`module_of` names; the path of the model itself is ""."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return "", ""
    path, kind = tuple(stack.values())[-1][:2]
    return path_of(path), printable(kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)


def path_of(path: str) -> str:
    """Return the path of a module or parameter without what torch's wrappers and dynamo have put into it."""
    parts = re.split(r"[.\[\]'\"]+", _ROOT.sub("", path, count=1) if path[:2] in ("L[", "G[") else path)
    return printable(".".join(part for part in parts if part not in _BESIDE))


def put_module(node: fx.Node, path: str, kind: str) -> None:
    """Note that ``node`` belongs to the module ``path`` of the class ``kind``."""
    node.meta["nn_module_stack"] = {path: (path, kind)}


def put_under(node: fx.Node, path: str) -> None:
    """Let the path of the module of ``node`` begin at the model, not at its module ``path``."""
    for inner, kind in (node.meta.get("nn_module_stack") or {}).values():
        put_module(node, f"{path}.{inner}" if inner else path, kind)


def copy_origin(node: fx.Node, like: fx.Node) -> None:
    """Give ``node`` the line and the module of ``like``; it keeps its own if ``like`` has neither."""
    origin = {key: like.meta[key] for key in ORIGIN if key in like.meta}
    for key in ORIGIN if origin else ():
        node.meta.pop(key, None)
    node.meta |= origin


def trace_back(forward: Iterable[fx.Node], backward: Iterable[fx.Node]) -> None:
    """Give nodes of backward the line and the module of the forward call that they belong to, where they have none.

    torch notes the number of that call as ``"seq_nr"`` of both. Operators behind it that have no gradient have the
    number as well: the first is the call's own. A sum of gradients belongs to no call.
    """
    calls: dict[int, fx.Node] = {}
    for node in forward:
        if "seq_nr" in node.meta and any(key in node.meta for key in ORIGIN):
            calls.setdefault(node.meta["seq_nr"], node)
    for node in backward:
        call = calls.get(node.meta.get("seq_nr", -1))
        if call is not None and not node.meta.get(SUM_OF_GRADIENTS):
            node.meta |= {key: call.meta[key] for key in ORIGIN if key in call.meta and not node.meta.get(key)}


def folded(paths: Iterable[str]) -> Callable[[str], str]:
    """Return a function that folds layers: ``h.*.mlp`` for ``h.0.mlp``.

    A number becomes ``*`` if there are modules inside of what it counts: the parts of a plain ``nn.Sequential`` stay.

    Args:
        paths: all paths of the model.
    """
    inner = {path[: at.start()] for path in set(paths) for at in re.finditer(r"\.", path)}

    def fold(path: str) -> str:
        parts = path.split(".")
        layers = (part.isdecimal() and ".".join(parts[: at + 1]) in inner for at, part in enumerate(parts))
        return ".".join("*" if layer else part for layer, part in zip(layers, parts, strict=True))

    return fold
