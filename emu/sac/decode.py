"""A decode GPU: continuous batching, and per layer: project, write back, select, read the missed rows, attend."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from emu.sac.hot_buffer import HotBuffer, HotBufferShape
from emu.sac.plan import hbm_request_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from emu.sac.attach import Attacher, Delivery
    from emu.sac.designs import Design
    from emu.sac.hot_buffer import Resolved
    from emu.sac.model import DsaModel, Projection
    from emu.sac.plan import RunSpec
    from emu.sac.sequence import Sequence
    from emu.store import KVStore, Rows, TokenIds
    from emu.timing.actors import Op, Signal, Wait
    from emu.timing.clock import Clock
    from emu.timing.system import System


@dataclass(slots=True)
class Context:
    """What all decode GPUs of a run share.

    Attributes:
        model, spec, design, clock, system: what runs, and what charges the time.
        attacher: brings requests in.
        finish: called with each sequence that has produced its last token.
        progress: called after each output token.
    """

    model: DsaModel
    spec: RunSpec
    design: Design
    clock: Clock
    system: System
    attacher: Attacher
    finish: Callable[[Sequence], None]
    progress: Callable[[], None]


@dataclass(slots=True)
class Usage:
    """GPU memory and hot-buffer counters.

    Attributes:
        bytes_now, bytes_peak: rows and index keys held for attached requests.
        hits, misses, evictions: of the hot buffer.
    """

    bytes_now: int = 0
    bytes_peak: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Scratch:
    """Arrays of one GPU, made once: the hot path allocates nothing."""

    tokens: TokenIds
    places: TokenIds
    newest: TokenIds
    rows: Rows
    new_rows: dict[str, Rows]
    free_places: list[int] = field(default_factory=list)


class DecodeGpu:
    """One GPU of the decode instance.

    Args:
        number: of the GPU.
        deliveries: its requests, in order of arrival.
        buffers: the store that gives the hot buffer's memory.
        context: shared with the other GPUs.
    """

    def __init__(
        self, number: int, deliveries: list[Delivery], buffers: KVStore, context: Context
    ) -> None:
        self.number = number
        self.usage = Usage()
        self._context = context
        self._model, self._design, self._clock = context.model, context.design, context.clock
        self._layout = context.model.layout
        self._waiting = deque(deliveries)
        self._attaching = 0
        self._active: list[Sequence] = []
        self._wake: Signal | None = None
        self._copied: Signal | None = None  # the last request that began to attach has its bytes
        slots, top_k = context.spec.gpu_slots(number), context.model.config.top_k
        self._kv = self._layout.component("kv")
        self._hot = None if self._design.resident else self._hot_buffer(slots, buffers)
        self._scratch = _Scratch(
            tokens=np.full((slots, top_k), -1, np.int32),
            places=np.zeros(slots, np.int32),
            newest=np.zeros(slots, np.int32),
            rows=buffers.buffer(slots * top_k * self._kv.row_bytes).reshape(
                slots, top_k, self._kv.row_bytes
            ),
            new_rows={
                c.name: np.empty((slots, 1, c.row_bytes), np.uint8) for c in self._layout.components
            },
            free_places=list(range(slots)),
        )

    def _hot_buffer(self, requests: int, buffers: KVStore) -> HotBuffer:
        config = self._model.config
        shape = HotBufferShape(
            len(self._kv.layers), requests, config.hot_buffer, config.top_k, self._kv.row_bytes
        )
        return HotBuffer(shape, buffers.buffer(shape.nbytes))

    # -- continuous batching --------------------------------------------------------------------------------
    def actor(self) -> Generator[Wait, None, None]:
        """Runs until every request of this GPU has ended."""
        while True:
            self._admit()
            if self._active:
                yield from self._step()
                self._retire()
            elif self._attaching:
                self._wake = self._clock.signal()
                yield self._wake
            elif self._waiting:
                yield self._arrival_ns(self._waiting[0])
            else:
                break
        if self._hot is not None:
            self.usage.hits, self.usage.misses = self._hot.hits, self._hot.misses
            self.usage.evictions = self._hot.evictions

    def wake(self) -> None:
        """Something changed for a GPU that waits."""
        if self._wake is not None:
            self._wake.fire()
            self._wake = None

    def _arrival_ns(self, delivery: Delivery) -> int:
        """When a request comes: at once in a closed loop, else at its time in the trace."""
        if self._context.spec.arrivals == "closed":
            return 0
        return round(delivery.plan.request.arrival_ms * 1e6)

    def arrivals(self) -> Generator[Wait, None, None]:
        """An actor that wakes the GPU at each arrival of an open loop."""
        for delivery in list(self._waiting):
            yield self._arrival_ns(delivery)
            self.wake()

    def _admit(self) -> None:
        """Start attaching every request that has arrived and fits."""
        while self._waiting and self._scratch.free_places:
            delivery = self._waiting[0]
            need = self._hbm_bytes(delivery)
            if self._arrival_ns(delivery) > self._clock.now_ns:
                return
            if self.usage.bytes_now + need > self._context.spec.hbm_bytes:
                return
            self._waiting.popleft()
            self.usage.bytes_now += need
            self.usage.bytes_peak = max(self.usage.bytes_peak, self.usage.bytes_now)
            self._attaching += 1
            place = self._scratch.free_places.pop(0)
            self._clock.spawn(
                f"gpu{self.number}.attach.{delivery.plan.number}", self._attach(delivery, place)
            )

    def _attach(self, delivery: Delivery, place: int) -> Generator[Wait, None, None]:
        arrival_ns = self._arrival_ns(delivery)
        turn, copied = self._copied, self._clock.signal()
        self._copied = copied
        sequence = yield from self._context.attacher.attach(delivery, place, self._hot, turn)
        copied.fire()
        if self._context.spec.arrivals == "trace":
            sequence.record.arrival_ns = arrival_ns
        self._attaching -= 1
        self._active.append(sequence)
        self.wake()

    def _hbm_bytes(self, delivery: Delivery) -> int:
        return hbm_request_bytes(delivery.plan, self._design, self._model.config, self._layout)

    def _retire(self) -> None:
        """Let go of the sequences that have produced their last token."""
        for sequence in [
            s for s in self._active if len(s.record.tokens) == s.plan.request.output_tokens
        ]:
            self._active.remove(sequence)
            self._scratch.free_places.append(sequence.place)
            if self._hot is not None:
                self._hot.release(sequence.place)
            self.usage.bytes_now -= hbm_request_bytes(
                sequence.plan, self._design, self._model.config, self._layout
            )
            self._context.finish(sequence)

    # -- one step --------------------------------------------------------------------------------------------
    def _step(self) -> Generator[Wait, None, None]:
        """One token for every active sequence."""
        batch = list(self._active)
        for sequence in batch:
            sequence.record.begin_step(self._clock.now_ns)
        hidden = [self._model.embed(torch.tensor([s.token])) for s in batch]
        stall_ns = 0
        compute_ns = self._context.system.compute.decode_layer_ns(
            len(batch), sum(s.length + 1 for s in batch) / len(batch)
        )
        for place, layer in enumerate(self._kv.layers):
            projections = [
                self._model.project(layer, x, torch.tensor([s.length]))
                for s, x in zip(batch, hidden, strict=True)
            ]
            self._select(batch, layer, place, projections)
            yield self._clock.compute(f"gpu{self.number}", compute_ns, f"layer {layer}")
            began_ns = self._clock.now_ns
            yield [op for s in batch if (op := s.writes[place]) is not None]
            rows = yield from self._read(batch, layer, place, projections)
            stall_ns += self._clock.now_ns - began_ns
            hidden = [
                self._model.attend(layer, x, projection, 0, selected)
                for x, projection, selected in zip(hidden, projections, rows, strict=True)
            ]
        self._emit(batch, hidden, stall_ns)

    def _select(
        self, batch: list[Sequence], layer: int, place: int, projections: list[Projection]
    ) -> None:
        """Fill scratch.tokens [B, k]; a layer without an indexer keeps the selection of the one before it."""
        for b, (sequence, projection) in enumerate(zip(batch, projections, strict=True)):
            if projection.index_rows is not None:
                keys = sequence.keys[layer]
                keys.extend(projection.index_rows)
                self._scratch.tokens[b] = self._model.select(
                    layer, projection, 0, keys, sequence.length + 1
                )
            selected = self._scratch.tokens[b]
            selected = selected[selected >= 0]
            sequence.touched[place, selected] = True
            sequence.record.rows_selected += len(selected)

    def _read(
        self, batch: list[Sequence], layer: int, place: int, projections: list[Projection]
    ) -> Generator[Wait, None, list[Rows]]:
        """Bring the selected rows together, uint8 [selected, row_bytes] for each sequence, in selection order."""
        size = len(batch)
        tokens = self._scratch.tokens[:size]
        if self._hot is None:
            self._write_back(batch, layer, place, projections)
            self._gather(batch, list(range(size)), layer, tokens, self._scratch.rows[:size], None)
            return [
                self._scratch.rows[b][: int(np.count_nonzero(tokens[b] >= 0))] for b in range(size)
            ]
        for b, sequence in enumerate(batch):
            self._scratch.places[b] = sequence.place
            self._scratch.newest[b] = sequence.length
        resolved = self._hot.resolve(
            place, self._scratch.places[:size], tokens, self._scratch.newest[:size]
        )
        missing = np.flatnonzero(resolved.miss_tokens[:, 0] >= 0).tolist()
        ops = [
            self._fetch_misses(batch, members, (layer, place), resolved)
            for members in self._by_reader(batch, missing)
        ]
        for sequence, projection in zip(batch, projections, strict=True):
            self._hot.rows(place)[self._hot.newest_row(sequence.place)] = projection.kv_rows[0]
        yield ops
        self._write_back(batch, layer, place, projections)
        return [self._take(place, s, resolved.locs[b], b) for b, s in enumerate(batch)]

    def _take(self, place: int, sequence: Sequence, locs: TokenIds, b: int) -> Rows:
        """The selected rows of a sequence out of the hot buffer, uint8 [selected, row_bytes]."""
        assert self._hot is not None
        count = int(np.count_nonzero(locs >= 0))
        rows = self._hot.request_rows(place, sequence.place)
        return np.take(rows, locs[:count], axis=0, out=self._scratch.rows[b, :count], mode="clip")

    def _by_reader(self, batch: list[Sequence], members: Iterable[int]) -> list[list[int]]:
        """These places of the batch, one list per store that they are read from."""
        groups: dict[KVStore, list[int]] = {}
        for b in members:
            groups.setdefault(batch[b].reader, []).append(b)
        return list(groups.values())

    def _fetch_misses(
        self, batch: list[Sequence], members: list[int], where: tuple[int, int], resolved: Resolved
    ) -> Op:
        """One batched read of the rows that the hot buffer lacks, from one store into the hot buffer."""
        assert self._hot is not None
        layer, place = where
        chosen = resolved.miss_tokens[members]
        self._gather(
            batch, members, layer, chosen, self._hot.rows(place), resolved.miss_rows[members]
        )
        counts = np.count_nonzero(chosen >= 0, axis=1)
        for b, count in zip(members, counts, strict=True):
            batch[b].record.read(int(count) * self._kv.row_bytes)
        plan = batch[members[0]].plan
        path = self._context.system.path(self._design.miss_path, self.number, plan.device)
        total = int(counts.sum())
        runs = (
            remote_runs(chosen, self._layout.block_tokens) if self._design.work_requests else total
        )
        return self._clock.transfer(
            f"gpu{self.number}",
            path,
            total * self._kv.row_bytes,
            total,
            f"misses {layer}",
            requests=runs,
        )

    def _gather(
        self,
        batch: list[Sequence],
        members: list[int],
        layer: int,
        tokens: TokenIds,
        out: Rows,
        out_rows: TokenIds | None,
    ) -> None:
        slots = np.array([batch[b].reader_slot for b in members], np.int64)
        batch[members[0]].reader.gather(
            slots, layer, tokens, out, out_rows=out_rows, packed=self._design.packed
        )

    def _write_back(
        self, batch: list[Sequence], layer: int, place: int, projections: list[Projection]
    ) -> None:
        """New rows go through to where later steps will read them; the next read of this layer waits for it."""
        for members in self._by_reader(batch, range(len(batch))):
            group = [batch[b] for b in members]
            slots = np.array([s.reader_slot for s in group], np.int64)
            start = np.array([s.length for s in group], np.int32)
            nbytes = 0
            for component, rows in self._scratch.new_rows.items():
                for i, b in enumerate(members):
                    new = projections[b].kv_rows if component == "kv" else projections[b].index_rows
                    if new is None:
                        break
                    rows[i] = new
                else:
                    group[0].reader.append(
                        slots, layer, start, rows[: len(group)], component=component
                    )
                    nbytes += len(group) * rows.shape[2]
            path = self._context.system.path(
                self._design.write_path, self.number, group[0].plan.device
            )
            op = self._clock.transfer(
                f"gpu{self.number}", path, nbytes, len(group), f"write back {layer}"
            )
            for sequence in group:
                sequence.writes[place] = op

    def _emit(self, batch: list[Sequence], hidden: list[torch.Tensor], stall_ns: int) -> None:
        for sequence, x in zip(batch, hidden, strict=True):
            token = int(self._model.logits(x).argmax())
            sequence.length += 1
            sequence.token = token
            sequence.record.tokens.append(token)
            sequence.record.token_ns.append(self._clock.now_ns)
            sequence.record.stall_ns.append(stall_ns)
            self._context.progress()


def remote_runs(tokens: TokenIds, block_tokens: int) -> int:
    """READs that fetch these tokens, int32 [B, k] with -1 padding: one per remote-contiguous run, in the given order.

    Rows of different blocks count as apart, wherever the blocks happen to lie: model time must not depend on that.
    """
    follows = (
        (tokens[:, 1:] == tokens[:, :-1] + 1)
        & (tokens[:, 1:] % block_tokens != 0)
        & (tokens[:, :-1] >= 0)
    )
    return int(np.count_nonzero(tokens >= 0)) - int(np.count_nonzero(follows))
