"""Plans for a mesh of ranks that need not be there: ``--mesh dp=1,pp=8,tp=8`` and ``roamc.plan(..., mesh=...)``.

One process plans for one rank. What differs between the ranks of ``tp`` is which part of the matrices they have, and
no plan depends on that; see :mod:`roamc.capture.tensor_parallel`. No process group is made, and one that this process
has is left alone; but for ``fsdp``, whose ranks ``fully_shard`` asks of a group that stands for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from roamc.capture.tensor_parallel import check_called, check_names, split, unmatched
from roamc.compat_dynamo import original
from roamc.compat_fsdp import shard_fully
from roamc.compat_groups import planned_for, stand_in_group
from roamc.errors import OptionError, RoamcError, nearest
from roamc.frontends.stages import Stage, stage_note
from roamc.frontends.workload import Optimizer, Workload, optimizer_of
from roamc.planning.plan import Plan
from roamc.settings import Setting, parse_setting

TP = "tp"
"""Name of the axis of tensor parallelism, and of its group in the graph."""


IN_A_FUNCTION = (
    "shard the model by fully_shard in a function, under a fake process group, as docs/ranks.md shows, and plan "
    "FILE.py:FUNCTION or roamc.plan(model, ...)"
)
"""What to do where ``fsdp`` in a mesh does not do it."""


@dataclass(frozen=True)
class Mesh:
    """How many ranks each axis has.

    Attributes:
        dp: replicas of the model; each has a batch of its own, which is the one that is planned.
        pp: stages of the pipeline.
        tp: ranks that have a part of each matrix; they are neighbours, as many in one node as fit.
        fsdp: ranks that have a part of each parameter, by ``fully_shard``; on the command line, without other axes.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    fsdp: int = 1

    def planned_for(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager; capture, plan and explain a graph for this mesh inside.

        Collectives may there name the group of the ``tp`` ranks, although no process group exists. The groups of other
        axes are there as well: what averages gradients or sends activations takes its memory beside the step.
        """
        if self.fsdp > 1:
            return stand_in_group(self.fsdp)
        sizes = dataclasses.asdict(self)
        return planned_for({axis: range(size) for axis, size in sizes.items() if size > 1})


def parse_mesh(mesh: str | Mapping[str, int]) -> Mesh:
    """Read a mesh, ``"dp=1,pp=8,tp=8"`` or a mapping; an axis that is left out has one rank.

    Raises:
        OptionError: ``mesh`` is neither, an axis is unknown or named twice, or its size is no whole number from 1.
    """
    if not isinstance(mesh, str | Mapping):
        raise OptionError(f"mesh must name its axes, such as 'tp=8' or {{'tp': 8}}, not {mesh!r}")
    pairs = list(map(_axis, mesh.split(","))) if isinstance(mesh, str) else list(mesh.items())
    axes = [field.name for field in dataclasses.fields(Mesh)]
    sizes: dict[str, int] = {}
    for axis, size in pairs:
        if axis == "zero":
            raise OptionError(
                f"the mesh has no axis 'zero': fsdp=N shards as ZeRO does at its stage 3; else {IN_A_FUNCTION}"
            )
        if axis not in axes:
            raise OptionError(f"the mesh has no axis {axis!r}{nearest(str(axis), axes)} Axes: {', '.join(axes)}")
        if axis in sizes:
            raise OptionError(f"axis {axis} of the mesh is named twice")
        sizes[axis] = _size(axis, size)
    if sizes.get("fsdp", 1) > 1 and any(size > 1 for axis, size in sizes.items() if axis != "fsdp"):
        raise OptionError(f"fsdp stands alone in a mesh: {IN_A_FUNCTION}")
    return Mesh(**sizes)


def _axis(text: str) -> tuple[str, Setting]:
    """Read an axis, such as ``tp=8``."""
    try:
        return parse_setting(text)
    except OptionError:
        raise OptionError(f"{text!r} is no axis of a mesh with its size; write a mesh as 'dp=1,pp=8,tp=8'") from None


MOST_RANKS = 1 << 20
"""Of an axis: parameters that are sharded are padded to so many rows."""


def _size(axis: str, size: Setting) -> int:
    if type(size) is not int or not 1 <= size <= MOST_RANKS:
        raise OptionError(f"axis {axis} of the mesh must be a whole number of ranks from 1 to {MOST_RANKS}, not {size}")
    return size


def part_of(
    model: nn.Module, optimizer: Optimizer | None, mesh: Mesh, tp_plan: Mapping[str, str] | None = None
) -> tuple[nn.Module, Optimizer | None]:
    """Return what one rank of ``mesh`` has of a model and of its optimizer; both stay as they are.

    Args:
        model: the whole model; of what ``torch.compile`` returned, the model in it.
        optimizer: the optimizer of its parameters, if there is one.
        mesh: the mesh; of a pipeline's stage ``model`` has the layers already.
        tp_plan: how layers are split, see :func:`roamc.capture.tensor_parallel.split`; None or empty for the model's
            attribute ``tp_plan``, which models of transformers have.

    Raises:
        OptionError: the model cannot be split like that.
    """
    if mesh.fsdp > 1:
        raise OptionError(f"fsdp in a mesh is for the command line: {IN_A_FUNCTION}")
    if mesh.tp == 1:
        return model, optimizer
    model = original(model)
    if tp_plan:
        check_names(model, tp_plan)
    return split(model, optimizer, tp_plan or getattr(model, "tp_plan", None) or {}, mesh.tp, TP)


@contextlib.contextmanager
def running_split(model: nn.Module, mesh: Mesh, tp_plan: Mapping[str, str] | None = None) -> Iterator[None]:
    """Context manager, around the capture of ``model``: says what is wrong with how it is split.

    Args:
        model: what :func:`part_of` returned for ``mesh``.
        mesh: the mesh.
        tp_plan: as for :func:`part_of`.

    Raises:
        OptionError: the model does not run as it is split, or does not call a layer that is.
    """
    try:
        yield
    except RuntimeError as error:
        if mesh.tp == 1 or isinstance(error, RoamcError):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise OptionError(
            f"{type(model).__name__} does not run with its layers split among {mesh.tp} ranks as the tensor-parallel "
            f"plan says: {reason}. What reads the columns of a colwise layer must be rowwise, or need no more of them"
            + "".join(f"; {missing.rstrip('.')}" for missing in unmatched(model, tp_plan or {}).values())
        ) from error
    check_called(model)


def notes_on(model: nn.Module, mesh: Mesh, tp_plan: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return a sentence for each pattern of a user's ``tp_plan`` that no layer of ``model`` has a name like.

    Args:
        model: what :func:`part_of` returned for ``mesh``.
        mesh: the mesh; one without ``tp`` splits no layer.
        tp_plan: the user's; None for none.
    """
    return tuple(unmatched(model, tp_plan or {}).values()) if mesh.tp > 1 else ()


def on_mesh(workload: Workload, mesh: Mesh) -> Workload:
    """Return one rank's part of ``workload``; raises as :func:`part_of` and :func:`optimizer_of`.

    With ``fsdp`` the model is sharded in place, and the optimizer must be made of its parameters afterwards.
    """
    if mesh.fsdp > 1:
        return _fully_sharded(workload, mesh.fsdp)
    asked = None if workload.optimizer is None else optimizer_of(workload)
    model, optimizer = part_of(workload.model, asked, mesh, workload.tp_plan)
    workload = dataclasses.replace(workload, model=model)
    if optimizer is None:
        return workload
    its_optimizer: Optimizer = optimizer
    return dataclasses.replace(workload, optimizer=lambda parameters: its_optimizer)


def _fully_sharded(workload: Workload, ranks: int) -> Workload:
    if workload.loss_fn is None:
        raise OptionError(f"fsdp={ranks} plans whole steps: return (model, inputs, loss_fn) from {workload.name}")
    whole = set(map(id, workload.model.parameters()))
    shard_fully(workload.model, ranks)
    groups = [] if workload.optimizer is None else optimizer_of(workload).param_groups
    if any(id(parameter) in whole for group in groups for parameter in group["params"]):
        raise OptionError(
            f"{workload.optimizer_name} of {workload.name} has whole parameters, and fsdp={ranks} shards them: return "
            "a function that makes it of parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    return workload


def check_tokens(plan: Plan) -> None:
    """Refuse the plan of a mesh whose ranks do not divide the tokens that ``shard`` is to split among them.

    Raises:
        OptionError: names the number of tokens, and the next that fits.
    """
    for _, ranks, tokens in plan.decisions.get("shard", {}).get("uneven", ()):
        raise OptionError(
            f"tp={ranks} does not divide the {tokens} tokens of a batch, which shard='sequence' splits; the next "
            f"number that fits is {tokens + -tokens % ranks}"
        )


def noted(plan: Plan, mesh: Mesh, stage: Stage, layers: Setting | None = None) -> Plan:
    """Return ``plan`` with notes on what the mesh adds to the plan of one rank and one micro-batch.

    Args:
        plan: of one rank.
        mesh: the mesh.
        stage: the stage of the rank; if ``mesh`` has several, a note says what it needs with its micro-batches in
            flight.
        layers: how many layers the whole model has; None if that is not known.

    Raises:
        OptionError: as :func:`check_tokens`.
    """
    check_tokens(plan)
    axes = f"fsdp={mesh.fsdp}" if mesh.fsdp > 1 else f"dp={mesh.dp}, pp={mesh.pp}, tp={mesh.tp}"
    notes: tuple[str, ...] = (f"one rank of a mesh of {mesh.dp * mesh.pp * mesh.tp * mesh.fsdp}: {axes}",)
    if mesh.pp > 1:
        notes += (stage_note(plan, stage, layers if isinstance(layers, int) else None),)
    if mesh.dp > 1:
        notes += ("what averages gradients over dp runs beside the planned step and is not counted",)
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))
