"""The torch.compile backend: ``torch.compile(model, backend="roamc", options={...})``.

Found through the entry point group ``torch_dynamo_backends``: no import is needed. If roamc cannot plan
or run a graph, training goes on with torch's own aot_eager at full save, after one warning.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roamc import compat, pipeline
from roamc.capture import joint, recurrent
from roamc.codegen.halves import halves_of
from roamc.errors import BudgetError, OptionError, RoamcError
from roamc.graph import TrainGraph
from roamc.options import Options, parse_options
from roamc.plan import Plan
from roamc.runtime.program import Pair, Whole

log = logging.getLogger(__name__)
Boxed = Callable[[list[Any]], Sequence[Any]]


def roamc(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one dynamo graph.

    Args:
        gm: the graph as dynamo captured it.
        example_inputs: its inputs, fake.
        options: see :class:`roamc.options.Options`.
        mode: not used by roamc; torch refuses ``mode`` together with ``options``.

    Raises:
        OptionError: an option is unknown or out of range.
        BudgetError: no plan fits ``memory_budget``.
    """
    if mode is not None:
        raise OptionError(f"roamc has no modes; got mode={mode!r}. Use options={{...}}")
    return compile_graph(gm, example_inputs, parse_options(options), Record())


class Record:
    """Plans and programs behind one compiled object, oldest first; bounded."""

    def __init__(self, name: str = "", limit: int = 64) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._limit = limit
        self.programs: list[Pair | Whole] = []
        self.fallbacks: list[str] = []

    def add(self, program: Pair | Whole) -> None:
        """Remember a program; the oldest is forgotten past the limit (its code keeps running)."""
        with self._lock:
            self.programs = [*self.programs, program][-self._limit :]

    @property
    def plans(self) -> list[Plan]:
        """The plans, oldest first."""
        return [program.executable.planned.plan for program in self.programs]


LATEST: deque[Plan] = deque(maxlen=64)
"""Plans of the most recent torch.compile graphs of this process. Plans only: programs would keep their arenas."""


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], options: Options, record: Record
) -> Callable[..., Any]:
    """One dynamo graph through AOTAutograd with roamc's partition and compilers."""
    specialized = _specialize(example_inputs)
    if specialized:
        log.warning(
            "roamc plans fixed shapes: a graph with %d symbolic sizes is specialised; other sizes are planned anew "
            "(torch.compile(..., dynamic=False) says so from the start)",
            specialized,
        )
    unit = _Unit(_name(gm, record), options, record, compat.graph_break(gm))
    with recurrent.decomposed():
        compiled: Callable[..., Any] = unit.backend()(gm, example_inputs)
    return compiled


def _specialize(example_inputs: Sequence[Any]) -> int:
    """Fix every symbolic size to its example, which guards on it; how many there were."""
    count = 0
    for value in example_inputs:
        if isinstance(value, torch.SymInt):
            int(value)
            count += 1
        elif isinstance(value, torch.Tensor):
            for size in (*value.shape, *value.stride(), value.storage_offset()):
                if isinstance(size, torch.SymInt):
                    int(size)
                    count += 1
    return count


def _name(gm: fx.GraphModule, record: Record) -> str:
    """The model's class where it is known, numbered from its second graph on; else that of a part."""
    if record.name:
        return record.name if not record.programs else f"{record.name} (graph {len(record.programs) + 1})"
    module = compat.compiled_module()
    if module is not None:
        return type(module).__name__
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            kind = next(iter(stack.values()))[1]
            return kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__
    return "graph"


class _Unit:
    """One graph on its way: AOTAutograd calls partition, then forward, then (at the first backward) backward."""

    def __init__(self, name: str, options: Options, record: Record, split: str | None = None) -> None:
        self.name = name
        self.options = options
        self.record = record
        self.pair: Pair | None = None
        self.notes = (f"torch.compile splits the model at {split}; each piece has a plan",) if split else ()
        if split and options.memory_budget is not None:
            warnings.warn(
                f"memory_budget={options.memory_budget!r} holds for each piece of {name!r} by itself, and they may "
                f"take more together: torch.compile splits the model at {split}. Change that line, or use "
                "roamc.train_step",
                stacklevel=2,
            )

    def backend(self) -> Callable[..., Any]:
        return compat.aot_backend(
            forward=self.forward, backward=self.backward, inference=self.inference, partition=self.partition
        )

    def partition(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **how: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """torch's split at full save, planned as one graph; then split again, as what is saved may have changed."""
        halves = compat.default_partition(graph, inputs, **how)
        static = how.get("static_lifetime_input_indices") or ()
        outputs = how["num_fwd_outputs"]
        self.pair = self._guarded(lambda: self._plan_pair(*halves, outputs, static))
        return halves if self.pair is None else halves_of(self.pair.executable.planned.graph)

    def forward(self, gm: fx.GraphModule, _: list[Any]) -> Boxed:
        """The forward half of the pair, or the graph itself."""
        return boxed(self.pair.forward) if self.pair is not None else interpreter(gm)

    def backward(self, gm: fx.GraphModule, _: list[Any]) -> Boxed:
        """The backward half of the pair, or the graph itself."""
        return boxed(self.pair.backward) if self.pair is not None else interpreter(gm)

    def inference(self, gm: fx.GraphModule, _: list[Any]) -> Boxed:
        """A graph without backward."""
        static = compat.static_inputs()
        whole = self._guarded(lambda: self._plan_whole(joint.inference(gm, static, self.name)))
        return boxed(whole) if whole is not None else interpreter(gm)

    def _plan_pair(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, static: Sequence[int]
    ) -> Pair:
        graph = joint.stitch(forward, backward, outputs, static, self.name)
        pair = Pair(pipeline.run(graph.replace(notes=self.notes), self.options), keep=self.options.keeps_arena)
        self._remember(pair)
        return pair

    def _plan_whole(self, graph: TrainGraph) -> Whole:
        whole = Whole(pipeline.run(graph.replace(notes=self.notes), self.options), keep=self.options.keeps_arena)
        self._remember(whole)
        return whole

    def _remember(self, program: Pair | Whole) -> None:
        self.record.add(program)
        LATEST.append(program.executable.planned.plan)

    def _guarded(self, plan: Callable[[], Any]) -> Any:
        """Run ``plan``; if it fails, warn once and give None, unless the options or the user's budget are at fault."""
        try:
            return plan()
        except (OptionError, BudgetError):
            raise
        except Exception as error:  # law 8: whatever fails in here, training goes on
            if self.options.strict:
                raise
            text = str(error) if isinstance(error, RoamcError) else f"{type(error).__name__}: {error}"
            reason = text.splitlines()[0]
            self.record.fallbacks.append(reason)
            warnings.warn(
                f"roamc could not plan {self.name!r} and hands it to aot_eager: {reason} "
                "(options={'strict': True} raises)",
                stacklevel=2,
            )
            log.debug("planning %s failed", self.name, exc_info=True)
            return None


def boxed(function: Callable[[list[Any]], Sequence[Any]]) -> Boxed:
    """A callable that AOTAutograd hands its argument list to, to be emptied."""

    def run(args: list[Any]) -> Sequence[Any]:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def interpreter(gm: fx.GraphModule) -> Boxed:
    """The fallback: the graph as torch generated it, arguments dropped as they are used."""

    def run(args: list[Any]) -> Sequence[Any]:
        values = list(args)
        args.clear()
        results: Sequence[Any] = fx.Interpreter(gm).boxed_run(values)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
