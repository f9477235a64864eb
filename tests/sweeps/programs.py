"""Random training programs from a number: 20 to 80 operators of torch as the source text of a module and its loss.

A line is drawn from :mod:`tests.sweeps.program_lines` and kept if eager can train the lines so far, so that shapes and
dtypes fit by what eager says of them. What is printed for a number is a whole Python file.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import random
import re
import sys
import textwrap
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweeps import program_lines
from tests.sweeps.in_place_models import CONSTANTS, values_of
from tests.sweeps.random_models import generator_kept
from tests.sweeps.strangers import Stranger, adamw, sgd

FEWEST, MOST = 20, 80
TRIES = 6
"""Lines of one kind that are drawn until eager can train one."""
LARGEST = 1 << 18
"""Elements of one tensor, at most."""
LONGEST = 2048
"""Rows or columns of a matrix, at most: attention and products have their square."""
DRAWS_IN_PLACE = {"train_step": "draws in place inside a torch.utils.checkpoint region"}
"""Way in to what roamc says of a program that it does not take."""
WIDEST = 128
"""Last size, at most, of what a line with parameters reads: some have its square."""
KINDS = {
    **{"POINTWISE": 22, "CUT": 7, "SHAPES": 20, "INDEXED": 8, "PRODUCTS": 12, "NORMS": 6, "STATE": 3, "DROPOUTS": 5},
    **{"CONVOLUTIONS": 6, "ATTENTION": 4, "DTYPES": 5, "FUNCTIONS": 3, "WRITES": 12},
}
"""Tables of lines, and how often each is drawn."""

PRELUDE = '''
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Rounded(torch.autograd.Function):
    """Rounds to quarters; backward does not know."""

    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, g):
        return g


class Kept(torch.autograd.Function):
    """A product that saves an input and a result."""

    @staticmethod
    def forward(ctx, x, y):
        z = x.tanh()
        ctx.save_for_backward(z, y)
        return z * y

    @staticmethod
    def backward(ctx, g):
        z, y = ctx.saved_tensors
        return g * y * (1 - z * z), g * z if ctx.needs_input_grad[1] else None


class Two(torch.autograd.Function):
    """Two results."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * x.cos() - h * x.sin()


class Scaled(torch.autograd.Function):
    """Times a number, written over."""

    @staticmethod
    def forward(ctx, x, c):
        ctx.c = c
        return x.clone().mul_(c)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.c, None
'''.lstrip()


@dataclass(frozen=True)
class Program:
    """A program as text.

    Attributes:
        text: the classes, ``loss(model, x, i, y)`` and ``batch()``.
        fast: whether it is to be run with ``numerics="fast"``.
        adam: AdamW, else SGD with momentum.
    """

    name: str
    text: str
    fast: bool
    adam: bool

    def stranger(self) -> Stranger:
        """The program as what :mod:`tests.sweeps.strangers_compare` judges."""
        scope = self._scope()

        def build() -> nn.Module:
            torch.manual_seed(0)
            model: nn.Module = scope["Program"]()
            return model

        numerics = "fast" if self.fast else "exact"
        optimizer = adamw if self.adam else sgd
        return Stranger(build, scope["batch"], scope["loss"], optimizer, numerics=numerics, limits=DRAWS_IN_PLACE)

    def _scope(self) -> dict[str, Any]:
        # Tracebacks and what torch.compile says of a line show the line; torch.compile reads classes from a module.
        linecache.cache[self.name] = (len(self.text), None, self.text.splitlines(keepends=True), self.name)
        module = types.ModuleType(self.name)
        sys.modules[self.name] = module
        exec(compile(self.text, self.name, "exec"), module.__dict__)
        return module.__dict__


@dataclass
class _Text:
    """Parts of a program so far: what ``__init__`` makes, methods that run again in backward, lines of forward."""

    setup: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def model(self, forward: bool = False) -> str:
        head = "def __init__(self):\n    super().__init__()\n" + _indented(self.setup)
        methods = [head, *self.parts]
        if forward:
            methods.append("def forward(self, x, i):\n" + _indented(self.lines))
        return "class Program(nn.Module):\n" + "\n".join(_indented([method]) for method in methods)


def _longest(value: Tensor) -> int:
    """The most rows or columns of a matrix; 0 of what is none."""
    return max(value.shape) if value.dim() > 1 else 0


def _indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines).rstrip() + "\n", "    ")


class _Draft:
    """Lines so far, and the tensors that eager has under each name after them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"program {seed}")
        self.seed, self.fast = seed, seed % 5 == 4
        self.width = self.draw.choice((8, 16, 32, 48, 64))
        tokens, rows = self.draw.choice((9, 16, 32, 64)), self.draw.choice((3, 4, 8, 16))
        self.size = (rows, tokens, self.width)
        self.text = _Text()
        self.values: dict[str, Tensor] = {}
        self.numbers = itertools.count(1)
        self.open: set[str] | None = None  # names that a part that runs again may read
        self.first = 0  # lines before the part

    def program(self) -> Program:
        """Some lines, what is returned of their tensors, and a loss of that."""
        self._kept("h0 = self.l0(x)", [f"self.l0 = nn.Linear({self.width}, {self.width})"])
        for _ in range(self.draw.randrange(FEWEST, MOST + 1)):
            if self.draw.random() < 0.04:
                self._part()
            else:
                self._any(KINDS)
        self._end()
        batch = f"torch.randn{self.size}, torch.randint(0, 96, {self.size[:2]}), torch.rand({self.size[0]})"
        whole = [PRELUDE, "\n" + self.text.model(forward=True), "\n" + self.loss]
        whole.append(f"\ndef batch():\n    return {batch}\n")
        adam = self.draw.random() < 0.5 and not self.fast  # AdamW makes much of a gradient that is nearly 0
        return Program(f"program_{self.seed}", "\n".join(whole), self.fast, adam)

    def _any(self, kinds: dict[str, int]) -> None:
        """One more line of a kind, if eager can train one of a few."""
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        if kind == "CUT" and self.fast:
            kind = "POINTWISE"
        table = getattr(program_lines, kind)
        any(self._line(kind, self.draw.choice(table)) for _ in range(TRIES))

    def _line(self, kind: str, template: str) -> bool:
        setup, _, line = template.rpartition(" :: ")
        names = self._names()
        if kind == "WRITES":
            names = [name for name in names if name not in ("x", *self._held())]
        if not names:
            return False
        name = self._name(names)
        number, value = next(self.numbers), self.values[name]
        if value.dim() < 1 + ("{v.shape[" in template) or (setup and value.shape[-1] > WIDEST):
            return False
        used = [word for word in self.text.setup if setup and word.partition(" = ")[2] == self._shape(setup, name)]
        if used and self.draw.random() < 0.5:  # the same weights once more
            setup, module = "", self.draw.choice(used).partition(" = ")[0].removeprefix("self.")
        else:
            module = f"m{number}"
        filled = self._filled(line, name, module)
        if kind == "WRITES" and self.draw.random() < 0.1:
            filled = f"with torch.no_grad():\n    {filled}"
        elif kind != "WRITES":
            filled = f"h{number} = {filled}"
        return self._kept(filled, [self._filled(setup, name, module)] if setup else [])

    def _shape(self, setup: str, name: str) -> str:
        """The module that a template makes for a tensor, without its name."""
        return self._filled(setup, name, "").partition(" = ")[2] if "{w}" not in setup else ""

    def _names(self) -> list[str]:
        return [name for name in self.values if self.open is None or name in self.open]

    def _held(self) -> set[str]:
        """Names of tensors that a part that runs again must not write to: those it did not make."""
        if self.open is None:
            return set()
        passed = {self.values[name].untyped_storage().data_ptr() for name in self.given}
        return {name for name in self.open if self.values[name].untyped_storage().data_ptr() in passed}

    def _name(self, names: list[str]) -> str:
        """A tensor, most often one with a gradient, and one of the latest."""
        if self.draw.random() < 0.8:
            names = [name for name in names if self.values[name].requires_grad] or names
        return self.draw.choice(names[-4:] if self.draw.random() < 0.7 else names)

    def _filled(self, line: str, name: str, module: str) -> str:
        """The line with names of tensors and sizes."""
        value = self.values[name]
        alike = [n for n in self._names() if self.values[n].dtype == value.dtype]
        same = [n for n in alike if self.values[n].shape == value.shape] or [name]
        o, p = self.draw.choice(same), self.draw.choice(same)
        d = self.draw.randrange(value.dim()) if value.dim() else 0
        first, *_ = *value.shape, 1
        size = value.shape[d] if value.dim() else 1
        n = value.shape[-1] if value.dim() else 1
        for at in range(value.dim()):
            for index in (at, at - value.dim()):
                line = line.replace(f"{{v.shape[{index}]}}", str(value.shape[at]))
        return line.format(
            v=name,
            o=o,
            p=p,
            e=o,
            q=self.draw.choice(alike or [name]),
            d=d,
            s=size,
            n=n,
            first=first,
            w=self.draw.choice((4, 8, 12, 24, 32, self.width)),
            c=self.draw.choice(CONSTANTS),
            k=self.draw.randrange(max(size, 1)),
            half=max(size // 2, 1),
            i=self.draw.randrange(max(first, 1)),
            j=0,
            m=module,
            ones=", ".join(["1", *map(str, value.shape[1:])]),
        )

    def _kept(self, line: str, setup: list[str], parts: tuple[str, ...] = ()) -> bool:
        """Take the line over if eager can train what there is then."""
        text = _Text([*self.text.setup, *setup], [*self.text.parts, *parts], [*self.text.lines, line])
        try:
            self.values = self._tried(text)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError):
            return False
        if self.open is not None:
            self.open |= self.values.keys() - self.known
        self.text = text
        return True

    def _tried(self, text: _Text) -> dict[str, Tensor]:
        scope: dict[str, Any] = {}
        exec(PRELUDE + text.model(), scope)
        scope["i"] = torch.randint(0, 96, self.size[:2], generator=torch.Generator().manual_seed(1))
        x = torch.randn(self.size, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(0)
        scope |= {"self": scope["Program"](), "x": x}
        values = values_of(text.lines, scope)
        if any(value.numel() > LARGEST or _longest(value) > LONGEST for value in values.values()):
            raise ValueError("a tensor with too many elements")
        return {name: value for name, value in values.items() if value.is_floating_point()}

    def _part(self) -> None:
        """A few lines that run again in backward."""
        before, passed = self.text, list(dict.fromkeys(self._name(self._names()) for _ in range(2)))
        self.given, self.known = passed, set(self.values)
        self.open = set(passed)
        for _ in range(self.draw.randrange(2, 7)):
            self._any({kind: often for kind, often in KINDS.items() if kind != "STATE"})
        setup, lines = self.text.setup, self.text.lines[len(before.lines) :]
        new = [name for name in self.values if name not in self.known and self.values[name].requires_grad]
        self.open, self.text = None, _Text(setup, before.parts, before.lines)
        if new:
            name, result = f"part{next(self.numbers)}", new[-1]
            part = f"def {name}(self, {', '.join([*passed, 'i'])}):\n" + _indented([*lines, f"return {result}"])
            line = f"{result} = checkpoint(self.{name}, {', '.join([*passed, 'i'])}, use_reentrant=False)"
            if self._kept(line, [], (part,)):
                return
        self.text = before
        self.values = self._tried(before)

    def _end(self) -> None:
        """What forward returns, and a loss of it."""
        names = [name for name, value in self.values.items() if value.requires_grad and value.dim()]
        text = "\n".join(self.text.lines)
        ends = [name for name in names if len(re.findall(rf"\b{name}\b", text)) == 1]
        last = [*names[-2:], *ends[-4:]]
        last += self.draw.sample(names, min(len(names), self.draw.randrange(3)))
        last = list(dict.fromkeys(last))
        self.text.lines.append(f"return {', '.join(last)},")
        terms = [self._term(f"outputs[{at}].float()", self.values[name]) for at, name in enumerate(last)]
        lines = ["outputs = model(x, i)", "return " + " + ".join(terms)]
        self.loss = "def loss(model, x, i, y):\n" + _indented(lines)

    def _term(self, output: str, value: Tensor) -> str:
        """A loss of one output that eager can compute."""
        sizes = {"n": value.shape[-1], "rows": value.numel() // value.shape[-1]}
        for template in self.draw.sample(program_lines.LOSSES, 4):
            scope: dict[str, Any] = {"outputs": value.detach().float().requires_grad_(), "y": torch.rand(self.size[0])}
            lines = ["import torch, torch.nn.functional as F", f"loss = {template.format(v='outputs', **sizes)}"]
            try:
                if values_of(lines, scope)["loss"].dim() == 0:
                    return template.format(v=output, **sizes)
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue
        return f"{output}.square().mean()"


@functools.lru_cache(maxsize=16)
def program(seed: int) -> Program:
    """The program of a number: the same one in every process with one version of torch."""
    with generator_kept():
        return _Draft(seed).program()
