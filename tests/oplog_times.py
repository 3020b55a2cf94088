"""Times of an operation log, as it holds them and replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.timing.oplog import OpLog, replay

if TYPE_CHECKING:
    from emu.timing.system import System


def times(log: OpLog) -> tuple[list[int], list[int]]:
    return [op.start_ns for op in log.ops], [op.end_ns for op in log.ops]


def replayed(log: OpLog, system: System) -> tuple[list[int], list[int]]:
    starts, ends = replay(log, system)
    return starts.tolist(), ends.tolist()
