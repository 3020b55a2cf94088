"""Backends by URL scheme, imported on first use; the remedy stands beside the name."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import HostError, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from emu.layout import KVLayout
    from emu.store import KVStore, StoreOptions


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a scheme's store class is.

    Attributes:
        target: "package.module:Class".
        remedy: what to do when the import fails.
        server: the module that serves a store's memory as a process of its own, "" where none is needed. Run as a
            program it takes `--socket PATH --size BYTES [--die-with-parent]`, prints "ready" when it serves, and
            ends on SIGTERM.
    """

    target: str
    remedy: str
    server: str = ""


_REINSTALL = "reinstall emu: pip install --force-reinstall sac-emu"
_backends: dict[str, Backend] = {
    "dram": Backend("backends.dram:DramStore", _REINSTALL),
    "cxl": Backend("backends.cxl:CxlStore", _REINSTALL),
    "rdma": Backend("backends.rdma:RdmaStore", _REINSTALL, "backends.memory_node"),
}


def register(scheme: str, target: str, *, remedy: str, server: str = "") -> None:
    """Add a backend of your own; the arguments are Backend's.

    Raises:
        UserError: the scheme is taken by another target.
    """
    known = _backends.get(scheme)
    if known is not None and known.target != target:
        raise UserError(
            f"scheme {scheme!r} is taken by {known.target}", remedy="choose another scheme"
        )
    _backends[scheme] = Backend(target, remedy, server)


def server_argv(
    scheme: str,
    socket: Path | str,
    size_bytes: int,
    *,
    with_parent: bool = False,
    python: str = sys.executable,
) -> tuple[str, ...]:
    """The command of a process that serves a scheme's memory at a Unix socket.

    Args:
        scheme: for instance "rdma".
        socket: path that it listens at; the store's URL is then "SCHEME://SOCKET".
        size_bytes: memory that it owns.
        with_parent: it ends with the process that starts it, whatever becomes of that.
        python: the interpreter.

    Raises:
        UserError: unknown scheme, or one whose stores need no server.
    """
    module = _backend(scheme).server
    if not module:
        raise UserError(
            f"{scheme} stores need no server", remedy=f"open {scheme}:// without starting one"
        )
    # -P: the working directory's modules must not stand before ours.
    argv = (python, "-P", "-m", module, "--socket", str(socket), "--size", str(size_bytes))
    return (*argv, "--die-with-parent") if with_parent else argv


def _backend(scheme: str) -> Backend:
    backend = _backends.get(scheme)
    if backend is None:
        raise UserError(
            f"no backend {scheme!r}", remedy=f"use one of {', '.join(sorted(_backends))}"
        )
    return backend


def store_class(scheme: str) -> type[KVStore]:
    """The store class of a scheme.

    Raises:
        UserError: unknown scheme.
        HostError: its module cannot be imported here.
    """
    from emu.store import KVStore  # late: planning a server needs no numpy

    backend = _backend(scheme)
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
    from emu.store import StoreOptions

    scheme, separator, address = url.partition("://")
    if not separator:
        raise UserError(
            f"{url!r} is not a store URL",
            remedy="write scheme://address, for instance cxl:///dev/dax0.0",
        )
    return store_class(scheme).open(address, layout, options or StoreOptions())
