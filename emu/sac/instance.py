"""The decode instance: all its GPUs under one clock, from deliveries to records and refreshed descriptors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emu.sac.attach import Attacher, Delivery
from emu.sac.decode import DecodeGpu
from emu.sac.prefill import write_rows
from emu.sac.scratch import Scratch

if TYPE_CHECKING:
    from emu.sac.context import DecodeContext
    from emu.sac.sequence import Record, Sequence
    from emu.store import Descriptor, KVStore


@dataclass(slots=True)
class Decoded:
    """What a decode instance produced.

    Attributes:
        records: per request, in order of completion.
        descriptors: refreshed by the decode instance, by request number.
        end_ns: when the last request ended.
        hits, misses, evictions: of the hot buffers, over all GPUs.
        local_bytes: what the decode host must hold: the sum over the GPUs of each one's peak, and the peak of the
            copy in DRAM, where there is one.
    """

    records: list[Record] = field(default_factory=list)
    descriptors: dict[int, Descriptor] = field(default_factory=dict)
    end_ns: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    local_bytes: int = 0


class DecodeInstance:
    """Decodes all deliveries of one design.

    Args:
        context: what runs where.
    """

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._result = Decoded()
        self._copied_peak = 0
        self._scratch = Scratch()
        self._attached: list[tuple[KVStore, int]] = []

    def run(self, deliveries: list[Delivery]) -> Decoded:
        """Decode everything; the slots stay attached until release()."""
        context, clock = self._context, self._context.clock
        attacher = Attacher(context)
        gpus = []
        for number in range(context.spec.active_gpus):
            own = [delivery for delivery in deliveries if delivery.plan.gpu == number]
            gpus.append(DecodeGpu(number, own, context, attacher, self._finish))
            clock.spawn(f"gpu{number}", gpus[-1].actor())
            if context.spec.arrivals == "trace":
                clock.spawn(f"gpu{number}.arrivals", gpus[-1].arrivals())
        clock.run()
        result = self._result
        result.end_ns = max(record.token_ns[-1] for record in result.records)
        for gpu in gpus:
            result.hits += gpu.usage.hits
            result.misses += gpu.usage.misses
            result.evictions += gpu.usage.evictions
            result.local_bytes += gpu.usage.bytes_peak
        result.local_bytes += self._copied_peak
        return result

    def release(self) -> None:
        """Drop the leases: the pool may reclaim."""
        for store, slot in self._attached:
            store.detach(slot)
        self._attached.clear()

    def _finish(self, sequence: Sequence) -> None:
        """The sequence's rows are complete in the pool, and everybody may know."""
        if self._context.local is not None:
            self._copied_peak = max(self._copied_peak, self._context.local.stats().used_bytes)
            self._flush_copy(sequence, self._context.local)
        plan = sequence.plan
        self._result.descriptors[plan.number] = sequence.pool.publish(plan.key)
        self._result.records.append(sequence.close_record())
        self._attached.append((sequence.pool, sequence.slot))

    def _flush_copy(self, sequence: Sequence, local: KVStore) -> None:
        """The RDMA baseline: what was decoded goes from the local copy to the pool, in one batch."""
        plan = sequence.plan
        new = sequence.length - plan.prompt_rows
        nbytes = 0
        for component in self._context.model.layout.components:
            shaped = self._scratch.rows(sequence.pool, component, new)
            local.fetch(sequence.reader_slot, component.name, plan.prompt_rows, shaped)
            write_rows(sequence.pool, sequence.slot, component, shaped, plan.prompt_rows)
            nbytes += shaped.size
        blocks = self._context.model.layout.blocks_for(new) * len(
            self._context.model.layout.regions
        )
        path = self._context.system.path(self._context.design.flush_path, plan.gpu, plan.device)
        self._context.clock.transfer(f"gpu{plan.gpu}", path, nbytes, blocks, f"flush {plan.label}")
        local.delete([plan.key])
