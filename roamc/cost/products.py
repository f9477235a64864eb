"""Which library multiplies matrices faster on this machine, by form of the product: torch's own or oneDNN.

Measured when it is first asked, and kept in a file beside the measured profiles. A form stands for all products whose
sizes round to the same powers of two, so that a model has a few dozen of them, and none takes more than some
milliseconds to measure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roamc import files
from roamc.compat import without_modes
from roamc.compat_onednn import product_into
from roamc.cost.measure import clock
from roamc.cost.profile import device_model
from roamc.files import measured_folder
from roamc.units import Seconds

log = logging.getLogger(__name__)

LARGEST, MOST = 1024, 8
"""Sizes of a form are at most LARGEST, and its batch at most MOST: larger products run at the same rates."""

ROUNDS = 3
"""How often each library is timed; the shortest time counts."""

PATIENCE: Seconds = 5.0
"""A plan measures forms for this long at most; products of the others stay with torch, until a later plan."""


class Form(NamedTuple):
    """A class of products ``first [batch, rows, depth] @ second [batch, depth, columns]`` of about the same sizes.

    Attributes:
        batch, rows, depth, columns: sizes, rounded to powers of two; batch is 0 for a product of two matrices.
        first_in_columns, second_in_columns: whether neighbours in memory are of one column, as in a transposed matrix.
    """

    batch: int
    rows: int
    depth: int
    columns: int
    first_in_columns: bool
    second_in_columns: bool


def form_of(first: Tensor, second: Tensor) -> Form:
    """Return the form of ``first @ second``, of two matrices, or of two batches of them."""
    batch = min(MOST, _rounded(first.shape[0])) if first.dim() > 2 else 0
    rows, depth, columns = (min(LARGEST, _rounded(size)) for size in (*first.shape[-2:], second.shape[-1]))
    return Form(batch, rows, depth, columns, first.stride(-1) != 1, second.stride(-1) != 1)


def _rounded(size: int) -> int:
    """The power of two that is nearest to ``size`` on a logarithmic scale; 1 for 0."""
    low = 1 << max(size.bit_length() - 1, 0)
    return 2 * low if size * size > 2 * low * low else low


def faster_by_onednn(forms: Collection[Form]) -> frozenset[Form]:
    """Return the ``forms`` that oneDNN multiplies faster here, with torch's present number of threads.

    Times come from this machine's file in :func:`roamc.files.measured_folder`. Forms that it lacks are measured, in the
    order given, for 5 seconds (:data:`PATIENCE`) at most, and written to it. A form that stays unmeasured is not
    returned.
    """
    times_of = stored()
    fresh = {}
    time = clock(torch.device("cpu"))
    begun = time()
    for form in dict.fromkeys(forms):
        if form not in times_of and time() - begun < PATIENCE:
            with without_modes():  # planning happens under fake tensors
                fresh[form] = _measured(form)
    if fresh:
        times_of |= fresh
        _store(times_of)
    return frozenset(form for form in forms if form in times_of and times_of[form][1] < times_of[form][0])


Times = tuple[Seconds, Seconds]
"""Seconds of one product by torch, and by oneDNN."""


def _measured(form: Form) -> Times:
    product = product_into()
    if product is None:
        return 0.0, 0.0
    batch = (form.batch,) if form.batch else ()
    first = _matrix(batch, form.rows, form.depth, in_columns=form.first_in_columns)
    second = _matrix(batch, form.depth, form.columns, in_columns=form.second_in_columns)
    out = first.new_empty((*batch, form.rows, form.columns))
    time, fewest = clock(out.device), []
    with torch.no_grad():
        for run in (lambda: torch.matmul(first, second, out=out), lambda: product(first, second, out, 0.0)):
            run()
            seconds = []
            for _ in range(ROUNDS):
                begun = time()
                run()
                seconds.append(time() - begun)
            fewest.append(min(seconds))
    return fewest[0], fewest[1]


def _matrix(batch: tuple[int, ...], rows: int, columns: int, *, in_columns: bool) -> Tensor:
    if in_columns:
        return _matrix(batch, columns, rows, in_columns=False).transpose(-1, -2)
    return torch.full((*batch, rows, columns), 0.5, dtype=torch.float32, device="cpu")


def _machine() -> dict[str, Any]:
    """What the measured times depend on besides the form."""
    return {"model": device_model("cpu"), "torch": torch.__version__, "threads": torch.get_num_threads()}


def _path() -> Path:
    return measured_folder() / f"products-{torch.get_num_threads()}.json"


def stored() -> dict[Form, Times]:
    """Return form to times from the file for torch's present number of threads.

    Empty if there is no such file, it is of another machine or torch, or it cannot be read.
    """
    try:
        data = json.loads(_path().read_text(encoding="utf-8"))
        if data["machine"] != _machine():
            return {}
        return {
            Form(int(b), int(r), int(d), int(c), bool(first), bool(second)): (float(torchs), float(onednns))
            for b, r, d, c, first, second, torchs, onednns in data["forms"]
        }  # an endless number raises OverflowError, lists within lists RecursionError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        log.warning("%s is measured anew: %r", _path(), error)
        return {}


def _store(times_of: dict[Form, Times]) -> None:
    """Write ``times_of``, form to times, to the file; where that is not possible, only a warning is logged."""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        rows = [[*form, *times] for form, times in sorted(times_of.items())]
        files.write_text(_path(), json.dumps({"machine": _machine(), "forms": rows}) + "\n")
    except OSError as error:
        log.warning("the times of matrix products are not kept: %s", error)
