"""The log of a run's operations: in memory, as JSON lines in a file, and its replay through the engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from emu.timing.system import System

SCHEMA_VERSION = 1
KINDS = ("compute", "transfer", "join")


@dataclass(slots=True)
class OpRow:
    """One operation.

    Attributes:
        id: its place in the log.
        actor: who submitted it; computes of one actor queue behind one another.
        kind: "compute", "transfer", or "join" (comes after others, takes no time).
        path, gpu, device: what a transfer crossed.
        bytes, rows: what a transfer moved.
        requests: requests that its path saw.
        duration_ns: of a compute.
        after: ids of earlier operations that it came after.
        not_before_ns: earliest start, 0 if any.
        start_ns, end_ns: when it was submitted and when it ended, by the clock of the run.
        label: what for.
    """

    id: int = 0
    actor: str = ""
    kind: str = ""
    path: str = ""
    gpu: int = 0
    device: int = 0
    bytes: int = 0
    rows: int = 0
    requests: int = 0
    duration_ns: int = 0
    after: tuple[int, ...] = ()
    not_before_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    label: str = ""


_JSON_TYPES: dict[str, type] = {
    field.name: {"int": int, "str": str}.get(str(field.type), list) for field in fields(OpRow)
}


class OpLog:
    """Operations in the order in which they were submitted.

    Attributes:
        ops: the operations; each one's id is its place.
    """

    def __init__(self) -> None:
        self.ops: list[OpRow] = []

    def __len__(self) -> int:
        return len(self.ops)

    def write(self, file: str | Path) -> None:
        """Write the log as JSON lines: a header, then one line per operation.

        Raises:
            UserError: the file cannot be written.
        """
        header = {"schema_version": SCHEMA_VERSION, "ops": len(self)}
        try:
            with Path(file).open("w", encoding="utf-8") as stream:
                stream.write(json.dumps(header) + "\n")
                stream.writelines(
                    json.dumps(asdict(op), separators=(",", ":")) + "\n" for op in self.ops
                )
        except OSError as error:
            raise UserError(
                f"operation log {file} cannot be written: {error.strerror}",
                remedy="give a path in a writable directory",
            ) from error

    @classmethod
    def read(cls, file: str | Path) -> OpLog:
        """Read a log.

        Raises:
            UserError: it cannot be read, or is not such a log; the message gives file, line and reason.
        """
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"operation log {file} cannot be read: {error}", remedy="give a log that emu wrote"
            ) from error
        log = cls()
        count = _header(lines[:1], file)
        for number, line in enumerate(lines[1:]):
            log.ops.append(_parsed(line, number, f"{file}, line {number + 2}"))
        if len(log) != count:
            raise UserError(
                f"{file}: {len(log)} operations, {count} announced", remedy="the file is cut short"
            )
        return log


def replay(log: OpLog, system: System) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run a log through the links of a system: (start_ns, end_ns), int64 [len(log)] each.

    With the system that a virtual run had these are the run's own times.

    Raises:
        UserError: the system lacks a path, GPU or device of the log.
    """
    numbers = {
        name: number for number, name in enumerate(dict.fromkeys(op.actor for op in log.ops))
    }
    actors = [numbers[op.actor] if op.kind == "compute" else -1 for op in log.ops]
    paths = [
        system.path(op.path, op.gpu, op.device).number if op.kind == "transfer" else -1
        for op in log.ops
    ]
    offsets = np.zeros(len(log) + 1, np.int64)
    np.cumsum([len(op.after) for op in log.ops], out=offsets[1:])
    engine = system.engine()
    system.add_paths(engine, 0)
    return engine.replay(
        np.array(actors, np.int32),
        np.array(paths, np.int32),
        _column(op.bytes for op in log.ops),
        _column(op.requests for op in log.ops),
        _column(op.duration_ns for op in log.ops),
        offsets,
        _column(dep for op in log.ops for dep in op.after),
        _column(op.not_before_ns for op in log.ops),
    )


def _column(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _header(lines: list[str], file: str | Path) -> int:
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


def _parsed(line: str, number: int, where: str) -> OpRow:
    try:
        row = json.loads(line)
        _check(row, number)
    except ValueError as error:
        raise UserError(
            f"{where}: {error}", remedy="the file is damaged: write it again"
        ) from error
    row["after"] = tuple(row["after"])
    return OpRow(**row)


def _check(row: object, number: int) -> None:
    if not isinstance(row, dict) or set(row) != set(_JSON_TYPES):
        raise ValueError(f"the keys are not {', '.join(_JSON_TYPES)}")
    for key, kind in _JSON_TYPES.items():
        if type(row[key]) is not kind:
            raise ValueError(f"{key} is {row[key]!r}, not of type {kind.__name__}")
        if kind is int and not 0 <= row[key] < 1 << 50:
            raise ValueError(f"{key} is {row[key]}, not 0 .. 2^50")
    if row["id"] != number:
        raise ValueError(f"id is {row['id']}, wanted {number}")
    if row["kind"] not in KINDS:
        raise ValueError(f"kind is {row['kind']!r}, not one of {', '.join(KINDS)}")
    if not all(type(dep) is int and 0 <= dep < number for dep in row["after"]):
        raise ValueError("after names an operation that is not an earlier one")
