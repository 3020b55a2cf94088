"""The rdma medium: a memory node owns the bytes, work requests move them.

Who executes the work requests is the connection's business: today a memory node's thread, without any kernel
module; a queue pair of libibverbs fits behind the same class.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backends.node_connection import ConnectionOptions, NodeConnection
from emu import _native
from emu.errors import MediumError, UserError
from emu.numa import NumaWarning
from emu.pool.medium import Medium
from emu.pool.store import PoolStore
from emu.store import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from emu.layout import KVLayout
    from emu.pool.medium import Gather, Region
    from emu.store import Rows, SlotIds, Stats, StoreOptions, TokenIds

# Bounce memory for arrays that are not registered, and messages to the owner.
STAGING_BYTES = 4 << 20


class RdmaMedium(Medium):
    """A memory node's bytes, reached by READ, WRITE and PACK work requests on one queue pair.

    Args:
        address: path of the node's socket.
        numa_node: the NUMA node that the memory should lie on; only the node itself can bind it.
        options: attributes of the queue pair.
    """

    def __init__(
        self,
        address: str,
        *,
        numa_node: int | None = None,
        options: ConnectionOptions | None = None,
    ) -> None:
        self._connection = NodeConnection(address, options)
        self.name = address
        self.size_bytes = self._connection.size_bytes
        self.directory_path = f"{Path(address).resolve()}.directory"
        self._numa_node = self._connection.facts["numa_node"] if numa_node is None else numa_node
        self._memory: list[_native.RegisteredMemory] = []
        try:
            self._numa_reason = self._why_not_bound()
            staging, lkey = self._connection.register(STAGING_BYTES)
            self._memory.append(staging)
            self._requester = _native.Requester(
                self._connection.queue_pair,
                self._connection.expose(0, self.size_bytes),
                staging.address,
                STAGING_BYTES,
                lkey,
            )
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Leave the node. Arrays from buffer() stay readable."""
        self._connection.close()

    def check(self) -> None:
        """Refuse a node that is gone, or whose pool is another.

        Raises:
            MediumError: it does not answer, or says what stands there.
        """
        self._connection.describe()
        super().check()

    def buffer(self, nbytes: int) -> Rows:
        """Registered memory, uint8 [nbytes], page-aligned."""
        memory, lkey = self._connection.register(max(nbytes, 1))
        self._memory.append(memory)
        self._requester.add_memory(memory.address, max(nbytes, 1), lkey)
        return memory.array()[:nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raw bytes, by READ."""
        out = np.empty(nbytes, np.uint8)
        with self._faults():
            self._requester.read(offset, out)
        return out.tobytes()

    def write(self, offset: int, data: bytes) -> None:
        """Raw bytes, by WRITE; in the node's memory on return."""
        with self._faults():
            self._requester.write(offset, np.frombuffer(data, np.uint8))

    def gather(self, tables: _native.RowTables, region: Region, wanted: Gather) -> int:
        """One READ per remote-contiguous run, or one PACK message for all rows."""
        move = self._requester.pack_rows if wanted.packed else self._requester.read_rows
        where = (tables, region.number, region.offset, region.row_bytes)
        with self._faults():
            return move(*where, wanted.slots, wanted.tokens, wanted.out, wanted.out_rows)

    def scatter(
        self, tables: _native.RowTables, region: Region, slots: SlotIds, start: TokenIds, rows: Rows
    ) -> None:
        """One WRITE per remote-contiguous run; lengths advance once the last has completed."""
        with self._faults():
            self._requester.write_rows(
                tables, region.number, region.offset, region.row_bytes, slots, start, rows
            )

    def add_stats(self, stats: Stats) -> None:
        """Work requests, READs in flight, and the node's NUMA facts."""
        stats.work_requests = self._requester.work_requests
        stats.max_outstanding_reads = self._connection.queue_pair.max_outstanding_reads
        stats.numa_node = self._numa_node
        stats.numa_reason = self._numa_reason
        stats.numa_bound = self._numa_node is not None and not self._numa_reason

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._requester.reset_counters()

    def _why_not_bound(self) -> str:
        """Empty when the memory lies where it was asked for, or nobody asked."""
        facts, node = self._connection.facts, self._numa_node
        if node is None:
            return ""
        reason: str = facts["numa_reason"]
        if node != facts["numa_node"]:
            reason = f"the memory node binds its own memory; start it with --numa-node {node}"
        if reason:
            warnings.warn(
                f"{self.name}: memory is not bound to NUMA node {node}: {reason}",
                NumaWarning,
                stacklevel=4,
            )
        return reason

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except _native.WorkFault as fault:
            status, message = fault.args
            silent = status == "IBV_WC_RETRY_EXC_ERR"
            raise MediumError(
                f"{self.name}: {message}",
                device=self.name,
                status=status,
                remedy=self._connection.what_to_do() if silent else "open the store again",
            ) from fault


class RdmaStore(PoolStore):
    """A memory node's memory. Arrays that do not come from buffer() are moved through a bounce buffer."""

    @classmethod
    def open(cls, address: str, layout: KVLayout, options: StoreOptions) -> Self:
        """See KVStore.open; the address is the path of the node's socket, its size is the node's own.

        Raises:
            UserError: no node listens there; the remedy is the command that starts one. Or a timeout_s that is none.
            MediumError: the node does not answer within timeout_s.
        """
        if not 0 < options.timeout_s < math.inf:
            raise UserError(
                f"rdma://{address}: a timeout of {options.timeout_s} s",
                remedy="give seconds, for instance StoreOptions(timeout_s=10)",
            )
        connection = ConnectionOptions(timeout_s=options.timeout_s)
        medium = RdmaMedium(address, numa_node=options.numa_node, options=connection)
        capabilities = (
            Capability.SHARED | Capability.REMOTE | Capability.REGISTERED | Capability.PACKED
        )
        return cls(medium, layout, options, capabilities)
