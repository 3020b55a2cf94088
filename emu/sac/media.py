"""The pool of each design, made for a run and removed after it: device files, host DRAM, a memory node."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import HostError
from emu.registry import server_argv
from emu.server import running_server
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from emu.provision.testbed import Testbed
    from emu.sac.designs import Design


GUEST_RUN = "/run"
"""Where a guest's programs write files."""
FIRST_PORT, PORTS = 10000, 20000
"""Of memory nodes in guests; beneath the ports that the kernel gives to clients."""


@dataclass(frozen=True, slots=True)
class Media:
    """What a run may use.

    Attributes:
        devices: the testbed's CXL device paths that the run uses.
        workspace: a directory of the run's own.
        pool_bytes: size that one device needs to hold every request.
        copy_bytes: host DRAM for the copies that a prefetching design makes.
    """

    devices: Sequence[Path]
    workspace: Path
    pool_bytes: int
    copy_bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Where a design's pool is.

    Attributes:
        urls: one store for each device, as the testbed's first host reaches it.
        far_urls: the same stores from its last host.
        transport: of rdma stores, see StoreOptions.
    """

    urls: list[str]
    far_urls: list[str]
    transport: str = "auto"


@contextmanager
def open_pool(design: Design, media: Media, testbed: Testbed) -> Iterator[Pool]:
    """A design's pool, while it exists."""
    if design.scheme == "cxl":
        urls = [f"cxl://{path}" for path in media.devices]
        yield Pool(urls, urls)
    elif design.scheme == "dram":
        with _host_dram(media) as path:
            yield Pool([f"dram://{path}"], [f"dram://{path}"])
    elif testbed.record.guests:
        with _guest_node(media, testbed) as pool:
            yield pool
    else:
        with _memory_node(media, testbed) as path:
            yield Pool([f"rdma://{path}"], [f"rdma://{path}"])


@contextmanager
def _host_dram(media: Media) -> Iterator[Path]:
    """Shared memory of the host, allocated so that a full tmpfs shows here and not as a SIGBUS later."""
    path = media.workspace / "host-dram"
    try:
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, media.pool_bytes)
        except OSError as error:
            raise HostError(
                f"{path}: {format_size(media.pool_bytes)} cannot be allocated: {error.strerror}",
                capability="shm",
                remedy="use a shorter --context or fewer --requests, or --dir on a larger file system",
            ) from error
        yield path
    finally:
        for left in media.workspace.glob("host-dram*"):
            left.unlink()


@contextmanager
def _memory_node(media: Media, testbed: Testbed) -> Iterator[Path]:
    """A process that owns the remote memory."""
    path = media.workspace / "memory-node.sock"
    try:
        with _node(server_argv("rdma", path, media.pool_bytes, with_parent=True), testbed):
            yield path
    finally:
        for left in media.workspace.glob("memory-node.sock*"):
            left.unlink()


@contextmanager
def _guest_node(media: Media, testbed: Testbed) -> Iterator[Pool]:
    """A memory node in the first guest, reached from the others over their network, by real verbs only.

    Its files are in the guest and go with it; socket and port are this process's own.
    """
    path = f"{GUEST_RUN}/emu-node-{os.getpid()}.sock"
    listen = f"{testbed.hosts[0]}:{FIRST_PORT + os.getpid() % PORTS}"
    argv = server_argv(
        "rdma", path, media.pool_bytes
    )  # the agent ends it with what stands for it here
    with _node((*argv, "--listen", listen), testbed):
        near = [f"rdma://{path}"]
        far = [f"rdma://{listen}"] if len(testbed.hosts) > 1 else near
        yield Pool(near, far, transport="verbs")


@contextmanager
def _node(argv: Sequence[str], testbed: Testbed) -> Iterator[None]:
    """A memory node on the first host, ready."""
    host = testbed.hosts[0]
    with running_server(
        argv,
        Path(testbed.log_path(host)),
        role="memory-node",
        remedy="see `emu doctor` for memory",
        spawn=lambda argv, **popen: testbed.spawn(host, argv, **popen),
    ) as node:
        yield
    testbed.forget(node.pid)
