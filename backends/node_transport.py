"""The two ways of a queue pair to a memory node: a RoCE device's, and one that the node itself executes."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import numpy as np

from backends.node_verbs import endpoint_from_json, endpoint_to_json, open_device
from emu import _native
from emu.errors import HostError, MediumError

if TYPE_CHECKING:
    from collections.abc import Collection

    from backends.node_connection import ConnectionOptions, NodeConnection

_PROBE_BYTES = 1 << 20  # staging memory of the first READ


class VerbsUnusable(Exception):
    """There are no verbs between this process and the node; says why."""


class VerbsTransport:
    """A reliable connection of a RoCE device, tried by one READ.

    Args:
        connection: the control plane.
        options: attributes of the queue pair.

    Attributes:
        device: the port that it uses.
        queue_pair: of it.

    Raises:
        VerbsUnusable: here or at the node there is no usable device, or nothing comes through.
    """

    name = "verbs"

    def __init__(self, connection: NodeConnection, options: ConnectionOptions) -> None:
        self._connection = connection
        remote = connection.sock.family != socket.AF_UNIX
        try:
            self.device = open_device(connection.sock.getsockname()[0] if remote else "")
            reads = max(1, min(options.max_rd_atomic, self.device.max_reads_started, 255))
            depth = min(options.send_queue_depth, self.device.max_send_wr)
            self.queue_pair = _native.RcQueuePair(self.device, depth, reads, options.timeout_s)
            self._connect(reads, options.timeout_s)
            self._try()
        except (LookupError, RuntimeError, OSError) as error:  # WorkFault is a RuntimeError
            raise VerbsUnusable(error.args[-1] if error.args else str(error)) from error
        except (MediumError, HostError) as error:
            raise VerbsUnusable(error.message) from error

    def _connect(self, reads: int, timeout_s: float) -> None:
        reply = self._connection.call(
            "connect_verbs",
            endpoint=endpoint_to_json(self.queue_pair.endpoint),
            address=self.device.address,
            max_rd_atomic=reads,
            timeout_s=timeout_s,
        )
        peer = endpoint_from_json(reply["endpoint"])
        self.queue_pair.connect(peer, reply["max_rd_atomic"], self._connection.sock.fileno())

    def _try(self) -> None:
        """READ a byte: addresses, routes and rights are right, or it fails within the timeout."""
        memory = _native.RegisteredMemory(_PROBE_BYTES)
        keys = self.register(memory, _PROBE_BYTES)
        staging = _native.LocalMemory(memory.address, _PROBE_BYTES, *keys)
        rkey = self.expose(0, 1, ("remote_read",))
        _native.Requester(self.queue_pair, rkey, staging).read(0, np.empty(1, np.uint8))
        self.deregister(staging.lkey)

    def register(self, memory: _native.RegisteredMemory, nbytes: int) -> tuple[int, int]:
        """(lkey, remote key) of memory.

        Raises:
            HostError: the device cannot lock so much.
        """
        try:
            return self.queue_pair.register_memory(memory.address, nbytes)
        except OSError as error:
            lock = error.errno in {errno.ENOMEM, errno.EAGAIN}
            raise HostError(
                f"{nbytes} bytes of memory cannot be registered: {error.args[-1]}",
                capability="memlock" if lock else "verbs",
                remedy="raise `ulimit -l`" if lock else "see the row verbs of `emu doctor`",
            ) from error

    def deregister(self, lkey: int) -> None:
        """Forget registered memory."""
        self.queue_pair.deregister_memory(lkey)

    def expose(self, offset: int, nbytes: int, access: Collection[str]) -> int:
        """The rkey of a range of the node's memory."""
        reply = self._connection.call("expose", offset=offset, nbytes=nbytes, access=sorted(access))
        self.queue_pair.add_remote(reply["rkey"], reply["address"])
        rkey: int = reply["rkey"]
        return rkey


class RingTransport:
    """Rings in memory shared with the node, whose thread executes them; attributes as VerbsTransport's.

    Args:
        connection: the control plane, over a Unix socket.
        options: attributes of the queue pair.
    """

    name = "process"

    def __init__(self, connection: NodeConnection, options: ConnectionOptions) -> None:
        self._connection = connection
        self.queue_pair = _native.RingQueuePair(
            options.send_queue_depth, options.max_rd_atomic, options.timeout_s
        )
        connection.call(
            "connect",
            self.queue_pair.fds,
            send_queue_depth=options.send_queue_depth,
            max_rd_atomic=options.max_rd_atomic,
        )
        self.queue_pair.connect(connection.sock.fileno())

    def register(self, memory: _native.RegisteredMemory, nbytes: int) -> tuple[int, int]:
        """(lkey, remote key) of memory: the node has one key for both."""
        reply = self._connection.call(
            "register", [memory.fd], nbytes=nbytes, address=memory.address
        )
        return reply["lkey"], reply["lkey"]

    def deregister(self, lkey: int) -> None:
        """Forget registered memory."""
        self._connection.call("deregister", lkey=lkey)

    def expose(self, offset: int, nbytes: int, access: Collection[str]) -> int:
        """The rkey of a range of the node's memory."""
        reply = self._connection.call("expose", offset=offset, nbytes=nbytes, access=sorted(access))
        rkey: int = reply["rkey"]
        return rkey
