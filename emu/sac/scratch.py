"""Memory for whole components on their way between stores, made once and used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emu.layout import Component
    from emu.store import KVStore, Rows


class Scratch:
    """One buffer per store, as large as the largest need so far."""

    def __init__(self) -> None:
        self._buffers: dict[KVStore, Rows] = {}

    def rows(self, store: KVStore, component: Component, tokens: int) -> Rows:
        """uint8 [layers, tokens, row_bytes] from the store's own buffers, valid until the next call for the store."""
        nbytes = len(component.layers) * tokens * component.row_bytes
        buffer = self._buffers.get(store)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[store] = store.buffer(2 * nbytes)
        return buffer[:nbytes].reshape(len(component.layers), tokens, component.row_bytes)
