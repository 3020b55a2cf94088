"""An emulation testbed for KV caches on CXL and RDMA."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emu.layout import Component, KVLayout
    from emu.provision import Testbed, testbed
    from emu.registry import open_store
    from emu.store import Capability, Descriptor, KVStore, Reservation, Stats, StoreOptions
    from emu.timing.store_timing import store_timing

    __version__: str

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
    "store_timing": "emu.timing.store_timing",
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
    "store_timing",
    "testbed",
]


def __getattr__(name: str) -> object:
    """A public name on first use, so that commands which move no rows do not load numpy."""
    if name == "__version__":
        value: object = importlib.import_module("importlib.metadata").version("sac-emu")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'emu' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those that were not used yet."""
    return [*__all__, "__version__"]
