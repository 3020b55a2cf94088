"""A memory node whose raw bytes a test can see, and clients of it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backends.node_connection import ConnectionOptions, NodeConnection
from emu import _native
from emu.registry import server_argv
from emu.server import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODE_BYTES = 4 << 20
BLOCK = 64
OFFSET = 4096
STAGING_BYTES = 1 << 20


@dataclass
class RawNode:
    """A node, and its memory as /proc shows it: the store's own code has no part in this view."""

    process: subprocess.Popen[bytes]
    address: str
    raw: np.ndarray


@contextmanager
def start_node(
    path: Path | str, size_bytes: int, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A ready node at the path; leaves no file beside its socket."""
    argv = server_argv("rdma", path, size_bytes, with_parent=True)
    with (
        tempfile.NamedTemporaryFile() as log,
        running_server((*argv, *options), Path(log.name), role="memory-node") as process,
    ):
        yield process


@contextmanager
def raw_node(
    directory: Path, size_bytes: int = NODE_BYTES, name: str = "node.sock"
) -> Iterator[RawNode]:
    with start_node(directory / name, size_bytes) as process:
        idle = open_fds(process.pid)
        connection = NodeConnection(str(directory / name))
        facts = connection.facts
        connection.close()
        assert wait_until(lambda: open_fds(process.pid) == idle)
        path = f"/proc/{facts['pid']}/fd/{facts['memory_fd']}"
        yield RawNode(
            process, str(directory / name), np.memmap(path, np.uint8, "r+", shape=(size_bytes,))
        )


class Client:
    """A connection with a requester and its staging memory."""

    def __init__(
        self,
        address: str,
        options: ConnectionOptions | None = None,
        access: tuple[str, ...] = ("remote_read", "remote_write"),
        exposed: tuple[int, int] | None = None,
    ) -> None:
        self.connection = NodeConnection(address, options)
        self.staging, self.staging_lkey = self.connection.register(STAGING_BYTES)
        self.rkey = self.connection.expose(*(exposed or (0, self.connection.size_bytes)), access)
        self.requester = self.requester_for(self.rkey)

    def requester_for(self, rkey: int) -> _native.Requester:
        return _native.Requester(
            self.connection.queue_pair, rkey, self.staging.address, STAGING_BYTES, self.staging_lkey
        )

    def buffer(self, *shape: int) -> np.ndarray:
        """Registered uint8 of that shape."""
        nbytes = int(np.prod(shape))
        self.memory, self.lkey = self.connection.register(nbytes)
        self.requester.add_memory(self.memory.address, nbytes, self.lkey)
        return self.memory.array().reshape(shape)

    def run(self, *requests: _native.WorkRequest) -> list[str]:
        """Post, wait for every completion; their statuses in order. All must be signalled."""
        queue_pair = self.connection.queue_pair
        assert queue_pair.post(list(requests)) == len(requests)
        statuses: list[str] = []
        while len(statuses) < len(requests):
            queue_pair.wait()
            statuses += [completion.status for completion in queue_pair.poll()]
        return statuses

    def close(self) -> None:
        self.connection.close()


@contextmanager
def client_of(node: RawNode, **arguments: object) -> Iterator[Client]:
    client = Client(node.address, **arguments)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


def one_request(
    blocks: list[int] | np.ndarray,
    *,
    prompt: int | None = None,
    shared: int = 0,
    length: int | None = None,
) -> tuple[_native.RowTables, np.ndarray]:
    """Tables with one request; returns them and slots [1]."""
    blocks = np.array(blocks, np.int32)
    prompt = blocks.size * BLOCK if prompt is None else prompt
    tables = _native.RowTables(BLOCK, 1)
    slot = tables.add(blocks, prompt, shared, prompt if length is None else length)
    return tables, np.array([slot])


def tokens_of(*rows: list[int] | range) -> np.ndarray:
    return np.array([list(row) for row in rows], np.int32)


def open_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def process_state(pid: int) -> str:
    """The kernel's letter for it: R, S, T (stopped), Z (ended); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition came true; the bound is wide, for machines under load."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@contextmanager
def python(program: str) -> Iterator[subprocess.Popen[str]]:
    """A child that runs the program, killed at the end in any case."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()
