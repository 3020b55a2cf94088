"""What happens between a request's arrival at a decode GPU and its first step: the designs differ most here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu.sac.prefill import write_rows
from emu.sac.scratch import Scratch
from emu.sac.selection import IndexKeys
from emu.sac.sequence import Record, Sequence

if TYPE_CHECKING:
    from collections.abc import Generator

    from emu.sac.context import DecodeContext
    from emu.sac.hot_buffer import HotBuffer
    from emu.sac.plan import RequestPlan
    from emu.store import Descriptor, KVStore, Rows
    from emu.timing.actors import Signal, Wait


@dataclass(slots=True)
class Delivery:
    """What the decode instance was told about a request.

    Attributes:
        plan: the request.
        descriptor: of its KV in the pool.
        computed_tokens: prompt tokens that prefill had to compute (the others were shared).
    """

    plan: RequestPlan
    descriptor: Descriptor
    computed_tokens: int


class Attacher:
    """Brings requests to decode GPUs.

    Args:
        context: what runs where.
    """

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._model, self._spec, self._design = context.model, context.spec, context.design
        self._local, self._clock, self._system = context.local, context.clock, context.system
        self._layout = context.model.layout
        self._scratch = Scratch()

    def attach(
        self, delivery: Delivery, place: int, hot: HotBuffer | None, turn: Signal | None = None
    ) -> Generator[Wait, None, Sequence]:
        """Actor steps that end with a sequence ready to decode.

        Args:
            delivery: the request.
            place: its row in the hot buffer.
            hot: the GPU's hot buffer, None where it has none.
            turn: a GPU copies for one request at a time: the one before has what it needs when this has fired.
        """
        plan = delivery.plan
        record = Record(plan.number, self._clock.now_ns, self._clock.modelled_ns)
        if self._spec.round == 1:
            yield from self._prefill(delivery, record)
        # A wait, even for nothing, would miss a step that begins now.
        if turn is not None and not turn.fired:
            yield turn
        started_ns = self._clock.modelled_ns
        pool = self._context.pool(plan)
        slot = pool.attach(delivery.descriptor)
        reader, reader_slot = pool, slot
        if self._local is not None:
            reader, reader_slot = self._local, self._copy(plan, pool, slot, self._local)
            yield from self._charge(self._design.prefetch_path, plan, record, ("kv", "index"))
        keys = self._index_keys(plan, reader, reader_slot)
        if self._design.index_path:
            yield from self._charge(self._design.index_path, plan, record, ("index",))
        if hot is not None:
            yield from self._admit(plan, record, (reader, reader_slot), place, hot)
        record.attach_transfer_ns += self._clock.modelled_ns - started_ns
        return self._sequence(delivery, record, (pool, slot), (reader, reader_slot), place, keys)

    def _prefill(self, delivery: Delivery, record: Record) -> Generator[Wait, None, None]:
        """Round 1: one prefill instance takes the requests in their order of arrival."""
        plan, tokens = delivery.plan, delivery.computed_tokens
        layers = len(self._layout.component("kv").layers)
        record.prefill_compute_ns = self._system.compute.prefill_ns(tokens, layers)
        yield self._clock.compute("prefill", record.prefill_compute_ns, f"prefill {plan.label}")
        computed_ns = self._clock.modelled_ns
        path = self._system.path(
            self._design.flush_path or self._design.write_path, plan.gpu, plan.device
        )
        for row_bytes in self._layout.region_row_bytes:
            yield self._clock.transfer(
                "prefill",
                path,
                tokens * row_bytes,
                tokens,
                f"publish {plan.label}",
                requests=self._layout.blocks_for(tokens),
            )
        record.attach_transfer_ns += self._clock.modelled_ns - computed_ns

    def _read(self, store: KVStore, slot: int, name: str, tokens: int) -> Rows:
        """A component's first tokens, uint8 [layers, tokens, row_bytes], valid until the next call."""
        rows = self._scratch.rows(store, self._layout.component(name), tokens)
        store.fetch(slot, name, 0, rows)
        return rows

    def _index_keys(self, plan: RequestPlan, store: KVStore, slot: int) -> dict[int, IndexKeys]:
        rows = self._read(store, slot, "index", plan.prompt_rows)
        keys = {}
        for number, layer in enumerate(self._layout.component("index").layers):
            keys[layer] = IndexKeys(self._model.config, plan.total_rows, self._model.kv_dtype)
            keys[layer].extend(rows[number])
        return keys

    def _copy(self, plan: RequestPlan, pool: KVStore, slot: int, local: KVStore) -> int:
        """The RDMA baseline: the whole KV into the decode host's DRAM."""
        reserved = local.reserve(
            plan.key, plan.prompt_rows, append_tokens=plan.request.output_tokens
        )
        for component in self._layout.components:
            write_rows(
                local,
                reserved.slot,
                component,
                self._read(pool, slot, component.name, plan.prompt_rows),
                0,
            )
        return reserved.slot

    def _charge(
        self, path_name: str, plan: RequestPlan, record: Record, names: tuple[str, ...]
    ) -> Generator[Wait, None, None]:
        """Whole components of the prompt over a path, layer by layer, one request per block.

        A copy in one piece would keep its links from the decode steps of all GPUs until it ends.
        """
        for name in names:
            component = self._layout.component(name)
            for layer in component.layers:
                nbytes = plan.prompt_rows * component.row_bytes
                record.read(nbytes)
                yield self._clock.transfer(
                    f"gpu{plan.gpu}.attach",
                    self._system.path(path_name, plan.gpu, plan.device),
                    nbytes,
                    plan.prompt_rows,
                    f"attach {plan.label} {name} {layer}",
                    requests=self._layout.blocks_for(plan.prompt_rows),
                )

    def _admit(
        self,
        plan: RequestPlan,
        record: Record,
        source: tuple[KVStore, int],
        place: int,
        hot: HotBuffer,
    ) -> Generator[Wait, None, None]:
        """A prompt that fits the hot buffer becomes resident at once, else the first step misses every row."""
        if not hot.admit(place, plan.prompt_rows):
            return
        rows = self._read(*source, "kv", plan.prompt_rows)
        for number in range(rows.shape[0]):
            hot.request_rows(number, place)[: plan.prompt_rows] = rows[number]
        yield from self._charge(self._design.miss_path, plan, record, ("kv",))

    def _sequence(
        self,
        delivery: Delivery,
        record: Record,
        pool: tuple[KVStore, int],
        reader: tuple[KVStore, int],
        place: int,
        keys: dict[int, IndexKeys],
    ) -> Sequence:
        plan = delivery.plan
        num_layers = len(self._layout.component("kv").layers)
        return Sequence(
            plan=plan,
            place=place,
            record=record,
            pool=pool[0],
            slot=pool[1],
            reader=reader[0],
            reader_slot=reader[1],
            keys=keys,
            length=plan.prompt_rows,
            token=int(plan.prompt(self._spec)[-1]),
            writes=[None] * num_layers,
            touched=np.zeros((num_layers, plan.total_rows), np.bool_),
        )
