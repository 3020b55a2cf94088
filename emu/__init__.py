"""An emulation testbed for KV caches on CXL and RDMA."""

from typing import TYPE_CHECKING

from emu.layout import Component, KVLayout
from emu.registry import open_store
from emu.store import Capability, Descriptor, KVStore, Reservation, Stats, StoreOptions

if TYPE_CHECKING:
    from emu.provision import Testbed, testbed

__all__ = [
    "Capability",
    "Component",
    "Descriptor",
    "KVLayout",
    "KVStore",
    "Reservation",
    "Stats",
    "StoreOptions",
    "Testbed",
    "open_store",
    "testbed",
]


def __getattr__(name: str) -> object:
    """Testbed and testbed on first use: a program that only opens stores does not load them."""
    if name not in {"Testbed", "testbed"}:
        raise AttributeError(f"module 'emu' has no attribute {name!r}")
    from emu import provision

    value: object = getattr(provision, name)
    return value
