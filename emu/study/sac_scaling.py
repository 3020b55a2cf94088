"""SAC's Figs 11 to 14: requests in flight, HBM only, interleaving, buffer size (arXiv 2606.19746)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.study.result import FITTED, PREDICTED, SELECTED, Curve, Panel, Row, Study
from emu.study.sac import CHEAP_LAYERS, CONTEXTS, Point, SacModel
from emu.study.sac_rows import FIG11_CONCURRENCY, NAMES, K, in_words, with_reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from emu.study.sensitivity import Sensitivity


def fig11(model: SacModel, sensitivity: Sensitivity) -> Study:
    """Scaling with concurrency."""
    contexts = CONTEXTS[1:]
    keys = [(c, n) for c in contexts for n in FIG11_CONCURRENCY]
    flat = model.run(Point(d, c, n) for d in ("cxl", "rdma") for c, n in keys)
    sac, rdma = flat[: len(keys)], flat[len(keys) :]
    over = {
        key: a["throughput_tok_s"] / b["throughput_tok_s"]
        for key, a, b in zip(keys, sac, rdma, strict=True)
    }
    best = {c: max(over[c, n] for n in FIG11_CONCURRENCY) for c in contexts}
    low, high = sensitivity.interval("throughput", best[contexts[-1]])
    rows = [
        Row(
            "most of SAC over RDMA at 128K",
            best[contexts[-1]],
            "x",
            3.1,
            0.15,
            SELECTED,
            low,
            high,
        ),
        Row(
            "grows with the context (1 is yes)",
            float(best[contexts[0]] < best[contexts[1]] < best[contexts[2]]),
            "",
            1.0,
            0.0,
            SELECTED,
        ),
        *(Row(f"most of SAC over RDMA at {c // K}K", best[c], "x") for c in contexts[:-1]),
        *(
            Row(f"SAC over RDMA at 128K, {n} in flight", over[contexts[-1], n], "x")
            for n in FIG11_CONCURRENCY
        ),
    ]
    x = tuple(float(n) for n in FIG11_CONCURRENCY)
    curves = []
    for panel, c in enumerate(contexts):
        for name, values in (("cxl", sac), ("rdma", rdma)):
            y = tuple(
                f["throughput_tok_s"] for (k, _), f in zip(keys, values, strict=True) if k == c
            )
            curves.append(Curve(NAMES[name], x, y, panel=panel))
    panels = tuple(
        Panel(f"{c // K}K", "requests in flight", "tokens/s", logx=True) for c in contexts
    )
    return Study(
        "sac-fig11",
        "Throughput against requests in flight, at 32K, 64K and 128K",
        "More requests are more prefetches for RDMA, and only more reads for SAC. The pool (2 TB) holds about 195 "
        "requests of 128K, so no more are simulated; SAC's own counts are not known to us, and the ratio grows with them.",
        "sac",
        tuple(rows),
        tuple(curves),
        panels,
    )


def fig12(model: SacModel, sensitivity: Sensitivity) -> Study:
    """Against DRAM and HBM only."""
    designs, context = ("cxl", "dram", "hbm"), CONTEXTS[-1]
    counts = (8, *FIG11_CONCURRENCY[:-1])
    flat = model.run(Point(d, context, n) for d in designs for n in counts)
    by_design = {
        d: [f["throughput_tok_s"] for f in flat[i * len(counts) : (i + 1) * len(counts)]]
        for i, d in enumerate(designs)
    }
    low, high = (by_design["hbm"][i] / by_design["cxl"][i] for i in (0, -1))
    flat_hbm = by_design["hbm"][-1] / by_design["hbm"][-2]
    rows = [
        in_words(
            "HBM only over SAC, 8 in flight", low, (1.0, 10.0), sensitivity.interval("hbm_few", low)
        ),
        in_words(
            f"HBM only over SAC, {counts[-1]} in flight",
            high,
            (0.0, 1.0),
            sensitivity.interval("hbm_many", high),
        ),
        Row(
            f"HBM only, {counts[-1]} in flight over {counts[-2]}",
            flat_hbm,
            "x",
            1.0,
            0.05,
            PREDICTED,
        ),
        Row(
            "SAC over DRAM, 64 in flight",
            by_design["cxl"][2] / by_design["dram"][2],
            "x",
            0.91,
            0.15,
            FITTED,
        ),
    ]
    x = tuple(float(n) for n in counts)
    return Study(
        "sac-fig12",
        "SAC against local DRAM and HBM only, 128K",
        "With few requests everything fits GPU memory, and nothing is faster. GPU memory then fills, and that design's "
        "throughput stays flat; pools go on. SAC's paper says so in words; the limits are those words.",
        "sac",
        tuple(rows),
        tuple(Curve(NAMES[d], x, tuple(by_design[d])) for d in designs),
        (Panel("throughput", "requests in flight", "tokens/s", logx=True),),
    )


_FIG13_DEVICES_GB_PER_S = (22.5, 46.2, 256.0)


def fig13(model: SacModel, _sensitivity: Sensitivity) -> Study:
    """Interleaving."""
    gain = _interleaving({}, model.seed)
    others = {
        rate: _interleaving({"link.cxl_device.read_gb_per_s": rate}, model.seed)
        for rate in _FIG13_DEVICES_GB_PER_S
    }
    ends = [gain[-1], *(found[-1] for found in others.values())]
    helps = in_words("interleaving helps at 128K", gain[-1], (1.005, 10.0), (min(ends), max(ends)))
    most = Row(
        "it helps most at 128K (1 is yes)",
        float(gain[-1] >= 1.005 and gain[-1] == max(gain)),
        "",
        1.0,
        0.0,
        PREDICTED,
    )
    reason = (
        "One device at 184 GB/s alone outruns the server's two adapters (46.2 GB/s each), so a second relieves nothing. "
        "Slower devices give the gain (rows below); SAC publishes no bandwidth of a device."
    )
    x = tuple(float(c // K) for c in CONTEXTS)
    return Study(
        "sac-fig13",
        "Requests handed round to both devices, against all on one (128 in flight)",
        "SAC's ablation says that interleaving helps, most at 128K; its value was not available, nor is the bandwidth of "
        "a device. The model takes half of the pool's 512 GB/s, less what Beluga's links lose, and then interleaving gains "
        "nothing. With one x16 port for a device (46.2 GB/s) it would help, with Beluga's devices (22.5 GB/s) more than "
        "that; neither was taken because of this figure.",
        "sac",
        (
            with_reason(helps, reason),
            with_reason(most, reason),
            *(
                Row(f"interleaving at {c // K}K", g, "x")
                for c, g in zip(CONTEXTS, gain, strict=True)
            ),
            *(
                Row(f"the same with devices of {rate:g} GB/s at {c // K}K", g, "x")
                for rate, found in others.items()
                for c, g in zip(CONTEXTS, found, strict=True)
            ),
        ),
        (
            Curve("devices of 184 GB/s, as used", x, tuple(gain)),
            *(Curve(f"{rate:g} GB/s", x, tuple(found)) for rate, found in others.items()),
        ),
        (Panel("throughput, interleaved over not", "prompt, K tokens", "ratio", logx=True),),
    )


def _interleaving(changes: Mapping[str, float], seed: int) -> list[float]:
    """Throughput round-robin over single, per context; of a model of few layers, whose ratios are the same."""
    kinds = ("round-robin", "single")
    with SacModel(changes, CHEAP_LAYERS, seed) as model:
        flat = model.run(Point("cxl", c, 128, placement=p) for p in kinds for c in CONTEXTS)
    both, one = flat[: len(CONTEXTS)], flat[len(CONTEXTS) :]
    return [a["throughput_tok_s"] / b["throughput_tok_s"] for a, b in zip(both, one, strict=True)]


def fig14(model: SacModel, sensitivity: Sensitivity) -> Study:
    """Buffer size."""
    slots, context = (2048, 4096, 6144, 8192), CONTEXTS[-1]
    figures = model.run(Point("cxl", context, hot_buffer=n) for n in slots)
    throughput = [f["throughput_tok_s"] for f in figures]
    misses = [100 * f["miss_rate"] for f in figures]
    x = tuple(float(n) for n in slots)
    return Study(
        "sac-fig14",
        "Size of the hot buffer, 128K, 64 in flight",
        "A larger buffer in GPU memory keeps more of what will be read again. SAC says that 6K slots beat 4K.",
        "sac",
        (
            in_words(
                "throughput, 6144 slots over 4096",
                throughput[2] / throughput[1],
                (1.0, 10.0),
                sensitivity.interval("buffer", throughput[2] / throughput[1]),
            ),
            *(Row(f"misses with {n} slots", m, "%") for n, m in zip(slots, misses, strict=True)),
        ),
        (Curve("SAC", x, tuple(throughput)), Curve("misses", x, tuple(misses), panel=1)),
        (Panel("throughput", "slots", "tokens/s"), Panel("misses", "slots", "% of selected rows")),
    )
