"""A client's connection to a memory node: the control plane, and the queue pair that carries the bytes.

The transport is chosen by trying: a queue pair of a RoCE device ("verbs") where both sides have one and a first READ
comes through, else one that the node itself executes ("process"), which works on one machine only.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.node_channel import Channel, ChannelEnded
from backends.node_socket import connect
from backends.node_transport import RingTransport, VerbsTransport, VerbsUnusable
from emu import _native
from emu.errors import HostError, MediumError, UserError
from emu.host_memory import require_free

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


TRANSPORTS = ("auto", "verbs", "process")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Attributes of the queue pair.

    Attributes:
        transport: "verbs" (a RoCE device), "process" (the node's own threads), or "auto".
        send_queue_depth: work requests that may be posted and not completed, a power of two.
        max_rd_atomic: READs in flight at once (ibv_modify_qp(3); adapters often allow 16); a device may allow fewer.
        timeout_s: without any progress for that long, the node counts as lost.
    """

    transport: str = "auto"
    send_queue_depth: int = 1024
    max_rd_atomic: int = 16
    timeout_s: float = 30.0


class NodeConnection:
    """One queue pair to one node, with the memory registered for it.

    Attributes:
        address: the node's socket, or HOST:PORT.
        size_bytes: memory that the node serves.
        facts: what the node says of itself: pid, memory_fd, size_bytes, numa_node, numa_bound, numa_reason.
        queue_pair: where work requests go.
        transport: "verbs" or "process".
        transport_reason: why that one.

    Raises:
        UserError: no node listens there, or no such transport.
        HostError: the transport asked for, or the only one that leads there, cannot be had.
    """

    def __init__(self, address: str, options: ConnectionOptions | None = None) -> None:
        options = options or ConnectionOptions()
        if options.transport not in TRANSPORTS:
            raise UserError(
                f"no transport {options.transport!r}", remedy=f"use one of {', '.join(TRANSPORTS)}"
            )
        self.address = address
        self._pid = os.getpid()
        self._channel = Channel(connect(address, options.timeout_s))
        try:
            self.facts = self.describe()
            self.size_bytes: int = self.facts["size_bytes"]
            self._transport = self._open_transport(options)
        except BaseException:
            self.close()
            raise
        self.transport = self._transport.name
        self.queue_pair = self._transport.queue_pair

    def _open_transport(self, options: ConnectionOptions) -> VerbsTransport | RingTransport:
        local = self._channel.carries_fds
        if options.transport == "process" and not local:
            raise HostError(
                f'{self.address}: the transport "process" needs shared memory, so a node on this machine',
                capability="verbs",
                remedy="use transport verbs, or the path of a node's socket",
            )
        if options.transport == "process":
            self.transport_reason = "you asked for it"
        else:
            try:
                transport = VerbsTransport(self, options)
            except VerbsUnusable as error:
                if options.transport == "verbs" or not local:
                    raise HostError(
                        f"{self.address}: no verbs: {error}",
                        capability="verbs",
                        remedy="see the rows verbs and uverbs of `emu doctor`, on both sides",
                    ) from error
                self.transport_reason = f"no verbs: {error}"
                self.call("disconnect")
            else:
                self.transport_reason = f"a READ over {transport.device.name} came through"
                return transport
        return RingTransport(self, options)

    @property
    def sock(self) -> socket.socket:
        """The control plane's socket; its end says that the node is gone."""
        return self._channel.sock

    def close(self) -> None:
        """Leave the node; it forgets the queue pair and the registered memory. Twice is allowed.

        A forked child only drops its copy: the connection is the parent's.
        """
        if os.getpid() == self._pid:
            with suppress(OSError):  # closed already, or the node is gone
                self.sock.shutdown(socket.SHUT_RDWR)  # the queue pair holds a duplicate
        self._channel.close()

    def register(self, nbytes: int) -> tuple[_native.RegisteredMemory, _native.LocalMemory]:
        """New memory of that many bytes, registered for local access; returns it and its keys.

        Raises:
            HostError: it does not fit the free memory, or what may be locked.
            MediumError: the node is gone or refuses.
        """
        require_free(nbytes, "registered memory")
        memory = _native.RegisteredMemory(nbytes)
        lkey, remote_key = self._transport.register(memory, nbytes)
        memory.close_fd()
        return memory, _native.LocalMemory(memory.address, nbytes, lkey, remote_key)

    def describe(self) -> dict[str, Any]:
        """What the node says of itself now.

        Raises:
            MediumError: it is gone.
        """
        return self.call("describe")

    def claim_directory(self, machine: str) -> bool:
        """Whether the pool's directory may be on this machine: clients of another one may have theirs."""
        granted: bool = self.call("claim", machine=machine)["granted"]
        return granted

    def deregister(self, lkey: int) -> None:
        """Forget registered memory; work requests that name it fail from now on."""
        self._transport.deregister(lkey)

    def expose(
        self, offset: int, nbytes: int, access: Collection[str] = ("remote_read", "remote_write")
    ) -> int:
        """The rkey of a range of the node's memory, for this queue pair only."""
        return self._transport.expose(offset, nbytes, access)

    def call(self, operation: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """One question to the node, and its answer.

        Raises:
            MediumError: it is gone, or refuses.
        """
        try:
            self._channel.send({"op": operation, **fields}, fds)
            while not (messages := self._channel.receive()):
                pass
        except OSError as error:
            raise self._lost(str(error)) from error
        except ChannelEnded:
            raise self._lost("it closed the connection") from None
        reply: dict[str, Any] = json.loads(messages[0][0])
        if not reply["ok"]:
            raise MediumError(
                f"{self.address}: the memory node refused {operation}: {reply['error']}",
                device=self.address,
            )
        return reply

    def _lost(self, reason: str) -> MediumError:
        return MediumError(
            f"{self.address}: the memory node does not answer: {reason}",
            device=self.address,
            status="IBV_WC_RETRY_EXC_ERR",
            remedy="start it again; its content is lost",
        )
