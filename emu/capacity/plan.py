"""XM-Sparse's planner in closed form (LMSYS / Netpreme, 2026-11-05), with a serial model of a decode step.

Batch per GPU: B = min(hbm / (hot_buffer * p + context * i), capacity / (gpus * context * p)), with p the KV and index
bytes of a token, i its index bytes. Step: T = base + B * (request + context * token) + miss * B * top_k * layers *
row / (efficiency * bandwidth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.sac.row_format import index_row_bytes

if TYPE_CHECKING:
    from emu.sac.row_format import KVDtype
    from emu.sim.models import ModelShape


@dataclass(frozen=True, slots=True)
class Fitted:
    """A parameter that was fitted.

    Attributes:
        value: the value used.
        low, high: range within which every published number that it was fitted to stays within 5 %, the other
            parameters fixed.
        unit: of the value.
        fitted_to: the published numbers.
    """

    value: float
    low: float
    high: float
    unit: str
    fitted_to: str


XM_SPARSE_FIT = (
    "XM-Sparse: TPOT 167.48 and 84.99 ms (16K, batch 192, 20 % miss, 64 and 900 GB/s); throughput of 900 over 64 GB/s "
    "1.80x (16K, batch 241) and 1.39x (128K, batch 109)"
)
PARAMETERS = {
    "base_ms": Fitted(40.0, 39.2, 40.4, "ms per step", XM_SPARSE_FIT),
    "request_ms": Fitted(0.181, 0.177, 0.183, "ms per request and step", XM_SPARSE_FIT),
    "context_us_per_1k": Fitted(
        2.8, 2.55, 2.94, "us per request and 1024 tokens of context", XM_SPARSE_FIT
    ),
    "efficiency": Fitted(0.8217, 0.813, 0.830, "of the nominal bandwidth", XM_SPARSE_FIT),
}


@dataclass(frozen=True, slots=True)
class Compute:
    """What a step takes without reads, and what the reads get of the nominal bandwidth.

    Attributes:
        base_ms, request_ms: per step; per request of the batch.
        context_us_per_1k: per request and 1024 tokens of its context.
        efficiency: of the nominal bandwidth, for small random reads.
    """

    base_ms: float = PARAMETERS["base_ms"].value
    request_ms: float = PARAMETERS["request_ms"].value
    context_us_per_1k: float = PARAMETERS["context_us_per_1k"].value
    efficiency: float = PARAMETERS["efficiency"].value

    def step_ms(self, batch: float, context: float) -> float:
        """A step of a batch whose contexts have this mean, without reads."""
        return self.base_ms + batch * (
            self.request_ms + self.context_us_per_1k * context / 1024 / 1000
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and links of an instance.

    Attributes:
        gpus: of the instance.
        hbm_bytes: per GPU, for hot buffers and index keys.
        capacity_bytes: external memory of the instance.
        bandwidth_gb_per_s: nominal, per GPU.
        node_gb_per_s: nominal, shared by all GPUs; 0 is no limit.
    """

    gpus: int
    hbm_bytes: float
    capacity_bytes: float
    bandwidth_gb_per_s: float
    node_gb_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: a size, count or bandwidth that is not positive.
        """
        sizes = (self.gpus, self.hbm_bytes, self.capacity_bytes, self.bandwidth_gb_per_s)
        if min(sizes) <= 0 or self.node_gb_per_s < 0 or not all(map(math.isfinite, sizes)):
            raise UserError(f"a machine with {self}", remedy="give positive sizes and bandwidths")

    @property
    def per_gpu_gb_per_s(self) -> float:
        """What each GPU gets when all read."""
        if not self.node_gb_per_s:
            return self.bandwidth_gb_per_s
        return min(self.bandwidth_gb_per_s, self.node_gb_per_s / self.gpus)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is served.

    Attributes:
        shape, kv_dtype: the model and its rows.
        context: tokens per request.
        miss: share of the selected rows that is read.
        hot_buffer: rows per request and layer.
        top_k: rows selected per layer and step; 0 takes the model's.
    """

    shape: ModelShape
    context: int
    miss: float = 0.2
    hot_buffer: int = 4096
    top_k: int = 0
    kv_dtype: KVDtype = "fp8"

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: says what is wrong.
        """
        if self.context < 1 or self.hot_buffer < 1 or not 0 <= self.miss <= 1:
            raise UserError(
                f"context {self.context}, hot buffer {self.hot_buffer}, miss {self.miss}",
                remedy="give a context and a hot buffer of 1 or more, and a miss share of 0 .. 1",
            )

    @property
    def index_bytes(self) -> float:
        """Per token, held in GPU memory."""
        shape = self.shape
        index = shape.planned_index_bytes or index_row_bytes(self.kv_dtype) * len(
            shape.index_layers
        )
        return index / shape.tokens_per_row + shape.resident_bytes_per_token

    @property
    def kv_bytes(self) -> float:
        """Per token of rows, over all layers, without index keys."""
        return len(self.shape.kv_layers) * self.shape.row_bytes(self.kv_dtype)

    @property
    def token_bytes(self) -> float:
        """KV and index bytes per token, in external memory."""
        return self.kv_bytes / self.shape.tokens_per_row + self.index_bytes

    @property
    def hot_bytes(self) -> float:
        """GPU memory of a request's hot buffer; XM-Sparse counts its rows with their index keys."""
        return self.hot_buffer * (self.kv_bytes + self.index_bytes)

    @property
    def miss_bytes(self) -> float:
        """Read per request and step."""
        return self.miss * (self.top_k or self.shape.top_k) * self.kv_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What the closed form says.

    Attributes:
        batch_max: requests per GPU that memory allows.
        bound_by: "hbm" or "capacity": which memory allows no more.
        batch: requests per GPU planned for (batch_max unless given).
        capacity_used_bytes: external memory of the instance at that batch.
        hbm_used_bytes: per GPU.
        bandwidth_gb_per_s: nominal, that a GPU gets when all read.
        tbt_ms, compute_ms, read_ms: a step, and its parts.
        step_bound_by: "compute" or "bandwidth": the larger part.
        tokens_per_s_per_gpu: batch / tbt.
    """

    batch_max: int
    bound_by: str
    batch: int
    capacity_used_bytes: float
    hbm_used_bytes: float
    bandwidth_gb_per_s: float
    tbt_ms: float
    compute_ms: float
    read_ms: float
    step_bound_by: str
    tokens_per_s_per_gpu: float


def plan(machine: Machine, demand: Demand, compute: Compute | None = None, batch: int = 0) -> Plan:
    """The largest batch that fits, and its step.

    Args:
        machine: memory and links.
        demand: model and requests.
        compute: step without reads, and efficiency; None takes the fitted values.
        batch: requests per GPU to plan for; 0 takes the largest that fits.

    Raises:
        UserError: not one request fits, or the batch does not.
    """
    compute = compute or Compute()
    hbm_each = demand.hot_bytes + demand.context * demand.index_bytes
    external_each = machine.gpus * demand.context * demand.token_bytes
    by_hbm = math.floor(machine.hbm_bytes / hbm_each)
    by_capacity = math.floor(machine.capacity_bytes / external_each)
    most = min(by_hbm, by_capacity)
    bound_by = "hbm" if by_hbm <= by_capacity else "capacity"
    if most < 1:
        need = hbm_each if by_hbm < 1 else external_each
        raise UserError(
            f"not one request of {demand.context} tokens fits: it needs {need / 1e9:.3g} GB of "
            f"{'GPU memory' if by_hbm < 1 else 'external memory'}",
            remedy="give more --hbm or --capacity, or a shorter --context",
        )
    if batch < 0 or batch > most:
        raise UserError(
            f"a batch of {batch} does not fit: {bound_by} allows {most}",
            remedy=f"give --batch {most} or less, or 0 for the largest",
        )
    batch = batch or most
    compute_ms = compute.step_ms(batch, demand.context)
    read_ms = read_time_ms(batch * demand.miss_bytes, machine, compute)
    return Plan(
        batch_max=most,
        bound_by=bound_by,
        batch=batch,
        capacity_used_bytes=batch * external_each,
        hbm_used_bytes=batch * hbm_each,
        bandwidth_gb_per_s=machine.per_gpu_gb_per_s,
        tbt_ms=compute_ms + read_ms,
        compute_ms=compute_ms,
        read_ms=read_ms,
        step_bound_by="bandwidth" if read_ms > compute_ms else "compute",
        tokens_per_s_per_gpu=batch / (compute_ms + read_ms) * 1000,
    )


def read_time_ms(nbytes: float, machine: Machine, compute: Compute) -> float:
    """Time that a GPU's reads of a step take."""
    return nbytes / (compute.efficiency * machine.per_gpu_gb_per_s * 1e9) * 1000
