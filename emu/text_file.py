"""Reading text and numbers that anyone may have written: every failure is one error of ours."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: not a regular file, not readable, or not UTF-8.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device never ends
        raise UserError(f"{path}: not a regular file", remedy="give a text file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", remedy="give a text file") from None


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Around the reading of values that may be cut, or of any type and size.

    Args:
        what: begins the message.
        remedy: what to do about it.

    Raises:
        UserError: for what arithmetic, lookups and conversions raise; one of ours passes as it is.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{what}: {error}", remedy=remedy) from error
