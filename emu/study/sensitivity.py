"""What the ranges of SAC's parameters do to what is predicted: one parameter after the other, on a cheap model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.study.sac import CHEAP_LAYERS, PARAMETERS, Point, SacModel, ratios
from emu.study.sparse_read import relative_to_dram

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTEXTS = (32 << 10, 128 << 10)
_UNTOUCHED = {
    "link.nic": ("cxl", "dram", "hbm"),
    "link.cxl_device": ("rdma", "dram", "hbm"),
    "link.gpu_cxl": ("rdma", "dram", "hbm"),
    "link.gpu_pcie": ("cxl", "hbm"),
    "locality": ("hbm",),
}
"""Designs whose paths do not cross a link, or that read no selections."""
WORDS = {
    "throughput": "throughput, SAC over RDMA",
    "ttft": "TTFT, RDMA over SAC",
    "tbt": "TBT, RDMA over SAC",
    "of_dram": "throughput, SAC over DRAM",
    "hbm_few": "HBM only over SAC, 8 in flight",
    "hbm_many": "HBM only over SAC, 128 in flight",
    "buffer": "6144 slots over 4096",
    "cxl_least": "CXL read over DRAM, least",
    "cxl_most": "CXL read over DRAM, most",
    "rdma_least": "RDMA read over DRAM, least",
    "rdma_most": "RDMA read over DRAM, most",
}


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the ranges of the parameters do.

    Attributes:
        table: (parameter, at which value, {quantity: relative change}).
        factors: quantity -> (low, high) factors on a prediction: the changes of all parameters, added in squares.
    """

    table: tuple[tuple[str, float, Mapping[str, float]], ...] = ()
    factors: Mapping[str, tuple[float, float]] | None = None

    def interval(self, quantity: str, value: float) -> tuple[float, float]:
        """Low and high of a predicted value."""
        low, high = (self.factors or {}).get(quantity, (1.0, 1.0))
        return value * low, value * high


def quantities(model: SacModel, serving: bool) -> dict[str, float]:
    """What is predicted of reads, and, if asked for, of serving."""
    found = _serving(model) if serving else {}
    for medium, values in relative_to_dram(model.profile).items():
        found |= {f"{medium}_least": min(values), f"{medium}_most": max(values)}
    return found


def _serving(model: SacModel) -> dict[str, float]:
    """The ratios of Fig 10 summed over two contexts, the others at 128K."""
    found = {key: sum(values) for key, values in ratios(model, CONTEXTS).items()}
    long = CONTEXTS[-1]
    cxl_few, cxl_many, hbm_few, hbm_many, small, large = (
        run["throughput_tok_s"]
        for run in model.run(
            (
                Point("cxl", long, 8),
                Point("cxl", long, 128),
                Point("hbm", long, 8),
                Point("hbm", long, 128),
                Point("cxl", long),
                Point("cxl", long, hot_buffer=6144),
            )
        )
    )
    return found | {
        "hbm_few": hbm_few / cxl_few,
        "hbm_many": hbm_many / cxl_many,
        "buffer": large / small,
    }


def sensitivity(seed: int = 0, serving: bool = True) -> Sensitivity:
    """Each parameter at the ends of its range, on a model of few layers.

    Args:
        seed: of selections and of the order of requests.
        serving: False leaves out what needs the simulator.
    """
    with SacModel(layers=CHEAP_LAYERS, seed=seed) as base:
        before = quantities(base, serving)
    table = []
    down, up = dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0)
    for parameter in PARAMETERS:
        worst: dict[str, list[float]] = {k: [0.0] for k in before}
        for value in (parameter.low, parameter.high):
            if value == parameter.value:
                continue
            with SacModel({parameter.target: value}, CHEAP_LAYERS, seed) as model:
                model.adopt(base, _UNTOUCHED.get(parameter.target.rpartition(".")[0], ()))
                after = quantities(model, serving)
            change = {k: after[k] / before[k] - 1 for k in before}
            table.append((parameter.name, value, change))
            for k in before:
                worst[k].append(change[k])
        for k in before:
            down[k] += min(worst[k]) ** 2
            up[k] += max(worst[k]) ** 2
    factors = {k: (1 - down[k] ** 0.5, 1 + up[k] ** 0.5) for k in before}
    return Sensitivity(tuple(table), factors)
