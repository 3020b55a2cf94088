"""Settings of SAC's server that its paper leaves open: each with the ratios it gives, the one in use among them.

The setting was chosen by people who knew the published ratios. So that nobody takes the choice for a prediction, all
that were tried are computed again with every report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from emu.study.sac import CHEAP_LAYERS, CONTEXTS, Point, SacModel, ratios

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.study.sac import Change

MANY = 192
"""Requests in flight: about what SAC's pool holds of 128K."""
QUANTITIES = {
    "throughput": ("throughput, SAC over RDMA, mean", 2.1),
    "ttft": ("TTFT, RDMA over SAC, mean", 9.7),
    "tbt": ("TBT, RDMA over SAC, mean", 1.8),
    "of_dram": ("throughput, SAC over DRAM, mean", 0.91),
    "many": (f"throughput, SAC over RDMA, 128K, {MANY} in flight", 3.1),
}
"""Quantity -> words and published value."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting.

    Attributes:
        name: what differs from the one in use.
        changes: of the profile's numbers, as SacModel takes them.
        points: of every Point.
    """

    name: str
    changes: dict[str, Change] = field(default_factory=dict)
    points: dict[str, Any] = field(default_factory=dict)


_DEVICE = "link.cxl_device.read_gb_per_s"
CANDIDATES = (
    Candidate("as used"),
    Candidate("decode goes on during a prefetch", points={"stalls": False}),
    Candidate("all requests start together", points={"steady": False}),
    Candidate(
        "both: decode goes on, all start together", points={"stalls": False, "steady": False}
    ),
    Candidate("16 requests in flight", points={"concurrency": 16}),
    Candidate("128 requests in flight", points={"concurrency": 128}),
    Candidate("one NIC for the server", {"link.nic.per": "system"}),
    Candidate("NICs with jumbo frames, 12.25 GB/s", {"link.nic.read_gb_per_s": 12.25}),
    Candidate("devices of 22.5 GB/s (Beluga's)", {_DEVICE: 22.5}),
    Candidate("devices of 46.2 GB/s (one x16 port)", {_DEVICE: 46.2}),
    Candidate("devices of 256 GB/s (half of the pool)", {_DEVICE: 256.0}),
)


def candidates(seed: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Name and ratios of each, on a model of few layers, whose ratios are the same as those of all.

    Args:
        seed: of selections and of the order of requests.
        progress: told each name.
    """
    found = []
    for candidate in CANDIDATES:
        progress(f"setting: {candidate.name}")
        with SacModel(candidate.changes, CHEAP_LAYERS, seed) as model:
            by_context = ratios(model, CONTEXTS, **candidate.points)
            kinds = {**candidate.points, "concurrency": MANY}
            sac, rdma = model.run(Point(d, CONTEXTS[-1], **kinds) for d in ("cxl", "rdma"))
        values = {key: mean(by_context[key]) for key in QUANTITIES if key in by_context}
        values["many"] = sac["throughput_tok_s"] / rdma["throughput_tok_s"]
        found.append({"setting": candidate.name, **{k: round(v, 4) for k, v in values.items()}})
    return found
