"""Reading a TOML file that anyone may have written: bounded, and every failure is one error of ours."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from emu.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

MAX_TOML_BYTES = 256 << 10
"""More than any spec or profile needs; the largest that comes with emu has 9 KB."""
MAX_DOTS = 200
"""In one line: a key of n dotted parts takes tomllib n * n steps."""
_REMEDY = "give a readable .toml file"


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        file: its path.
        what: what it is, for messages, for instance "profile".

    Raises:
        UserError: not a regular file, not readable, too large, or not TOML.
    """
    if file.exists() and not file.is_file():
        raise UserError(f"{what} {file} is not a regular file", remedy=_REMEDY)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_TOML_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{what} {file} cannot be read: {why}", remedy=_REMEDY) from error
    if len(raw) > MAX_TOML_BYTES:
        raise UserError(f"{what} {file} has more than {MAX_TOML_BYTES} bytes", remedy=_REMEDY)
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.count(b".") > MAX_DOTS:
            raise UserError(
                f"{what} {file}: line {number} has more than {MAX_DOTS} dots",
                remedy="split it into tables, or into several lines",
            )
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8, and huge numbers
        raise UserError(f"{what} {file} is not TOML: {error}", remedy="mend the file") from error
