"""The closest known name, for a name that is none of them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy: the known name that is closest, or all of them where none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}"


def unknown(kind: str, name: str, names: Iterable[str]) -> UserError:
    """The error for a name that is none of the names, with the closest one."""
    return UserError(f"no {kind} {name!r}", remedy=did_you_mean(name, sorted(names)))
