"""Maps and distributions: which constraint binds where, what to buy first, what the user's own batches gain."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from emu.capacity.plan import Compute, Plan, plan
from emu.errors import UserError
from emu.text_file import read_text
from emu.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from emu.capacity.plan import Demand, Machine

SWEPT = ("bandwidth", "capacity")


def parse_external(text: str | float) -> float:
    """Bytes of external memory as it is sold: "1T" and "24TB" are powers of 1000, "1TiB" of 1024.

    Raises:
        UserError: not a size.
    """
    if isinstance(text, int | float):
        return float(text)
    value = text.strip()
    if value.lower().endswith("ib") or value.lower().endswith("i"):
        return float(parse_size(value))
    stripped = value.upper().removesuffix("B")
    power = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}.get(stripped[-1:], 0)
    try:
        number = float(stripped[:-1] if power else stripped)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise UserError(f"{text!r} is not a size", remedy="write for instance 24T, 1TiB or 1e12")
    return number * 1000.0**power


def parse_sweep(text: str) -> dict[str, list[float]]:
    """Values of "bandwidth=64,225,900,capacity=1T,24T".

    Raises:
        UserError: another key, or a value that is no number or size.
    """
    values: dict[str, list[float]] = {}
    key = ""
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        if equals:
            key = name.strip()
            if key not in SWEPT:
                raise UserError(f"--sweep: no {key!r}", remedy="sweep bandwidth and capacity")
        if not key:
            raise UserError(
                f"--sweep: {part!r} belongs to nothing", remedy="write bandwidth=64,900"
            )
        values.setdefault(key, []).append(_number(key, value))
    return values


def _number(key: str, value: str) -> float:
    if key == "capacity":
        return parse_external(value)
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise UserError(f"--sweep: {key} {value!r}", remedy="give GB/s above 0")
    return number


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a map.

    Attributes:
        bandwidth_gb_per_s, capacity_bytes: of the machine.
        plan: at the largest batch; None where not one request fits.
        binds: "capacity", "hbm", "bandwidth" or "compute": what to enlarge for more tokens per second: memory
            as long as it limits the batch and a larger batch pays, else the larger part of the step.
    """

    bandwidth_gb_per_s: float
    capacity_bytes: float
    plan: Plan | None
    binds: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def sweep(
    machine: Machine, demand: Demand, values: dict[str, list[float]], compute: Compute
) -> list[Cell]:
    """The map over the swept values; what is not swept stays as it is."""
    bandwidths = values.get("bandwidth", [machine.bandwidth_gb_per_s])
    capacities = values.get("capacity", [machine.capacity_bytes])
    cells = []
    for capacity, bandwidth in product(capacities, bandwidths):
        here = replace(machine, bandwidth_gb_per_s=bandwidth, capacity_bytes=capacity)
        try:
            made = plan(here, demand, compute)
        except UserError:
            cells.append(Cell(bandwidth, capacity, None, "nothing fits"))
            continue
        cells.append(Cell(bandwidth, capacity, made, _binds(here, demand, compute, made)))
    return cells


DOUBLED = ("bandwidth", "capacity", "hbm")


def doubled(machine: Machine, name: str) -> Machine:
    """A machine with twice of one of DOUBLED."""
    if name == "bandwidth":
        return replace(
            machine,
            bandwidth_gb_per_s=machine.bandwidth_gb_per_s * 2,
            node_gb_per_s=machine.node_gb_per_s * 2,
        )
    if name == "capacity":
        return replace(machine, capacity_bytes=machine.capacity_bytes * 2)
    return replace(machine, hbm_bytes=machine.hbm_bytes * 2)


def gains(machine: Machine, demand: Demand, compute: Compute, batch: int = 0) -> dict[str, float]:
    """Throughput of a GPU with twice of one thing, over that without: what to buy first.

    Args:
        machine: memory and links.
        demand: model and requests.
        compute: step without reads, and efficiency.
        batch: requests per GPU in both cases; 0 takes the largest that fits each.
    """
    base = plan(machine, demand, compute, batch).tokens_per_s_per_gpu
    return {
        name: plan(doubled(machine, name), demand, compute, batch).tokens_per_s_per_gpu / base
        for name in DOUBLED
    }


def _binds(machine: Machine, demand: Demand, compute: Compute, made: Plan) -> str:
    found = gains(machine, demand, compute)
    best = max(found, key=lambda name: found[name])
    return best if found[best] > 1.02 else made.step_bound_by


def read_batches(path: Path) -> list[tuple[int, float]]:
    """(batch, weight) of a file: one "batch [weight]" a line, # begins a comment; the weight is 1 unless given.

    Raises:
        UserError: it cannot be read, a line is bad, or none is good; gives file, line and reason.
    """
    lines = read_text(path).splitlines()
    batches = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            batch, weight = int(words[0]), float(words[1]) if len(words) > 1 else 1.0
            bad = len(words) > 2 or batch < 1 or not 0 <= weight < float("inf")
        except ValueError:
            bad, batch, weight = True, 0, 0.0
        if bad:
            raise UserError(
                f"{path}:{number}: {line!r} is not a batch and a weight", remedy='write "192 0.5"'
            )
        batches.append((batch, weight))
    if not sum(weight for _, weight in batches):
        raise UserError(f"{path}: no batches in it", remedy='write lines like "192 0.5"')
    return batches


def distribution(
    machine: Machine, demand: Demand, compute: Compute, batches: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """What the user's own batches take: steps weighted, a batch beyond what fits is cut to it.

    tokens_per_s_per_gpu is all tokens over all time of the weighted steps, doubling_gains what it gains with twice of
    one thing.
    """
    plans = _plans(machine, demand, compute, batches)
    rate = _tokens_per_s(plans, batches)
    return {
        "tokens_per_s_per_gpu": rate,
        "tbt_ms": sum(p.tbt_ms * w for p, (_, w) in zip(plans, batches, strict=True))
        / sum(w for _, w in batches),
        "cut": sum(p.batch < asked for p, (asked, _) in zip(plans, batches, strict=True)),
        "doubling_gains": {
            name: _tokens_per_s(_plans(doubled(machine, name), demand, compute, batches), batches)
            / rate
            for name in DOUBLED
        },
        "batches": [
            {"batch": asked, "weight": w, "planned": p.batch, "tbt_ms": p.tbt_ms}
            for p, (asked, w) in zip(plans, batches, strict=True)
        ],
    }


def _plans(
    machine: Machine, demand: Demand, compute: Compute, batches: Sequence[tuple[int, float]]
) -> list[Plan]:
    most = plan(machine, demand, compute).batch_max
    return [plan(machine, demand, compute, min(batch, most)) for batch, _ in batches]


def _tokens_per_s(plans: Sequence[Plan], batches: Sequence[tuple[int, float]]) -> float:
    """All tokens over all time of weighted steps."""
    weighted = [(p, w) for p, (_, w) in zip(plans, batches, strict=True)]
    return sum(p.batch * w for p, w in weighted) / sum(p.tbt_ms * w for p, w in weighted) * 1000
