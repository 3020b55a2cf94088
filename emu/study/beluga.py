"""Beluga's sparse reads (arXiv 2511.20172)."""

from __future__ import annotations

from emu.study.result import SELECTED, Curve, Panel, Row, Study
from emu.study.sac import Parameter, varied_profile
from emu.study.sparse_read import read_us
from emu.timing.system import System

PARAMETERS = (
    Parameter(
        "GPU reading CXL, per chunk of 160 B",
        9.85,
        8.53,
        11.13,
        "ns",
        "microbenchmark",
        "two requests of 128 B at 26 GB/s; the range: 30 and 23 GB/s",
        "link.gpu_cxl.per_request_ns",
    ),
    Parameter(
        "RDMA work request",
        336,
        302,
        370,
        "ns per chunk",
        "microbenchmark",
        "a 16 KB copy and lists of 30 entries; the range: +-10 %, one figure in three digits",
        "link.nic.per_request_ns",
    ),
)


def _interval(medium: str, chunks: int) -> tuple[float, float]:
    found = []
    for parameter in PARAMETERS:
        for value in (parameter.low, parameter.high):
            with varied_profile("beluga-server", {parameter.target: value}) as name:
                found.append(read_us(System.load(name), f"pool_read.{medium}", chunks, 160))
    return min(found), max(found)


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
            SELECTED,
            *_interval(m, n),
        )
        for (m, n), value in published.items()
    )
    counts = tuple(2**n for n in range(7, 16))
    return Study(
        "beluga-sparse",
        "Beluga: reading 16 sparse tokens' KV, thousands of chunks of 160 B",
        "The profile uses Beluga's microbenchmarks alone: 26 GB/s between GPU and CXL, requests of 128 B (so a chunk of "
        "160 B takes two), 64 KB copies for the launch; for RDMA a 16 KB copy and lists of 30 entries. Which of its microbenchmarks give the "
        "cost of a request was decided with these reads in view, so they check consistency and predict nothing.",
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
