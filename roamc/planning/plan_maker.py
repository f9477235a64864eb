"""The making of one plan: the pipeline runs on one graph for given terms, and its layout is checked.

Passes that decide the same for every budget run once, in :func:`prepared`. Where the arena is so much larger than the
most live bytes in it that it matters, :mod:`roamc.planning.other_orders` lays out other orders with no higher peak, and
the best one is taken.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import torch

from roamc import budget, cost
from roamc.cost import utilisation
from roamc.cost.caching_allocator import peak_reserved
from roamc.errors import OptionError
from roamc.gpus import Gpu
from roamc.graph import Role, TrainGraph, copied, main_device, value_flow, verify
from roamc.graph.eager_memory import eager_lifetimes, eager_live_bytes, of_eager
from roamc.graph.in_flight import waiting_bytes
from roamc.graph.lifetimes import sizes
from roamc.graph.memory import ASSUMED_STATE, Int64s, MemoryModel, build_memory, held_storages, input_bytes
from roamc.graph.ranks import planned_groups, with_same_plan
from roamc.graph.value_numbers import Numbers
from roamc.options import Options
from roamc.passes import layout, overlap, reorder, retain, reuse
from roamc.planning import layout_judge, other_orders, pipeline
from roamc.planning.effort import EFFORT, Effort
from roamc.planning.pipeline import Runner, State
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned, Terms, margin_of, plan_of
from roamc.rewriting.split import splittable
from roamc.runtime import blocks
from roamc.units import Bytes, Seconds, format_bytes


def prepared(
    graph: TrainGraph, options: Options, plan: Plan | None, fingerprint: str, *, deep: bool = False
) -> tuple[PlanMaker, State]:
    """Check a captured graph, resolve the budget, and run the passes that decide the same for every budget.

    Args:
        graph: the graph as it was captured; its nodes are moved and erased in place.
        options: what the user set.
        plan: a plan whose decisions are used instead of deciding; None to decide.
        fingerprint: hash of the captured graph, for the plans.
        deep: also derive the metadata of all nodes again after every pass.

    Returns:
        (maker, state): a maker for the terms of the options, and the state behind these passes, where its plans begin.

    Raises:
        OptionError: the budget is a share of eager's bytes that is less than one byte, or the options name a GPU and
            the graph is for another device.
        PlanError: a decision of ``plan`` does not fit the graph.
        VerifyError: the graph, or what a pass left of it, is invalid.
    """
    verify.check_graph(graph, "capture", deep=deep)
    _check_device(graph, options)
    threads = plan.threads if plan else torch.get_num_threads()
    graph = graph.replace(threads=threads, device=main_device(graph))
    if options.shard != "off" and (groups := planned_groups(graph)):
        graph = with_same_plan(graph, groups)
    memory = build_memory(graph)
    live = eager_live_bytes(memory)
    peak = int(live.max(initial=0))
    graph = _noted(graph, memory, peak)
    floor = other_orders.eager_floor(graph, memory) if peak < layout.EFFORT.small_graph else {}
    graph = graph.replace(eager_bytes=peak, eager_floor=floor)
    most_threads = max(threads, torch.get_num_threads())  # a plan from elsewhere may be counted again for more
    needs = eager_needs(graph, memory, live, most_threads) + waiting_bytes(graph, memory, eager=True)
    products = utilisation.model_products(graph) if main_device(graph).type == "cuda" else {}
    loses = eager_loses(graph, memory)
    maker = PlanMaker(Runner(options, plan, deep), fingerprint, needs, loses, products=products, room=options.room)
    maker = maker.under(terms_of(graph, options.memory_budget, needs, options.room))
    state = State(graph, {}, {}, value_flow.read(graph, Numbers()), verify.constraints(graph))
    return maker, maker.runner.run(state, pipeline.same_for_all_budgets(pipeline.PIPELINE))


def eager_needs(graph: TrainGraph, memory: MemoryModel, live: Int64s, threads: int) -> Bytes:
    """Return the bytes that eager PyTorch takes at its worst step, with workspaces of so many threads and objects.

    ``live`` is what :func:`eager_live_bytes` gives for ``memory``.
    """
    most = int((live + cost.workspaces(of_eager(memory).operators, threads, eager=True)).max(initial=0))
    own = cost.tensor_objects(memory, list(graph.graph.nodes), *eager_lifetimes(memory)).peak()
    return most + cost.objects(most, own)


def eager_loses(graph: TrainGraph, memory: MemoryModel) -> Bytes:
    """Return the bytes that torch's caching allocator needs on a GPU beyond those of eager's step and its inputs.

    ``graph`` has :attr:`TrainGraph.eager_bytes`. Of several micro-batches in flight, one runs; 0 on a CPU, where memory
    goes back to the system.
    """
    if main_device(graph).type != "cuda":
        return 0
    eager = of_eager(memory)
    size, (born, dead) = sizes(eager.counted), eager_lifetimes(eager)
    inputs = [(port.role, storage.nbytes) for _, port, storage in held_storages(graph) if storage.nbytes]
    trained = [nbytes for role, nbytes in inputs if role is Role.PARAMETER]
    assumed = input_bytes(graph).get(ASSUMED_STATE, 0) // max(1, sum(trained))  # states as large as all parameters
    held = [*(nbytes for _, nbytes in inputs), *trained * assumed]
    return peak_reserved(size, born, dead, held, full=True) - (graph.eager_bytes or 0) - sum(held)


def _check_device(graph: TrainGraph, options: Options) -> None:
    device = main_device(graph).type
    if options.gpu is not None and device != "cuda":
        raise OptionError(
            f"gpu={options.gpu!r} is for steps on a GPU, and {graph.name!r} runs on {device}: move the model, or plan "
            "with roamc.plan(..., device='cuda'); memory_budget='total:40GB' limits the total on any device"
        )


DROPPED_SHARE = 0.02
"""A plan notes eager's peak without the outputs if the peak with them is higher by more than this share."""


def _noted(graph: TrainGraph, memory: MemoryModel, peak: Bytes) -> TrainGraph:
    """Return ``graph`` with a note where eager takes clearly less than ``peak`` if the caller drops the outputs."""
    dropped = int(eager_live_bytes(memory, dropped=True).max(initial=0)) if graph.boundary else peak
    if peak <= dropped * (1 + DROPPED_SHARE):
        return graph
    note = f"eager's peak, like the plan's, counts outputs to the end of backward; {format_bytes(dropped)} without them"
    return graph.replace(notes=(*graph.notes, note))


def terms_of(graph: TrainGraph, asked: budget.Budget | None, eager_needs: Bytes, room: Gpu | None = None) -> Terms:
    """Return the terms that a budget in bytes and what is to hold the process ask for, the tighter of both.

    Args:
        graph: the graph to plan; says the device and the bytes of optimizer state.
        asked: the budget as the user sets it; None for none.
        eager_needs: bytes that eager PyTorch takes at its worst step; shares such as "80%" are of these.
        room: what is to hold the whole process; None for nothing named.

    Raises:
        OptionError: a share is less than one byte.
    """
    allowed = asked if asked == budget.LIGHT else "all"
    asked_total = budget.total_bytes(asked)
    limit = left_by(graph, asked_total) if asked_total else limit_of(graph, asked, eager_needs)
    whole = left_by(graph, room.capacity) if room is not None else None
    if limit and whole and whole < limit:  # 0 asks for the lowest, which no limit lowers
        return Terms(whole, allowed, budget.added_share(asked), total=True)
    return Terms(limit, allowed, budget.added_share(asked), asked_total > 0)


def left_by(graph: TrainGraph, total: Bytes) -> Bytes:
    """Return the bytes that ``total``, for the whole process, leaves to the step beside what is held; at least 1."""
    return max(1, total - sum(input_bytes(graph).values()) - sum(margin_of(graph).values()))


def limit_of(graph: TrainGraph, asked: budget.Budget | None, eager_needs: Bytes) -> Bytes | None:
    """Return a budget on the step in bytes, see :func:`roamc.budget.resolve`.

    For ``"device"``, arenas of other programs that are idle give their memory back first: all programs of a process
    take turns in it, so that it is free for this one.

    Args:
        graph: the graph to plan; says the device and the bytes of optimizer state.
        asked: the budget as the user sets it, not one on the total; None for none.
        eager_needs: bytes that eager PyTorch takes at its worst step.

    Raises:
        OptionError: a share is less than one byte, or ``"device"`` asks for a GPU that is not here.
    """
    device = main_device(graph)
    if asked == "device":
        blocks.empty_idle(device)
    state = input_bytes(graph).get(Role.OPTIMIZER_STATE.value, 0) + (graph.assumed_state or 0)
    return budget.resolve(asked, eager_needs, device, state)


@dataclass(frozen=True)
class PlanMaker:
    """Makes plans: runs the passes behind those that decide the same for every budget.

    Attributes:
        runner: runs the passes, with the user's options and the budget in bytes.
        fingerprint: hash of the captured graph.
        eager_needs: bytes that eager PyTorch takes at its worst step: workspaces, tensor objects and what other
            micro-batches in flight have saved included.
        eager_loses: bytes that its allocator loses on a GPU.
        terms: the terms that plans are made for; their limit is the budget of the options.
        effort: limits of the search for a plan, and which differences it ignores.
        splits: whether pass overlap may split collectives.
        products: FLOPs of the captured graph, for the utilisation of a GPU; none for a CPU, whose peak rate no profile
            has.
        room: what is to hold the whole process, for the plans; None for nothing named.
    """

    runner: Runner
    fingerprint: str
    eager_needs: Bytes = 0
    eager_loses: Bytes = 0
    terms: Terms = field(default=Terms(None))
    effort: Effort = EFFORT
    splits: bool = True
    products: utilisation.Products = field(default_factory=dict)
    room: Gpu | None = None

    @property
    def options(self) -> Options:
        """The user's options, with the budget in bytes."""
        return self.runner.options

    def under(self, terms: Terms) -> PlanMaker:
        """Return a maker that differs only in its terms."""
        changed = self._with(dataclasses.replace(self.options, memory_budget=terms.limit))
        return dataclasses.replace(changed, terms=terms)

    @property
    def in_program_order(self) -> PlanMaker:
        """The same maker, except that operators run in program order in its plans, and collectives are not split."""
        return dataclasses.replace(self._with(dataclasses.replace(self.options, order="program")), splits=False)

    def _with(self, options: Options) -> PlanMaker:
        return dataclasses.replace(self, runner=dataclasses.replace(self.runner, options=options))

    def make(self, start: State, kept: retain.Decision | None, step_seconds: Seconds) -> Planned:
        """Run all passes behind ``start``, check the layout and write the plan.

        Args:
            start: the state that :func:`prepared` returned, or a copy by :func:`fresh`; its graph may be changed in
                place.
            kept: the decision of pass retain; None if it is to decide, or the plan of :attr:`runner`.
            step_seconds: predicted time of the step without recomputation, for the plan. That of the plan of
                :attr:`runner` is left as it is.

        Returns:
            The graph behind all passes, and its plan. The plan may need more than the budget.

        Raises:
            PlanError: a decision does not fit the graph.
            VerifyError: a pass left an invalid graph or a wrong layout.
        """
        return self.place(self.order(start, kept), step_seconds)

    def order(self, start: State, kept: retain.Decision | None, ordered: reorder.Decision | None = None) -> State:
        """Run the passes behind ``start``, up to the order of the operators, and return the state behind them.

        Arguments and errors are those of :meth:`make`; the graph of ``start`` may be changed in place. ``ordered`` is
        the decision of pass reorder; None if it is to decide, or the plan of :attr:`runner`.
        """
        passes = pipeline.until(pipeline.ORDER, pipeline.PIPELINE)
        shared = pipeline.same_for_all_budgets(passes)
        return self.runner.run(start, passes[len(shared) :], {retain.NAME: kept, reorder.NAME: ordered})

    def place(self, ordered: State, step_seconds: Seconds) -> Planned:
        """Run the passes behind the order, check the layout and write the plan.

        Args:
            ordered: the state that :meth:`order` returned; its graph may be changed in place.
            step_seconds: as for :meth:`make`; seconds of collectives that other operators hide are taken off.
        """
        whole = fresh(ordered) if self.splits and self.runner.plan is None and splittable(ordered.graph) else None
        end = self._laid_out(ordered)
        if whole is not None and _splits(end) and self._takes_more(end):
            plain = dataclasses.replace(self, splits=False)._laid_out(whole)
            if self._size(end) > self._size(plain):  # by choice of the layout, maybe
                limit = plain.decisions[layout.NAME].needed_bytes
                end = self.under(dataclasses.replace(self.terms, limit=limit))._layout_again(end)
            end = min(end, plain, key=self._size)
        begun = time.perf_counter()
        layout_judge.check_layout(end.graph)
        if self.runner.plan is None:
            step_seconds -= _hidden_seconds(end)
        decided = self.runner.plan is None and retain.NAME in end.decisions
        codecs = self.options.codecs if decided else ()
        limit = self.options.limit_bytes
        eager = self.eager_needs, self.eager_loses
        plan = plan_of(end, self.fingerprint, limit, step_seconds, *eager, self.effort, codecs, self.room)
        plan.seconds["verify"] = time.perf_counter() - begun  # type: ignore[index]
        return Planned(end.graph, plan)

    def _laid_out(self, ordered: State) -> State:
        """Return the state behind all passes, with another order or a longer search where the layout falls short."""
        again = self.runner.plan is None and other_orders.may_look_again(self.options)
        first = self._with(other_orders.first_look(self.options, self.effort)) if again else self
        passes = pipeline.PIPELINE[len(pipeline.until(pipeline.ORDER, pipeline.PIPELINE)) :]
        end = first.runner.run(ordered, passes, {} if self.splits else {overlap.NAME: overlap.Decision()})
        if not again or not other_orders.is_worth_another(end.decisions[layout.NAME], self.options, self.effort):
            return end
        if not _splits(end):
            return self._other_orders(end)
        return self._layout_again(end) if self.options.layout_nodes > self.effort.first_nodes else end

    def _takes_more(self, end: State) -> bool:
        """Whether a state with split collectives may take more than without, and more than the budget."""
        ordered: reorder.Decision | None = end.decisions.get(reorder.NAME)
        placed: layout.Decision = end.decisions[layout.NAME]
        if self.options.limit_bytes is None and ordered is not None:
            return self._size(end) > ordered.peak_bytes
        return placed.needed_bytes > (self.options.limit_bytes or 0)

    def _size(self, end: State) -> Bytes:
        """The bytes by which a state is compared with one without split collectives, which may be a bit smaller.

        Without a limit, tensors' own objects do not count: hidden collectives are worth one more of them.
        """
        placed: layout.Decision = end.decisions[layout.NAME]
        size = placed.peak_bytes if self.options.limit_bytes is None else placed.needed_bytes
        return size - self.effort.aligned(size) if _splits(end) else size

    def _layout_again(self, end: State) -> State:
        """Return the state with a layout for the terms of this maker, searched with all nodes of the options."""
        last = [each for each in pipeline.PIPELINE if each.name == layout.NAME]
        return self.runner.run(dataclasses.replace(end, graph=end.graph.replace(layout=None)), last)

    def _other_orders(self, end: State) -> State:
        """Return the state with the best of the orders with no higher peak, where the layout of ``end`` falls short."""
        begun = time.perf_counter()
        first = other_orders.LaidOut(end.decisions[reorder.NAME], end.decisions[layout.NAME])
        graph = end.graph.replace(reuse={}, layout=None)
        best = other_orders.decide(graph, first, self.options, self.effort)
        decisions = {reorder.NAME: best.ordered, layout.NAME: best.placed}
        anew: tuple[str, ...] = (*decisions, reuse.NAME)
        if best.ordered.order == first.ordered.order:
            graph, anew = end.graph, (layout.NAME,)
        seconds = {**end.seconds, other_orders.NAME: time.perf_counter() - begun}
        ordered = {**end.decisions, reorder.NAME: best.ordered}
        state = State(graph, ordered, seconds, end.flow, verify.constraints(graph))
        return self.runner.run(state, [each for each in pipeline.PIPELINE if each.name in anew], decisions)


def _splits(end: State) -> bool:
    """Whether collectives are split, so that other operators hide them."""
    decision: overlap.Decision | None = end.decisions.get(overlap.NAME)
    return decision is not None and bool(decision.collectives)


def _hidden_seconds(end: State) -> Seconds:
    """The predicted seconds of collectives that other operators hide."""
    decision: overlap.Decision | None = end.decisions.get(overlap.NAME)
    return decision.link_seconds - decision.exposed_seconds if decision is not None else 0.0


def fresh(state: State) -> State:
    """Return the state with a copy of its graph, which passes may change."""
    return dataclasses.replace(state, graph=copied(state.graph))


def above_eager(planned: Planned, maker: PlanMaker) -> Bytes:
    """Return the bytes by which a plan may take more than eager does, workspaces included; 0 if it does not.

    In small graphs every moment is compared, see :mod:`roamc.passes.layout.eager`; in others, and under a budget, the
    worst steps.

    Args:
        planned: the graph and its plan.
        maker: the maker of the plan, which knows what eager needs.
    """
    if planned.graph.eager_floor and maker.options.limit_bytes is None:
        return layout.above_eager(planned.graph, maker.options)
    return max(planned.plan.needed_bytes - maker.eager_needs, 0)
