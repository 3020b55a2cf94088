"""SAC's Figs 4 and 5: what is read, and how long a read takes (arXiv 2606.19746)."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from emu.locality.model import FITTED as FITTED_MODEL
from emu.locality.model import StreamSpec, index_stream, sample_layers
from emu.sim.models import model_shape
from emu.study.result import FITTED, PREDICTED, SELECTED, Curve, Panel, Row, Study
from emu.study.sac import CONTEXTS, SacModel
from emu.study.sac_rows import K, with_reason
from emu.study.sparse_read import ENTRIES, ENTRY_BYTES, read_us, relative_to_dram
from emu.timing.system import System

if TYPE_CHECKING:
    from emu.study.sensitivity import Sensitivity


def fig4(model: SacModel, _sensitivity: Sensitivity) -> Study:
    """KV touched during decode."""
    shape = model_shape("deepseek-v3.2")
    layers = sample_layers(list(shape.kv_layers), 5)
    shares = []
    for context in CONTEXTS:
        spec = StreamSpec(context, shape.top_k, K, shape.num_layers, model.seed)
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


_LARGEST = (
    "A work request costs 336 ns, whatever its bytes (from Beluga's copies); local DRAM brings a row of 1152 B in 31 ns: "
    "the ratio cannot pass 10.8. SAC's 19.7 asks for smaller entries (the last row) or dearer work requests; which is "
    "not published."
)


def fig5(model: SacModel, sensitivity: Sensitivity) -> Study:
    """Sparse-read latency."""
    system = System.load(model.profile)
    times = {
        medium: [read_us(system, f"pool_read.{medium}", n, ENTRY_BYTES) for n in ENTRIES]
        for medium in ("dram", "cxl", "rdma")
    }
    relative = relative_to_dram(model.profile)
    rows = []
    for medium, name, band in (("cxl", "CXL", (1.04, 1.64)), ("rdma", "RDMA", (4.0, 19.7))):
        origin = PREDICTED if medium == "cxl" else SELECTED
        for end, value in (("least", min(relative[medium])), ("most", max(relative[medium]))):
            low, high = sensitivity.interval(f"{medium}_{end}", value)
            text = f"{name} over DRAM, {end}"
            rows.append(Row(text, value, "x", None, 0.15, origin, low, high, band))
        text = f"largest ratio of {name} over DRAM"
        interval = sensitivity.interval(f"{medium}_most", max(relative[medium]))
        largest = Row(text, max(relative[medium]), "x", band[1], 0.15, origin, *interval)
        rows.append(with_reason(largest, _LARGEST))
    fp8 = relative_to_dram(model.profile, 656)["rdma"]
    rows.append(Row("RDMA over DRAM, most, with entries of 656 B (FP8 rows)", max(fp8), "x"))
    x = tuple(float(n) for n in ENTRIES)
    return Study(
        "sac-fig5",
        "A GPU reads scattered KV entries: latency against their number, on three media",
        "Each entry is a separate small read. Over CXL they go as loads and come at nearly DRAM's speed; over RDMA "
        "each is a work request. The paper gives the range of each ratio over its counts, not the values: least and most "
        "are met within 15 % of that range, and the largest ratio is compared by itself. SAC's counts and entry size are "
        f"not known to us, {ENTRIES[0]} to {ENTRIES[-1]} entries of {ENTRY_BYTES} B (SAC's BF16 rows, as in all its "
        "figures) are assumed. The cost of a work request does not depend on its bytes, so smaller entries make "
        "RDMA's ratio larger (last row). Nothing was fitted to this figure; the cost of an RDMA request was chosen knowing "
        "Beluga's and this figure's ratios, so RDMA's count as selected.",
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
