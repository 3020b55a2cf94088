"""Real waiting for model time: the host's side of paced mode."""

from __future__ import annotations

import time

import numpy as np

from emu import _native
from emu.errors import UserError

_PROBE_ROWS, _PROBE_ROW_BYTES, _PROBE_POOL_ROWS = 2048, 1152, 1 << 16
_PROBE_ROUNDS = 9


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
        self.late_ns = max(self.late_ns, self.now_ns() - time_ns)
        self._clock.wait_until_ns(self._start_ns + time_ns)
        return self.now_ns()

    def paceable_gb_per_s(self) -> float:
        """The bandwidth of modelled links, all together, up to which the host's copies fit into the model's time.

        One thread of this machine gathers so many bytes per second; the dilation stretches the time it has.
        """
        if self._gather_gb_per_s is None:
            self._gather_gb_per_s = measure_gather_gb_per_s()
        return self._gather_gb_per_s * self.dilation


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
    if not 1e-3 <= dilation <= 1e9:
        raise UserError(
            f"dilation {dilation} is not a number from 0.001 to 1e9",
            remedy="give host time per model time, for instance 30",
        )
