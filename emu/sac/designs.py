"""The designs compared, as data: where the KV rows lie, and which path each kind of read and write takes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from emu.errors import UserError


@dataclass(frozen=True, slots=True)
class Design:
    """One way to serve sparse attention.

    Attributes:
        name: what `--backend` says.
        scheme: the store that is the pool.
        index_path: brings the index keys to the GPU at attach; "" where they are there already.
        miss_path: brings the selected rows that the hot buffer lacks, per layer and step.
        write_path: takes a new token's rows away, per layer and step.
        prefetch_path: copies a request's whole KV to the decode host's DRAM at attach; "" where nothing is
            prefetched. The misses are then read from that copy.
        flush_path: takes the rows written to that copy to the pool when the request ends.
        packed: the owner packs the missed rows into one message.
        resident: every row is in GPU memory: no hot buffer, and as many requests as fit.
    """

    name: str
    scheme: str
    index_path: str
    miss_path: str
    write_path: str
    prefetch_path: str = ""
    flush_path: str = ""
    packed: bool = False
    resident: bool = False

    @property
    def work_requests(self) -> bool:
        """Whether missed rows are read by RDMA work requests, one per remote-contiguous run."""
        return self.miss_path == "pool_read.rdma"


_designs = (
    Design("cxl", "cxl", "pool_read.cxl", "pool_read.cxl", "pool_write.cxl"),
    Design(
        "rdma",
        "rdma",
        "local_read.rdma",
        "local_read.rdma",
        "local_write.rdma",
        prefetch_path="prefetch.rdma",
        flush_path="pool_write.rdma",
    ),
    Design("rdma-sparse", "rdma", "pool_read.rdma", "pool_read.rdma", "pool_write.rdma"),
    Design(
        "rdma-gather", "rdma", "pool_read.rdma", "pool_pack.rdma", "pool_write.rdma", packed=True
    ),
    Design("dram", "dram", "pool_read.dram", "pool_read.dram", "pool_write.dram"),
    Design("hbm", "dram", "", "hbm", "hbm", resident=True),
)
DESIGNS = MappingProxyType({design.name: design for design in _designs})


def parse_designs(text: str) -> tuple[Design, ...]:
    """The designs of a comma-separated list; "all" is every one.

    Raises:
        UserError: an unknown or repeated name, or none.
    """
    names = (
        list(DESIGNS)
        if text == "all"
        else [name.strip() for name in text.split(",") if name.strip()]
    )
    if not names:
        raise UserError("no backend given", remedy=f"choose from {', '.join(DESIGNS)}, or all")
    for name in names:
        if name not in DESIGNS:
            raise UserError(
                f"no backend {name!r}", remedy=f"choose from {', '.join(DESIGNS)}, or all"
            )
        if names.count(name) > 1:
            raise UserError(f"backend {name!r} is named twice", remedy="name each once")
    return tuple(DESIGNS[name] for name in names)
