"""SAC's figures (arXiv 2606.19746)."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.locality.model import FITTED as FITTED_MODEL
from emu.locality.model import StreamSpec, index_stream, sample_layers
from emu.sim.models import model_shape
from emu.study.result import FITTED, PREDICTED, Curve, Panel, Row, Study
from emu.study.sac import CHEAP_LAYERS, CONTEXTS, PROFILE, Point, SacModel, Sensitivity, ratios
from emu.study.sparse_read import read_us
from emu.timing.system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

K = 1024
ENTRIES = tuple(2**n for n in range(7, 15))
ENTRY_BYTES = 656
FIG11_CONCURRENCY = (16, 64, 128, 192)
NAMES = {"cxl": "SAC (CXL)", "rdma": "RDMA, full prefetch", "dram": "local DRAM", "hbm": "HBM only"}
NO_STALL = "if decode went on during prefetch: "


def fig4(_model: SacModel, _sensitivity: Sensitivity) -> Study:
    """KV touched during decode."""
    shape = model_shape("deepseek-v3.2")
    layers = sample_layers(list(shape.kv_layers), 5)
    shares = []
    for context in CONTEXTS:
        spec = StreamSpec(context, shape.top_k, K, shape.num_layers)
        touched = [len(np.unique(index_stream(FITTED_MODEL, spec, layer))) for layer in layers]
        shares.append(mean(touched) / (context + K))
    return Study(
        "sac-fig4",
        "Share of a request's KV that 1024 decode steps touch",
        "Sparse attention reads few of a context's rows: what is never read need not be moved. The generator of "
        "selections was fitted to the 21 % at 128K; shorter contexts are predictions.",
        "sac",
        (
            Row("KV touched at 128K, 1K output", 100 * shares[-1], "%", 21.0, 2 / 21, FITTED),
            *(
                Row(f"KV touched at {c // K}K, 1K output", 100 * share, "%")
                for c, share in zip(CONTEXTS[:-1], shares[:-1], strict=True)
            ),
        ),
        (
            Curve(
                "generated", tuple(float(c // K) for c in CONTEXTS), tuple(100 * s for s in shares)
            ),
            Curve("published", (128.0,), (21.0,), published=True),
        ),
        (Panel("KV touched", "context, K tokens", "%", logx=True),),
    )


def fig5(_model: SacModel, _sensitivity: Sensitivity) -> Study:
    """Sparse-read latency."""
    system = System.load(PROFILE)
    times = {
        medium: [read_us(system, f"pool_read.{medium}", n, ENTRY_BYTES) for n in ENTRIES]
        for medium in ("dram", "cxl", "rdma")
    }
    relative = {
        m: [a / b for a, b in zip(times[m], times["dram"], strict=True)] for m in ("cxl", "rdma")
    }
    large = read_us(system, "pool_read.rdma", ENTRIES[-1], 1152) / read_us(
        system, "pool_read.dram", ENTRIES[-1], 1152
    )
    ends = {"cxl": (1.04, 1.64), "rdma": (4.0, 19.7)}
    rows = []
    for medium, (low, high) in ends.items():
        name = NAMES[medium].split(",")[0].replace("SAC (CXL)", "CXL")
        rows += [
            Row(f"{name} over DRAM, least", min(relative[medium]), "x", low, 0.15, PREDICTED),
            Row(f"{name} over DRAM, most", max(relative[medium]), "x", high, 0.15, PREDICTED),
        ]
    rows.append(Row("RDMA over DRAM, most, with entries of 1152 B", large, "x"))
    x = tuple(float(n) for n in ENTRIES)
    return Study(
        "sac-fig5",
        "A GPU reads scattered KV entries: latency against their number, on three media",
        "Each entry is a separate small read. Over CXL they go as loads and come at nearly DRAM's speed; over RDMA "
        "each is a work request. The model uses microbenchmarks only. SAC's counts and entry size are not known to "
        f"us: {ENTRIES[0]} to {ENTRIES[-1]} entries of {ENTRY_BYTES} B (an FP8 row) are assumed; with BF16 rows of "
        "1152 B the largest RDMA ratio is the last row's.",
        "sac",
        tuple(rows),
        (
            *(
                Curve(name, x, tuple(times[m]))
                for m, name in (("dram", "DRAM"), ("cxl", "CXL"), ("rdma", "RDMA"))
            ),
            Curve("CXL over DRAM", x, tuple(relative["cxl"]), panel=1),
            Curve("RDMA over DRAM", x, tuple(relative["rdma"]), panel=1),
        ),
        (
            Panel("latency", "entries", "us", logx=True, logy=True),
            Panel("over DRAM", "entries", "ratio", logx=True, logy=True),
        ),
    )


def _three(
    model: SacModel, rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], tuple[Curve, ...]]:
    designs = ("cxl", "rdma", "dram")
    flat = model.run(Point(d, c, round=rounds) for d in designs for c in CONTEXTS)
    by_design = {
        d: flat[i * len(CONTEXTS) : (i + 1) * len(CONTEXTS)] for i, d in enumerate(designs)
    }
    x = tuple(float(c // K) for c in CONTEXTS)
    picks: tuple[Callable[[dict[str, Any]], float], ...] = (
        lambda f: f["throughput_tok_s"],
        lambda f: f["ttft_ms"]["mean"],
        lambda f: f["tbt_ms"]["mean"],
    )
    curves = tuple(
        Curve(NAMES[d], x, tuple(pick(f) for f in by_design[d]), panel=panel)
        for panel, pick in enumerate(picks)
        for d in designs
    )
    return by_design, curves


_THREE_PANELS = (
    Panel("throughput", "prompt, K tokens", "tokens/s", logx=True),
    Panel("time to first token", "prompt, K tokens", "ms", logx=True, logy=True),
    Panel("time between tokens", "prompt, K tokens", "ms", logx=True),
)


def fig9(model: SacModel, _sensitivity: Sensitivity) -> Study:
    """Round 1."""
    by_design, curves = _three(model, 1)
    rows = [
        Row(
            f"SAC over RDMA, throughput at {c // K}K",
            by_design["cxl"][i]["throughput_tok_s"] / by_design["rdma"][i]["throughput_tok_s"],
            "x",
        )
        for i, c in enumerate(CONTEXTS)
    ]
    return Study(
        "sac-fig9",
        "Round 1: prefill is computed and written to the pool, then decoded",
        "One prefill node computes all prompts, so it bounds every design, and the pool matters little. No values of "
        "this figure were available to compare with.",
        "sac",
        tuple(rows),
        curves,
        _THREE_PANELS,
    )


def fig10(model: SacModel, sensitivity: Sensitivity) -> Study:
    """Round 2."""
    by_design, curves = _three(model, 2)
    with_stalls = ratios(model, CONTEXTS)
    without = ratios(model, CONTEXTS, stalls=False)
    at_128k = by_design["cxl"][-1]["throughput_tok_s"]
    rows = [
        _ratio(
            "throughput, SAC over RDMA, mean over 16K-128K",
            with_stalls,
            "throughput",
            2.1,
            sensitivity,
        ),
        _ratio("TTFT, RDMA over SAC, mean", with_stalls, "ttft", 9.7, sensitivity),
        replace(
            _ratio("TBT, RDMA over SAC, mean", with_stalls, "tbt", 1.8, sensitivity), origin=FITTED
        ),
        _ratio("throughput, SAC over local DRAM, mean", with_stalls, "of_dram", 0.91, sensitivity),
        Row("SAC's throughput at 128K, 64 concurrent", at_128k, "tok/s", 1800.0, 0.2, FITTED),
        Row("TTFT, RDMA over SAC, at 128K", with_stalls["ttft"][-1], "x"),
        Row(NO_STALL + "throughput", mean(without["throughput"]), "x"),
        Row(NO_STALL + "TBT", mean(without["tbt"]), "x"),
        Row(NO_STALL + "TTFT", mean(without["ttft"]), "x"),
    ]
    rows[0] = _reason(
        rows[0],
        "The model's prefetch costs what its bytes take at the NIC's rate. The published ratios together (and 3.1x at "
        "128K) ask for about 8 GB/s of prefetch for the whole server, less than the NIC's 11.6; what else the "
        "measured prefetch waited for is not published.",
    )
    rows[1] = _reason(
        rows[1],
        "A ratio of two waits. SAC's is 50 to 90 ms in the model: index keys and one step; no software (tokenising, "
        "scheduling) is in it, and RDMA's is what its prefetch takes alone. At 128K the ratio agrees; for short prompts the "
        "first step outweighs the bytes in both designs. How SAC's requests arrive, and so how long they queue, is not known.",
    )
    return Study(
        "sac-fig10",
        "Round 2: the KV is in the pool already; SAC against RDMA with full prefetch and against local DRAM",
        "RDMA must bring the whole KV before the first token, SAC only the index keys. The TBT ratio was used to decide "
        "that decode waits for a prefetch (see the assumptions); everything else is predicted.",
        "sac",
        tuple(rows),
        curves,
        _THREE_PANELS,
    )


def _ratio(
    name: str, found: dict[str, list[float]], key: str, published: float, sensitivity: Sensitivity
) -> Row:
    value = mean(found[key])
    low, high = (value * factor for factor in sensitivity.factors[key])
    return Row(name, value, "x", published, 0.15, PREDICTED, low, high)


def _reason(row: Row, text: str) -> Row:
    return row if row.met else replace(row, reason=text)


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
    low, high = (best[contexts[-1]] * f for f in sensitivity.factors["throughput"])
    rows = [
        Row(
            "most of SAC over RDMA at 128K",
            best[contexts[-1]],
            "x",
            3.1,
            0.15,
            PREDICTED,
            low,
            high,
        ),
        Row(
            "grows with the context (1 is yes)",
            float(best[contexts[0]] < best[contexts[1]] < best[contexts[2]]),
            "",
            1.0,
            0.0,
            PREDICTED,
        ),
        *(Row(f"most of SAC over RDMA at {c // K}K", best[c], "x") for c in contexts[:-1]),
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
        "requests of 128K, so no more are simulated.",
        "sac",
        tuple(rows),
        tuple(curves),
        panels,
    )


def fig12(model: SacModel, _sensitivity: Sensitivity) -> Study:
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
        Row("HBM only over SAC, 8 in flight", low, "x", origin=PREDICTED, limits=(1.0, 10.0)),
        Row(
            f"HBM only over SAC, {counts[-1]} in flight",
            high,
            "x",
            origin=PREDICTED,
            limits=(0.0, 1.0),
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
            PREDICTED,
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


def fig13(_model: SacModel, _sensitivity: Sensitivity) -> Study:
    """Interleaving."""
    gain, slow_gain = (
        _interleaving(changes) for changes in ({}, {"link.cxl_device.read_gb_per_s": 22.5})
    )
    reason = "No link of the model that a second device relieves is busy enough."
    helps = Row("interleaving helps at 128K", gain[-1], "x", origin=PREDICTED, limits=(1.005, 10.0))
    most = Row(
        "it helps most at 128K (1 is yes)", float(gain[-1] == max(gain)), "", 1.0, 0.0, PREDICTED
    )
    return Study(
        "sac-fig13",
        "Requests handed round to both devices, against all on one (128 in flight)",
        "SAC's ablation says that interleaving helps, most at 128K; its value was not available. That a device has one "
        "x16 port is our assumption; with devices as slow as Beluga's (22.5 GB/s) two are too few at 64K and more.",
        "sac",
        (
            _reason(helps, reason),
            _reason(most, reason),
            *(
                Row(f"interleaving at {c // K}K", g, "x")
                for c, g in zip(CONTEXTS, gain, strict=True)
            ),
            *(
                Row(f"the same with devices of 22.5 GB/s at {c // K}K", g, "x")
                for c, g in zip(CONTEXTS, slow_gain, strict=True)
            ),
        ),
        (
            Curve("devices of 46.2 GB/s", tuple(float(c // K) for c in CONTEXTS), tuple(gain)),
            Curve("devices of 22.5 GB/s", tuple(float(c // K) for c in CONTEXTS), tuple(slow_gain)),
        ),
        (Panel("throughput, interleaved over not", "prompt, K tokens", "ratio", logx=True),),
    )


def _interleaving(changes: dict[str, float]) -> list[float]:
    """Throughput round-robin over single, per context; of a model of few layers, whose ratios are the same."""
    kinds = ("round-robin", "single")
    with SacModel(changes, CHEAP_LAYERS) as model:
        flat = model.run(Point("cxl", c, 128, placement=p) for p in kinds for c in CONTEXTS)
    both, one = flat[: len(CONTEXTS)], flat[len(CONTEXTS) :]
    return [a["throughput_tok_s"] / b["throughput_tok_s"] for a, b in zip(both, one, strict=True)]


def fig14(model: SacModel, _sensitivity: Sensitivity) -> Study:
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
            Row(
                "throughput, 6144 slots over 4096",
                throughput[2] / throughput[1],
                "x",
                origin=PREDICTED,
                limits=(1.0, 10.0),
            ),
            *(Row(f"misses with {n} slots", m, "%") for n, m in zip(slots, misses, strict=True)),
        ),
        (Curve("SAC", x, tuple(throughput)), Curve("misses", x, tuple(misses), panel=1)),
        (Panel("throughput", "slots", "tokens/s"), Panel("misses", "slots", "% of selected rows")),
    )


SAC_FIGURES: Sequence[Callable[[SacModel, Sensitivity], Study]] = (
    fig4,
    fig5,
    fig9,
    fig10,
    fig11,
    fig12,
    fig13,
    fig14,
)
