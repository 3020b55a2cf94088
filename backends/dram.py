"""Local DRAM: this process's own memory, or a file on tmpfs that processes share."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from backends.mapped import MappedMedium, allocate, map_anonymous, map_device, open_device
from emu.errors import HostError, UserError
from emu.host_memory import occupies_memory, require_free
from emu.pool.store import PoolStore
from emu.store import Capability

if TYPE_CHECKING:
    from typing import Self

    from emu.layout import KVLayout
    from emu.store import StoreOptions


class DramStore(PoolStore):
    """`dram://` is private to the process, `dram:///path` a shared file."""

    @classmethod
    def open(cls, address: str, layout: KVLayout, options: StoreOptions) -> Self:
        """See KVStore.open.

        Args:
            address: empty for private memory of options.capacity_bytes; else a file's path, made with
                capacity_bytes where that is given and there is none yet.
            layout: of the rows.
            options: see StoreOptions.

        Raises:
            UserError: no capacity, one that holds no block, or a file of another size.
            HostError: it does not fit.
        """
        capacity = _whole_pages(options.capacity_bytes)
        if capacity < 0 or (not address and capacity == 0):
            raise UserError(
                f"dram://{address}: a capacity of {options.capacity_bytes} bytes",
                remedy="give capacity_bytes, for instance StoreOptions(capacity_bytes=256 << 20)",
            )
        smallest = layout.device_bytes(1)
        if 0 < capacity < smallest:
            raise UserError(
                f"dram://{address}: a capacity of {options.capacity_bytes} bytes holds no block",
                remedy=f"give at least {smallest} bytes",
            )
        capabilities = Capability.LOAD_STORE
        if address:
            capabilities |= Capability.SHARED
            if capacity:
                _make_file(Path(address), capacity)
            mapping = map_device(Path(address))
        else:
            require_free(capacity, "dram://", remedy="ask for less capacity_bytes")
            mapping = map_anonymous(capacity)
        return cls(MappedMedium(mapping, options), layout, options, capabilities)


def _whole_pages(nbytes: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-nbytes // page) * page


def _make_file(path: Path, nbytes: int) -> None:
    """Make the file, or agree with whoever made it; one that a killed maker left empty is completed."""
    try:
        fd, ours = open_device(path, os.O_CREAT | os.O_EXCL), True
    except FileExistsError:
        fd, ours = open_device(path), False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        found = os.fstat(fd).st_size
        if found == 0:
            if occupies_memory(path):
                require_free(nbytes, f"dram://{path}", remedy="ask for less capacity_bytes")
            allocate(path, fd, nbytes)
        elif found != nbytes:
            raise UserError(
                f"{path}: is there already with {found} bytes, {nbytes} asked for",
                remedy="leave capacity_bytes out to use it as it is, or remove it",
            )
    except HostError:
        if ours:
            path.unlink()
        raise
    finally:
        os.close(fd)
