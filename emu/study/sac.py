"""SAC's server and workload in the simulator: one parameter set (emu.study.sac_parameters) for all of its figures."""

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
from emu.study.sac_parameters import HBM_GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

Change = float | str
"""A number, or the text of a field that is one."""
PROFILE = "sac-server"
OUTPUT_TOKENS = 1024
CONTEXTS = (16 << 10, 32 << 10, 64 << 10, 128 << 10)
CONCURRENCY = 64
THREADS = 2
CHEAP_LAYERS = 6
ROUND_1_REQUESTS = 32


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
