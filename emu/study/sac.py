"""SAC's server and workload in the simulator: one parameter set for all of its figures, and how far each may be off."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.locality.model import FITTED
from emu.sac.designs import DESIGNS
from emu.sac.plan import RunSpec
from emu.sim.command import run_design
from emu.sim.models import ModelShape, model_shape
from emu.sim.simulate import SimSpec
from emu.sim.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

Change = float | str
"""A number, or the text of a field that is one."""
PROFILE = "sac-server"
OUTPUT_TOKENS = 1024
CONTEXTS = (16 << 10, 32 << 10, 64 << 10, 128 << 10)
HBM_GIB = 42.0
CONCURRENCY = 64
THREADS = 2
CHEAP_LAYERS = 6
ROUND_1_REQUESTS = 32


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
    "Two NICs and two CXL adapters, one per socket; prompts of 16K to 128K tokens and 1024 output tokens; BF16 rows.",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    Attributes:
        design, prompt, concurrency: what.
        hot_buffer, placement, round: as for emu sim.
        stalls: whether decode waits for a prefetch.
        steady: requests in flight are at all stages of their output; else all start together (so always in round 1).
    """

    design: str
    prompt: int
    concurrency: int = CONCURRENCY
    hot_buffer: int = 4096
    placement: str = "round-robin"
    round: int = 2
    stalls: bool = True
    steady: bool = True


@dataclass
class SacModel:
    """Runs points, each once; changed parameters are in force for all of them.

    Attributes:
        changes: target -> value, for sensitivity.
        layers: fewer than the model's 61 make a cheap model whose ratios are the same.
        seed: of selections and of the order of requests.
    """

    changes: Mapping[str, Change] = field(default_factory=dict)
    layers: int = 61
    seed: int = 0

    def __post_init__(self) -> None:
        self._done: dict[Point, dict[str, Any]] = {}
        self._stack = ExitStack()
        self.profile = PROFILE

    def __enter__(self) -> Self:
        self.profile = self._stack.enter_context(varied_profile(PROFILE, self.changes))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, points: Iterable[Point]) -> list[dict[str, Any]]:
        """Figures of each point (emu.sim.figures)."""
        points = list(points)
        todo = [point for point in dict.fromkeys(points) if point not in self._done]
        with ThreadPoolExecutor(THREADS) as pool:
            self._done.update(zip(todo, pool.map(self._run, todo), strict=True))
        return [self._done[point] for point in points]

    def adopt(self, other: SacModel, designs: Iterable[str]) -> None:
        """Take over another model's figures of designs that the changes do not touch."""
        kept = set(designs)
        self._done.update({p: f for p, f in other._done.items() if p.design in kept})

    def _run(self, point: Point) -> dict[str, Any]:
        shape = self._shape()
        if point.round == 1:
            workload = Workload.burst(ROUND_1_REQUESTS, point.prompt, OUTPUT_TOKENS)
        elif not point.steady:
            workload = Workload.burst(point.concurrency, point.prompt, OUTPUT_TOKENS)
        else:
            workload = Workload.steady(point.concurrency, point.prompt, OUTPUT_TOKENS, self.seed)
        run = RunSpec(
            model=shape.name,
            top_k=shape.top_k,
            hot_buffer=point.hot_buffer,
            gpus=8,
            devices=2,
            placement=point.placement,
            round=point.round,
            concurrency=point.concurrency,
            hbm_bytes=round(float(self.changes.get("hbm", HBM_GIB)) * 2**30 * self.layers / 61),
            profile=self.profile,
            seed=self.seed,
        )
        locality = replace(
            FITTED,
            **{
                k.partition(".")[2]: float(v)
                for k, v in self.changes.items()
                if k.startswith("locality.")
            },
        )
        spec = SimSpec(
            run,
            shape,
            prefetch_stalls=point.stalls,
            locality=locality,
            stop_after=workload.measured[1],
        )
        return run_design(spec, DESIGNS[point.design], workload)

    def _shape(self) -> ModelShape:
        shape = model_shape("deepseek-v3.2")
        layers = tuple(range(self.layers))
        return replace(shape, num_layers=self.layers, kv_layers=layers, index_layers=layers)


@contextmanager
def varied_profile(base: str, changes: Mapping[str, Change]) -> Iterator[str]:
    """A system profile with some numbers replaced ("link.NAME.FIELD", "compute.FIELD"; others are not looked at).

    A text replaces a field that is one ("link.NAME.per").
    """
    lines = []
    for target, value in changes.items():
        section, _, name = target.rpartition(".")
        if section.startswith("link.") or section == "compute":
            is_text = isinstance(value, str)
            figure = (
                f'"{value}"' if is_text else f'{{ value = {value}, source = "varied", date = "-" }}'
            )
            lines.append(f"[{section}]\n{name} = {figure}")
    if not lines:
        yield base
        return
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "varied.toml"
        file.write_text(f'base = "{base}"\ndescription = "varied"\n' + "\n".join(lines))
        yield str(file)


def ratios(model: SacModel, contexts: tuple[int, ...], **kinds: Any) -> dict[str, list[float]]:
    """SAC against RDMA and DRAM, one value for each context."""
    points = [Point(d, c, **kinds) for c in contexts for d in ("cxl", "rdma", "dram")]
    figures = model.run(points)
    out: dict[str, list[float]] = {"throughput": [], "ttft": [], "tbt": [], "of_dram": []}
    for i in range(len(contexts)):
        cxl, rdma, dram = figures[3 * i : 3 * i + 3]
        out["throughput"].append(cxl["throughput_tok_s"] / rdma["throughput_tok_s"])
        out["ttft"].append(rdma["ttft_ms"]["mean"] / cxl["ttft_ms"]["mean"])
        out["tbt"].append(rdma["tbt_ms"]["mean"] / cxl["tbt_ms"]["mean"])
        out["of_dram"].append(cxl["throughput_tok_s"] / dram["throughput_tok_s"])
    return out
