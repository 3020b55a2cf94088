"""Runs programs on a host of a testbed: recorded, in its environment, their output also in the host's log."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from emu.errors import ProgramError, TestbedError, UserError
from emu.provision import process
from emu.provision.plan import log_path
from emu.provision.state import ProcessRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from emu.provision.testbed import Testbed

Sink = Callable[[bytes], None]
DRAIN_S = 0.2
"""How long a program's children may still write after it has ended."""


@dataclass(frozen=True, slots=True)
class Sinks:
    """Where a program's output goes beside the log; a sink that raises BrokenPipeError ends its stream.

    Attributes:
        out: takes stdout.
        err: takes stderr.
    """

    out: Sink
    err: Sink


def spawn(
    testbed: Testbed,
    host: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Start a program on a host and record it, so that down ends it.

    Args:
        testbed: where.
        host: "host0", ...
        argv: the command.
        env: on top of this process's environment and the host's.
        popen: more arguments of subprocess.Popen.

    Raises:
        UserError: no such host.
        ProgramError: no such program, or one that cannot be run.
        TestbedError: the testbed is going down.
    """
    if not argv:
        raise UserError("no command to run")
    tagged = {process.TAG: testbed.record.id}
    full_env = {**os.environ, **testbed.env(host), **(env or {}), **tagged}
    try:
        child: subprocess.Popen[bytes] = subprocess.Popen(argv, env=full_env, **popen)
    except (OSError, ValueError) as error:
        raise _cannot_run(argv[0], error) from error
    try:
        started = process.identify(child.pid)
        if started is not None:
            _register(testbed, ProcessRecord(started, role=argv[0], host=host))
    except BaseException:
        child.kill()
        child.wait()
        raise
    return child


def _cannot_run(program: str, error: OSError | ValueError) -> ProgramError:
    missing = isinstance(error, FileNotFoundError)
    why = error.strerror if isinstance(error, OSError) else error
    return ProgramError(
        f"{program!r} cannot be run: {why}",
        program=program,
        shell_status=127 if missing else 126,
        remedy="check its name and $PATH" if missing else "check its permissions and its format",
    )


def forget(testbed: Testbed, pid: int) -> None:
    """Take an ended process out of the record; a testbed that is gone needs none."""
    with suppress(TestbedError), testbed.state.lock(testbed.name):
        record = testbed.state.load(testbed.name)
        if record.id == testbed.record.id:
            record.processes = [p for p in record.processes if p.process.pid != pid]
            testbed.state.save(record)


def _register(testbed: Testbed, entry: ProcessRecord) -> None:
    with testbed.state.lock(testbed.name, wait_s=30.0):
        record = testbed.state.load(testbed.name)
        if record.id != testbed.record.id or record.phase != "up":
            raise TestbedError(f"testbed {testbed.name!r} went down", name=testbed.name)
        record.processes.append(entry)
        testbed.state.save(record)


def pump(
    testbed: Testbed,
    host: str,
    child: subprocess.Popen[bytes],
    sinks: Sinks,
    *,
    deadline: float | None = None,
) -> None:
    """Pass a program's stdout and stderr to the sinks and the host's log until it has ended.

    Args:
        testbed: where it runs.
        host: its host.
        child: started with both streams piped.
        sinks: take the output.
        deadline: time.monotonic() after which TimeoutExpired is raised.

    Raises:
        subprocess.TimeoutExpired: the program still runs at the deadline.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log_fd = os.open(log_path(testbed.run_dir, host), flags)
    with os.fdopen(log_fd, "wb", buffering=0) as log, selectors.DefaultSelector() as selector:
        for stream, sink in ((child.stdout, sinks.out), (child.stderr, sinks.err)):
            selector.register(stream, selectors.EVENT_READ, sink)
        ended_at: float | None = None
        while selector.get_map():
            events = selector.select(0.05)
            now = time.monotonic()
            for key, _ in events:
                if not _forward(key.fileobj, key.data, log):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            if ended_at is None and child.poll() is not None:
                ended_at = now
            if ended_at is not None and not events and now - ended_at > DRAIN_S:
                return  # a child that it left behind still holds the pipe
            if deadline is not None and ended_at is None and now > deadline:
                raise subprocess.TimeoutExpired(child.args, 0)


def _forward(stream: IO[bytes], sink: Sink, log: IO[bytes]) -> bool:
    """Pass on what is there; False at the end of the stream, or when nobody takes it any more."""
    data = os.read(stream.fileno(), 1 << 16)
    with suppress(OSError):  # the log's medium may be full: the program's output goes on
        log.write(data)
    try:
        sink(data)
    except BrokenPipeError:
        return False
    return bool(data)


def ended_status(child: subprocess.Popen[bytes]) -> int:
    """Exit status as a shell gives it: 128 + N after signal N."""
    status = child.wait()
    return 128 - status if status < 0 else status


def end(testbed: Testbed, child: subprocess.Popen[bytes]) -> None:
    """Kill a program that still runs, close its pipes, and take it out of the record."""
    if child.poll() is None:
        child.kill()
    child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    forget(testbed, child.pid)
