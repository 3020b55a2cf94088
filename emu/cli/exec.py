"""`emu exec`: run a command on a host of a testbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import click

from emu.cli.common import name_option

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from emu.provision.testbed import Testbed

TIMEOUT_STATUS = 124
"""As timeout(1) has it."""


@click.command("exec", context_settings={"allow_interspersed_args": False})
@name_option
@click.argument("host")
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED)
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="Kill it after that.")
@click.option("-t", "--tty", is_flag=True, help="Give CMD this terminal; its output is not logged.")
def command(
    name: str | None, host: str, cmd: tuple[str, ...], timeout: float | None, tty: bool
) -> None:
    """Run CMD on HOST with the testbed's environment; exit with its status (124 after --timeout).

    Without CMD, on a terminal, a shell. The output is passed on and kept in the host's log (`emu logs HOST`).
    """
    from emu.provision import execute
    from emu.provision.testbed import Testbed

    argv = list(cmd[1:] if cmd[:1] == ("--",) else cmd)
    with_terminal = tty or not argv
    if with_terminal and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("a shell, or --tty, needs a terminal; give a CMD")
    testbed = Testbed.find(name)
    if with_terminal:
        sys.exit(_on_terminal(testbed, host, argv or [os.environ.get("SHELL", "/bin/sh")], timeout))
    deadline = None if timeout is None else time.monotonic() + timeout
    child = testbed.spawn(host, argv, stdin=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _pass_signals(child)
        execute.pump(testbed, host, child, execute.Sinks(_to(1), _to(2)), deadline=deadline)
        status = execute.ended_status(child)
    except subprocess.TimeoutExpired:
        click.echo(f"emu: {argv[0]} was killed after {timeout:g} s", err=True)
        status = TIMEOUT_STATUS
    finally:
        execute.end(testbed, child)
    sys.exit(status)


def _on_terminal(testbed: Testbed, host: str, argv: list[str], timeout: float | None) -> int:
    from emu.provision import execute

    child = testbed.spawn(host, argv, with_terminal=True)
    try:
        _pass_signals(child)
        child.wait(timeout)
        return execute.ended_status(child)
    except subprocess.TimeoutExpired:
        return TIMEOUT_STATUS
    finally:
        execute.end(testbed, child)


def _to(fd: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    return write


def _pass_signals(child: subprocess.Popen[bytes]) -> None:
    """Signals that end this command go to the program instead; its end is ours.

    On a terminal SIGINT and SIGQUIT reach the program without us: it is in the same process group.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        if child.poll() is None:
            child.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        del number, frame

    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, ignore if sys.stdin.isatty() else forward)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
