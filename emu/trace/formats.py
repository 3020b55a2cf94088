"""One line of a trace file to a Request: Mooncake JSONL, Azure CSV, and emu's own JSONL.

emu's own format, one object per line:

    {"arrival_ms": 0, "input_tokens": 3000, "output_tokens": 100, "prefix_ids": [7, 8]}

`prefix_ids` names the prompt's leading 512-token blocks: equal leading ids, equal leading tokens. It may be
shorter than the prompt or missing; the blocks without an id are the request's own.
"""

from __future__ import annotations

import csv
import json
import re
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from emu.trace.request import BLOCK_TOKENS, MAX_TOKENS, PRIVATE_IDS, Request, blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

AZURE_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
MAX_ARRIVAL_MS = 1e15
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")


class LineError(ValueError):
    """A line that is no request; the message is the reason, without file and line."""


class Format(Protocol):
    """Reads the lines of one file; keeps what it must remember between lines."""

    name: str

    def parse(self, text: str, request_id: str) -> Request:
        """The request of a line.

        Raises:
            LineError: says what is wrong.
        """


class Mooncake:
    """{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [..]} (FAST'25 release)."""

    name = "mooncake"

    def parse(self, text: str, request_id: str) -> Request:
        """See Format."""
        fields = parse_object(text)
        tokens = _tokens(fields, "input_length")
        ids = _ids(fields, "hash_ids")
        if len(ids) != blocks_of(tokens):
            raise LineError(
                f"{len(ids)} hash_ids for input_length {tokens}: "
                f"{blocks_of(tokens)} blocks of {BLOCK_TOKENS} tokens expected"
            )
        return Request(
            request_id,
            _arrival_ms(fields, "timestamp"),
            tokens,
            _tokens(fields, "output_length"),
            ids,
        )


class Emu:
    """emu's own JSONL; see this module."""

    name = "emu"

    def __init__(self) -> None:
        self._private = count(PRIVATE_IDS)

    def parse(self, text: str, request_id: str) -> Request:
        """See Format."""
        fields = parse_object(text)
        tokens = _tokens(fields, "input_tokens")
        ids = _ids(fields, "prefix_ids") if "prefix_ids" in fields else ()
        if len(ids) > blocks_of(tokens):
            raise LineError(
                f"{len(ids)} prefix_ids for input_tokens {tokens}: "
                f"at most {blocks_of(tokens)} blocks of {BLOCK_TOKENS} tokens"
            )
        arrival_ms = _arrival_ms(fields, "arrival_ms")
        output_tokens = _tokens(fields, "output_tokens")
        own = _take(self._private, blocks_of(tokens) - len(ids))
        return Request(request_id, arrival_ms, tokens, output_tokens, ids + own)


class Azure:
    """TIMESTAMP,ContextTokens,GeneratedTokens; nothing is shared between requests.

    Arrivals are milliseconds since 1970 here; the reader counts them from the first one.
    """

    name = "azure"

    def __init__(self, header: list[str]) -> None:
        self._columns = [header.index(name) for name in AZURE_COLUMNS]
        self._width = len(header)
        self._private = count(PRIVATE_IDS)

    def parse(self, text: str, request_id: str) -> Request:
        """See Format."""
        cells = split_csv(text)
        if len(cells) != self._width:
            raise LineError(f"{len(cells)} columns, {self._width} expected")
        when, context, generated = (cells[i] for i in self._columns)
        tokens = _csv_tokens(context, "ContextTokens")
        output_tokens = _csv_tokens(generated, "GeneratedTokens")
        return Request(
            request_id,
            _epoch_ms(when),
            tokens,
            output_tokens,
            _take(self._private, blocks_of(tokens)),
        )


def detect(text: str) -> Format:
    """The format that a file's first line announces: Azure by its header, the others by a request's fields.

    Raises:
        LineError: the line announces no format.
    """
    if text.lstrip().startswith("{"):
        fields = parse_object(text)
        if "hash_ids" in fields or "input_length" in fields:
            return Mooncake()
        if "arrival_ms" in fields or "input_tokens" in fields:
            return Emu()
        raise LineError(
            "an object with neither Mooncake's fields (timestamp, input_length, output_length, hash_ids) "
            "nor emu's (arrival_ms, input_tokens, output_tokens, prefix_ids)"
        )
    header = [cell.strip().lower() for cell in split_csv(text)]
    if set(AZURE_COLUMNS) <= set(header):
        return Azure(header)
    raise LineError(
        "neither a JSON object nor the CSV header TIMESTAMP,ContextTokens,GeneratedTokens"
    )


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        LineError: not JSON, not an object, or a number that JSON does not have (NaN, Infinity).
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise LineError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except LineError:
        raise
    except (ValueError, RecursionError) as error:
        raise LineError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError(f"a JSON {type(value).__name__}, not an object")
    return value


def split_csv(text: str) -> list[str]:
    """The cells of one CSV line.

    Raises:
        LineError: not CSV.
    """
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise LineError(f"not valid CSV: {error}") from None


def _refuse_constant(name: str) -> None:
    raise LineError(f"not valid JSON: {name} is no number")


def _take(ids: Iterator[int], n: int) -> tuple[int, ...]:
    return tuple(next(ids) for _ in range(n))


def _field(fields: dict[str, Any], name: str) -> Any:
    try:
        return fields[name]
    except KeyError:
        raise LineError(f"no field {name!r}") from None


def _tokens(fields: dict[str, Any], name: str) -> int:
    value = _field(fields, name)
    if type(value) is not int:
        raise LineError(f"{name} is {_show(value)}, not a whole number")
    return _in_range(value, name)


def _csv_tokens(text: str, name: str) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise LineError(f"{name} is {_show(text)}, not a whole number")
    return _in_range(int(text), name)


def _in_range(value: int, name: str) -> int:
    if not 1 <= value <= MAX_TOKENS:
        raise LineError(f"{name} is {_show(value)}, not in 1..{MAX_TOKENS}")
    return value


def _ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    value = _field(fields, name)
    if not isinstance(value, list):
        raise LineError(f"{name} is {_show(value)}, not a list")
    for item in value:
        if type(item) is not int or not 0 <= item < PRIVATE_IDS:
            raise LineError(f"{name} holds {_show(item)}, not a whole number in 0..2^64-1")
    return tuple(value)


def _arrival_ms(fields: dict[str, Any], name: str) -> float:
    value = _field(fields, name)
    if type(value) not in {int, float}:
        raise LineError(f"{name} is {_show(value)}, not a number")
    if not 0 <= value <= MAX_ARRIVAL_MS:
        raise LineError(f"{name} is {_show(value)}, not in 0..{MAX_ARRIVAL_MS:g} milliseconds")
    return float(value)


def _epoch_ms(text: str) -> float:
    try:
        when = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise LineError(
            f"TIMESTAMP is {_show(text)}, not a date and time like 2023-11-16 18:17:03.97"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return when.timestamp() * 1000


def _show(value: object) -> str:
    """A value for a message: at most 40 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer too long to print
        return "an enormous number"
    return text if len(text) <= 40 else text[:37] + "..."
