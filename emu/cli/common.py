"""What the verbs share: options, tables, JSON, progress."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from emu.json_output import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

name_option = click.option(
    "--name", metavar="NAME", help="The testbed; without it the one that is up."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on stdout, with its schema_version first."""
    click.echo(json_text(values))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns on stdout, as wide as they need; nothing is cut, so that paths can be copied."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def progress(line: str) -> None:
    """One line about what is being done: on stderr, and only on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"  {line}", err=True)
