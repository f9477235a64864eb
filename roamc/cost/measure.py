"""``roamc calibrate``: measures a device with small benchmarks and makes its profile.

Every round runs each probe, so that a slow moment of the machine hits all alike. The shortest time of all rounds is
kept: other work on the machine only adds to it. (Medians were off by a factor of two in either direction where three
other processes shared two cores.) With a single thread, the thread's processor time is measured.

On a CPU a probe runs twice in a round, and the mean counts: once after all others, when its tensors are out of the
caches, and once more directly after that. In a training step an operator's arguments were written lately and the place
of its result was not. Compared with a step of GPT, the first of the two runs is 10 to 50 % too slow for kinds that move
much and compute little, and the second is as much too fast.

The rate of a kind is its FLOPs or elements over its time, the overhead of the call included. Rates therefore hold for
tensors of the size of activations.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from roamc.cost import probes
from roamc.cost.probes import Probe, Scale, Work
from roamc.cost.profile import DeviceProfile, device_model, shipped_like
from roamc.errors import ProfileError
from roamc.units import Bytes, Seconds

SCALES = {"cpu": (1024, 768, 8), "cuda": (16384, 4096, 256)}
"""Device type to (rows, width, images) of :class:`Scale`: tensors are larger than the nearest caches, and a probe takes
a few milliseconds."""
QUICK = (32, 64, 1)
"""(rows, width, images) where ``quick`` is set."""
ROUNDS, QUICK_ROUNDS = 9, 2
"""How often every probe is timed, and how often where ``quick`` is set."""
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
CALLS = {"cpu": 2, "cuda": 10}
"""Device type to the calls between two readings of the clock; a GPU is synchronized before each reading."""
SWEEP = {"cpu": range(16, 27), "cuda": range(20, 30)}
"""Device type to the exponents n for which the bandwidth is measured, with three tensors of ``2**n`` bytes each."""

Say = Callable[[str, int], None]
"""Receives what is being done, as text, and the number of rounds that are done."""


def calibrate(device: str | torch.device = "cpu", *, quick: bool = False, say: Say | None = None) -> DeviceProfile:
    """Measure ``device``, on a CPU with torch's present number of threads, and return its profile; nothing is stored.

    This takes half a minute at most. :func:`roamc.cost.profile.store_profile` keeps the profile for later runs.

    Args:
        device: "cpu", "cuda" or one of several, such as "cuda:1".
        quick: use tiny tensors and two rounds. The profile is valid but its numbers mean nothing; for tests.
        say: called before every round with what is done, such as "measuring cpu", and the number of rounds done before.

    Raises:
        ProfileError: torch knows no device of this name, it is neither a CPU nor a CUDA device, or it is not there.
    """
    where = checked_device(device)
    scale = Scale(where, *(QUICK if quick else SCALES[where.type]))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with torch.no_grad():
        timed = _Timed(where)
        for table in (probes.PRODUCTS, probes.ELEMENTS):
            for kind, probe in table.items():
                for dtype in DTYPES[where.type]:
                    timed.add((kind, str(dtype).removeprefix("torch.")), probe, scale, dtype)
        sweep = [1 << power for power in SWEEP[where.type]][:: 6 if quick else 1]
        for size in sweep:
            timed.add(("bytes", size), _triad(size), scale, torch.float32)
        timed.add(("weights", 0), _weights, scale, torch.float32)
        timed.add(("overhead", 0), _overhead, scale, torch.float32)
        for done in range(rounds):
            if say is not None:
                say(f"measuring {where}", done)
            timed.round()
        return _profile(where, timed, sweep)


def checked_device(device: str | torch.device) -> torch.device:
    """Return ``device`` as torch's; raises as :func:`calibrate`."""
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ProfileError(f"no device is called {device!r}; known are {' and '.join(SCALES)}") from None
    if where.type not in SCALES:
        raise ProfileError(f"devices of type {where.type} cannot be measured, only {' and '.join(SCALES)}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ProfileError(f"there is no device {where} here; {torch.cuda.device_count()} GPUs are seen")
    return where


def clock(device: torch.device) -> Callable[[], Seconds]:
    """Return the function to read the time with: the thread's processor time on a CPU with one thread, else wall time.

    Processor time stands still while another process has the processor.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


class _Timed:
    """The probes that are measured and the seconds that each took.

    Attributes:
        device: the device that is measured.
        clock: see :func:`clock`.
        work: key to the callable of a probe and its FLOPs, elements or bytes. Keys are (kind, name of the dtype), or
            ("bytes", size), ("weights", 0) and ("overhead", 0).
        seconds: key to the mean time of one run, for every round.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = clock(device)
        self.work: dict[tuple[str, Any], Work] = {}
        self.seconds: dict[tuple[str, Any], list[Seconds]] = {}

    def add(self, key: tuple[str, Any], probe: Probe, scale: Scale, dtype: torch.dtype) -> None:
        """Set up a probe and run it once; leave it out where torch has no kernel for the dtype."""
        try:
            run, count = probe(scale, dtype)
            run()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return
        self.work[key], self.seconds[key] = (run, count), []

    def round(self) -> None:
        """Run every probe once more and append the time of one run to its seconds."""
        calls = CALLS[self.device.type]
        for key, (run, _) in self.work.items():
            self._wait()
            start = self.clock()
            for _ in range(calls):
                run()
            self._wait()
            self.seconds[key].append((self.clock() - start) / calls)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def least(self, key: tuple[str, Any]) -> Seconds:
        """Return the seconds of one run in the fastest round, at least a nanosecond."""
        return max(min(self.seconds[key]), 1e-9)

    def rate(self, key: tuple[str, Any]) -> float:
        """Return FLOPs, elements or bytes a second in the fastest round, rounded to four significant digits."""
        return _digits(self.work[key][1] / self.least(key))

    def rates(self, table: dict[str, Probe]) -> dict[str, dict[str, float]]:
        """Return the rates of the kinds in ``table`` that were measured: ``result[kind][name of the dtype]``.

        Each is as :meth:`rate` gives it. Kinds and dtypes for which torch has no kernel are left out.
        """
        by_kind: dict[str, dict[str, float]] = {}
        for kind, dtype in self.work:
            if kind in table:
                by_kind.setdefault(kind, {})[dtype] = self.rate((kind, dtype))
        return by_kind


def _profile(device: torch.device, timed: _Timed, sweep: Sequence[Bytes]) -> DeviceProfile:
    """Make the profile from measured times; ``sweep`` has the sizes of the bandwidth's tensors, smallest first."""
    by_traffic = {3 * size: timed.rate(("bytes", size)) for size in sweep}
    slow, fast = by_traffic[3 * sweep[-1]], max(by_traffic.values())
    cached = [traffic for traffic, rate in by_traffic.items() if rate >= (slow + fast) / 2]
    flops, elements = timed.rates(probes.PRODUCTS), timed.rates(probes.ELEMENTS)
    elements["convolution_weights"] = {"float32": _weight_rate(timed, flops["convolution"]["float32"])}
    model, shipped = device_model(device.type), shipped_like(device.type)
    today = datetime.date.today().isoformat()
    like = (
        f"; peaks, and links unless said otherwise, as in profile {shipped.name}" if shipped and shipped.links else ""
    )
    return DeviceProfile(
        name="measured",
        device=device.type,
        model=model,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        source=f"roamc calibrate, {today}, torch {torch.__version__}{like}",
        overhead=_digits(timed.least(("overhead", 0)) / timed.work["overhead", 0][1]),
        bandwidth=slow,
        cache_bandwidth=fast,
        cache_bytes=max(cached, default=0),
        flops=flops,
        elements=elements,
        links={} if shipped is None else shipped.links,
        peaks={} if shipped is None else shipped.peaks,
    )


def _digits(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def _triad(size: Bytes) -> Probe:
    """Return a probe that adds two tensors of ``size`` bytes into a third and multiplies one in place.

    Its work is the bytes that both move, five times ``size``. About half of all pointwise work is of these two forms.
    """

    def probe(scale: Scale, dtype: torch.dtype) -> Work:
        a, b, out = (torch.ones(size // dtype.itemsize, dtype=dtype, device=scale.device) for _ in range(3))

        def run() -> None:
            torch.add(a, b, out=out)
            a.mul_(1.0)

        return run, 5 * size

    return probe


def _weights(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare a convolution with large weights and one small image, whose time goes mostly into reordering the weights.

    Returns (run, elements of the weights).
    """
    x, weight = scale.floats(dtype, 1, 512, 4, 4), scale.floats(dtype, 512, 512, 3, 3)
    return lambda: F.conv2d(x, weight, padding=1), weight.numel()


def _weight_rate(timed: _Timed, flop_rate: float) -> float:
    """Return elements of the weights a second in :func:`_weights`, after the time of the products is taken off.

    ``flop_rate`` is the rate of dense convolutions. At least a tenth of the time counts as that of the weights.
    """
    count = timed.work["weights", 0][1]
    products = 2 * 16 * count / flop_rate
    took = timed.least(("weights", 0))
    return _digits(count / max(took - products, took / 10))


def _overhead(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare 500 calls of operators on tiny tensors, a hundred of each of five; return (run, 500)."""
    x, weight = scale.floats(dtype, 8, 8), scale.floats(dtype, 8)
    out = torch.empty_like(x)

    def run() -> None:
        for _ in range(100):
            torch.add(x, x, out=out)
            out.mul_(0.5)
            torch.mm(x, x, out=out)
            torch.sum(x, 0)
            torch.native_layer_norm(x, [8], weight, weight, 1e-5)

    return run, 500
