"""`emu cp`: copy a file into a host of a testbed, or out of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from emu.cli.common import name_option


@click.command("cp")
@click.argument("source")
@click.argument("target")
@name_option
def command(source: str, target: str, name: str | None) -> None:
    """Copy a file: one of SOURCE and TARGET is HOST:PATH, the other a path here."""
    from emu.errors import UserError
    from emu.guest.files import get_file, put_file
    from emu.provision.testbed import Testbed

    testbed = Testbed.find(name)
    (from_host, from_path), (to_host, to_path) = (
        _split(p, testbed.hosts) for p in (source, target)
    )
    if (from_host is None) == (to_host is None):
        raise UserError(
            f"{source} and {target}: name one host",
            remedy=f"for instance emu cp FILE {testbed.hosts[0]}:/tmp/",
        )
    guest = testbed.guest(from_host or to_host or "")
    if to_path.endswith("/"):
        to_path += Path(from_path).name
    if guest is None:  # hosts of the local driver are processes of this machine
        try:
            shutil.copy(from_path, to_path)
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from error
    elif from_host is None:
        put_file(guest, Path(from_path), to_path)
    else:
        get_file(
            guest,
            from_path,
            Path(to_path) / Path(from_path).name if Path(to_path).is_dir() else Path(to_path),
        )


def _split(text: str, hosts: tuple[str, ...]) -> tuple[str | None, str]:
    """(host, path); a colon after anything but a host's name is part of a path."""
    head, colon, path = text.partition(":")
    return (head, path) if colon and head in hosts else (None, text)
