"""The KV-store interface: every medium behind it, no implementation in it.

Two tiers. The control path speaks keys; the hot path speaks integer slots and token indices, always batched,
into the caller's buffer. A miss is data, a fault is an exception (emu.errors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from emu.layout import KVLayout

Rows: TypeAlias = NDArray[np.uint8]
SlotIds: TypeAlias = NDArray[np.int64]
TokenIds: TypeAlias = NDArray[np.int32]
BoolMask: TypeAlias = NDArray[np.bool_]


class Capability(Flag):
    """What a store offers beyond the interface's floor."""

    LOAD_STORE = auto()  # rows are read by CPU loads (DRAM, CXL)
    SHARED = auto()  # descriptors can be attached from another process
    REMOTE = auto()  # descriptors can be attached from another host
    REGISTERED = auto()  # the hot path needs buffers from store.buffer()
    PACKED = auto()  # the owner can pack scattered rows into one message (gather(..., packed=True))


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Portable name of one published request: enough to read it from another process or host.

    Attributes:
        device: identity of the device that holds it (its pool's uuid, 16 bytes).
        key: the request's key.
        generation: distinguishes this request from any other that had or will have its key or its blocks.
        layout: fingerprint of the layout, 16 bytes.
        prompt_tokens: tokens in the leading blocks, which may be shared with other requests.
        num_tokens: tokens written in all.
        blocks: block numbers: ceil(prompt_tokens / block_tokens) for the prompt, then the blocks for appended
            tokens, which begin on a fresh block so that no line has two writers.
    """

    device: bytes
    key: str
    generation: int
    layout: bytes
    prompt_tokens: int
    num_tokens: int
    blocks: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """The wire form (little-endian, versioned; never pickle)."""
        from emu.descriptor_wire import descriptor_to_bytes

        return descriptor_to_bytes(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Descriptor:
        """Read the wire form.

        Raises:
            UserError: not a descriptor, damaged, or of another version.
        """
        from emu.descriptor_wire import descriptor_from_bytes

        return descriptor_from_bytes(raw)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request that is being written.

    Attributes:
        slot: handle for append() and gather().
        shared_tokens: leading tokens whose blocks were already there: readable at once, not to be written.
    """

    slot: int
    shared_tokens: int


@dataclass(slots=True)
class Stats:
    """Counters since open() or reset_stats().

    Attributes:
        rows_read, rows_written, bytes_read, bytes_written: what moved between the medium and the caller.
        work_requests: RDMA work requests posted (0 on load/store media).
        max_outstanding_reads: most RDMA READs in flight at once.
        lines_flushed: 64-byte lines of rows written back or invalidated by software coherence.
        metadata_lines_flushed: the same of the pool's metadata, since open().
        charged_ns: model time charged (0 where the store was opened without timing).
        waited_ns: host time spent waiting for the model time in paced mode.
        capacity_bytes, used_bytes: of the device's blocks; used counts a shared block once.
        numa_node: the node asked for, None if none was.
        numa_bound: True once every touched page was verified to lie on that node.
        numa_reason: why not, when numa_bound is False although a node was asked for.
    """

    rows_read: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    work_requests: int = 0
    max_outstanding_reads: int = 0
    lines_flushed: int = 0
    metadata_lines_flushed: int = 0
    charged_ns: int = 0
    waited_ns: int = 0
    capacity_bytes: int = 0
    used_bytes: int = 0
    numa_node: int | None = None
    numa_bound: bool = False
    numa_reason: str = ""


class Timing(Protocol):
    """Charges a store's operations to a time model (emu.timing makes them)."""

    def begin(self, operation: str, nbytes: int, rows: int) -> int:
        """Start charging "read" or "write" of that much; returns a handle for end()."""
        ...

    def end(self, handle: int) -> tuple[int, int]:
        """Finish: waits in paced mode. Returns (model ns charged, host ns waited)."""
        ...


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to open a store; the same for every backend.

    Attributes:
        capacity_bytes: size of a medium that the store makes itself (dram, a new memory node); media that
            exist have their own size.
        numa_node: bind the memory to this node, verified after touch.
        coherent: True where hardware keeps hosts coherent; False makes the store flush and fence in software.
        timeout_s: a medium that another process serves (rdma's memory node) counts as lost after so many seconds
            without any progress; one that has ended is noticed at once. Not for DRAM and CXL: loads do not time out.
        timing: charges operations to a time model; None charges nothing.
        pool_slots: [first, last) of the pool's 16 slots that this machine's stores may take; machines that share a
            device have ranges of their own.
        expiry_s: a store that is silent for so long (its process paused or unreachable) loses what it held.
    """

    capacity_bytes: int = 0
    numa_node: int | None = None
    coherent: bool = True
    timeout_s: float = 10.0
    timing: Timing | None = field(default=None, compare=False)
    pool_slots: tuple[int, int] = (0, 16)
    expiry_s: float = 10.0


class KVStore(ABC):
    """KV entries of many requests on one device.

    One store is one device: a request lives wholly on it. Not safe for two threads at once; any number of
    processes may open the same device.
    """

    layout: KVLayout
    capabilities: Capability
    device: str  # for messages: "cxl0", a path, a node's address

    # -- life ---------------------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def open(cls, address: str, layout: KVLayout, options: StoreOptions) -> Self:
        """Open the device at the address (what follows "scheme://" in a URL).

        Raises:
            UserError: no such device or an unusable address.
            LayoutMismatch: it holds live requests of another layout.
            HostError: the machine lacks something.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything, attachments first. Closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def buffer(self, nbytes: int) -> Rows:
        """Memory for the hot path: uint8 [nbytes], line-aligned, registered where the medium needs it.

        Lives as long as the store; the store never reuses it.
        """

    # -- control path: keys -------------------------------------------------------------------------------
    @abstractmethod
    def reserve(
        self,
        key: str,
        num_tokens: int,
        *,
        block_hashes: Sequence[bytes] = (),
        append_tokens: int = 0,
    ) -> Reservation:
        """Make room for a request, invisible to others until publish().

        Args:
            key: a new key.
            num_tokens: prompt tokens.
            block_hashes: 16-byte chain hashes of the prompt's leading full blocks; those that the device holds
                already are shared instead of written again.
            append_tokens: tokens that append() may add later.

        Raises:
            KeyExists: the key is taken.
            StoreFull: no room; nothing was changed.
        """

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[Mapping[str, Rows]]) -> None:
        """Write and publish whole requests; the caller may reuse its arrays on return.

        Args:
            keys: new keys, all different.
            values: for each key, for each component, uint8 [its layers, tokens, row_bytes].

        Raises:
            KeyExists, StoreFull: nothing of the batch is visible then.
            UserError (a ValueError): a wrong shape or dtype; the message gives got and wanted.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], out: Sequence[Mapping[str, Rows]]) -> BoolMask:
        """Read whole requests; out as put's values. Returns hits, bool [len(keys)]; misses leave out as it was."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> BoolMask:
        """Which keys are published here, bool [len(keys)], in the order of keys."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> int:
        """Forget keys; returns how many existed. Space returns when the last reader has detached."""

    @abstractmethod
    def slots(self, keys: Sequence[str]) -> SlotIds:
        """int64 [len(keys)] handles for the hot path, valid until delete or detach.

        Raises:
            KeyMissing: names the key.
        """

    @abstractmethod
    def length(self, slot: int) -> int:
        """Tokens that every layer of the request holds."""

    # -- hot path: slots and token indices ----------------------------------------------------------------
    @abstractmethod
    def gather(
        self,
        slots: SlotIds,
        layer: int,
        tokens: TokenIds,
        out: Rows,
        *,
        component: str = "kv",
        out_rows: TokenIds | None = None,
        packed: bool = False,
    ) -> int:
        """Fetch the selected rows of one layer: the per-layer top-k read.

        Args:
            slots: int64 [B].
            layer: model layer.
            tokens: int32 [B, k]; -1 pads, padded rows are not touched.
            out: uint8 [B, k, row_bytes], C-contiguous; with out_rows uint8 [R, row_bytes].
            component: which rows.
            out_rows: int32 [B, k]: the row of tokens[b, j] lands in out[out_rows[b, j]] (a hot buffer's slots).
            packed: where Capability.PACKED is there, the owner packs the rows into one message.

        Returns:
            Rows fetched.

        Raises:
            UserError (a ValueError): a wrong shape, dtype or stride; the message gives got and wanted.
            SlotStale, TokenMissing: names device, key, layer and token; out is unspecified then.
            MediumError: the medium failed.
        """

    @abstractmethod
    def fetch(self, slot: int, component: str, start: int, out: Rows) -> None:
        """Read a token range of all the component's layers: out uint8 [layers, n, row_bytes], tokens start.. ."""

    @abstractmethod
    def append(
        self, slots: SlotIds, layer: int, start: TokenIds, rows: Rows, *, component: str = "kv"
    ) -> None:
        """Write rows of one layer: rows uint8 [B, n, row_bytes] at tokens start[b] .. start[b] + n.

        start[b] may be anything up to what the layer holds; writing shared tokens is refused.

        Raises:
            UserError (a ValueError): a wrong shape, a gap, a shared token, or more than was reserved.
            SlotStale: names the slot.
        """

    # -- sharing ------------------------------------------------------------------------------------------
    @abstractmethod
    def publish(self, key: str) -> Descriptor:
        """Make a request visible to others, and its full prompt blocks shareable. Publishing again refreshes."""

    @abstractmethod
    def attach(self, descriptor: Descriptor) -> int:
        """Take a lease on a published request; returns its slot. append() past its tokens is allowed to one
        attacher at a time, into the blocks reserved for it.

        Raises:
            LayoutMismatch: the other side has other rows.
            StaleDescriptor: the request is gone, or lies on another device; says which.
        """

    @abstractmethod
    def detach(self, slot: int) -> None:
        """Drop a lease. A deleted request's space returns with the last one."""

    # -- figures ------------------------------------------------------------------------------------------
    @abstractmethod
    def stats(self) -> Stats:
        """A snapshot of the counters."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set the counters to zero (not the sizes and the NUMA facts)."""


def check_array(
    name: str, array: Any, dtype: type[np.generic], shape: tuple[int | None, ...]
) -> None:
    """Refuse an array of another dtype, shape (None: any extent) or layout, with got and wanted.

    Raises:
        UserError (a ValueError): says what was got and what is wanted.
    """
    if (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.flags.c_contiguous
        and (array.shape == shape or _fits(array.shape, shape))
    ):
        return
    extents = ", ".join("?" if n is None else str(n) for n in shape)
    wanted = f"{np.dtype(dtype).name} [{extents}], C-contiguous"
    if not isinstance(array, np.ndarray):
        raise UserError(f"{name}: got {type(array).__name__}, wanted {wanted}")
    contiguous = "" if array.flags.c_contiguous else ", not C-contiguous"
    raise UserError(
        f"{name}: got {array.dtype.name} {list(array.shape)}{contiguous}, wanted {wanted}"
    )


def _fits(have: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    same = (want is None or extent == want for extent, want in zip(have, wanted, strict=False))
    return len(have) == len(wanted) and all(same)
