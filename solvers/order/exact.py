"""The least peak of any order, by asking `capacity_search` for one capacity after the other.

An order below the best known one lowers the peak, a proof that there is none raises the bound. First the
question that may end it at once from below (is the bound reached?), then the one that may end it from above
(is the peak the least?), then the middle between the two. A capacity that is too hard to decide is given up,
and the middle moves up, where orders are easier to find.
"""

from dataclasses import dataclass

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.capacity_search import CapacityAnswer, search_within
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.flow import Flow, backward_flow, forward_flow
from roamc.solvers.order.problem import Bytes, OrderProblem


@dataclass(frozen=True, eq=False)
class Bracket:
    """The best order known and a lower bound: the least peak lies between `bound_bytes` and `peak_bytes`.

    order: int32[n], a legal order.
    peak_bytes: the peak of `order`.
    bound_bytes: lower bound on the peak of every legal order.
    work: number of operators looked at to find order and bound.
    """

    order: IntArray
    peak_bytes: Bytes
    bound_bytes: Bytes
    work: int = 0

    @property
    def closed(self) -> bool:
        """Whether the peak meets the bound, so that no order has a lower peak."""
        return self.peak_bytes <= self.bound_bytes


def narrow(problem: OrderProblem, start: Bracket, work_limit: int, effort: Effort = EFFORT) -> Bracket:
    """Search exactly for a lower peak or a higher bound than those of `start`, and return the better bracket.

    The result is closed unless `work_limit` ended the search or some capacities were too hard for their share of the
    work. Its `work` continues that of `start`. The problem must have one stage.

    start: a legal order of `problem`, its peak, and a lower bound.
    work_limit: operators to look at, kept but for one step of a search.
    effort: how the work is shared among the capacities that are tried.
    """
    flows = (forward_flow(problem), backward_flow(problem))
    best = start
    given_up = start.bound_bytes - 1
    for question in range(effort.search_questions):
        left = work_limit - (best.work - start.work)
        floor = max(given_up, best.bound_bytes - 1)
        if best.closed or left <= 0 or floor >= best.peak_bytes - 1:
            break
        capacity = (floor + 1, best.peak_bytes - 1, (floor + best.peak_bytes) // 2)[min(question, 2)]
        answer = _ask(flows, capacity, max(1, left // effort.question_share), effort)
        best = _learn(problem, best, answer)
        if answer.order is None and answer.proved_bytes is None:
            given_up = max(given_up, capacity)
    return best


def _ask(flows: tuple[Flow, Flow], capacity: Bytes, work_limit: int, effort: Effort) -> CapacityAnswer:
    """Search from the front and from the back with small limits, then from both again with what is left."""
    work, (front, back) = 0, flows
    first, second = effort.first_look_share, effort.second_look_share
    for share, flow in ((first, front), (first, back), (second, front), (1, back)):
        answer = search_within(flow, capacity, (work_limit - work) // share)
        work += answer.work
        if answer.order is not None or answer.proved_bytes is not None:
            break
    return CapacityAnswer(answer.order, answer.proved_bytes, work)


def _learn(problem: OrderProblem, best: Bracket, answer: CapacityAnswer) -> Bracket:
    work = best.work + answer.work
    if answer.order is not None:
        return Bracket(answer.order, peak_bytes(problem, answer.order), best.bound_bytes, work)
    if answer.proved_bytes is not None:
        return Bracket(best.order, best.peak_bytes, min(best.peak_bytes, answer.proved_bytes), work)
    return Bracket(best.order, best.peak_bytes, best.bound_bytes, work)
