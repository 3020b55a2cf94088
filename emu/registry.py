"""Backends by URL scheme, imported on first use; the remedy stands beside the name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from emu.errors import HostError, UserError
from emu.store import KVStore, StoreOptions

if TYPE_CHECKING:
    from emu.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a scheme's store class is.

    Attributes:
        target: "package.module:Class".
        remedy: what to do when the import fails.
    """

    target: str
    remedy: str


_REINSTALL = "reinstall emu: pip install --force-reinstall sac-emu"
_backends: dict[str, Backend] = {
    "dram": Backend("backends.dram:DramStore", _REINSTALL),
    "cxl": Backend("backends.cxl:CxlStore", _REINSTALL),
    "rdma": Backend("backends.rdma:RdmaStore", _REINSTALL),
}
BACKENDS = MappingProxyType(_backends)


def register(scheme: str, target: str, *, remedy: str) -> None:
    """Add a backend of your own.

    Raises:
        UserError: the scheme is taken by another target.
    """
    known = _backends.get(scheme)
    if known is not None and known.target != target:
        raise UserError(
            f"scheme {scheme!r} is taken by {known.target}", remedy="choose another scheme"
        )
    _backends[scheme] = Backend(target, remedy)


def store_class(scheme: str) -> type[KVStore]:
    """The store class of a scheme.

    Raises:
        UserError: unknown scheme.
        HostError: its module cannot be imported here.
    """
    backend = _backends.get(scheme)
    if backend is None:
        raise UserError(
            f"no backend {scheme!r}", remedy=f"use one of {', '.join(sorted(_backends))}"
        )
    module_name, _, class_name = backend.target.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise HostError(
            f"backend {scheme!r} cannot be loaded: {error}", remedy=backend.remedy
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, KVStore)):
        raise HostError(
            f"backend {scheme!r}: {backend.target} is not a KVStore", remedy=backend.remedy
        )
    return cls


def open_store(url: str, layout: KVLayout, options: StoreOptions | None = None) -> KVStore:
    """Open the store at a URL: "dram://", "cxl:///path/of/device", "rdma:///path/of/node.sock".

    Raises:
        UserError: not such a URL, or an unknown scheme.
    """
    scheme, separator, address = url.partition("://")
    if not separator:
        raise UserError(
            f"{url!r} is not a store URL",
            remedy="write scheme://address, for instance cxl:///dev/dax0.0",
        )
    return store_class(scheme).open(address, layout, options or StoreOptions())
