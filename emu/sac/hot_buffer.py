"""The decode instance's hot buffer: recently selected KV rows of each request, kept near the compute.

The replacement rule is HiSparse's and lives in the native core; this class owns its rows and its output arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.store import check_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emu.store import Rows, TokenIds


@dataclass(frozen=True, slots=True)
class HotBufferShape:
    """Extents of a hot buffer.

    Attributes:
        num_layers: layers that keep KV rows.
        max_requests: requests in flight at once.
        slots: rows per layer and request (HiSparse's device_buffer_size), at least top_k.
        top_k: most tokens selected per layer and step.
        row_bytes: bytes of a KV row.
    """

    num_layers: int
    max_requests: int
    slots: int
    top_k: int
    row_bytes: int

    @property
    def rows_per_request(self) -> int:
        """The slots, and one for the newest token."""
        return self.slots + 1

    @property
    def nbytes(self) -> int:
        """Bytes that store.buffer() must give."""
        return self.num_layers * self.max_requests * self.rows_per_request * self.row_bytes


@dataclass(frozen=True, slots=True)
class Resolved:
    """What one step of one layer needs; the arrays are overwritten by the next resolve().

    Attributes:
        locs: int32 [B, k], the slot of each selected token within its request's rows; -1 where tokens had -1.
        miss_tokens: int32 [B, k], tokens to fetch, padded with -1 (KVStore.gather's tokens).
        miss_rows: int32 [B, k], where they go in rows(layer), padded with -1 (KVStore.gather's out_rows).
        misses: how many.
    """

    locs: TokenIds
    miss_tokens: TokenIds
    miss_rows: TokenIds
    misses: int


class HotBuffer:
    """Rows of the requests in flight, and which tokens they are.

    Args:
        shape: the extents.
        buffer: uint8 [shape.nbytes] from store.buffer().

    Raises:
        ValueError: the buffer has another size, or the slots are fewer than top_k.
    """

    def __init__(self, shape: HotBufferShape, buffer: Rows) -> None:
        check_array("buffer", buffer, np.uint8, (shape.nbytes,))
        self.shape = shape
        self._rule = _native.HotBuffer(
            shape.num_layers, shape.max_requests, shape.slots, shape.top_k
        )
        self._rows = buffer.reshape(
            shape.num_layers, shape.max_requests * shape.rows_per_request, shape.row_bytes
        )
        extent = shape.max_requests * shape.top_k
        self._locs, self._miss_tokens, self._miss_slots, self._miss_rows = (
            np.empty(extent, np.int32) for _ in range(4)
        )
        self._padding = np.empty(extent, np.bool_)

    def admit(self, request: int, resident_tokens: int) -> bool:
        """Give an index in 0 .. max_requests - 1 to a new request.

        Args:
            request: the index.
            resident_tokens: tokens that the request has; up to `slots` of them all count as resident, token t in
                slot t, and the caller loads them; of more none does, and the first step misses everything.

        Returns:
            Whether the caller must load tokens 0 .. resident_tokens - 1.
        """
        self._rule.admit(request, resident_tokens)
        return 0 < resident_tokens <= self.shape.slots

    def release(self, request: int) -> None:
        """The request is done; its index may be admitted again.

        Raises:
            ValueError: it is not admitted.
        """
        self._rule.release(request)

    def resolve(
        self, layer: int, requests: TokenIds, tokens: TokenIds, newest: TokenIds
    ) -> Resolved:
        """One decode step of one layer. The caller then fetches the misses into rows(layer).

        Args:
            layer: 0 .. num_layers - 1.
            requests: int32 [B], different indices of admitted requests.
            tokens: int32 [B, k], the selected tokens, different within a row; -1 pads.
            newest: int32 [B], the token whose row is in newest_row(); a hit when selected. -1 if there is none.

        Raises:
            ValueError: a wrong shape, a token or request that comes twice, a request that is not admitted; nothing
                was changed.
        """
        batch, k = tokens.shape
        if batch > self.shape.max_requests or k > self.shape.top_k:
            raise ValueError(
                f"tokens: got int32 [{batch}, {k}], wanted at most [{self.shape.max_requests}, {self.shape.top_k}]"
            )
        locs, miss_tokens, miss_slots, miss_rows = (
            flat[: batch * k].reshape(batch, k)
            for flat in (self._locs, self._miss_tokens, self._miss_slots, self._miss_rows)
        )
        misses = self._rule.resolve(layer, requests, tokens, newest, locs, miss_tokens, miss_slots)
        first_rows: NDArray[np.int32] = requests * np.int32(self.shape.rows_per_request)
        np.add(miss_slots, first_rows[:, None], out=miss_rows)
        padding = self._padding[: batch * k].reshape(batch, k)
        np.less(miss_slots, 0, out=padding)
        np.copyto(miss_rows, -1, where=padding)
        return Resolved(locs, miss_tokens, miss_rows, misses)

    def rows(self, layer: int) -> Rows:
        """View uint8 [max_requests * (slots + 1), row_bytes] of a layer, request after request."""
        rows: Rows = self._rows[layer]
        return rows

    def request_rows(self, layer: int, request: int) -> Rows:
        """View uint8 [slots + 1, row_bytes] of a layer and request, indexed by Resolved.locs."""
        first = request * self.shape.rows_per_request
        return self.rows(layer)[first : first + self.shape.rows_per_request]

    def newest_row(self, request: int) -> int:
        """Row in rows(layer) that the newest token's bytes belong in."""
        return request * self.shape.rows_per_request + self.shape.slots

    @property
    def hits(self) -> int:
        """Selected tokens found, newest ones included, over all layers and steps."""
        return self._rule.hits

    @property
    def misses(self) -> int:
        """Selected tokens that had to be fetched."""
        return self._rule.misses

    @property
    def evictions(self) -> int:
        """Tokens that were thrown out for a miss."""
        return self._rule.evictions
