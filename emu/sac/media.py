"""The pool of each design, made for a run and removed after it: device files, host DRAM, a memory node."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import HostError, WorkerError
from emu.registry import server_argv
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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
    path, log_path = media.workspace / "memory-node.sock", media.workspace / "memory-node.log"
    argv = server_argv("rdma", path, media.pool_bytes, with_parent=True)
    with log_path.open("ab") as log:
        node = testbed.spawn(
            testbed.hosts[0],
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert node.stdout is not None
        if b"ready" not in node.stdout.readline():
            status = node.wait()
            tail = log_path.read_text(errors="replace").strip()
            raise WorkerError(
                f"the memory node ended with status {status}: {tail.splitlines()[-1] if tail else 'it wrote nothing'}",
                role="memory-node",
                exit_status=status,
                log_tail=tail,
                remedy="see `emu doctor` for memory",
            )
        yield path
    finally:
        node.terminate()
        try:
            node.wait(timeout=5)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
        testbed.forget(node.pid)
        if node.stdout is not None:
            node.stdout.close()
        for left in media.workspace.glob("memory-node.sock*"):
            left.unlink()
