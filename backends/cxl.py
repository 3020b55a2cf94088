"""CXL memory: an existing device, mapped and read by CPU loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backends.mapped import MappedMedium, map_device
from emu.errors import UserError
from emu.pool.store import PoolStore
from emu.store import Capability

if TYPE_CHECKING:
    from typing import Self

    from emu.layout import KVLayout
    from emu.store import StoreOptions


class CxlStore(PoolStore):
    """A devdax device (/dev/daxN.M), or the file that stands for a device in a testbed."""

    @classmethod
    def open(cls, address: str, layout: KVLayout, options: StoreOptions) -> Self:
        """See KVStore.open; the address is the device's path.

        Raises:
            UserError: no such device; none is ever made here.
        """
        if not address:
            raise UserError("cxl:// names no device", remedy="write cxl:///dev/dax0.0")
        medium = MappedMedium(map_device(Path(address)), options)
        return cls(medium, layout, options, Capability.LOAD_STORE | Capability.SHARED)
