"""One side of the demo in a process of its own: ``python -m roamc.cli.demo.worker '{"side": "eager", …}'``.

A line of JSON on stdin for every step, a line of JSON on stdout for every answer; ends with its stdin.

What is measured: the first step runs under torch's profiler, and the peak is the maximum of the running
sum of all that torch's CPU allocator hands out and takes back during it. Parameters, optimizer state
and batches exist before, gradients do not, on all sides; so the number is what one step needs on top of
them, workspace inside operators included. roamc's first step plans (which allocates no tensors) and
then allocates its arena, which is therefore part of the sum.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch
from torch import Tensor

import roamc
from roamc.capture.optimizers import init_state, rule_for
from roamc.cli import zoo
from roamc.cli.demo import text
from roamc.errors import BudgetError
from roamc.frontends.workload import Workload

EAGER, FREE, BUDGET = "eager", "roamc", "roamc, budget"
SIDES = (EAGER, FREE, BUDGET)
"""Eager PyTorch, roamc by default, and roamc under the task's budget."""


@dataclass(frozen=True)
class Task:
    """What all sides do, and which side this is.

    Attributes:
        side: "eager", "roamc" (its default) or "roamc, budget".
        steps: number of training steps.
        batch, seq, layers, width, heads, dropout: settings of model ``gpt`` of :mod:`roamc.cli.zoo`.
        memory_budget: the budget of side "roamc, budget", as the option of that name.
        seed: seeds weights, batches and dropout.
        lr: learning rate of AdamW.
    """

    side: str
    steps: int
    batch: int
    seq: int
    layers: int
    width: int
    heads: int
    memory_budget: str = "50%"
    dropout: float = 0.1
    seed: int = 1
    lr: float = 1e-3

    def to_json(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(asdict(self))

    @property
    def sizes(self) -> dict[str, int | float]:
        """Settings of model ``gpt`` that the task gives, by the names of :mod:`roamc.cli.zoo`."""
        names = ("batch", "seq", "layers", "width", "heads", "dropout")
        return {key: value for key, value in asdict(self).items() if key in names}


def peak_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
    """Call ``run`` under torch's profiler, and return (its result, its peak in bytes).

    The peak is the most bytes that torch's CPU allocator had handed out, less those taken back, since ``run`` began.
    """
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        result = run()
    kineto: Any = profile.profiler
    events = [(e.start_ns(), e.nbytes()) for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        total += change
        peak = max(peak, total)
    return result, peak


class Side:
    """One side of the demo: a model with its optimizer and batches, ready to step.

    Args:
        task: which side it is, and the sizes.

    Attributes:
        parameters: number of parameters of the model.
        batches: (inputs, targets) for every step.
        optimizer: AdamW, with its state already made.
        train: roamc's train step; None on the eager side.
        run: the function that runs a step on the two tensors of a batch and returns the loss.
    """

    def __init__(self, task: Task) -> None:
        torch.manual_seed(task.seed)
        workload = zoo.make("gpt", task.sizes, device="cpu")
        self.parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        self.batches = text.batches(text.read(), task.steps, task.batch, task.seq, task.seed)
        self.optimizer = torch.optim.AdamW(workload.model.parameters(), lr=task.lr)
        rule = rule_for(self.optimizer)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                init_state(self.optimizer, rule, parameter, group)
        self.train: roamc.TrainStep | None = None
        if task.side != EAGER:
            assert workload.loss_fn is not None
            budget = task.memory_budget if task.side == BUDGET else None
            self.train = roamc.train_step(workload.model, workload.loss_fn, self.optimizer, memory_budget=budget)
        self.run = self.train or self._eager(workload)
        torch.manual_seed(task.seed)

    def step(self, index: int) -> dict[str, Any]:
        """Run step ``index``, counted from 0, and return its loss, time and peak.

        Returns:
            ``loss``, ``seconds`` and ``peak_bytes``, which is None except for step 0.
        """
        batch = self.batches[index]
        start = time.perf_counter()
        if index == 0:
            loss, peak = peak_bytes(lambda: self._loss(batch))
        else:
            loss, peak = self._loss(batch), None
        return {"loss": loss, "seconds": time.perf_counter() - start, "peak_bytes": peak}

    def plan(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON, with times and fragmentation; ``{}`` on the eager side.

        At least one step must have run.
        """
        if self.train is None:
            return {}
        plan = self.train.plans[0]
        return {**plan.to_dict(seconds=True), "fragmentation": plan.fragmentation}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> float:
        return float(self.run(*batch))

    def _eager(self, workload: Workload) -> Callable[..., Tensor]:
        loss_fn = workload.loss_fn
        assert loss_fn is not None

        def step(*batch: Tensor) -> Tensor:
            loss = loss_fn(workload.model, *batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step


def answers(task: Task, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield ``parameters`` and ``threads``, the numbers of both, then one answer for each of ``lines``.

    A line is a request as JSON: ``{"step": index}`` runs a step and gets what :meth:`Side.step` returns; any other gets
    the plan, as :meth:`Side.plan` returns it, under the key ``plan``.
    """
    side = Side(task)
    yield {"parameters": side.parameters, "threads": torch.get_num_threads()}
    for line in lines:
        request = json.loads(line)
        yield side.step(request["step"]) if "step" in request else {"plan": side.plan()}


def main(argument: str, source: IO[str], sink: IO[str]) -> None:
    """Serve one task until ``source`` ends, with a line of JSON for each answer; an error is the last one.

    Beside an error stands whether a plan keeps the budget.

    Args:
        argument: a :class:`Task` as JSON.
        source: requests, a line each; see :func:`answers`.
        sink: gets the answers.
    """
    task = Task(**json.loads(argument))
    try:
        for answer in answers(task, iter(source)):
            print(json.dumps(answer), file=sink, flush=True)
    except Exception as error:  # whatever it is, the other side of the pipe has to hear of it
        said = {"error": f"{type(error).__name__}: {error}", "fits": not isinstance(error, BudgetError)}
        print(json.dumps(said), file=sink, flush=True)


if __name__ == "__main__":
    answer_pipe, sys.stdout = sys.stdout, sys.stderr  # a stray print must not break the pipe
    main(sys.argv[1], sys.stdin, answer_pipe)
