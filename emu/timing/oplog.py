"""The log of a run's operations: columns in memory, JSON lines in a file, and its replay through the engine."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from emu.timing.system import System

PathKey: TypeAlias = tuple[str, int, int]
NO_PATH: PathKey = ("", 0, 0)
SCHEMA_VERSION = 1
KINDS = ("compute", "transfer", "join")
_FIELDS: dict[str, type] = {
    "id": int,
    "actor": str,
    "kind": str,
    "path": str,
    "gpu": int,
    "device": int,
    "bytes": int,
    "rows": int,
    "requests": int,
    "duration_ns": int,
    "after": list,
    "not_before_ns": int,
    "start_ns": int,
    "end_ns": int,
    "label": str,
}


class OpLog:
    """Operations in columns; an operation's id is its place.

    Attributes:
        actors: who submitted it.
        kinds: "compute", "transfer", or "join" (waits for others, takes no time).
        paths: (name, gpu, device) of a transfer's path, NO_PATH otherwise.
        nbytes, rows: what a transfer moved.
        requests: requests that its path saw.
        durations_ns: of a compute.
        afters: ids that it waited for.
        not_before_ns: earliest start, 0 if any.
        starts_ns, ends_ns: when it was submitted and when it ended, by the clock of the run.
        labels: what for.
    """

    def __init__(self) -> None:
        self.actors: list[str] = []
        self.kinds: list[str] = []
        self.paths: list[tuple[str, int, int]] = []
        self.nbytes: list[int] = []
        self.rows: list[int] = []
        self.requests: list[int] = []
        self.durations_ns: list[int] = []
        self.afters: list[tuple[int, ...]] = []
        self.not_before_ns: list[int] = []
        self.starts_ns: list[int] = []
        self.ends_ns: list[int] = []
        self.labels: list[str] = []

    def __len__(self) -> int:
        return len(self.kinds)

    def add(  # noqa: PLR0913 - a row of the table, on the clock's hot path
        self,
        actor: str,
        kind: str,
        path: PathKey,
        nbytes: int,
        rows: int,
        requests: int,
        duration_ns: int,
        after: tuple[int, ...],
        not_before_ns: int,
        start_ns: int,
        end_ns: int,
        label: str,
    ) -> None:
        """Append one operation."""
        self.actors.append(actor)
        self.kinds.append(kind)
        self.paths.append(path)
        self.nbytes.append(nbytes)
        self.rows.append(rows)
        self.requests.append(requests)
        self.durations_ns.append(duration_ns)
        self.afters.append(after)
        self.not_before_ns.append(not_before_ns)
        self.starts_ns.append(start_ns)
        self.ends_ns.append(end_ns)
        self.labels.append(label)

    def row(self, number: int) -> dict[str, Any]:
        """One operation as the file has it."""
        path, gpu, device = self.paths[number]
        values = (
            number,
            self.actors[number],
            self.kinds[number],
            path,
            gpu,
            device,
            self.nbytes[number],
            self.rows[number],
            self.requests[number],
            self.durations_ns[number],
            list(self.afters[number]),
            self.not_before_ns[number],
            self.starts_ns[number],
            self.ends_ns[number],
            self.labels[number],
        )
        return dict(zip(_FIELDS, values, strict=True))

    def write(self, file: str | FilePath) -> None:
        """Write the log as JSON lines: a header, then one line per operation.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            with FilePath(file).open("w", encoding="utf-8") as stream:
                stream.write(
                    json.dumps({"schema_version": SCHEMA_VERSION, "ops": len(self)}) + "\n"
                )
                for number in range(len(self)):
                    stream.write(json.dumps(self.row(number), separators=(",", ":")) + "\n")
        except OSError as error:
            raise UserError(
                f"operation log {file} cannot be written: {error.strerror}",
                remedy="give a path in a writable directory",
            ) from error

    @classmethod
    def read(cls, file: str | FilePath) -> OpLog:
        """Read a log.

        Raises:
            UserError: it cannot be read, or is not such a log; the message gives file, line and reason.
        """
        try:
            lines = FilePath(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"operation log {file} cannot be read: {error}", remedy="give a log that emu wrote"
            ) from error
        log = cls()
        count = _header(lines[:1], file)
        for number, line in enumerate(lines[1:]):
            log._add_row(_checked(line, number, f"{file}, line {number + 2}"))
        if len(log) != count:
            raise UserError(
                f"{file}: {len(log)} operations, {count} announced", remedy="the file is cut short"
            )
        return log

    def _add_row(self, row: dict[str, Any]) -> None:
        self.add(
            row["actor"],
            row["kind"],
            (row["path"], row["gpu"], row["device"]),
            row["bytes"],
            row["rows"],
            row["requests"],
            row["duration_ns"],
            tuple(row["after"]),
            row["not_before_ns"],
            row["start_ns"],
            row["end_ns"],
            row["label"],
        )


def replay(log: OpLog, system: System) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run a log through the links of a system: (start_ns, end_ns), int64 [len(log)] each.

    With the system that a virtual run had these are the run's own times.

    Raises:
        UserError: the system lacks a path, GPU or device of the log.
    """
    paths = [
        system.path(*path).number if kind == "transfer" else -1
        for kind, path in zip(log.kinds, log.paths, strict=True)
    ]
    engine = system.engine()
    system.add_paths(engine, 0)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(log.actors))}
    actors = [
        numbers[name] if kind == "compute" else -1
        for kind, name in zip(log.kinds, log.actors, strict=True)
    ]
    offsets = np.zeros(len(log) + 1, np.int64)
    np.cumsum([len(after) for after in log.afters], out=offsets[1:])
    return engine.replay(
        np.array(actors, np.int32),
        np.array(paths, np.int32),
        _column(log.nbytes),
        _column(log.requests),
        _column(log.durations_ns),
        offsets,
        _column(dep for after in log.afters for dep in after),
        _column(log.not_before_ns),
    )


def _column(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _header(lines: list[str], file: str | FilePath) -> int:
    try:
        header = json.loads(lines[0])
        version, count = header["schema_version"], header["ops"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}, line 1: not an operation log", remedy="give a log that emu wrote"
        ) from error
    if version != SCHEMA_VERSION or type(count) is not int:
        raise UserError(
            f"{file}, line 1: schema_version {version!r}, wanted {SCHEMA_VERSION}",
            remedy="use the emu that wrote it",
        )
    return count


def _checked(line: str, number: int, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}", remedy="mend or drop the file") from error
    reason = _wrong(row, number)
    if reason:
        raise UserError(f"{where}: {reason}", remedy="mend or drop the file")
    assert isinstance(row, dict)
    return row


def _wrong(row: object, number: int) -> str:
    """What is wrong with a line, "" if nothing is."""
    if not isinstance(row, dict) or set(row) != set(_FIELDS):
        return f"the keys are not {', '.join(_FIELDS)}"
    for key, kind in _FIELDS.items():
        if type(row[key]) is not kind:
            return f"{key} is {row[key]!r}, not {kind.__name__}"
        if kind is int and not 0 <= row[key] < 1 << 52:
            return f"{key} is {row[key]}, not 0 .. 2^52"
    if row["id"] != number:
        return f"id is {row['id']}, wanted {number}"
    if row["kind"] not in KINDS:
        return f"kind is {row['kind']!r}, not one of {', '.join(KINDS)}"
    if not all(type(dep) is int and 0 <= dep < number for dep in row["after"]):
        return "after names an operation that is not an earlier one"
    return ""
