"""Misses of an index stream under a replacement policy, step by step.

All policies work as HiSparse's hot buffer does: selected rows are never victims of their own step, the newest row
has a slot of its own, and a context that fits the slots is resident from the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import UserError
from emu.suggest import unknown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emu.store import TokenIds

POLICIES = ("lru", "fifo", "random", "belady")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A hot buffer's rule.

    Attributes:
        slots: rows per layer and request.
        policy: "lru" (HiSparse's own), "fifo", "random", or "belady" (evicts what is needed last: a bound).
        seed: of "random".
    """

    slots: int
    policy: str = "lru"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: an unknown policy, or no slots.
        """
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES)
        if self.slots < 1:
            raise UserError(f"a hot buffer of {self.slots} slots", remedy="give 1 or more")


@dataclass(frozen=True, slots=True)
class Misses:
    """What a stream missed.

    Attributes:
        rows: int32 [steps], rows fetched.
        runs: int32 [steps], contiguous runs of rows among them within blocks of 64, in the order of fetching.
        selected: rows selected in all.
        touched: different rows selected.
    """

    rows: NDArray[np.int32]
    runs: NDArray[np.int32]
    selected: int
    touched: int


def misses(stream: TokenIds, context: int, buffer: Buffer) -> Misses:
    """Run a stream through a hot buffer.

    Args:
        stream: int32 [steps, k], different within a step, -1 pads; step t's newest row is context + t - 1.
        context: rows before the first step.
        buffer: slots and rule.

    Raises:
        UserError: fewer slots than rows selected in a step.
    """
    if buffer.slots < stream.shape[1]:
        raise UserError(
            f"a hot buffer of {buffer.slots} slots cannot hold the top {stream.shape[1]} rows",
            remedy=f"give --hot-buffer {stream.shape[1]} or more",
        )
    run = _lru if buffer.policy == "lru" else _other
    rows, runs = run(stream, context, buffer)
    return Misses(
        rows, runs, int(np.count_nonzero(stream >= 0)), len(np.unique(stream[stream >= 0]))
    )


def _lru(
    stream: TokenIds, context: int, buffer: Buffer
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """HiSparse's rule, by the code that `emu run` uses."""
    steps, k = stream.shape
    rule = _native.HotBuffer(1, 1, buffer.slots, k)
    rule.admit(0, context - 1)
    locs, missed, slots = (np.empty((1, k), np.int32) for _ in range(3))
    rows, runs = np.empty(steps, np.int32), np.empty(steps, np.int32)
    request, newest = np.zeros(1, np.int32), np.empty(1, np.int32)
    for step in range(steps):
        newest[0] = context + step - 1
        rows[step] = rule.resolve(0, request, stream[step : step + 1], newest, locs, missed, slots)
        runs[step] = _runs(missed[0, : rows[step]])
    return rows, runs


def _runs(rows: NDArray[np.int32]) -> int:
    return len(rows) - int(np.count_nonzero((np.diff(rows) == 1) & (rows[1:] % 64 != 0)))


def _other(
    stream: TokenIds, context: int, buffer: Buffer
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The other policies, on arrays over the rows: `rank` says who goes first (lowest)."""
    steps, _ = stream.shape
    size = context + steps
    held = np.zeros(size, np.bool_)
    rank = np.zeros(size, np.int64)
    if context - 1 <= buffer.slots:
        held[: context - 1] = True
    random = np.random.default_rng(buffer.seed)
    uses = _NextUse(stream, size) if buffer.policy == "belady" else None
    rows, runs = np.empty(steps, np.int32), np.empty(steps, np.int32)
    free = buffer.slots - int(np.count_nonzero(held))
    for step in range(steps):
        chosen = stream[step][stream[step] >= 0]
        old = chosen[chosen != context + step - 1]
        missed = old[~held[old]]
        if uses is not None:
            uses.after(step, rank)
        over = len(missed) - free
        if over > 0:
            kept = held.copy()
            kept[chosen] = False
            candidates = np.flatnonzero(kept)
            order = (
                random.random(len(candidates)) if buffer.policy == "random" else rank[candidates]
            )
            held[candidates[np.argpartition(order, over - 1)[:over]]] = False
        free = max(0, -over)
        held[missed] = True
        if uses is None:
            rank[missed] = step
        rows[step], runs[step] = len(missed), _runs(missed)
    return rows, runs


class _NextUse:
    """For Belady: minus the next step that selects a row, kept up to date in a rank array.

    Args:
        stream: int32 [steps, k].
        size: rows in all.
    """

    def __init__(self, stream: TokenIds, size: int) -> None:
        steps, _ = stream.shape
        self._stream = stream
        self._next = np.full(stream.shape, steps + 1, np.int64)
        later = np.full(size, steps + 1, np.int64)
        for step in range(steps - 1, -1, -1):
            valid = stream[step] >= 0
            self._next[step, valid] = later[stream[step][valid]]
            later[stream[step][valid]] = step
        self._first = later

    def after(self, step: int, rank: NDArray[np.int64]) -> None:
        """Bring the ranks to after a step."""
        if step == 0:
            rank[:] = -self._first
        valid = self._stream[step] >= 0
        rank[self._stream[step][valid]] = -self._next[step, valid]
