"""The prefill instance: computes KV rows in chunks and writes them to the pool, sharing prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from emu.sac.chunked_prefill import CHUNK_TOKENS, PrefillState

if TYPE_CHECKING:
    from emu.layout import Component
    from emu.sac.model import DsaModel
    from emu.sac.plan import RequestPlan, RunSpec
    from emu.store import Descriptor, KVStore, Rows


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A request whose KV is in the pool.

    Attributes:
        descriptor: for the decode instance.
        shared_tokens: leading tokens that the pool held already.
    """

    descriptor: Descriptor
    shared_tokens: int


class PrefillInstance:
    """Computes each request's rows once and keeps them, as an engine's own prefix cache does.

    Args:
        model: the model.
        spec: the run.
    """

    def __init__(self, model: DsaModel, spec: RunSpec) -> None:
        self._model = model
        self._spec = spec
        self._layout = model.layout
        self._rows: dict[int, dict[str, Rows]] = {}

    def run(self, plan: RequestPlan, store: KVStore) -> Prefilled:
        """Bring one request's rows into the store and publish it.

        Raises:
            StoreFull: no room on the device.
        """
        hashes = plan.hashes(self._spec, self._layout.block_tokens)
        reservation = store.reserve(
            plan.key,
            plan.prompt_rows,
            block_hashes=hashes,
            append_tokens=plan.request.output_tokens,
        )
        rows = self._rows.get(plan.number)
        if rows is None:
            rows = self._compute(plan, store, reservation.slot, reservation.shared_tokens)
            self._rows[plan.number] = rows
        shared = reservation.shared_tokens
        if shared < plan.prompt_rows:
            for component in self._layout.components:
                rest = np.ascontiguousarray(rows[component.name][:, shared:])
                write_rows(store, reservation.slot, component, rest, shared)
        return Prefilled(store.publish(plan.key), reservation.shared_tokens)

    def _compute(
        self, plan: RequestPlan, store: KVStore, slot: int, shared: int
    ) -> dict[str, Rows]:
        """All rows of the prompt, uint8 [layers, prompt_rows, row_bytes] per component.

        The shared prefix is read from the pool, never computed again.
        """
        rows: dict[str, Rows] = {
            c.name: np.empty((len(c.layers), plan.prompt_rows, c.row_bytes), np.uint8)
            for c in self._layout.components
        }
        state = PrefillState(self._model, plan.prompt_rows)
        if shared:
            for name, values in rows.items():
                prefix = np.empty((values.shape[0], shared, values.shape[2]), np.uint8)
                store.fetch(slot, name, 0, prefix)
                values[:, :shared] = prefix
            state.load({name: values[:, :shared] for name, values in rows.items()})
        tokens = torch.from_numpy(plan.prompt(self._spec)[: plan.prompt_rows].copy())
        for start in range(shared, plan.prompt_rows, CHUNK_TOKENS):
            chunk = self._model.prefill_chunk(tokens[start : start + CHUNK_TOKENS], start, state)
            for name, values in chunk.items():
                rows[name][:, start : start + values.shape[1]] = values
        return rows


def write_rows(store: KVStore, slot: int, component: Component, rows: Rows, start: int) -> None:
    """Append one component's rows, uint8 [layers, n, row_bytes], at tokens start .. start + n, layer by layer."""
    slots = np.array([slot], np.int64)
    first = np.array([start], np.int32)
    for place, layer in enumerate(component.layers):
        store.append(slots, layer, first, rows[place : place + 1], component=component.name)
