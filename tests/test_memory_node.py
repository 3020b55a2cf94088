"""The memory node as a process: how it starts and ends, and what it survives."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from memory_nodes import (
    RawNode,
    client_of,
    line_of,
    open_fds,
    process_state,
    python,
    raw_node,
    start_node,
    wait_until,
)

from backends import memory_node
from backends.node_connection import NodeConnection
from backends.rdma import RdmaMedium
from emu.errors import HostError, MediumError, UserError, WorkerError
from emu.registry import server_argv

if TYPE_CHECKING:
    from collections.abc import Iterator


MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RawNode]:
    with raw_node(tmp_path) as node:
        yield node


def alive(pid: int) -> bool:
    return process_state(pid) not in {"", "Z"}


def run_node(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backends.memory_node", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


# -- start and end --------------------------------------------------------------------------------------------


def test_a_node_starts_lean_and_leaves_nothing(tmp_path: Path) -> None:
    with start_node(tmp_path / "n.sock", MIB) as node:
        assert stat.S_IMODE((tmp_path / "n.sock").stat().st_mode) & 0o077 == 0
        connection = NodeConnection(str(tmp_path / "n.sock"))
        assert connection.facts["pid"] == node.pid
        connection.close()
        assert "libtorch" not in Path(f"/proc/{node.pid}/maps").read_text()
    assert node.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_memory_is_allocated_not_sparse(node: RawNode) -> None:
    with client_of(node) as client:
        facts = client.connection.facts
    status = Path(f"/proc/{facts['pid']}/fd/{facts['memory_fd']}").stat()
    assert status.st_blocks * 512 >= status.st_size == node.raw.size
    assert (node.raw == 0).all()


def test_a_node_ends_by_signal(tmp_path: Path) -> None:
    path = tmp_path / "n.sock"
    command = server_argv("rdma", path, MIB)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert path.exists()
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
    assert not path.exists()


def test_a_node_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    path = tmp_path / "n.sock"
    program = f"""
        import time
        from pathlib import Path
        from emu.registry import server_argv
        from emu.server import running_server
        argv = server_argv("rdma", {str(path)!r}, 1 << 20, with_parent=True)
        with running_server(argv, Path("/dev/null"), role="memory-node") as process:
            print(process.pid, flush=True)
            time.sleep(600)
        """
    with python(program) as parent:
        pid = int(line_of(parent))
        assert alive(pid)
        parent.kill()
        assert wait_until(lambda: not alive(pid))
        assert wait_until(lambda: not path.exists())


def test_a_parent_that_has_gone_already_is_noticed(tmp_path: Path) -> None:
    done = run_node("--socket", str(tmp_path / "n"), "--size", "1M", "--die-with-parent", "1")
    assert done.returncode == 1
    assert "parent process is gone" in done.stderr
    assert list(tmp_path.iterdir()) == []


def refusal(path: Path | str, size_bytes: int) -> str:
    """What a node that does not start says."""
    with ExitStack() as stack:
        with pytest.raises(WorkerError) as refused:
            stack.enter_context(start_node(path, size_bytes))
        assert refused.value.exit_status == 1
        return str(refused.value)
    raise AssertionError


# -- refusals -------------------------------------------------------------------------------------------------


def test_a_taken_path_is_refused_and_a_dead_nodes_socket_replaced(
    node: RawNode, tmp_path: Path
) -> None:
    assert "already" in refusal(node.address, MIB)
    (tmp_path / "file").write_text("mine")
    assert "is no socket" in refusal(tmp_path / "file", MIB)
    assert (tmp_path / "file").read_text() == "mine"
    node.process.kill()
    node.process.wait()
    with start_node(node.address, MIB):
        RdmaMedium(node.address).close()
    assert not Path(node.address).exists()


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    assert "longer than 107 bytes" in refusal(tmp_path / ("x" * 108), MIB)
    with pytest.raises(UserError, match="longer than 107 bytes"):
        RdmaMedium(str(tmp_path / ("x" * 108)))
    assert "No such file or directory" in refusal(tmp_path / "no" / "n.sock", MIB)
    with pytest.raises(UserError, match=r"python -m backends\.memory_node --socket"):
        RdmaMedium("")
    with pytest.raises(UserError, match=r"python -m backends.memory_node --socket .*nobody"):
        RdmaMedium(str(tmp_path / "nobody"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--size", "banana"], 2, "not a size"),
        (["--size", "0"], 1, "multiple of 4096"),
        (["--size", "4097"], 1, "multiple of 4096"),
        (["--size", "900T"], 1, "of memory are free"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    done = run_node("--socket", str(tmp_path / "n.sock"), *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    assert re.search(r"900 TiB.*of memory are free", refusal(tmp_path / "n.sock", 900 << 40))
    with pytest.raises(HostError, match=r"900 TiB.*of memory are free"):
        memory_node.allocate(900 << 40, None)


# -- the control plane ----------------------------------------------------------------------------------------


def ask(connection: socket.socket, message: bytes, fds: tuple[int, ...] = ()) -> dict[str, Any]:
    socket.send_fds(connection, [message], list(fds))
    return json.loads(connection.recv(65536))


def test_bad_messages_are_answered_and_leak_nothing(node: RawNode) -> None:
    pid = node.process.pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(node.address)
        assert ask(connection, b'{"op": "describe"}')["ok"]
        before = open_fds(pid)
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 1 << 20)
        rings = b'{"op": "connect", "send_queue_depth": 16, "max_rd_atomic": 4}'
        for message in (
            b"\xff\xfe",
            b"[]",
            b"{}",
            b'{"op": "format"}',
            b'{"op": "connect"}',
            b'{"op": "expose", "offset": 0, "nbytes": 1, "access": ["remote_read"]}',
            b'{"op": "register", "nbytes": 1, "address": 0}',
            rings,
        ):
            assert not ask(connection, message, (unsealed,) * 3)["ok"]
        assert "sealed" in ask(connection, rings, (unsealed,) * 3)["error"]
        os.close(unsealed)
        assert open_fds(pid) == before
    with client_of(node) as client:
        with pytest.raises(MediumError, match="passes the end"):
            client.connection.expose(1, client.connection.size_bytes)
        with pytest.raises(MediumError, match="unknown access"):
            client.connection.expose(0, 1, ["atomic"])
        with pytest.raises(MediumError, match="no registered memory"):
            client.connection.deregister(client.staging_lkey ^ 1)
        assert "remote_atomic" not in client.connection.describe()


def test_a_killed_client_leaves_nothing_in_the_node(node: RawNode) -> None:
    pid = node.process.pid
    before = open_fds(pid)
    program = f"""
        from backends.rdma import RdmaMedium
        medium = RdmaMedium({node.address!r})
        buffers = [medium.buffer(1 << 20) for _ in range(20)]
        print("ready", flush=True)
        while True:
            medium.read(0, 1 << 20)
        """
    with python(program) as process:
        assert line_of(process) == "ready"
        assert open_fds(pid) > before
        assert Path(f"/proc/{pid}/maps").read_text().count("emu-registered") == 21
    assert wait_until(lambda: open_fds(pid) == before)
    assert "emu-registered" not in Path(f"/proc/{pid}/maps").read_text()
    with client_of(node) as client:
        assert client.connection.describe()["queue_pairs"] == 1
