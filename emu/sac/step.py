"""One decode step of a GPU, layer by layer: project, select, read the missed rows, attend, write back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from emu.sac.hot_buffer import HotBuffer, HotBufferShape

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from emu.sac.context import DecodeContext
    from emu.sac.hot_buffer import Resolved
    from emu.sac.model import Projection
    from emu.sac.sequence import Sequence
    from emu.store import KVStore, Rows, TokenIds
    from emu.timing.actors import Op, Wait
    from emu.timing.system import Path


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Arrays of one GPU, made once.

    Attributes:
        tokens: int32 [slots, k], the selection; -1 pads.
        places, newest: int32 [slots], each sequence's row of the hot buffer and its newest token.
        rows: uint8 [slots, k, row_bytes], the selected rows.
        new_rows: per component uint8 [slots, 1, row_bytes], the rows to write back.
    """

    tokens: TokenIds
    places: TokenIds
    newest: TokenIds
    rows: Rows
    new_rows: dict[str, Rows]


@dataclass(frozen=True, slots=True)
class _Source:
    """Requests of a batch whose rows lie behind the same links.

    Attributes:
        store: where they are read from and written to.
        path: of the operation that moves them.
        members: their places in the batch.
    """

    store: KVStore
    path: Path
    members: list[int]


class DecodeStep:
    """What a GPU does in each step; it owns the hot buffer.

    Args:
        number: of the GPU.
        context: what runs where.

    Attributes:
        hot: the hot buffer, None where every row is in GPU memory.
    """

    def __init__(self, number: int, context: DecodeContext) -> None:
        self._number, self._actor = number, f"gpu{number}"
        self._context = context
        self._model, self._design, self._clock = context.model, context.design, context.clock
        self._layout = context.model.layout
        self._kv = self._layout.component("kv")
        slots, top_k = context.spec.gpu_slots(number), context.model.config.top_k
        buffers = context.buffers
        self.hot = None if self._design.resident else self._hot_buffer(slots, buffers)
        row_bytes = self._kv.row_bytes
        self._scratch = _Scratch(
            tokens=np.full((slots, top_k), -1, np.int32),
            places=np.zeros(slots, np.int32),
            newest=np.zeros(slots, np.int32),
            rows=buffers.buffer(slots * top_k * row_bytes).reshape(slots, top_k, row_bytes),
            new_rows={
                c.name: np.empty((slots, 1, c.row_bytes), np.uint8) for c in self._layout.components
            },
        )

    def _hot_buffer(self, requests: int, buffers: KVStore) -> HotBuffer:
        config = self._model.config
        shape = HotBufferShape(
            len(self._kv.layers), requests, config.hot_buffer, config.top_k, self._kv.row_bytes
        )
        return HotBuffer(shape, buffers.buffer(shape.nbytes))

    def run(self, batch: list[Sequence]) -> Generator[Wait, None, None]:
        """One token for every active sequence."""
        for sequence in batch:
            sequence.record.begin_step(self._clock.modelled_ns)
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
            yield self._clock.compute(self._actor, compute_ns, f"layer {layer}")
            began_ns = self._clock.modelled_ns
            yield [op for s in batch if (op := s.writes[place]) is not None]
            rows = yield from self._read(batch, layer, place, projections)
            stall_ns += self._clock.modelled_ns - began_ns
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
            if self._context.observe is not None:
                number, length = sequence.plan.number, sequence.length + 1
                self._context.observe(number, layer, length, selected)
            sequence.touched[place, selected[selected >= 0]] = True

    def _read(
        self, batch: list[Sequence], layer: int, place: int, projections: list[Projection]
    ) -> Generator[Wait, None, list[Rows]]:
        """Bring the selected rows together, uint8 [selected, row_bytes] for each sequence, in selection order."""
        size = len(batch)
        tokens = self._scratch.tokens[:size]
        if self.hot is None:
            self._write_back(batch, layer, place, projections)
            self._gather(batch, list(range(size)), layer, tokens, self._scratch.rows[:size], None)
            return [
                self._scratch.rows[b][: int(np.count_nonzero(tokens[b] >= 0))] for b in range(size)
            ]
        for b, sequence in enumerate(batch):
            self._scratch.places[b] = sequence.place
            self._scratch.newest[b] = sequence.length
        resolved = self.hot.resolve(
            place, self._scratch.places[:size], tokens, self._scratch.newest[:size]
        )
        missing = np.flatnonzero(resolved.miss_tokens[:, 0] >= 0).tolist()
        ops = [
            self._fetch_misses(source, batch, (layer, place), resolved)
            for source in self._sources(batch, missing, self._design.miss_path)
        ]
        for sequence, projection in zip(batch, projections, strict=True):
            self.hot.rows(place)[self.hot.newest_row(sequence.place)] = projection.kv_rows[0]
        yield ops
        self._write_back(batch, layer, place, projections)
        return [self._take(place, s, resolved.locs[b], b) for b, s in enumerate(batch)]

    def _take(self, place: int, sequence: Sequence, locs: TokenIds, b: int) -> Rows:
        """The selected rows of a sequence out of the hot buffer, uint8 [selected, row_bytes]."""
        assert self.hot is not None
        count = int(np.count_nonzero(locs >= 0))
        rows = self.hot.request_rows(place, sequence.place)
        return np.take(rows, locs[:count], axis=0, out=self._scratch.rows[b, :count], mode="clip")

    def _sources(
        self, batch: list[Sequence], members: Iterable[int], path_name: str
    ) -> list[_Source]:
        """Where the rows of these places of the batch lie: apart when they cross other links.

        One pool may stand for several devices, each with links of its own.
        """
        sources: dict[tuple[KVStore, tuple[int, ...]], _Source] = {}
        for b in members:
            path = self._context.system.path(path_name, self._number, batch[b].plan.device)
            reader = batch[b].reader
            sources.setdefault((reader, path.links), _Source(reader, path, [])).members.append(b)
        return list(sources.values())

    def _fetch_misses(
        self, source: _Source, batch: list[Sequence], where: tuple[int, int], resolved: Resolved
    ) -> Op:
        """One batched read of the rows that the hot buffer lacks, from one source into the hot buffer."""
        assert self.hot is not None
        layer, place = where
        members = source.members
        chosen = resolved.miss_tokens[members]
        self._gather(
            batch, members, layer, chosen, self.hot.rows(place), resolved.miss_rows[members]
        )
        counts = np.count_nonzero(chosen >= 0, axis=1)
        for b, count in zip(members, counts, strict=True):
            batch[b].record.read(int(count) * self._kv.row_bytes)
        total = int(counts.sum())
        runs = (
            remote_runs(chosen, self._layout.block_tokens) if self._design.work_requests else total
        )
        return self._clock.transfer(
            self._actor,
            source.path,
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
        for source in self._sources(batch, range(len(batch)), self._design.write_path):
            group = [batch[b] for b in source.members]
            slots = np.array([s.reader_slot for s in group], np.int64)
            start = np.array([s.length for s in group], np.int32)
            nbytes = 0
            for component, rows in self._scratch.new_rows.items():
                for i, b in enumerate(source.members):
                    new = projections[b].kv_rows if component == "kv" else projections[b].index_rows
                    if new is None:
                        break
                    rows[i] = new
                else:
                    source.store.append(
                        slots, layer, start, rows[: len(group)], component=component
                    )
                    nbytes += len(group) * rows.shape[2]
            op = self._clock.transfer(
                self._actor, source.path, nbytes, len(group), f"write back {layer}"
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
            self._context.tick()


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
