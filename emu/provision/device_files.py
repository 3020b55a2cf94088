"""Acts on the pool's files: memory for those that are made, zeros for what an attached one held."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from emu.errors import HostError
from emu.provision.attached import CHECKED_BYTES, node_free_bytes
from emu.units import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from emu.provision.steps import AllocateDevice


def allocate(path: Path, step: AllocateDevice) -> None:
    """Make a file with all its memory.

    Args:
        path: the file to make, for step.path.
        step: how large, and where its memory shall lie.

    Raises:
        HostError: the memory cannot be had; the file may be there, and small.
        OSError: the file cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if step.numa_node is None:
            os.posix_fallocate(fd, 0, step.size_bytes)
        else:
            _allocate_on_node(fd, step, step.numa_node)
    except OSError as error:
        raise HostError(
            f"{step.path}: {format_size(step.size_bytes)} cannot be allocated: {error.strerror}",
            capability="shm",
            remedy="make --device-size smaller, or choose another --dir",
        ) from error
    finally:
        os.close(fd)


def _allocate_on_node(fd: int, step: AllocateDevice, node: int) -> None:
    free = node_free_bytes(node)
    if free < step.size_bytes:  # what is bound to a full node ends in the kernel killing a process
        raise HostError(
            f"{step.path}: NUMA node {node} has only {format_size(free)} free by now",
            capability="memory",
            remedy="make --device-size smaller, or use another node",
        )
    from emu.numa import allocate_file  # late: brings numpy, which most testbeds do without

    binding = allocate_file(fd, step.size_bytes, node)
    if not binding.bound:
        raise HostError(
            f"{step.path} is not on NUMA node {node}: {binding.reason}",
            capability="mbind",
            remedy=binding.remedy,
        )


def clear(path: Path, size_bytes: int) -> None:
    """Overwrite the beginning of a device with zeros, as far as anybody's data was searched there."""
    with path.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), size_bytes) as area:
        area[:CHECKED_BYTES] = bytes(CHECKED_BYTES)
