"""``make sweep``: whether one ``train_step`` of every operator of torch's database has eager's bits.

The tensors of a sample that need a gradient are parameters; the loss weighs every element of every result.

    python -m tests.sweeps.steps [--samples N] [--workers N] [--only REGEX] [--log FILE]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import roamc
from tests.sweeps import command, pool
from tests.sweeps.compare import SEED, OutOfTime, Verdict, bits, time_limit
from tests.sweeps.databases import Case, Entry, operators_in, tensors_in, verdicts

SECONDS = 30
"""Of processor time for one sample."""
GOOD = ("same", "refused", "left out")


class Weighed(nn.Module):
    """A sample as a model without inputs.

    Args:
        case: the sample.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.leaves, self.spec = pytree.tree_flatten((case.args, case.kwargs))
        self.places = [at for at, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.weights = nn.ParameterList([nn.Parameter(self.leaves[at].detach().clone()) for at in self.places])

    def forward(self) -> Tensor:
        """The sum of all elements of results that have a gradient, each with another weight; shape ()."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        for at, weight in zip(self.places, self.weights, strict=True):
            leaves[at] = weight * 1
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = [r for r in tensors_in(self.case.model(*args, **kwargs)) if r.requires_grad]
        total = torch.zeros(())
        for result in results:
            real = torch.view_as_real(result) if result.is_complex() else result
            slopes = torch.linspace(0.3, 2.0, max(1, real.numel()))[: real.numel()]
            total = total + (real * slopes.to(real.dtype).reshape(real.shape)).sum()
        return total


def loss(model: nn.Module) -> Tensor:
    """What the model returns."""
    total: Tensor = model()
    return total


def results(case: Case, by_roamc: bool) -> list[Tensor]:
    """Loss and parameters after one step of SGD; empty if the sample has no tensor that needs a gradient."""
    model = Weighed(case.fresh())
    if not model.places:
        return []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(SEED)
    if by_roamc:
        value = roamc.train_step(model, loss, optimizer, strict=True)()
    else:
        value = loss(model)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [value.detach(), *(weight.detach() for weight in model.weights)]


def judge(case: Case, seconds: int = SECONDS) -> Verdict:
    """The verdict on one sample.

    "same" or "differs" from eager; "refused": roamc says why it does not take the step; "left out": eager has no
    answer, or another one in every run. Else "raises" or "time".
    """
    at = "eager"
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = results(case, by_roamc=False)
            if not wanted or _other(results(case, by_roamc=False), wanted):
                return Verdict("left out", "two runs of eager differ" if wanted else "nothing needs a gradient")
            at = "train_step"
            wrong = _other(results(case, by_roamc=True), wanted)
            return Verdict("differs", f"results {wrong} of {len(wanted)}") if wrong else Verdict("same")
    except OutOfTime:
        return Verdict("left out" if at == "eager" else "time", f"{at}: over {seconds} s")
    except Exception as error:  # whatever fails is a line of the log
        kind = "refused" if type(error) is roamc.CaptureError else "raises"
        said = " ".join(f"{at}: {type(error).__name__}: {error}".split())[:300]
        return Verdict("left out" if at == "eager" else kind, said)


def _other(actual: list[Tensor], wanted: list[Tensor]) -> list[int]:
    return [n for n, pair in enumerate(zip(actual, wanted, strict=True)) if not torch.equal(*map(bits, pair))]


def entries() -> list[Entry]:
    """Every operator of torch's database in float32."""
    return list(operators_in(torch.float32))


def work(job: tuple[Entry, int | None], first: int) -> Iterator[pool.Row]:
    """The verdicts of an entry's samples, from the ``first`` on."""
    entry, samples = job
    yield from verdicts(entry, samples, judge, first)


def main() -> int:
    """Run the sweep; 1 if a step has other bits than eager, or fails."""
    about = "torch's database of operators by roamc.train_step"
    return command.by_operator(about, "build/steps.jsonl", entries(), work, GOOD)


if __name__ == "__main__":
    sys.exit(main())
