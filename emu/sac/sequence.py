"""A request while it decodes, and what became of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emu.sac.plan import RequestPlan
    from emu.sac.selection import IndexKeys
    from emu.store import KVStore
    from emu.timing.actors import Op


@dataclass(slots=True)
class Record:
    """One request's history, in ns of the run's clock; its waits are the model's where there is one (modelled_ns).

    Attributes:
        number: of the request.
        arrival_ns, modelled_arrival_ns: when it arrived.
        queue_ns: what its first step waited for apart from prefill and bytes: a turn, and the end of a step.
        prefill_compute_ns: modelled compute of its prefill (round 1 only).
        attach_transfer_ns: waiting for bytes before its first step: prefill's write (round 1), prefetch, index keys.
        token_ns: when each output token was there.
        stall_ns: for each output token, the time its step waited for rows.
        bytes_before_first_token, bytes_fetched: read for it from the pool, or from its local copy.
        rows_touched: distinct rows selected, over all layers.
        rows_held: rows times layers at the end.
        tokens: the output.
    """

    number: int
    arrival_ns: int
    modelled_arrival_ns: int
    queue_ns: int = 0
    prefill_compute_ns: int = 0
    attach_transfer_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    stall_ns: list[int] = field(default_factory=list)
    bytes_before_first_token: int = 0
    bytes_fetched: int = 0
    rows_touched: int = 0
    rows_held: int = 0
    tokens: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """What to_json() made."""
        return cls(**data)

    def begin_step(self, modelled_ns: int) -> None:
        """A step with this request begins; what came before the first one and is not accounted for was waiting."""
        if not self.token_ns:
            accounted_ns = self.prefill_compute_ns + self.attach_transfer_ns
            self.queue_ns = modelled_ns - self.modelled_arrival_ns - accounted_ns

    def read(self, nbytes: int) -> None:
        """Count bytes read for this request."""
        self.bytes_fetched += nbytes
        if not self.token_ns:
            self.bytes_before_first_token += nbytes


@dataclass(slots=True)
class Sequence:
    """A request on a decode GPU.

    Attributes:
        plan: what is to be done.
        place: its row in the GPU's hot buffer.
        record: its history.
        pool, slot: the store that holds its KV, and its slot there.
        reader, reader_slot: where its rows are read from while it decodes: the pool, or the local copy.
        keys: decoded index keys per layer that has an indexer.
        length: tokens whose rows exist.
        token: the next step's input.
        writes: the last write-back of each layer: a later read of that row waits for it.
        touched: bool [layers, rows], which rows were selected.
    """

    plan: RequestPlan
    place: int
    record: Record
    pool: KVStore
    slot: int
    reader: KVStore
    reader_slot: int
    keys: dict[int, IndexKeys]
    length: int
    token: int
    writes: list[Op | None]
    touched: NDArray[np.bool_]

    def close_record(self) -> Record:
        """The history, complete."""
        self.record.rows_touched = int(np.count_nonzero(self.touched))
        self.record.rows_held = self.touched.shape[0] * self.length
        return self.record
