"""Many schedules of the simulator at once, on all cores: the native code runs without the interpreter's lock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from emu import _native

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEDULES = 100_000  # seeds 0 ... of test_pool_schedules.py
COUNTS = ("steps", "published", "read", "refused", "expired", "crashed")


def simulate_all(plots: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Play each of the plots (arguments of `pool_simulate`), in order; the sum of what happened.

    Raises:
        AssertionError: a plot broke an invariant; says which seed, and how to play it again.
    """
    total = dict.fromkeys(COUNTS, 0)
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        plots = list(plots)
        for plot, seen in zip(
            plots, threads.map(lambda p: _native.pool_simulate(**p), plots), strict=True
        ):
            assert seen["violation"] == "", replay(plot, seen)
            for name in COUNTS:
                total[name] += seen[name]
    return total


def replay(plot: dict[str, Any], seen: dict[str, Any]) -> str:
    """What went wrong, and the call that shows it again."""
    again = ", ".join(
        f"{name}={value}"
        for name, value in (plot | {"first_seed": seen["seed"], "count": 1}).items()
    )
    return f"{seen['violation']}; again: emu._native.pool_simulate({again})"
