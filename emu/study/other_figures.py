"""Beluga's sparse reads (arXiv 2511.20172) and XM-Sparse's figures (LMSYS / Netpreme, 2026-11-05)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.capacity.plan import XM_SPARSE_FIT, Compute, Demand, Machine, Plan, plan
from emu.sim.models import model_shape
from emu.study.result import FITTED, PREDICTED, Curve, Panel, Row, Study
from emu.study.sparse_read import read_us
from emu.timing.system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

K = 1024
CONTEXTS = (16 * K, 32 * K, 64 * K, 128 * K, 256 * K)
TIERS = {
    "PCIe, host DRAM": (64.0, 1e12),
    "CXL": (64.0, 24e12),
    "NVLink-C2C": (225.0, 1e12),
    "scale-up": (900.0, 24e12),
}
HBM_BYTES = 60 * 2**30
GPUS = 4
NODE_GB_PER_S = 4000.0


def xm_plan(tier: str, context: int, batch: int = 0) -> Plan:
    """A tier of XM-Sparse's setting: GLM-5.3 on four GPUs, 20 % misses, hot buffers of 4096 rows."""
    bandwidth, capacity = TIERS[tier]
    machine = Machine(GPUS, HBM_BYTES, capacity, bandwidth, NODE_GB_PER_S)
    return plan(machine, Demand(model_shape("glm-5.3"), context), Compute(), batch)


def beluga() -> Study:
    """Sparse reads in microseconds."""
    system = System.load("beluga-server")
    published = {
        ("cxl", 8192): 97.0,
        ("cxl", 16384): 211.0,
        ("rdma", 8192): 2670.0,
        ("rdma", 16384): 5260.0,
    }
    names = {8192: "Llama-3-8B", 16384: "Qwen-32B"}
    found = {key: read_us(system, f"pool_read.{key[0]}", key[1], 160) for key in published}
    rows = tuple(
        Row(
            f"{m.upper()}, 16 tokens of {names[n]}: {n} chunks of 160 B",
            found[m, n],
            "us",
            value,
            0.25,
            PREDICTED,
        )
        for (m, n), value in published.items()
    )
    counts = tuple(2**n for n in range(7, 16))
    return Study(
        "beluga-sparse",
        "Beluga: reading 16 sparse tokens' KV, thousands of chunks of 160 B",
        "The profile uses Beluga's microbenchmarks alone: 26 GB/s between GPU and CXL, requests of 128 B (so a chunk of "
        "160 B takes two), 64 KB copies for the launch; for RDMA a 16 KB copy and lists of 30 entries.",
        "beluga",
        rows,
        (
            *(
                Curve(
                    m.upper(),
                    tuple(map(float, counts)),
                    tuple(read_us(system, f"pool_read.{m}", n, 160) for n in counts),
                )
                for m in ("cxl", "rdma")
            ),
            *(
                Curve(
                    f"{m.upper()}, published",
                    tuple(float(n) for k, n in published if k == m),
                    tuple(v for (k, _), v in published.items() if k == m),
                    published=True,
                )
                for m in ("cxl", "rdma")
            ),
        ),
        (Panel("latency", "chunks", "us", logx=True, logy=True),),
    )


def xm_fig2() -> Study:
    """Batch and throughput against context."""
    plans = {(t, c): xm_plan(t, c) for t in TIERS for c in CONTEXTS}
    at16, at128 = 16 * K, 128 * K
    gain = {
        c: plans["scale-up", c].tokens_per_s_per_gpu / plans["CXL", c].tokens_per_s_per_gpu
        for c in CONTEXTS
    }
    rows = (
        Row("batch per GPU at 16K", plans["CXL", at16].batch_max, "", 241, 1.001 / 241, PREDICTED),
        Row(
            "batch per GPU at 128K, 1 TB",
            plans["NVLink-C2C", at128].batch_max,
            "",
            36,
            1.001 / 36,
            PREDICTED,
        ),
        Row(
            "batch per GPU at 128K, 24 TB",
            plans["scale-up", at128].batch_max,
            "",
            109,
            1.001 / 109,
            PREDICTED,
        ),
        Row(
            "external memory used at 16K",
            plans["CXL", at16].capacity_used_bytes / 1e12,
            "TB",
            0.85,
            0.02,
            PREDICTED,
        ),
        Row("throughput, 900 over 64 GB/s at 16K", gain[at16], "x", 1.80, 0.05, FITTED),
        Row("throughput, 900 over 64 GB/s at 128K", gain[at128], "x", 1.39, 0.05, FITTED),
    )
    x = tuple(float(c // K) for c in CONTEXTS)
    curves = []
    for tier in TIERS:
        curves.append(Curve(tier, x, tuple(float(plans[tier, c].batch_max) for c in CONTEXTS)))
        curves.append(
            Curve(tier, x, tuple(plans[tier, c].tokens_per_s_per_gpu for c in CONTEXTS), panel=1)
        )
    return Study(
        "xm-fig2",
        "XM-Sparse (modelled): batch and throughput of four memory tiers against context",
        "A request needs GPU memory for its hot buffer and index keys, and external memory for all of its KV. With 1 TB "
        "long contexts run out of external memory; then bandwidth does not help. Batches follow from sizes alone.",
        "xm-sparse",
        rows,
        tuple(curves),
        (
            Panel("batch per GPU", "context, K tokens", "requests", logx=True),
            Panel("throughput per GPU", "context, K tokens", "tokens/s", logx=True),
        ),
    )


def xm_fig3() -> Study:
    """Bandwidth against capacity."""
    bandwidths = (32.0, 64.0, 128.0, 225.0, 450.0, 900.0)
    capacities = (1e12, 2e12, 4e12, 24e12)
    curves, rows = [], []
    for panel, context in enumerate((16 * K, 128 * K)):
        demand = Demand(model_shape("glm-5.3"), context)
        for capacity in capacities:
            y = tuple(
                plan(
                    Machine(GPUS, HBM_BYTES, capacity, b, NODE_GB_PER_S), demand
                ).tokens_per_s_per_gpu
                for b in bandwidths
            )
            curves.append(Curve(f"{capacity / 1e12:g} TB", bandwidths, y, panel=panel))
            rows.append(
                Row(f"{context // K}K, {capacity / 1e12:g} TB: 900 over 64 GB/s", y[-1] / y[1], "x")
            )
    return Study(
        "xm-fig3",
        "XM-Sparse (modelled): throughput against bandwidth, for several capacities",
        "Bandwidth and capacity work together: at 128K, 1 TB holds so few requests that a faster link gains less. A node "
        "shares 4 TB/s. The article's own curves were not available to us: these are predictions.",
        "xm-sparse",
        tuple(rows),
        tuple(curves),
        (
            Panel("16K", "GB/s per GPU", "tokens/s per GPU", logx=True),
            Panel("128K", "GB/s per GPU", "tokens/s per GPU", logx=True),
        ),
    )


_BATCHES = (1, 8, 16, 32, 64, 96, 128, 160, 192)


def _measured() -> dict[str, list[Plan]]:
    return {t: [xm_plan(t, 16 * K, b) for b in _BATCHES] for t in ("PCIe, host DRAM", "scale-up")}


def xm_fig5() -> Study:
    """TPOT measured."""
    plans = _measured()
    slow, fast = plans["PCIe, host DRAM"], plans["scale-up"]
    rows = (
        Row("TPOT at batch 192, host DRAM over PCIe", slow[-1].tbt_ms, "ms", 167.48, 0.05, FITTED),
        Row("TPOT at batch 192, X-Mem", fast[-1].tbt_ms, "ms", 84.99, 0.05, FITTED),
        *(
            Row(f"TPOT at batch {b}, {name}", p[i].tbt_ms, "ms")
            for i, b in enumerate(_BATCHES[:-1])
            if b in (16, 64, 128)
            for name, p in (("PCIe", slow), ("X-Mem", fast))
        ),
    )
    x = tuple(map(float, _BATCHES))
    return Study(
        "xm-fig5",
        "XM-Sparse (measured, 16K): time per output token against batch",
        "A step takes its compute and, after it, its reads. One efficiency of small reads stands for both links; it and "
        f"the compute were fitted to: {XM_SPARSE_FIT}. The fit leaves 4.5 %: the measured times and the modelled "
        "ratios do not come from quite the same model.",
        "xm-sparse",
        rows,
        tuple(Curve(t, x, tuple(p.tbt_ms for p in ps)) for t, ps in plans.items()),
        (Panel("time per output token", "batch per GPU", "ms"),),
    )


def xm_fig6() -> Study:
    """Throughput measured."""
    plans = _measured()
    slow, fast = plans["PCIe, host DRAM"], plans["scale-up"]
    gains = [
        b.tokens_per_s_per_gpu / a.tokens_per_s_per_gpu for a, b in zip(slow, fast, strict=True)
    ]
    rows = (
        Row(
            "throughput, X-Mem over PCIe at batch 192", gains[-1], "x", 167.48 / 84.99, 0.1, FITTED
        ),
        Row(
            "throughput, X-Mem over PCIe at batch 1",
            gains[0],
            "x",
            origin=PREDICTED,
            limits=(0.9, 1.1),
        ),
        *(
            Row(f"throughput, X-Mem over PCIe at batch {b}", g, "x")
            for b, g in zip(_BATCHES, gains, strict=True)
            if b in (16, 64, 128)
        ),
    )
    x = tuple(map(float, _BATCHES))
    return Study(
        "xm-fig6",
        "XM-Sparse (measured, 16K): throughput against batch",
        "With small batches a step is nearly all compute, so a faster tier gains little; the article also sees slight "
        "losses there, which this model, in which more bandwidth never costs, cannot show.",
        "xm-sparse",
        rows,
        tuple(Curve(t, x, tuple(p.tokens_per_s_per_gpu for p in ps)) for t, ps in plans.items()),
        (Panel("throughput per GPU", "batch per GPU", "tokens/s"),),
    )


OTHER_FIGURES: Sequence[Callable[[], Study]] = (beluga, xm_fig2, xm_fig3, xm_fig5, xm_fig6)
