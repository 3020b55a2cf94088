"""What all parts of a decode instance share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.sac.designs import Design
    from emu.sac.model import DsaModel
    from emu.sac.plan import RequestPlan, RunSpec
    from emu.store import KVStore, TokenIds
    from emu.timing.clock import Clock
    from emu.timing.system import System


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """A design on its media, under a clock.

    Attributes:
        model, spec, design: what runs.
        pools: the pool's stores, by device; one where the design has one medium for all.
        local: the decode host's DRAM copy, None where the design has none.
        clock, system: charge the time.
        tick: called after each output token.
        observe: called with request, layer, rows that exist and int32 [k] selected tokens, where somebody records.
    """

    model: DsaModel
    spec: RunSpec
    design: Design
    pools: list[KVStore]
    local: KVStore | None
    clock: Clock
    system: System
    tick: Callable[[], None]
    observe: Callable[[int, int, int, TokenIds], None] | None = None

    def pool(self, plan: RequestPlan) -> KVStore:
        """The store that holds a request's KV."""
        return self.pools[plan.device if len(self.pools) > 1 else 0]

    @property
    def buffers(self) -> KVStore:
        """The store that rows are read from while decoding, whose buffers its hot path takes."""
        return self.local or self.pools[0]
