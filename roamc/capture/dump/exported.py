"""The forward of a ``.pt2`` as a module without memory, which runs the operators of the file where it is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from roamc.capture import module_paths
from roamc.capture.dump import names
from roamc.capture.dump.annotations import Sizes, check_possible
from roamc.capture.dump.archive import DEVICE, Geometry, Graph, Operator, Program, State
from roamc.capture.dump.text import Dotted, Name, Value
from roamc.compat import OpOverload
from roamc.errors import DumpError, OptionError, RoamcError, nearest

META = torch.device("meta")

MOST_CONSTANT = 1 << 10
"""Most bytes of a constant that the graph has itself, as of ``torch.tensor(2.5)``; others are buffers."""

_NO_GRADIENT = "torch.ops.higher_order.wrap_with_set_grad_enabled"
_AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
"""Operators whose arguments are a context, a graph to run in it, and the arguments of the graph."""

_ASSERTION = "torch.ops.aten._assert_scalar.default"
_CHECKS = (
    "torch.ops.aten._assert_tensor_metadata.default",
    "torch.ops.aten.sym_constrain_range.default",
    "torch.ops.aten.sym_constrain_range_for_size.default",
)
"""What torch.export adds to a program to check what it is given; they compute nothing."""


def sizes_of(program: Program, asked: Mapping[str, int]) -> Sizes:
    """Return values of the symbolic sizes: those that are asked for, and else those of the export.

    Raises:
        OptionError: there is no such size, or it is out of the range that the program takes.
    """
    symbols = program.exported.keys() | program.ranges.keys()
    for name, value in asked.items():
        if name not in symbols:
            raise OptionError(no_size(program.path, name, {each: program.described(each) for each in symbols}))
        least, most = program.ranges.get(name, (None, None))
        if (least is not None and value < least) or (most is not None and value > most):
            span = f"{least or 0} and more" if most is None else f"{least or 0} to {most}"
            raise OptionError(f"{program.path} takes {span} for {name}, not {value}")
    return Sizes({**program.exported, **asked}, program.path)


def no_size(path: str, name: str, symbols: Mapping[str, str]) -> str:
    """Return the sentence that a file has no symbolic size of this name, only ``symbols``, each with what it is."""
    listed = ", ".join(symbols[each] for each in sorted(symbols))
    sizes = f" Sizes: {listed}" if symbols else " All of its sizes are fixed"
    return f"{path} has no size {name!r}{nearest(name, sorted(symbols))}{sizes}"


class Exported(nn.Module):
    """A forward from a file; parameters and buffers are on the meta device.

    It returns the tensors that the file returns; with a floating-point scalar among them a dict, with the first of
    these as ``"loss"`` and the others by their positions.

    Args:
        program: the file.
        sizes: see :func:`sizes_of`.

    Raises:
        DumpError: it names what is not known or not allowed.
    """

    def __init__(self, program: Program, sizes: Sizes) -> None:
        super().__init__()
        self.program, self.sizes = program, sizes
        self.operators = {target: self._operator(target) for target in _targets(program.graph)}
        self.constants: dict[str, Tensor] = {}
        self.places: list[tuple[str, nn.Module, str]] = []  # name in the graph, and where its tensor is registered
        self._register()

    @property
    def batch(self) -> tuple[Tensor, ...]:
        """Inputs like those of the export, of the sizes that are asked for."""
        tensors = []
        for _, each in self.program.batch:
            shape, stride, dtype = self._geometry(each)
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=META)
            tensors.append(tensor.requires_grad_(each.requires_grad and dtype.is_floating_point))
        return tuple(tensors)

    def forward(self, *batch: Tensor) -> Any:
        """Run the operators of the file."""
        env: dict[str, Any] = {name: self.sizes.of(str(size)) for name, size in self.program.numbers.items()}
        env |= self.constants | {name: getattr(owner, leaf) for name, owner, leaf in self.places}
        env |= {name: tensor for (name, _), tensor in zip(self.program.batch, batch, strict=True)}
        results = self._run(self.program.graph, env)
        with torch.no_grad():
            for target, value in self.program.written:
                self._value(Name(target), env).data.copy_(self._value(Name(value), env))  # autograd may have saved it
        tensors = [each for each in results if isinstance(each, Tensor)]
        loss = next((at for at, each in enumerate(tensors) if not each.dim() and each.is_floating_point()), None)
        if loss is None:
            return tensors[0] if len(tensors) == 1 else tuple(tensors)
        return {"loss": tensors[loss]} | {str(at): each for at, each in enumerate(tensors) if at != loss}

    def _fail(self, reason: str) -> NoReturn:
        raise DumpError(f"{self.program.path}: {reason}")

    def _operator(self, target: str) -> OpOverload | None:
        if target in (_NO_GRADIENT, _AUTOCAST, _ASSERTION, *_CHECKS) or target.removeprefix("_") in names.NUMBERS:
            return None
        operator = names.operator_of(target)
        if operator is None:
            self._fail(
                f"unknown operator {target[:80]!r}: roamc plans those of ATen and prims, and the gradient of any other "
                "is not in an archive; a log that TORCH_TRACE writes of a training step has it"
            )
        return operator

    def _geometry(self, said: Geometry) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        dtype = names.CONSTANTS[said.dtype]
        assert isinstance(dtype, torch.dtype)
        shape, stride = (tuple(self.sizes.of(str(each)) for each in part) for part in (said.shape, said.stride))
        check_possible(shape, stride, self.program.path)
        return shape, stride, dtype

    def _register(self) -> None:
        """Register parameters and buffers; those in one file share their memory, and are tied if alike."""
        sizes: dict[str, int] = {}
        for state in self.program.state:
            storage = state.storage or state.name
            sizes[storage] = max(sizes.get(storage, 0), self._bytes(state))
        memory = {key: torch.empty(size, dtype=torch.uint8, device=META) for key, size in sizes.items()}
        tied: dict[object, Tensor] = {}
        for state in self.program.state:
            shape, stride, dtype = self._geometry(state.geometry)
            offset, storage = self._offset(state), state.storage or state.name
            key = (storage, shape, stride, offset, dtype, state.kind)
            if key not in tied:
                tensor = torch.empty(0, dtype=dtype, device=META).set_(
                    memory[storage].untyped_storage(), offset, shape, stride
                )
                if state.kind == "constant" and self._bytes(state) <= MOST_CONSTANT:
                    self.constants[state.name] = torch.zeros_like(tensor, device="cpu")
                    continue
                trained = state.geometry.requires_grad and dtype.is_floating_point
                tied[key] = nn.Parameter(tensor, trained) if state.kind == "parameter" else tensor
            self._put(state, tied[key])

    def _bytes(self, state: State) -> int:
        shape, stride, dtype = self._geometry(state.geometry)
        span = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 0
        return (self._offset(state) + span) * dtype.itemsize

    def _offset(self, state: State) -> int:
        offset = self.sizes.of(str(state.geometry.offset))
        check_possible((offset,), (1,), self.program.path)
        return offset

    def _put(self, state: State, tensor: Tensor) -> None:
        *parts, leaf = state.path.split(".")
        owner: nn.Module = self
        try:
            for part in parts:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=state.persistent)
        except (KeyError, AttributeError):
            self._fail(f"a {state.kind} cannot be called {state.path[:80]!r}")
        self.places.append((state.name, owner, leaf))

    def _run(self, graph: Graph, env: dict[str, Any]) -> list[Any]:
        for each in graph.operators:
            with _origin(each):
                result = self._result(each, env)
            self._bind(each, each.results, result, env)
        return [self._value(each, env) for each in graph.results]

    def _result(self, each: Operator, env: Mapping[str, Any]) -> Any:
        args = [self._value(arg, env) for arg in each.args]
        kwargs = {key: self._value(arg, env) for key, arg in each.kwargs.items()}
        if each.target in _CHECKS:
            return None
        if each.target == _ASSERTION:
            if args and not isinstance(args[0], Tensor) and not args[0]:
                self._fail(f"the program does not take these sizes: {args[-1]!s:.120}")
            return None
        if each.target in (_NO_GRADIENT, _AUTOCAST):
            return self._within(each, args)
        operator = self.operators[each.target]
        try:
            if operator is None:
                return names.number(each.target.removeprefix("_"), args)
            names.check_results(operator, args, kwargs)
            return operator(*args, **kwargs)
        except RoamcError as error:
            self._fail(str(error))
        except Exception as error:  # whatever a kernel on fake tensors raises
            reason = str(error).partition("\n")[0][:200]
            self._fail(f"{each.target} refuses its arguments: {reason or type(error).__name__}")

    def _within(self, each: Operator, args: Sequence[Any]) -> Any:
        at = next((at for at, arg in enumerate(args) if isinstance(arg, Graph)), None)
        if at is None or len(args[at].inputs) != len(args) - at - 1:
            self._fail(f"{each.target} without a graph of its arguments")
        how, graph = args[:at], args[at]
        try:
            context = torch.set_grad_enabled(*how) if each.target == _NO_GRADIENT else torch.autocast(*how)
        except (TypeError, RuntimeError) as error:
            self._fail(f"{each.target} refuses its arguments: {str(error).partition(chr(10))[0][:200]}")
        with context:
            results = self._run(graph, dict(zip(graph.inputs, args[at + 1 :], strict=True)))
        return results[0] if len(results) == 1 and isinstance(each.results, Name) else results

    def _bind(self, each: Operator, place: Value, result: Any, env: dict[str, Any]) -> None:
        """Give results the names that the file has for them."""
        if isinstance(place, Name):
            if place.name in env:
                self._fail(f"{place.name} is there twice: the program was changed")
            env[place.name] = result
        elif isinstance(place, list):
            if not isinstance(result, list | tuple) or len(result) != len(place):
                self._fail(f"{each.target} has other results than its {len(place)} in the file")
            for part, value in zip(place, result, strict=True):
                self._bind(each, part, value, env)

    def _value(self, value: Value, env: Mapping[str, Any]) -> Any:
        match value:
            case Name(name=name):
                if name not in env:
                    self._fail(f"{name} was never made: the program was changed{nearest(name, env, 0.9)}")
                return env[name]
            case Dotted(path=path):
                return torch.device("cpu") if value == DEVICE else names.CONSTANTS[path]
            case list():
                return [self._value(each, env) for each in value]
        return value


def _targets(graph: Graph) -> Iterator[str]:
    for each in graph.operators:
        yield each.target
        for arg in each.args:
            if isinstance(arg, Graph):
                yield from _targets(arg)


@contextlib.contextmanager
def _origin(each: Operator) -> Iterator[None]:
    """Context manager: operators that are traced have the line and the module of ``each``."""
    meta = fx.traceback.current_meta
    around = meta.get("stack_trace")
    if each.trace:
        meta["stack_trace"] = each.trace
    try:
        with module_paths.inside(*each.module) if each.module[1] else contextlib.nullcontext():
            yield
    finally:
        meta.pop("stack_trace", None)
        if around is not None:
            meta["stack_trace"] = around
