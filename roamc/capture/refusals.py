"""torch's errors about what no graph of a training step can hold, each as one line that says what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from roamc import compat
from roamc.capture import user_line
from roamc.errors import CaptureError

_HIGHER_ORDER = re.compile(r"(?:HigherOrderOperator |Higher Order Operator: torch\.)(\w+)")
"""In torch's errors: an operator whose arguments are functions."""

_ADVICE = {
    "FakeTensor.__format__": (
        "the step prints a tensor's value, and train_step traces it with none; print the loss that the step returns"
    ),
    ".numpy() is not supported": (
        "the step takes a tensor to numpy, where no graph can follow it; use torch's operators, or torch.compile or "
        "roamc.optimize"
    ),
    "NestedTensorImpl doesn't support": (
        "the step computes with a nested tensor, as nn.TransformerEncoder does with src_key_padding_mask in eval() and "
        "without gradients; make the encoder with enable_nested_tensor=False"
    ),
    "_apply(): Couldn't swap": (
        "loss_fn converts parameters of the model, as .to(), .half() and .cuda() do; convert the model before the "
        "first step, and what it computes in loss_fn"
    ),
    "of _Whole": (
        "the step writes to a parameter, of which fully_shard gathers a copy: the write would be lost, as it is in "
        "eager; write to it between steps"
    ),
    "backward through the graph a second time": (
        "loss_fn runs backward itself: let it return the loss alone, train_step adds backward and the optimizer's step"
    ),
}
"""Words of torch's errors to what is said instead."""


def value_read(line: str, target: object, cause: str = "") -> str:
    """Return the message for a step that reads a tensor's value.

    Args:
        line: the start of the message, as :func:`roamc.capture.user_line.in_front` returns it.
        target: the operator that reads it.
        cause: what the value depends on, in words; empty if it is not known.
    """
    return (
        f"{line}the step reads a tensor's value, to decide what to do next or to print it ({target})"
        f"{f', and the value depends on {cause}' if cause else ''}; a plan needs a step whose operators do not "
        "depend on data: use torch.where, print the loss that the step returns, pass validate_args=False to what "
        "checks its arguments, or use torch.compile"
    )


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Context manager: turn torch's errors about what a graph cannot hold into a :class:`CaptureError`; others pass.

    A step that reads a tensor's value is one case. The new error keeps the notes of the old, such as the user's line.

    Raises:
        CaptureError: one line that says what to do.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        text = _text(error)
        if text is None:
            raise
        refusal = CaptureError(text)
        for note in getattr(error, "__notes__", ()):
            refusal.add_note(note)
        raise refusal from None


def _text(error: RuntimeError | TypeError) -> str | None:
    """Return the message for an error of the trace; None for one that is about something else."""
    if isinstance(error, compat.DataDependentError):
        return value_read(user_line.in_front(error), error.func)
    if isinstance(error, compat.DynamicShapeError):
        if "_ctc_loss" in str(error.func):
            return (
                "train_step cannot plan F.ctc_loss, whose sizes depend on the lengths that it is given; use "
                "torch.compile or roamc.optimize"
            )
        return (
            f"{user_line.in_front(error)}the shape of a result depends on data ({error.func}); a plan needs fixed "
            "shapes: use a mask instead of an index, or torch.compile"
        )
    advice = next((advice for words, advice in _ADVICE.items() if words in str(error)), None)
    if advice is not None:
        return advice
    operator = _HIGHER_ORDER.search(str(error))
    if operator is not None:
        name = operator[1].removesuffix("_stack_output")
        return (
            f"train_step cannot plan torch's {name}, whose branches are graphs of their own; use torch.where, "
            "or torch.compile or roamc.optimize, which take it"
        )
    if not isinstance(error, NotImplementedError) or "Generator" not in str(error):
        return None
    # torch up to 2.12 has no place for a generator in a graph.
    return (
        f"the step hands an operator what no graph can hold ({error}); draw from a generator of your own "
        "outside the step and pass the numbers in the batch, or use the default generator"
    )
