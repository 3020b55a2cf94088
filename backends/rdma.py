"""The rdma medium: a memory node owns the bytes, work requests move them.

Who executes the work requests is the connection's business: an RDMA device, or a memory node's thread where there is
none. Which one it is, and why, the statistics say.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backends.node_connection import ConnectionOptions, NodeConnection
from backends.node_socket import is_tcp
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
    from emu.pool.medium import Region
    from emu.store import Rows, SlotIds, Stats, StoreOptions, TokenIds

# Bounce memory for arrays that are not registered, and messages to the owner.
STAGING_BYTES = 4 << 20


class RdmaMedium(Medium):
    """A memory node's bytes, reached by READ, WRITE and PACK work requests on one queue pair.

    Args:
        address: path of the node's socket, or HOST:PORT.
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
        self.directory_path = directory_path(address)
        self._numa_node = self._connection.facts["numa_node"] if numa_node is None else numa_node
        self._memory: list[_native.RegisteredMemory] = []
        try:
            self._numa_reason = self._why_not_bound()
            memory, staging = self._connection.register(STAGING_BYTES)
            self._memory.append(memory)
            rkey = self._connection.expose(0, self.size_bytes)
            self._requester = _native.Requester(self._connection.queue_pair, rkey, staging)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Leave the node. Arrays from buffer() stay readable."""
        self._connection.close()

    def check(self) -> None:
        """Refuse a node that is gone.

        Raises:
            MediumError: it does not answer.
        """
        self._connection.describe()

    def keep_directory(self) -> None:
        """Say that this machine keeps the pool's directory.

        Raises:
            UserError: another one does.
        """
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if not self._connection.claim_directory(machine):
            raise UserError(
                f"{self.name}: another host keeps the directory of this node's pool",
                remedy="open it with borrow=True and attach descriptors, or close the stores there",
            )

    def buffer(self, nbytes: int) -> Rows:
        """Registered memory, uint8 [nbytes], page-aligned."""
        memory, local = self._connection.register(max(nbytes, 1))
        self._memory.append(memory)
        self._requester.add_memory(local)
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

    def gather(
        self,
        tables: _native.RowTables,
        region: Region,
        slots: SlotIds,
        tokens: TokenIds,
        out: Rows,
        out_rows: TokenIds | None,
        packed: bool,
    ) -> int:
        """One READ per remote-contiguous run, or with packed=True one PACK message for all rows."""
        move = self._requester.pack_rows if packed else self._requester.read_rows
        with self._faults():
            return move(
                tables, region.number, region.offset, region.row_bytes, slots, tokens, out, out_rows
            )

    def scatter(
        self, tables: _native.RowTables, region: Region, slots: SlotIds, start: TokenIds, rows: Rows
    ) -> None:
        """One WRITE per remote-contiguous run; lengths advance once the last has completed."""
        with self._faults():
            self._requester.write_rows(
                tables, region.number, region.offset, region.row_bytes, slots, start, rows
            )

    def add_stats(self, stats: Stats) -> None:
        """Who carries the work requests, how many, READs in flight, and the node's NUMA facts."""
        stats.transport = self._connection.transport
        stats.transport_reason = self._connection.transport_reason
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
            raise MediumError(
                f"{self.name}: {message}",
                device=self.name,
                status=status,
                remedy="this store is dead, open it again; if the memory node died, start it again",
            ) from fault


def directory_path(address: str) -> str:
    """Where the pool's directory of a node lies: beside its socket, for a node elsewhere in this user's own place."""
    if not is_tcp(address):
        return f"{address}.directory"
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return f"{place}/emu-rdma-{address.replace(':', '-')}.directory"


class RdmaStore(PoolStore):
    """A memory node's memory. Arrays that do not come from buffer() are moved through a bounce buffer."""

    @classmethod
    def open(cls, address: str, layout: KVLayout, options: StoreOptions) -> Self:
        """See KVStore.open; the address is the path of the node's socket or HOST:PORT, its size is the node's own.

        Raises:
            UserError: no node listens there; the remedy is the command that starts one. Or another host keeps the
                pool's directory.
            HostError: no verbs, where they were asked for or are the only way.
        """
        chosen = ConnectionOptions(transport=options.transport)
        medium = RdmaMedium(address, numa_node=options.numa_node, options=chosen)
        if not options.borrow:
            try:
                medium.keep_directory()
            except BaseException:
                medium.close()
                raise
        capabilities = (
            Capability.SHARED | Capability.REMOTE | Capability.REGISTERED | Capability.PACKED
        )
        return cls(medium, layout, options, capabilities)
