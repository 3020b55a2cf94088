"""Sizes as people write them, to integers and back."""

from __future__ import annotations

import re
from fractions import Fraction

from emu.errors import UserError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Bytes of "256M", "1GiB", "4096" (K, M, G, T are powers of 1024, with or without "i" and "B").

    Raises:
        UserError: not a size, or not a whole number of bytes.
    """
    match = _SIZE.match(str(text))
    if match is None:
        raise UserError(f"{text!r} is not a size", remedy="write for instance 256M, 1GiB or 4096")
    value = Fraction(match[1]) * 1024 ** _POWER[match[2].lower()]
    if value.denominator != 1:
        raise UserError(
            f"{text!r} is not a whole number of bytes",
            remedy="write for instance 256M, 1GiB or 4096",
        )
    return int(value)


def format_size(nbytes: int) -> str:
    """Bytes for a person: 268435456 -> "256 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
