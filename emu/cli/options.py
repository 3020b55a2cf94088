"""Option types that several verbs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from emu.errors import UserError
from emu.units import parse_size

if TYPE_CHECKING:
    _IntParam = click.ParamType[int]
else:
    _IntParam = click.ParamType  # before click 8.3 it cannot be subscripted


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
