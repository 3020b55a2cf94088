"""A client's connection to a memory node: the control plane beside a queue pair."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.node_server import PACKET_BYTES
from backends.node_socket import connect
from emu import _native, process
from emu.errors import MediumError
from emu.host_memory import require_free

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Attributes of the queue pair.

    Attributes:
        send_queue_depth: work requests that may be posted and not completed, a power of two.
        max_rd_atomic: READs in flight at once (ibv_modify_qp(3); adapters often allow 16).
        timeout_s: without any progress for that long, the node counts as lost.
    """

    send_queue_depth: int = 1024
    max_rd_atomic: int = 16
    timeout_s: float = 10.0


class NodeConnection:
    """One queue pair to one node, with the memory registered for it.

    Attributes:
        address: the node's socket.
        size_bytes: memory that the node owns.
        facts: what the node says of itself: pid, memory_fd, size_bytes, numa_node, numa_bound, numa_reason.
        queue_pair: where work requests go.
    """

    def __init__(self, address: str, options: ConnectionOptions | None = None) -> None:
        options = options or ConnectionOptions()
        self.address = address
        self._pid = os.getpid()
        self._timeout_s = options.timeout_s
        self._socket = connect(address, options.timeout_s)
        self._node_pid = _peer_pid(self._socket)
        try:
            self.queue_pair = _native.RingQueuePair(
                options.send_queue_depth, options.max_rd_atomic, options.timeout_s
            )
            self.facts = self.describe()
            self.size_bytes: int = self.facts["size_bytes"]
            self._call(
                "connect",
                self.queue_pair.fds,
                send_queue_depth=options.send_queue_depth,
                max_rd_atomic=options.max_rd_atomic,
            )
            self.queue_pair.connect(self._socket.fileno())
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Leave the node; it forgets the queue pair and the registered memory. Twice is allowed.

        A forked child only drops its copy: the connection is the parent's.
        """
        if os.getpid() == self._pid:
            with suppress(OSError):  # closed already, or the node is gone
                self._socket.shutdown(socket.SHUT_RDWR)  # the queue pair holds a duplicate
        self._socket.close()

    def register(self, nbytes: int) -> tuple[_native.RegisteredMemory, int]:
        """New memory of that many bytes, registered for local access; returns it and its lkey.

        Raises:
            HostError: it does not fit the free memory.
            MediumError: the node is gone or refuses.
        """
        require_free(nbytes, "registered memory")
        memory = _native.RegisteredMemory(nbytes)
        reply = self._call("register", [memory.fd], nbytes=nbytes, address=memory.address)
        memory.close_fd()
        return memory, reply["lkey"]

    def describe(self) -> dict[str, Any]:
        """What the node says of itself now.

        Raises:
            MediumError: it is gone.
        """
        return self._call("describe")

    def deregister(self, lkey: int) -> None:
        """Forget registered memory; work requests that name it fail from now on."""
        self._call("deregister", lkey=lkey)

    def expose(
        self, offset: int, nbytes: int, access: Collection[str] = ("remote_read", "remote_write")
    ) -> int:
        """The rkey of a range of the node's memory, for this queue pair only."""
        rkey: int = self._call("expose", offset=offset, nbytes=nbytes, access=sorted(access))[
            "rkey"
        ]
        return rkey

    def _call(self, operation: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        message = json.dumps({"op": operation, **fields}).encode()
        try:
            socket.send_fds(self._socket, [message], list(fds))
            raw = self._socket.recv(PACKET_BYTES)
        except OSError as error:
            raise self._lost(str(error)) from error
        if not raw:
            raise self._lost("it closed the connection")
        reply: dict[str, Any] = json.loads(raw)
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
            remedy=self.what_to_do(),
        )

    def what_to_do(self) -> str:
        """What is to be seen of a node that does not answer, and what helps: the remedy of such an error."""
        pid = self._node_pid
        if not pid:
            return "it runs in another container: look there whether it was stopped or has ended"
        match process.state(pid):
            case "":
                return f"its process {pid} has ended: start it again; its content is lost"
            case "T" | "t":
                return (
                    f"its process {pid} is stopped: `kill -CONT {pid}`, then open the store again"
                )
            case state:
                return (
                    f"its process {pid} runs (state {state}) but did nothing for {self._timeout_s:g} s: look at the "
                    "machine's load and memory, or open the store with a longer timeout_s"
                )


def _peer_pid(connection: socket.socket) -> int:
    """Pid of the process that listens; 0 where it is of a pid namespace that cannot be seen from here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])
