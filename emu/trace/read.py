"""Trace files to requests, line by line."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from emu.errors import UserError
from emu.trace.formats import Azure, Format, LineError, detect
from emu.trace.request import BadLine, Request, Trace

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

MAX_LINE_BYTES = 4 << 20
_REMEDY = "mend or remove the line, or skip such lines with --skip-bad"


def read_trace(
    path: str | os.PathLike[str], *, limit: int | None = None, skip_bad: bool = False
) -> Trace:
    """The requests of a trace file; its format is told by its content.

    The file is read as a stream and always to its end, so that damage behind the limit is found too.

    Args:
        path: a Mooncake JSONL, Azure CSV or emu JSONL file (formats: emu.trace.formats).
        limit: keep only the first requests of the file.
        skip_bad: skip bad lines and count them, instead of failing at the first.

    Raises:
        UserError: the file cannot be read, a line is bad ("FILE:LINE: reason"), or no line is good.
    """
    name = str(path)
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} requests", remedy="ask for at least 1")
    reader = _Reader(name, limit, skip_bad)
    try:
        with _open(Path(path)) as file:
            hashed = _Hashed(file)
            for number, line in _lines(hashed):
                reader.take(number, line)
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read: {error.strerror or error}", remedy="give the path of a trace"
        ) from error
    return reader.trace(hashed.sha256.hexdigest())


@dataclass
class _Reader:
    """What has been read of one file."""

    name: str
    limit: int | None
    skip_bad: bool
    format: Format | None = None
    good: int = 0
    requests: list[Request] = field(default_factory=list)
    skipped: list[BadLine] = field(default_factory=list)

    def take(self, number: int, line: bytes) -> None:
        """Take the next line in."""
        try:
            self._parse(line)
        except LineError as error:
            torn = not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES
            bad = BadLine(self.name, number, f"{error}{' (the last line, torn)' if torn else ''}")
            if not self.skip_bad:
                raise UserError(str(bad), remedy=_REMEDY) from None
            self.skipped.append(bad)

    def _parse(self, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise LineError(f"a line of more than {MAX_LINE_BYTES} bytes: no text file?")
        text = _decode(line)
        if not text.strip():
            return
        if self.format is None:
            self.format = detect(text)
            if isinstance(self.format, Azure):  # that was its header
                return
        request = self.format.parse(text, f"r{self.good}")
        self.good += 1
        if self.limit is None or len(self.requests) < self.limit:
            self.requests.append(request)

    def trace(self, sha256: str) -> Trace:
        """What was read, of a file of that digest.

        Raises:
            UserError: nothing good.
        """
        if self.format is None or not self.requests:
            raise UserError(self._nothing(), remedy="give a trace with at least one request")
        requests = self.requests
        if isinstance(self.format, Azure):
            requests = _from_first(requests)
        requests = sorted(requests, key=lambda request: request.arrival_ms)
        return Trace(self.name, self.format.name, tuple(requests), tuple(self.skipped), sha256)

    def _nothing(self) -> str:
        if not self.skipped:
            return f"{self.name}: no requests in it"
        return f"{self.name}: all {len(self.skipped)} lines are bad; the first: {self.skipped[0]}"


def _from_first(requests: list[Request]) -> list[Request]:
    """The requests with arrivals counted from the earliest, to the microsecond."""
    first = min(request.arrival_ms for request in requests)
    return [
        replace(request, arrival_ms=round(request.arrival_ms - first, 3)) for request in requests
    ]


def _open(path: Path) -> IO[bytes]:
    mode = path.stat().st_mode
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and str(path) != "/dev/stdin"):
        raise OSError("a device, not a file")
    return path.open("rb")


class _Hashed:
    """A file whose digest is taken while it is read: a pipe cannot be read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def readline(self, most_bytes: int) -> bytes:
        """The next line, or its head."""
        line = self._file.readline(most_bytes)
        self.sha256.update(line)
        return line


def _lines(file: _Hashed) -> Iterator[tuple[int, bytes]]:
    """(1-based number, line) of a file; of an overlong line only its head, with the rest read past."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _decode(line: bytes) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError(
            f"not text: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        ) from None
    if "\0" in text:
        raise LineError(f"not text: byte 0x00 at column {text.index(chr(0)) + 1}")
    return text
