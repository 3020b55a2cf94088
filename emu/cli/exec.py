"""`emu exec`: run a command on a host of a testbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import click

from emu.cli.common import name_option

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


@click.command("exec", context_settings={"allow_interspersed_args": False})
@name_option
@click.argument("host")
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED)
def command(name: str | None, host: str, cmd: tuple[str, ...]) -> None:
    """Run CMD on HOST with the testbed's environment; exit with its status, 127 or 126 where it cannot be run.

    Its output is passed on and kept in the host's log (`emu logs HOST`).
    """
    from emu.provision import execute
    from emu.provision.testbed import Testbed

    testbed = Testbed.find(name)
    argv = list(cmd[1:] if cmd[0] == "--" else cmd)
    child = testbed.spawn(host, argv, stdin=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _pass_signals(child)
        execute.pump(testbed, host, child, execute.Sinks(_to(1), _to(2)))
        status = execute.ended_status(child)
    finally:
        execute.end(testbed, child)
    sys.exit(status)


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
