"""The arguments that ``roamc plan``, ``explain`` and ``max-batch`` share: what to plan, for what device and options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from roamc.capture.dump.recognise import is_archive, is_dump
from roamc.cli.models import AUTOCAST_NAMES, DTYPE_NAMES, TASK_NAMES
from roamc.gpus import GPUS


def _not_empty(target: str) -> str:
    """Check a target.

    Raises:
        BadParameter: it is empty, as from an unset variable of a shell; as a path it would be the current folder.
    """
    if not target.strip():
        raise typer.BadParameter("it is empty; give a model's name (roamc models lists them) or a path")
    return target


Target = Annotated[
    str,
    typer.Argument(
        callback=_not_empty,
        metavar="NAME|FILE.py:FUNCTION|CONFIG|LOG|MODEL.pt2|PLAN.json",
        help="A built-in model (see roamc models), a function that returns (model, inputs[, loss_fn[, optimizer]]), or "
        "a transformers configuration: a folder with config.json, or a .json file; or a log of "
        "TORCH_TRACE, its folder, or a printed graph; or a .pt2 of torch.export; or the file of a saved plan.",
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Batch size.")]
Seq = Annotated[int | None, typer.Option("--seq", "--sequence", help="Sequence length.")]
Layers = Annotated[int | None, typer.Option("--layers", help="Number of layers.")]
Width = Annotated[int | None, typer.Option("--width", help="Width of the residual stream.")]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads.")]
Vocab = Annotated[int | None, typer.Option("--vocab", help="Size of the vocabulary.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help=f"One of {', '.join(DTYPE_NAMES)}. Default: the configuration's.")
]
Autocast = Annotated[
    str | None,
    typer.Option(
        "--autocast",
        metavar="|".join(AUTOCAST_NAMES),
        help="Run forward and loss under torch.autocast; weights are float32 unless --dtype says otherwise.",
    ),
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Recompute each layer of a transformers model in backward, as its gradient checkpointing does.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        help=f"What the model of a configuration is trained for: one of {', '.join(TASK_NAMES)}. Default: by its "
        "architecture.",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=16,targets=q,v",
        help="Freeze the model of a configuration and train LoRA adapters of peft, of layers such as q_proj,v_proj; "
        "alpha= and dropout= as well.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the model, argument of the function or field of the configuration; of a log or .pt2, the "
        "value of a symbolic size; repeatable.",
    ),
]
Piece = Annotated[
    str | None,
    typer.Option("--piece", metavar="2/0", help="Which graph of a log or printed text; by default the largest."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="sgd, adam, adamw (the default) or compact, if the function returns none; none for forward and backward "
        "of the loss alone. For a log, adds the states to the total, as assumed; default: none.",
    ),
]
Halves = Annotated[
    bool, typer.Option("--forward-backward", help="Plan forward and backward only, as torch.compile does.")
]
Meta = Annotated[
    bool, typer.Option("--meta", help="Call the function on the meta device, where weights take no memory.")
]
Clip = Annotated[
    float | None, typer.Option("--clip-grad-norm", help="Clip the global 2-norm of all gradients to this value.")
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--memory-budget",
        metavar="SIZE",
        help="Most bytes that the step may allocate: 6GiB, 80% of what eager needs, min, light (as min, without "
        "recomputing matrix products and other heavy operators), +1% (the lowest peak for at most 1% more time; the "
        "default), +0% (recompute only what costs no time), device, or total:40GB (which parameters, optimizer state "
        "and inputs share). Exit code 2 if no plan fits. Repeat it to compare budgets with roamc plan.",
    ),
]
Others = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="A roamc option, such as order=program; repeatable."),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        help="cuda plans for a GPU; none is needed. Default: cuda with --gpu, else cpu, for the model's own device.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME|SIZE",
        help=f"The GPU that the step is to fit: {', '.join(GPUS)}, or its capacity such as 40GB. Plans for cuda within "
        "its capacity, margin included, at its speed; exit code 2 if no plan fits.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="Device profile for time predictions: cpu, the name of a GPU as for --gpu, or a file written by roamc "
        "calibrate. Default with --device cuda: that of --gpu, else h100.",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="pp=8,tp=8|fsdp=8",
        help="Plan one rank of this mesh; the others need not exist. tp splits matrices, pp splits layers, fsdp splits "
        "parameters, gradients and optimizer state; dp does not change a rank's plan. --option shard=sequence also "
        "splits activations.",
    ),
]
TpPlan = Annotated[
    list[str] | None,
    typer.Option(
        "--tp-plan",
        metavar="PATTERN=WORD",
        help="How tp splits layers, such as 'layers.*.up=colwise', where the model does not say it; repeatable.",
    ),
]
StageNumber = Annotated[
    str | None,
    typer.Option(
        "--stage",
        metavar="N|all",
        help="Pipeline stage to plan, from 0 (the default). With all, roamc plan compares the stages and shows the one "
        "with the highest peak.",
    ),
]


@dataclass(frozen=True)
class Request:
    """What the command line asks to plan.

    Attributes:
        target: name of a built-in model, ``FILE.py:function``, or path of a configuration of transformers.
        sizes: sizes of the model, and other settings with options of their own, by name; None for the default.
        sets: further settings of the model or arguments of the function, each as ``key=value``; with the optimizer
            "compact" its :data:`roamc.cli.words.COMPACT` as well.
        piece: which graph of a file, as ``2/0``; None for the largest.
        optimizer: name of the optimizer where the target brings none; None for AdamW there, ``"none"`` to leave the
            update of a loss out. For a file with graphs, the optimizer whose states are assumed; None for none.
        forward_backward: whether to leave the update out.
        meta: whether to call the function of a file with the meta device as torch's default.
        clip_grad_norm: limit of the gradients' norm, as for :func:`roamc.train_step`; None for no clipping.
        memory_budget: as the option of that name, see :data:`roamc.budget.Budget`; None for the default.
        options: roamc's options, each as ``key=value``.
        device: "cuda" to plan for a GPU, which need not be there; "cpu" for the device that the model lies on.
        gpu: the GPU that the step is to fit, as the option of that name; None for none.
        profile: the device profile that times are predicted with, as the option of that name; None for that option. For
            a GPU without either it is :data:`roamc.cost.GENERIC`, so that every machine makes the same plan.
        autocast: key of :data:`roamc.cli.models.AUTOCAST_NAMES`, of the autocast that forward and loss run under; None
            for none.
        gradient_checkpointing: whether each layer of a transformers model is a checkpoint.
        mesh: the ranks to plan for, such as "dp=1,pp=8,tp=8"; None for one.
        tp_plan: how ``tp`` splits layers, each as ``pattern=word``; empty for the model's own way.
        stage: number of the pipeline's stage, from 0; None for the first.
        words: the target and the options as they stand on the command line, but for budgets, batch and stage; empty
            where nothing does.
        is_dump: whether the target is a file or folder with graphs; looked up where it is left out.
        is_archive: whether it is one of torch.export; likewise.
    """

    target: str
    sizes: Mapping[str, int | str | float | bool | None] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    piece: str | None = None
    optimizer: str | None = None
    forward_backward: bool = False
    meta: bool = False
    clip_grad_norm: float | None = None
    memory_budget: str | None = None
    options: tuple[str, ...] = ()
    device: str = "cpu"
    gpu: str | None = None
    profile: str | None = None
    autocast: str | None = None
    gradient_checkpointing: bool = False
    mesh: str | None = None
    tp_plan: tuple[str, ...] = ()
    stage: int | None = None
    words: tuple[str, ...] = ()
    is_dump: bool | None = None
    is_archive: bool | None = None

    def __post_init__(self) -> None:
        if self.is_dump is None:  # a look into a folder and those in it: once for all requests of a command
            object.__setattr__(self, "is_dump", is_dump(self.target))
        if self.is_archive is None:
            object.__setattr__(self, "is_archive", is_archive(self.target))

    @property
    def is_file(self) -> bool:
        """Whether the target is a file of torch's, and no model."""
        return bool(self.is_dump or self.is_archive)

    @property
    def begins(self) -> str:
        """What is done first, as progress names it."""
        return f"{'reading' if self.is_file else 'building'} {self.target}"


@dataclass(frozen=True)
class Asked:
    """What the shared arguments say.

    Attributes:
        request: without a budget and a stage.
        budgets: each ``--memory-budget``.
        stage: the text of ``--stage``; None if it is left out.
        given: what stands on the command line, by the name of its parameter: the option, such as ``--batch``.
    """

    request: Request
    budgets: tuple[str, ...]
    stage: str | None
    given: Mapping[str, str] = field(default_factory=dict)


def _asked(
    target: Target, batch: Batch = None, seq: Seq = None, layers: Layers = None, width: Width = None,
    heads: Heads = None, vocab: Vocab = None, dtype: Dtype = None, task: Task = None, lora: Lora = None,
    sets: Sets = None, piece: Piece = None, optimizer: Optimizer = None, forward_backward: Halves = False,
    meta: Meta = False, clip_grad_norm: Clip = None, memory_budget: Limit = None, option: Others = None,
    device: Device = None, gpu: Gpu = None, profile: Profile = None, autocast: Autocast = None,
    gradient_checkpointing: Checkpointing = False, mesh: Ranks = None, tp_plan: TpPlan = None,
    stage: StageNumber = None,
) -> Asked:  # fmt: skip
    request = Request(
        target,
        sizes={"batch": batch, "seq": seq, "layers": layers, "width": width, "heads": heads, "vocab": vocab}
        | {"dtype": dtype, "task": task, "lora": lora},
        sets=tuple(sets or ()),
        piece=piece,
        optimizer=optimizer,
        forward_backward=forward_backward,
        meta=meta,
        clip_grad_norm=clip_grad_norm,
        options=tuple(option or ()),
        device=device or ("cpu" if gpu is None else "cuda"),
        gpu=gpu,
        profile=profile,
        autocast=autocast,
        gradient_checkpointing=gradient_checkpointing,
        mesh=mesh,
        tp_plan=tuple(tp_plan or ()),
    )
    return Asked(request, tuple(memory_budget or ()), stage)


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the shared arguments in the place of its first parameter, an :class:`Asked`."""
    shared = inspect.signature(_asked, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)
    _, *others = own.parameters.values()
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(command)
    def run(context: typer.Context, **arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in shared}
        asked, written = _asked(**values), _given(context)
        options = (
            _words(written[name], value) for name, value in values.items() if name in written and name not in _LEFT_OUT
        )
        request = dataclasses.replace(asked.request, words=(asked.request.target, *itertools.chain(*options)))
        command(dataclasses.replace(asked, request=request, given=written), **arguments)

    run.__signature__ = own.replace(parameters=[*shared.values(), *others, context])  # type: ignore[attr-defined]
    return run


_LEFT_OUT = ("target", "batch", "memory_budget", "stage")
"""Parameters that :attr:`Request.words` leaves out as options."""


def _words(option: str, value: Any) -> tuple[str, ...]:
    """An option as it is written; of one that is repeated, a ``--set batch=`` is left out."""
    if isinstance(value, bool):
        return (option,)
    several = value if isinstance(value, list) else [value]
    kept = (str(each) for each in several if not str(each).startswith("batch="))
    return tuple(word for each in kept for word in (option, each))


def _given(context: typer.Context) -> dict[str, str]:
    sources = {each.name: context.get_parameter_source(each.name or "") for each in context.command.params}
    written = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {each.name or "": each.opts[0] for each in context.command.params if each.name in written}
