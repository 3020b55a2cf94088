"""A memory node: the process that owns the bytes of an rdma store.

Clients connect to its Unix socket (SOCK_SEQPACKET: one JSON object per packet, file descriptors beside it),
hand over the rings of a queue pair and register memory. The data plane is native: one thread per queue pair.
Run it with `python -m backends.memory_node --socket PATH --size 256M`; it prints "ready" when it listens. With
`--listen HOST:PORT` clients on other hosts reach it too, by real verbs; with `--device /dev/daxN.M` it serves the
beginning of a device instead of memory of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backends.mapped import open_device, size_of_device
from backends.node_server import MemoryNode, NodeMemory
from backends.node_socket import listen, listen_tcp
from emu.errors import EmuError, UserError
from emu.host_memory import require_free
from emu.process import die_with_parent
from emu.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How to run a node.

    Attributes:
        socket: path of its Unix socket.
        size_bytes: memory that it owns.
        numa_node: bind the memory there, verified; None leaves it to the kernel.
        listen: HOST:PORT for clients on other hosts; "" for none.
        device: serve this device's memory; None makes memory of its own.
        parent_pid: end with this parent (PR_SET_PDEATHSIG); 0: whoever the parent is now; -1: do not.
    """

    socket: Path
    size_bytes: int
    numa_node: int | None = None
    listen: str = ""
    device: Path | None = None
    parent_pid: int = -1


def allocate(size_bytes: int, numa_node: int | None) -> NodeMemory:
    """Make the node's memory, every page of it.

    Raises:
        UserError: a size that cannot be.
        HostError: it does not fit the free memory; nothing was allocated.
    """
    if size_bytes < mmap.PAGESIZE or size_bytes % mmap.PAGESIZE:
        raise UserError(
            f"a memory node of {size_bytes} bytes",
            remedy="use a multiple of 4096, for instance 256M",
        )
    require_free(size_bytes, "the memory node")
    fd = os.memfd_create("emu-memory-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    bound, reason = (False, "") if numa_node is None else _bind(fd, size_bytes, numa_node)
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return NodeMemory(fd, size_bytes, numa_node, bound, reason)


def take_device(path: Path, size_bytes: int) -> NodeMemory:
    """Serve the beginning of an existing device; its content stays.

    Raises:
        UserError: no such device, or a shorter one.
        HostError: no permission, or no room behind a sparse file.
    """
    fd = open_device(path)
    device_bytes = size_of_device(path, fd)
    if size_bytes > device_bytes:
        raise UserError(
            f"{path} has {device_bytes} bytes, {size_bytes} asked for", remedy="ask for less"
        )
    return NodeMemory(fd, size_bytes, device_bytes=device_bytes)


def _bind(fd: int, size_bytes: int, numa_node: int) -> tuple[bool, str]:
    """Set the file's policy while it is empty, so that every page is allocated where it belongs."""
    import numpy as np

    from emu import numa

    with mmap.mmap(fd, size_bytes) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        binding = numa.bind(array, numa_node, fresh=True)
        del array  # an exported buffer keeps the mapping from closing
    return binding.bound, binding.reason


def parse_arguments(arguments: Sequence[str] | None = None) -> NodeOptions:
    """Options of the command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m backends.memory_node", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="path of the Unix socket")
    parser.add_argument("--size", required=True, help="bytes, or for instance 256M")
    parser.add_argument("--numa-node", type=int, help="bind the memory to this node")
    parser.add_argument(
        "--listen",
        default="",
        metavar="HOST:PORT",
        help="for clients on other hosts of a private network: whoever reaches it may read and write the memory",
    )
    parser.add_argument("--device", type=Path, help="serve this device's memory (/dev/daxN.M)")
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        default=-1,
        metavar="PID",
        help="end with the parent process (PID guards against one that has ended already)",
    )
    given = parser.parse_args(arguments)
    try:
        size_bytes = parse_size(given.size)
    except UserError as error:
        parser.error(str(error))
    if given.device is not None and given.numa_node is not None:
        parser.error("--numa-node: a device's memory lies where it lies")
    return NodeOptions(
        given.socket.absolute(),
        size_bytes,
        given.numa_node,
        given.listen,
        given.device,
        given.die_with_parent,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        if options.parent_pid >= 0:
            die_with_parent(options.parent_pid, signal.SIGTERM)
        if options.device is None:
            memory = allocate(options.size_bytes, options.numa_node)
        else:
            memory = take_device(options.device, options.size_bytes)
        node = MemoryNode(memory)  # handles signals from here on
        listeners = [listen_tcp(options.listen)] if options.listen else []
        listeners.append(listen(options.socket))
    except EmuError as error:
        print(f"memory node: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print("ready", flush=True)  # noqa: T201 - whoever started us waits for this line
    node.serve(listeners, options.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
