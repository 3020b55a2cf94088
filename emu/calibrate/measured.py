"""Readers of measurements: each gives the profile's figures that it can tell, with an interval."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from emu.errors import UserError
from emu.text_file import read_text

if TYPE_CHECKING:
    from pathlib import Path

_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """One number and how far it may be off.

    Attributes:
        field: of a media profile (emu.timing.profile.LinkModel).
        value, low, high: in the unit that the field's name gives.
        how: what was measured, for the profile's note.
    """

    field: str
    value: float
    low: float
    high: float
    how: str


def read_mlc(path: Path, from_node: int, node: int) -> list[Measured]:
    """Intel MLC: idle latency and read bandwidth of one NUMA node seen from another.

    One run tells no spread, so its interval is the value; give the output of several runs for an interval. The
    peak-injection lines ("ALL Reads", "2:1 Reads-Writes", ...) are of the whole system and tell nothing of one node.

    Raises:
        UserError: the file is no MLC output, or lacks that pair of nodes.
    """
    lines = read_text(path).splitlines()
    latency = _matrix(lines, "idle latenc", path, from_node, node)
    bandwidth = _matrix(lines, "bandwidths between nodes", path, from_node, node)
    found = []
    if latency is not None:
        found.append(
            Measured("latency_ns", latency, latency, latency, "MLC, idle latency, one run")
        )
    if bandwidth is not None:
        rate = bandwidth / 1000
        found.append(
            Measured("read_gb_per_s", rate, rate, rate, "MLC, reads between nodes, one run")
        )
    if not found:
        raise UserError(
            f"{path}: no latency or bandwidth of node {node} from node {from_node}",
            remedy="give what `mlc` prints, and --from-node and --node that are in its matrices",
        )
    return found


def _matrix(lines: list[str], title: str, path: Path, row: int, column: int) -> float | None:
    """A value of the matrix under a title; None where there is no such title, row or column."""
    start = next((i for i, line in enumerate(lines) if title in line.lower()), None)
    if start is None:
        return None
    columns: list[int] = []
    for line in lines[start + 1 : start + 80]:
        words = line.split()
        if words[:2] == ["Numa", "node"] and len(words) > 2:
            columns = [int(w) for w in words[2:] if w.isdigit()]
        elif columns and words and words[0].isdigit() and len(words) > 1:
            if int(words[0]) == row and column in columns:
                place = columns.index(column) + 1
                if place >= len(words):
                    raise UserError(
                        f"{path}: the row of node {row} is cut short",
                        remedy="give the whole output",
                    )
                return None if words[place] == "-" else _positive(words[place], path)
        elif columns and words:
            return None
    return None


def read_perftest_latency(path: Path) -> list[Measured]:
    """ib_read_lat: the latency of the smallest message; the interval is its minimum and 99th percentile.

    Raises:
        UserError: no line of figures.
    """
    rows = _table(path, ("t_min", "t_typical"))
    head, row = rows[0], min(rows[1:], key=lambda r: float(r[0]))
    low, typical = (1000 * float(row[_column(head, name, path)]) for name in ("t_min", "t_typical"))
    high = 1000 * float(row[_column(head, "99%", path)]) if _has(head, "99%") else typical
    how = f"ib_read_lat, {row[0]} bytes, typical of {row[1]} iterations"
    return [Measured("latency_ns", typical, min(low, typical), max(high, typical), how)]


def read_perftest_bandwidth(path: Path) -> list[Measured]:
    """ib_read_bw: bandwidth of the largest message, and time per request of the smallest.

    perftest's MB/sec are 2^20 bytes. The interval of the bandwidth reaches to the peak.

    Raises:
        UserError: no line of figures.
    """
    text = read_text(path)
    rows = _table(path, ("BW average",))
    scale = 0.125 if "BW average[Gb/sec]" in text else _MIB / 1e9
    sized = sorted(rows[1:], key=lambda r: float(r[0]))
    largest, smallest = sized[-1], sized[0]
    peak, average = (scale * float(value) for value in largest[2:4])
    found = [
        Measured(
            "read_gb_per_s", average, average, max(peak, average), f"ib_read_bw, {largest[0]} bytes"
        )
    ]
    if len(smallest) > 4 and float(smallest[0]) <= 4096 and float(smallest[4]) > 0:
        each = 1000 / float(smallest[4])
        fastest = each * float(smallest[3]) / max(float(smallest[2]), float(smallest[3]))
        how = f"ib_read_bw, message rate of {smallest[0]} bytes"
        found.append(Measured("per_request_ns", each, fastest, each, how))
    return found


def _table(path: Path, needed: tuple[str, ...]) -> list[list[str]]:
    """perftest's lines of figures, the header first (its words split at the closing brackets)."""
    lines = read_text(path).splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("#bytes") and all(name in line for name in needed):
            head = re.findall(r"#\S+|\d+(?:\.\d+)?% \S+|BW \w+\[\S+\]|\S+", line)
            rows = []
            for later in lines[number + 1 :]:
                words = later.split()
                if not words or not all(re.fullmatch(_NUMBER, word) for word in words):
                    break
                rows.append(words)
            if rows and all(len(row) >= min(4, len(head)) for row in rows):
                return [head, *rows]
    raise UserError(
        f"{path}: no figures of perftest in it", remedy="give what ib_read_lat or ib_read_bw prints"
    )


def _has(head: list[str], name: str) -> bool:
    return any(word.startswith(name) for word in head)


def _column(head: list[str], name: str, path: Path) -> int:
    for place, word in enumerate(head):
        if word.startswith(name):
            return place
    raise UserError(f"{path}: no column {name}", remedy="give the whole output")


def read_sparse(paths: list[Path], case: str) -> list[Measured]:
    """`emu bench --json` with different --top-k: a line through (rows, time) of one case.

    The slope is the time per row, so the bandwidth of sparse reads; what is left at 0 rows is the fixed cost. The
    interval spans the lines through every two points.

    Raises:
        UserError: fewer than two different numbers of rows, or no such case.
    """
    points: list[tuple[float, float]] = []
    row_bytes: set[float] = set()
    for path in paths:
        result = _json(path)
        try:
            rows, size = float(result["top_k"]), float(result["row_bytes"])
            times = [
                float(c["median_ns"])
                for g in result["groups"]
                for c in g["cases"]
                if c["name"] == case
            ]
            names = sorted({c["name"] for g in result["groups"] for c in g["cases"]})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: not of `emu bench --json`: {error}", remedy="run it again"
            ) from None
        if not times:
            raise UserError(f"{path}: no case {case!r}", remedy=f"give one of {', '.join(names)}")
        points.append((rows, times[0]))
        row_bytes.add(size)
    if len({rows for rows, _ in points}) < 2 or len(row_bytes) != 1:
        raise UserError(
            "a line needs two measurements with different --top-k and the same --kv-dtype",
            remedy="run `emu bench --json --top-k N` with two or more N",
        )
    return _line(points, row_bytes.pop(), case)


def _line(points: list[tuple[float, float]], row_bytes: float, case: str) -> list[Measured]:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    if slope <= 0 or min(slopes) <= 0:
        raise UserError(
            f"{case}: more rows took less time", remedy="measure again on a quiet machine"
        )
    fixed = [max(0.0, mean_y - s * mean_x) for s in (slope, min(slopes), max(slopes))]
    how = f"emu bench, {case}, line through {len(points)} measurements"
    return [
        Measured(
            "read_gb_per_s",
            row_bytes / slope,
            row_bytes / max(slopes),
            row_bytes / min(slopes),
            how,
        ),
        Measured("setup_ns", fixed[0], min(fixed), max(fixed), how),
    ]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON: {error}", remedy="give what emu bench --json printed"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not of `emu bench --json`", remedy="run it again")
    return value


def _positive(word: str, path: Path) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(f"{path}: {word!r} is not a number above 0", remedy="give the whole output")
    return value
