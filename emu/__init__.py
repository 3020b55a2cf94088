"""An emulation testbed for KV caches on CXL and RDMA."""

from emu.layout import Component, KVLayout
from emu.registry import open_store
from emu.store import Capability, Descriptor, KVStore, Reservation, Stats, StoreOptions

__all__ = [
    "Capability",
    "Component",
    "Descriptor",
    "KVLayout",
    "KVStore",
    "Reservation",
    "Stats",
    "StoreOptions",
    "open_store",
]
