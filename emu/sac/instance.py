"""The decode instance: all its GPUs under one clock, from deliveries to records and refreshed descriptors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emu.sac.attach import Attacher, Delivery
from emu.sac.decode import Context, DecodeGpu
from emu.sac.prefill import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.sac.designs import Design
    from emu.sac.model import DsaModel
    from emu.sac.plan import RunSpec
    from emu.sac.sequence import Record, Sequence
    from emu.store import Descriptor, KVStore
    from emu.timing.clock import Clock
    from emu.timing.system import System


@dataclass(slots=True)
class Decoded:
    """What a decode instance produced.

    Attributes:
        records: per request, in order of completion.
        descriptors: refreshed by the decode instance, by request number.
        end_ns: when the last request ended.
        hits, misses, evictions: of the hot buffers, over all GPUs.
        local_bytes: peak of what the decode host holds in GPU memory and, where it has a copy, in DRAM.
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
        model, spec, design: what runs.
        pools: the pool's stores, by device.
        local: the decode host's DRAM copy, None where the design has none.
        clock, system: charge the time.
    """

    def __init__(
        self,
        model: DsaModel,
        spec: RunSpec,
        design: Design,
        pools: list[KVStore],
        local: KVStore | None,
        clock: Clock,
        system: System,
    ) -> None:
        self._model, self._spec, self._design = model, spec, design
        self._pools, self._local = pools, local
        self._clock, self._system = clock, system
        self._result = Decoded()
        self._copied_peak = 0
        self._attached: list[tuple[KVStore, int]] = []

    def run(self, deliveries: list[Delivery], progress: Callable[[], None]) -> Decoded:
        """Decode everything; the slots stay attached until release()."""
        attacher = Attacher(
            self._model,
            self._spec,
            self._design,
            self._pools,
            self._local,
            self._clock,
            self._system,
        )
        context = Context(
            model=self._model,
            spec=self._spec,
            design=self._design,
            clock=self._clock,
            system=self._system,
            attacher=attacher,
            finish=self._finish,
            progress=progress,
        )
        buffers = self._local or self._pools[0]
        gpus = [
            DecodeGpu(n, [d for d in deliveries if d.plan.gpu == n], buffers, context)
            for n in range(self._spec.active_gpus)
        ]
        for gpu in gpus:
            self._clock.spawn(f"gpu{gpu.number}", gpu.actor())
            if self._spec.arrivals == "trace":
                self._clock.spawn(f"gpu{gpu.number}.arrivals", gpu.arrivals())
        self._clock.run()
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
        if self._local is not None:
            self._copied_peak = max(self._copied_peak, self._local.stats().used_bytes)
            self._flush_copy(sequence, self._local)
        plan = sequence.plan
        self._result.descriptors[plan.number] = sequence.pool.publish(plan.key)
        self._result.records.append(sequence.close_record())
        self._attached.append((sequence.pool, sequence.slot))

    def _flush_copy(self, sequence: Sequence, local: KVStore) -> None:
        """The RDMA baseline: what was decoded goes from the local copy to the pool, in one batch."""
        plan = sequence.plan
        new = sequence.length - plan.prompt_rows
        nbytes = 0
        for component in self._model.layout.components:
            rows = sequence.pool.buffer(len(component.layers) * new * component.row_bytes)
            shaped = rows.reshape(len(component.layers), new, component.row_bytes)
            local.fetch(sequence.reader_slot, component.name, plan.prompt_rows, shaped)
            write_rows(sequence.pool, sequence.slot, component, shaped, plan.prompt_rows)
            nbytes += rows.size
        blocks = self._model.layout.blocks_for(new) * len(self._model.layout.regions)
        path = self._system.path(self._design.flush_path, plan.gpu, plan.device)
        self._clock.transfer(f"gpu{plan.gpu}", path, nbytes, blocks, f"flush {plan.key}")
        local.delete([plan.key])
