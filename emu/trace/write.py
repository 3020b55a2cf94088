"""Requests to emu's own JSONL."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.trace.request import PRIVATE_IDS, Request

if TYPE_CHECKING:
    from collections.abc import Iterable


def request_line(request: Request) -> str:
    """A request as one line of emu's JSONL, without the line end.

    Raises:
        ValueError: a block of the request's own stands before a shared one.
    """
    shared = [i for i in request.hash_ids if i < PRIVATE_IDS]
    if request.hash_ids[: len(shared)] != tuple(shared):
        raise ValueError(f"request {request.id}: a private block before a shared one")
    arrival = request.arrival_ms
    return json.dumps(
        {
            "arrival_ms": int(arrival) if arrival.is_integer() else arrival,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "prefix_ids": shared,
        }
    )


def write_trace(path: str | os.PathLike[str], requests: Iterable[Request]) -> None:
    """Write a trace file, whole or not at all.

    A regular file is replaced when everything is written; a pipe or terminal is written to as it is.

    Raises:
        UserError: the file cannot be written; what was there before is unharmed.
    """
    target = Path(path)
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            with target.open("w") as file:
                file.writelines(request_line(request) + "\n" for request in requests)
        else:
            _replace(target.resolve(), requests)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}",
            remedy="give a file in a directory that exists and can be written, or - for standard output",
        ) from error


def _replace(target: Path, requests: Iterable[Request]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.writelines(request_line(request) + "\n" for request in requests)
            umask = os.umask(0)
            os.umask(umask)
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~umask
            os.fchmod(file.fileno(), mode)
        Path(name).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
