"""The `emu` command: finds a verb's module by its name and turns our errors into one line."""

from __future__ import annotations

import importlib
import os
import select
import sys

import click

from emu.errors import EmuError, ProgramError

VERBS = {
    "up": "bring a testbed up",
    "status": "show the testbeds and what is left of them",
    "exec": "run a command on a host of a testbed",
    "env": "print the environment that a testbed's programs get",
    "logs": "show what a host's processes wrote",
    "down": "take a testbed down",
    "doctor": "say what this machine can do, what is missing, and what that costs",
    "run": "run the SAC path for real, every token and KV byte checked",
    "profiles": "list the profiles, or the numbers of one with their sources",
    "trace": "generate and inspect request traces",
    "pool": "look at the pools on devices, check and repair them",
    "sim": "simulate serving at scale, in model time",
    "plan": "bandwidth times capacity in closed form",
    "calibrate": "make a media profile from what was measured",
    "reproduce": "published figures against the model",
    "bench": "time the data path, as ratios",
}


_LINE_LENGTH = 1000


class VerbGroup(click.Group):
    """Loads emu/cli/<verb>.py on first use, so that `emu status` never imports torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of the help page."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's click command, None for a verb that is not ours."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"emu.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb; a reader of stdout that has seen enough (`emu logs | head`) is no error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            if not _stdout_is_closed():
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # what is buffered goes there at exit
            os.close(nowhere)
            return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _stdout_is_closed() -> bool:
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="sac-emu", prog_name="emu")
def cli() -> None:
    """Emulate CXL and RDMA memory pools for KV caches."""


def main() -> None:
    """Entry point: an error of ours or of the system is one line and exit 1; usage errors are click's, exit 2.

    A program that cannot be started gives a shell's 127 or 126: `emu exec` stands where a shell would.
    """
    _open_standard_streams()
    try:
        try:
            cli.main(prog_name="emu")
        finally:
            sys.stdout.flush()
    except EmuError as error:
        click.echo(f"emu: {_one_line(error)}", err=True)
        sys.exit(error.shell_status if isinstance(error, ProgramError) else 1)
    except OSError as error:  # a full or vanished medium, where no part knew better
        named = f"{error.filename}: " if error.filename else ""
        click.echo(f"emu: {named}{error.strerror or error}", err=True)
        sys.exit(1)


def _open_standard_streams() -> None:
    """Those that the caller closed (<&-, >&-) lead nowhere; else a file opened later would get their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _one_line(error: EmuError) -> str:
    """The message; of one that repeats a huge input, its beginning and its end."""
    line = " ".join(str(error).split())
    return line if len(line) <= _LINE_LENGTH else f"{line[:700]} ... {line[-250:]}"
