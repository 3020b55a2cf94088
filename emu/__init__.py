"""An emulation testbed for KV caches on CXL and RDMA."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emu.layout import Component, KVLayout
    from emu.provision.testbed import Testbed, testbed
    from emu.registry import open_store
    from emu.store import Capability, Descriptor, KVStore, Reservation, Stats, StoreOptions

_HOMES = {
    "Capability": "emu.store",
    "Component": "emu.layout",
    "Descriptor": "emu.store",
    "KVLayout": "emu.layout",
    "KVStore": "emu.store",
    "Reservation": "emu.store",
    "Stats": "emu.store",
    "StoreOptions": "emu.store",
    "Testbed": "emu.provision",
    "open_store": "emu.registry",
    "testbed": "emu.provision",
}

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
    """A public name on first use, so that commands which move no rows do not load numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'emu' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
