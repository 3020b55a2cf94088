"""Real waiting for model time: the host's side of paced mode."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PROBE_ROWS, _PROBE_ROW_BYTES, _PROBE_POOL_ROWS = 2048, 1152, 1 << 16
_PROBE_ROUNDS = 9
_LARGEST_DILATION = 1e9


class HostPace:
    """Host time divided by the dilation, from start() on, and waiting until it has reached a model time.

    Attributes:
        dilation: host time per model time.
        late_ns: the most that the host was behind a time that it should have waited for, in model ns.
    """

    def __init__(self, dilation: float) -> None:
        check_dilation(dilation)
        self.dilation = dilation
        self.late_ns = 0
        self._times_ns = array("q")  # of every wait: the model time waited for,
        self._work_ns = array("d")  # and the host's own time since the wait before
        self._ended_ns = 0
        self._gather_gb_per_s: float | None = None
        self._clock = _native.LinkClock(np.zeros(0, np.uint8), dilation)
        self._start_ns: int | None = None

    def start(self) -> None:
        """Let time begin; starting again changes nothing."""
        if self._start_ns is None:
            self._start_ns = self._clock.now_ns()

    def now_ns(self) -> int:
        """Model time by the host's clock; 0 before start()."""
        return 0 if self._start_ns is None else self._clock.now_ns() - self._start_ns

    def wait_until(self, time_ns: int) -> int:
        """Wait for a model time (hybrid sleep and spin, GIL released); returns the time that it is then."""
        assert self._start_ns is not None
        begin_ns = self.now_ns()
        self.late_ns = max(self.late_ns, begin_ns - time_ns)
        self._times_ns.append(time_ns)
        self._work_ns.append((begin_ns - self._ended_ns) * self.dilation)
        self._clock.wait_until_ns(self._start_ns + time_ns)
        self._ended_ns = self.now_ns()
        return self._ended_ns

    def dilation_to_hold(self, within_ns: int) -> float:
        """The least dilation at which this run, with the work that was seen, is never late by more (model ns)."""
        return dilation_to_hold(
            np.array(self._times_ns, np.int64), np.array(self._work_ns, np.float64), within_ns
        )

    def paceable_gb_per_s(self) -> float:
        """The bandwidth of modelled links, all together, up to which the host's copies fit into the model's time.

        One thread of this machine gathers so many bytes per second; the dilation stretches the time it has.
        """
        if self._gather_gb_per_s is None:
            self._gather_gb_per_s = measure_gather_gb_per_s()
        return self._gather_gb_per_s * self.dilation


def dilation_to_hold(
    times_ns: NDArray[np.int64], work_ns: NDArray[np.float64], within_ns: int
) -> float:
    """The least dilation at which no wait is late by more than within_ns of model time, to 0.1 %.

    Args:
        times_ns: int64 [n], model time of each wait, ascending.
        work_ns: float64 [n], host time of the work between the wait before (or the start) and this one.
        within_ns: lateness that is allowed, above 0.
    """
    if not len(times_ns):
        return 1e-3
    between_ns = np.diff(times_ns, prepend=0)

    def late_ns(dilation: float) -> float:
        """Work that does not fit before its wait is carried on to the next one (Lindley's recursion)."""
        behind = np.cumsum(work_ns / dilation - between_ns)
        return float(np.max(behind - np.minimum(np.minimum.accumulate(behind), 0.0)))

    low, high = 1e-3, _LARGEST_DILATION
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if late_ns(middle) > within_ns else (low, middle)
    return high


def measure_gather_gb_per_s() -> float:
    """What one thread of this machine gathers: 2048 random rows of 1152 bytes out of 75 MB, median of 9 rounds."""
    rng = np.random.default_rng(0)
    pool = np.ones((_PROBE_POOL_ROWS, _PROBE_ROW_BYTES), np.uint8)
    out = np.empty((_PROBE_ROWS, _PROBE_ROW_BYTES), np.uint8)
    times_ns = []
    for _ in range(_PROBE_ROUNDS):
        rows = rng.integers(0, _PROBE_POOL_ROWS, _PROBE_ROWS)
        begin_ns = time.perf_counter_ns()
        np.take(pool, rows, axis=0, out=out, mode="clip")
        times_ns.append(time.perf_counter_ns() - begin_ns)
    return out.nbytes / float(np.median(times_ns))


def check_dilation(dilation: float) -> None:
    """Refuse a dilation that the clocks cannot run with.

    Raises:
        UserError: it is not a number from 0.001 to 1e9.
    """
    if not 1e-3 <= dilation <= _LARGEST_DILATION:
        raise UserError(
            f"dilation {dilation} is not a number from 0.001 to 1e9",
            remedy="give host time per model time, for instance 30",
        )
