"""Option types that several verbs share."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.errors import UserError
from emu.units import parse_size

if TYPE_CHECKING:
    _IntParam = click.ParamType[int]
    _PathParam = click.ParamType[Path]
else:
    _IntParam = _PathParam = click.ParamType  # before click 8.3 it cannot be subscripted


class Size(_IntParam):
    """A number of bytes as people write it: "256M", "1GiB"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; a usage error where the text is not a size."""
        try:
            return parse_size(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


SIZE = Size()


class Finite(click.FloatRange):
    """A range of numbers without nan and infinities, which compare with everything."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; a usage error where it is none, or out of range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class OutDirectory(_PathParam):
    """A directory to write to, that exists or can be made; refused before any work, also by a dry run."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; nothing is made yet."""
        path = Path(value)
        if not str(value):
            self.fail("an empty name; use . for the current directory", param, ctx)
        existing = path
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            self.fail(f"{value}: {existing} is a file, or leads nowhere", param, ctx)
        if not os.access(existing, os.W_OK | os.X_OK):
            self.fail(f"{value}: no permission to write in {existing}", param, ctx)
        return path


OUT_DIRECTORY = OutDirectory()


def make_directory(out: Path) -> Path:
    """Make what OUT_DIRECTORY let through.

    Raises:
        UserError: the file system refuses.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out}: {error.strerror}", remedy="name another directory"
        ) from error
    return out
