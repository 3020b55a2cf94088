"""Whether a run fits this machine, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import HostError
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.sac.designs import Design

WORKER_BYTES = 400 << 20
"""What a worker takes beside the KV (measured: an interpreter with torch and a small model, 280 to 350 MiB)."""
WORKERS = 3


@dataclass(frozen=True, slots=True)
class Need:
    """What a run takes at its peak.

    Attributes:
        tmpfs_bytes: in files of the testbed's directory, beside the devices that are there already.
        memory_bytes: in all, those files included.
    """

    tmpfs_bytes: int
    memory_bytes: int


def peak_need(designs: Sequence[Design], made_bytes: int, pool_bytes: int, copy_bytes: int) -> Need:
    """The peak over the designs, which run one after the other.

    Args:
        designs: what runs.
        made_bytes: devices that are made for the run.
        pool_bytes: of one pool with every request.
        copy_bytes: of the copies that a prefetching design makes.
    """
    files = made_bytes + max(pool_bytes if design.scheme == "dram" else 0 for design in designs)
    held = max(
        (0 if design.scheme == "cxl" else pool_bytes) + (copy_bytes if design.prefetch_path else 0)
        for design in designs
    )
    return Need(files, made_bytes + held + WORKERS * WORKER_BYTES)


def check_fits(need: Need, *, fs_free_bytes: int, memory_free_bytes: int) -> None:
    """Refuse a run that would not fit.

    Args:
        need: of the run.
        fs_free_bytes: what the file system of the testbed's directory can take.
        memory_free_bytes: free memory, or what the memory cgroup leaves, whichever is less.

    Raises:
        HostError: with the numbers and the way out.
    """
    way_out = "use a shorter --context, fewer --requests or fewer --backend"
    if need.tmpfs_bytes > fs_free_bytes:
        raise HostError(
            f"the run needs {format_size(need.tmpfs_bytes)} in files, {format_size(fs_free_bytes)} are free there",
            capability="shm",
            remedy=f"{way_out}, or --dir on a larger file system",
        )
    if need.memory_bytes > memory_free_bytes:
        raise HostError(
            f"the run needs {format_size(need.memory_bytes)} of memory, {format_size(memory_free_bytes)} are free",
            capability="memory",
            remedy=way_out,
        )
