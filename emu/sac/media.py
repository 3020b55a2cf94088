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


@contextmanager
def pool_urls(design: Design, media: Media, testbed: Testbed) -> Iterator[list[str]]:
    """Store URLs of a design's pool, one per device, while it exists."""
    if design.scheme == "cxl":
        yield [f"cxl://{path}" for path in media.devices]
    elif design.scheme == "dram":
        with _host_dram(media) as path:
            yield [f"dram://{path}"]
    else:
        with _memory_node(media, testbed) as path:
            yield [f"rdma://{path}"]


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
    host = testbed.hosts[0]
    try:
        with running_server(
            server_argv("rdma", path, media.pool_bytes, with_parent=True),
            Path(testbed.log_path(host)),
            role="memory-node",
            remedy="see `emu doctor` for memory",
            spawn=lambda argv, **popen: testbed.spawn(host, argv, **popen),
        ) as node:
            yield path
        testbed.forget(node.pid)
    finally:
        for left in media.workspace.glob("memory-node.sock*"):
            left.unlink()
