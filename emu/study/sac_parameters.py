"""The parameter set of all SAC figures: each number, how far it may be off, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from emu.locality.model import FITTED

HBM_GIB = 42.0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of the SAC parameter set.

    Attributes:
        name: for tables.
        value, low, high: what is used, and its range.
        unit: of them.
        basis: "microbenchmark", "assumption" or "fitted".
        source: where it comes from, or what it was fitted to.
        target: where it goes: "link.NAME.FIELD", "compute.FIELD", "locality.FIELD" or "hbm".
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    basis: str
    source: str
    target: str


PARAMETERS = (
    Parameter(
        "decode base",
        287_000,
        230_000,
        380_000,
        "ns per layer",
        "fitted",
        "about 1800 tok/s (+-20 %) at 128K with 64 concurrent requests; how much of that step is reads was taken from "
        "SAC's 91 % of DRAM",
        "compute.decode_base_ns",
    ),
    Parameter(
        "NIC",
        11.6,
        10.2,
        12.25,
        "GB/s",
        "microbenchmark",
        "line rate less RoCEv2 headers; the range: 82 % of the line rate, and jumbo frames",
        "link.nic.read_gb_per_s",
    ),
    Parameter(
        "CXL device",
        184,
        22.5,
        256,
        "GB/s",
        "assumption",
        "half of the pool's 512 GB/s (SAC), times 46.2 / 64, the share of its link's rate that Beluga's adapter reads; "
        "the range: one device of Beluga's, and half of the 512",
        "link.cxl_device.read_gb_per_s",
    ),
    Parameter(
        "GPU reading CXL",
        26,
        23,
        30,
        "GB/s",
        "microbenchmark",
        "Beluga, GPU and CXL; +-12 %",
        "link.gpu_cxl.read_gb_per_s",
    ),
    Parameter(
        "GPU reading DRAM",
        37,
        33,
        43,
        "GB/s",
        "microbenchmark",
        "ESS, 656 B blocks over PCIe 5; 37 in, 43 out",
        "link.gpu_pcie.read_gb_per_s",
    ),
    Parameter(
        "CXL latency",
        750,
        220.5,
        750,
        "ns",
        "microbenchmark",
        "Beluga; MemChannel for the same switch",
        "link.cxl_device.latency_ns",
    ),
    Parameter(
        "background of selections",
        FITTED.background,
        0.25,
        0.40,
        "of a selection",
        "fitted",
        "13.4 % misses with twice the top-k (GLM-5.1); the range: 10 to 17 %",
        "locality.background",
    ),
    Parameter(
        "flicker of selections",
        FITTED.flicker,
        0.12,
        0.16,
        "of the active set",
        "fitted",
        "30 % misses with as many slots as top-k (GLM-5.1); the range: 28.5 to 31 %",
        "locality.flicker",
    ),
    Parameter(
        "skew of the background",
        FITTED.zipf,
        1.15,
        1.25,
        "exponent",
        "fitted",
        "30 and 13.4 % misses, with the two above; the range: 12.5 to 14.3 % with twice the top-k",
        "locality.zipf",
    ),
    Parameter(
        "pool of tokens ever selected",
        FITTED.pool,
        0.179,
        0.219,
        "of the context",
        "fitted",
        "21 % of a 128K context touched (SAC, Fig 4); the range: within 2 points",
        "locality.pool",
    ),
    Parameter(
        "GPU memory for KV",
        HBM_GIB,
        36,
        50,
        "GiB",
        "assumption",
        "96 GB of an H20 less 4-bit weights (42 GB) and activations",
        "hbm",
    ),
)
STRUCTURE = (
    "Decode of the server's eight GPUs waits while a request is prefetched over RDMA (ranks of data-parallel attention "
    "step together). Chosen because SAC publishes a TBT 1.8x higher for RDMA although both then read a hot buffer's "
    "misses and DRAM is the faster: so that one figure is fitted, by structure, not by a number. Without it the model "
    "gives the values in the row 'if decode went on'.",
    "A steady state: requests in flight are at all stages of their output. SAC does not say how its requests arrive.",
    "Of a selection, assumed and not fitted: the newest 1/32 of it, an active set that swaps 0.1 % of the top-k a step, "
    "layers that differ (0.4 in the logarithm) and that share 70 % of what they ever look at.",
    "Two NICs and two CXL adapters, one per socket; prompts of 16K to 128K tokens and 1024 output tokens; BF16 rows.",
)
