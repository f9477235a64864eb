"""Random modules that write in place: to views of inputs, activations and buffers, nested and overlapping.

The lines of ``forward`` are drawn as source text, so that torch.compile traces them like a user's module and a failing
model prints as code. A line is kept only if eager can train the lines so far: where autograd refuses a write, or
backward needs what was overwritten, another line is drawn. Which lines those are may change with torch's version.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.random_models import Example, generator_kept

ROWS, COLUMNS = (8, 12, 64, 128, 256), (8, 16, 64, 96, 256)
BUFFERS = ("b0", "b1", "b2")
FEWEST_LINES, MOST_LINES = 6, 15
TRIES = 8
"""Lines of one kind that are drawn until eager can train one."""
LARGEST = 1e3
"""No element of a model is larger, so that nothing overflows within a few steps."""

# In the lines, {v} is any tensor, {o} and {p} are tensors of its shape, {e} is an operand from LIKE, {i} and {j} are
# indices into the first and second dimension, {half} is half the first size, {ones} is (1, ...) behind it.
VIEWS = (
    *("{v}[1:-1]", "{v}[1::2]", "{v}[::2]", "{v}[{i}]", "{v}[{i}:]", "{v}.unbind(0)[{i}]", "{v}.detach()"),
    *("{v}[:, 1:]", "{v}[:, ::2]", "{v}[:, ::3]", "{v}[:, {j}]", "{v}[..., ::2]", "{v}[2:-1, 1:-2:2]"),
    *("{v}.diagonal()", "{v}.transpose(0, 1)", "{v}.mT", "{v}.unsqueeze(1)", "{v}.movedim(0, -1)"),
    *("{v}.unflatten(-1, (2, -1))", "{v}.unflatten(0, (2, -1))", "{v}.narrow(1, 1, 3).narrow(0, 0, {half})"),
    *("{v}.permute(2, 0, 1)", "{v}[:, 1:][::2]", "{v}.t()[1:].diagonal()", "{v}.view(-1)[{i}:]"),
)
PAIRS = ("{v}.chunk(2, 1)", "{v}.chunk(2)", "{v}.split({half})", "{v}.tensor_split(2, -1)", "{v}.hsplit(2)")
"""Views of which there are two."""
LIKE = (
    *("{o}", "{o}", "{o}.clone()", "({o} * {p})", "({o} - {p})", "({o} + 0.5)", "({o} * 2.0)"),
    *("torch.sin({o})", "torch.tanh({o})", "torch.sigmoid({o})", "torch.relu({o})", "torch.cos({o})", "{o}.abs()"),
    *("self.w", "self.b2", "({o} * self.w)", "{o}.mean(-1, keepdim=True)"),
)
"""Operands that have the shape of {v}, or broadcast to it; ".detach()" may stand behind each."""
VALUES = (
    *("torch.sin({o})", "torch.tanh({o})", "{o}.sigmoid()", "-{o}", "{o} * {p}", "{o} + {p}", "{v} * {e}", "{v} - {e}"),
    *("{o}.clone()", "torch.where({o} > 0, {o}, {p})", "{v} * self.w"),
)
LAYERS = (
    *("self.l1({v})", "F.gelu({v})", "F.layer_norm({v}, ({v}.shape[-1],))", "{v} + self.u", "torch.softmax({v}, -1)"),
    *("F.dropout({v}, 0.2, True)", "self.l0({v})"),
)
WRITES = (
    *("{v}.mul_({c})", "{v}.add_({e})", "{v}.sub_({e})", "{v}.copy_({e})", "{v} *= {e}", "{v} += {e}", "{v}.div_(1.7)"),
    *("{v}.relu_()", "{v}.sigmoid_()", "{v}.tanh_()", "{v}.neg_()", "{v}.clamp_(-1.0, 0.8)", "{v}.zero_()"),
    *("{v}.fill_({c})", "{v}.masked_fill_({v} > 0.3, {c})", "{v}.lerp_({e}, 0.1)", "{v}.mul_(0.9).add_({e})"),
    *("{v}.addcmul_({e}, {o}, value=0.3)", "{v}[...] = {e}", "{v}[{half}:] = 0.25", "{v}[{half}:].mul_({c})"),
    *("{v}[{half}:] = torch.sin({v}[{half}:])", "{v}[:, 1:] += {v}[:, :-1]", "{v}[1:] -= {v}[:-1]"),
    *("{v}[torch.tensor([1, 0])] = {v}[torch.tensor([0, 2])]", "F.dropout({v}, 0.3, True, inplace=True)"),
    *("{v}.index_put_((torch.tensor([0, 2]),), torch.tensor(0.7))", "F.relu({v}, inplace=True)"),
    *("{v}.index_add_(0, torch.tensor([1, 1]), {o}[:2] * 0.5)", "{v}[:, 1:][::2].add_({c})"),
    *("{v}.scatter_(0, torch.zeros({ones}, dtype=torch.long), 0.1)", "{v}.index_fill_(0, torch.tensor([1]), {c})"),
)
PARAMETERS = (
    *("torch.sin({v} + self.e(torch.arange({rows})))", "torch.cos({v} * self.e(torch.arange({rows}).flip(0) // 2))"),
    *("torch.sin({v} + self.u)\nself.u.detach().mul_(0.9)", "torch.cos({v} - self.w)\nself.w.detach().add_(0.1)"),
    "torch.tanh({v} + self.w).exp()\nself.w.detach()[1:].fill_(0.2)",
)
"""Parameters are read, then written by another name that autograd sees: AOTAutograd writes them after forward."""
CONSTANTS = (0.0, 0.5, -1.5, 2.0)


class Tensors(nn.Module):
    """What the lines work with: two layers, two parameters, three buffers, and an embedding that bounds its norms."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.l0, self.l1 = nn.Linear(columns, columns), nn.Linear(columns, columns)
        self.w, self.u = nn.Parameter(torch.randn(columns) * 0.3), nn.Parameter(torch.randn(rows, columns) * 0.1)
        self.register_buffer("b0", torch.randn(rows, columns))
        self.register_buffer("b1", torch.zeros(rows, columns))
        self.register_buffer("b2", torch.randn(columns))
        self.e = nn.Embedding(rows, columns, max_norm=0.9)


@dataclass(frozen=True)
class Source:
    """A model as text: sizes of its tensors and the code of ``forward``."""

    name: str
    rows: int
    columns: int
    text: str
    adam: bool

    def module(self) -> nn.Module:
        """The module, its tensors drawn anew."""
        return self._kind()(self.rows, self.columns)

    def _kind(self) -> type[nn.Module]:
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.text, self.name, "exec"), scope)
        # Tracebacks and what torch.compile says of a line show the line.
        linecache.cache[self.name] = (len(self.text), None, self.text.splitlines(keepends=True), self.name)
        said = f"rows={self.rows}, columns={self.columns}\n{self.text.rstrip()}"
        return type("InPlace", (Tensors,), {"forward": scope["forward"], "extra_repr": lambda _: said})


class _Draft:
    """Lines so far, and the tensors that they leave under each name."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        large = self.draw.random() < 0.08
        self.rows, self.columns = (512, 512) if large else (self.draw.choice(ROWS), self.draw.choice(COLUMNS))
        self.lines: list[str] = []
        self.values: dict[str, Tensor] = {}
        self.numbers = itertools.count(1)
        self.writes_input = self.draw.random() < 0.3
        self.spots = random.Random(f"parameters {seed}")  # of its own: the other models stay as they are

    def source(self, name: str) -> Source:
        """Some lines, and what is returned of their tensors."""
        for buffer in BUFFERS:
            if self.draw.random() < 0.35:
                self._kept(f"{buffer} = self.{buffer}")
        self._kept("h0 = self.l0(x)")
        kinds = self.draw.choices((self._value, self._layer, self._view, self._write), (15, 8, 25, 60), k=MOST_LINES)
        kinds = kinds[self.draw.randrange(MOST_LINES - FEWEST_LINES + 1) :]
        for _ in range(3 if self.spots.random() < 0.25 else 0):
            kinds.insert(self.spots.randrange(len(kinds) + 1), self._parameter)
        for kind in kinds:
            any(self._kept(kind()) for _ in range(TRIES))
        body = "\n".join([*self.lines, self._return()])
        text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in body.splitlines())
        return Source(name, self.rows, self.columns, text, adam=self.draw.random() < 0.5)

    def _kept(self, line: str) -> bool:
        """Take the line over if eager can train what there is then."""
        try:
            self.values = values_after([*self.lines, line], self.rows, self.columns)
        except (RuntimeError, IndexError, ValueError):
            return False
        self.lines.append(line)
        return True

    def _value(self) -> str:
        return f"h{next(self.numbers)} = {self._filled(self.draw.choice(VALUES), self._name())}"

    def _layer(self, lines: Sequence[str] = LAYERS) -> str:
        whole = [name for name, value in self.values.items() if value.shape == (self.rows, self.columns)]
        return f"h{next(self.numbers)} = {self._filled(self.draw.choice(lines), self.draw.choice(whole))}"

    def _parameter(self) -> str:
        return self._layer(PARAMETERS)

    def _view(self) -> str:
        if self.draw.random() < 0.2:
            two = self._filled(self.draw.choice(PAIRS), self._name())
            return f"v{next(self.numbers)}, v{next(self.numbers)} = {two}"
        return f"v{next(self.numbers)} = {self._filled(self.draw.choice(VIEWS), self._name())}"

    def _write(self) -> str:
        name = self._name(written=True)
        # An input or a buffer must not get a gradient: a line that gives it one would be refused.
        detached = not self.values[name].requires_grad and self.draw.random() < 0.8
        line = self._filled(self.draw.choice(WRITES), name, ".detach()" if detached else "")
        return f"with torch.no_grad():\n    {line}" if self.draw.random() < 0.12 else line

    def _name(self, written: bool = False) -> str:
        """A tensor, most often one with a gradient, and one of the latest."""
        names = [name for name in self.values if name != "x" or self.writes_input or not written]
        if self.draw.random() < 0.6:
            names = [name for name in names if self.values[name].requires_grad] or names
        return self.draw.choice(names[-5:] if self.draw.random() < 0.6 else names)

    def _filled(self, line: str, name: str, detached: str = "") -> str:
        """The line with names of tensors and sizes; ``detached`` is put behind operands."""
        value = self.values[name]
        like = [other for other, tensor in self.values.items() if tensor.shape == value.shape]
        o, p = self.draw.choice(like), self.draw.choice(like)
        first, second, *_ = (*value.shape, 1, 1)
        return line.format(
            v=name,
            o=o + detached,
            p=p + detached,
            e=self.draw.choice(LIKE).format(o=o, p=p) + detached,
            c=self.draw.choice(CONSTANTS),
            i=self.draw.randrange(first),
            j=self.draw.randrange(second),
            half=max(first // 2, 1),
            rows=self.rows,
            ones=", ".join(["1", *map(str, value.shape[1:])]),
        )

    def _return(self) -> str:
        """A loss, tensors, or tensors beside a buffer, an input or a view of one."""
        trained = [name for name, value in self.values.items() if value.requires_grad]
        held = {self.values[name].untyped_storage().data_ptr() for name in ("x", *BUFFERS) if name in self.values}
        views = [name for name, value in self.values.items() if value.untyped_storage().data_ptr() in held]
        names = self.draw.sample(trained, min(len(trained), self.draw.randrange(1, 6)))
        form = self.draw.choice(("loss", "loss", "loss", "tensors", "beside"))
        if form == "loss":
            return "return " + " + ".join(f"{name}.square().mean()" for name in names)
        if form == "beside":
            names += self.draw.sample(views, 1)
        return f"return {', '.join(names)}," if len(names) == 1 else f"return {', '.join(names)}"


def values_after(lines: list[str], rows: int, columns: int) -> dict[str, Tensor]:
    """The tensors by their names after the lines; raises where eager cannot run or train these lines.

    Raises:
        RuntimeError: an operation, or the backward of all tensors together, is refused.
        IndexError: a view of what is too small for it.
        ValueError: an empty tensor, elements that are too large, or a gradient that outlives the step.
    """
    torch.manual_seed(0)
    model, x = Tensors(rows, columns), torch.randn(rows, columns)
    return values_of(lines, {"self": model, "x": x, "torch": torch, "F": F})


def values_of(lines: list[str], scope: dict[str, Any]) -> dict[str, Tensor]:
    """The same where the lines run in ``scope``, with the input ``x`` and, as ``self``, a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(lines), scope)
        values = {name: value for name, value in scope.items() if isinstance(value, Tensor)}
        losses = [value.float().square().mean() for value in values.values() if value.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    held = [scope[name] for name in ("x",) if name in scope]
    if any(tensor.requires_grad for tensor in (*held, *(scope["self"].buffers() if "self" in scope else ()))):
        raise ValueError("an input or a buffer would have a gradient, of which the next step knows nothing")
    floats = [value for value in values.values() if value.is_floating_point()]
    if any(not value.numel() or not value.abs().max() < LARGEST for value in floats):
        raise ValueError("an empty tensor, or one with elements too large")
    return values


@functools.lru_cache(maxsize=8)
def source(seed: int) -> Source:
    """The text of the model of a number."""
    with generator_kept():
        return _Draft(seed).source(f"<in-place model {seed}>")


def example(seed: int) -> Example:
    """The model of a number: the same one in every process with one version of torch."""
    drawn = source(seed)

    def make() -> nn.Module:
        with generator_kept():
            torch.manual_seed(seed)
            return drawn.module()

    with generator_kept():
        torch.manual_seed(seed)
        batches = [(torch.randn(drawn.rows, drawn.columns),) for _ in range(2)]
    return Example(seed, make, batches, drawn.adam)
