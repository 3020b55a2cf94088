from typing import Annotated

import numpy
from numpy.typing import NDArray

class SlotFault(KeyError):
    pass

class TokenFault(IndexError):
    pass

class RowTables:
    def __init__(self, block_tokens: int, num_regions: int) -> None: ...
    def add(
        self,
        blocks: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        prompt_tokens: int,
        shared_tokens: int,
        length: int,
    ) -> int: ...
    def remove(self, slot: int) -> None: ...
    def length(self, slot: int, region: int) -> int: ...
    def min_length(self, slot: int) -> int: ...
    def set_length(self, slot: int, length: int) -> None: ...
    def set_shared(self, slot: int, shared_tokens: int) -> None: ...
    def capacity(self, slot: int) -> int: ...

def gather_rows(
    tables: RowTables,
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    region: int,
    region_offset: int,
    row_bytes: int,
    slots: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    tokens: Annotated[
        NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
    out_rows: Annotated[
        NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ]
    | None = None,
) -> int: ...
def scatter_rows(
    tables: RowTables,
    memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    region: int,
    region_offset: int,
    row_bytes: int,
    slots: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    start: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    rows: Annotated[
        NDArray[numpy.uint8],
        dict(shape=(None, None, None), order="C", device="cpu", writable=False),
    ],
    nontemporal: bool,
) -> int: ...
def writeback_rows(
    tables: RowTables,
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    region: int,
    region_offset: int,
    row_bytes: int,
    slots: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    start: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    n: int,
) -> int: ...
def invalidate_tokens(
    tables: RowTables,
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    region: int,
    region_offset: int,
    row_bytes: int,
    slots: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    tokens: Annotated[
        NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
) -> int: ...
def writeback(
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: int,
    nbytes: int,
) -> int: ...
def invalidate(
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: int,
    nbytes: int,
) -> int: ...
def store_fence() -> None: ...
def full_fence() -> None: ...
def nontemporal_copy(
    dst: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> int: ...
def visibility_features() -> dict[str, bool]: ...
def mbind(address: int, nbytes: int, node: int) -> int: ...
def page_nodes(
    address: int,
    page_bytes: int,
    nodes: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
) -> int: ...

class HotBuffer:
    def __init__(self, num_layers: int, max_requests: int, slots: int, top_k: int) -> None: ...
    def admit(self, request_index: int, resident_tokens: int) -> None: ...
    def release(self, request_index: int) -> None: ...
    def resolve(
        self,
        layer: int,
        requests: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        tokens: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        newest: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        locs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")],
        miss_tokens: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")
        ],
        miss_slots: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")
        ],
    ) -> int: ...
    def slot_tokens(self, layer: int, request_index: int) -> list[int]: ...
    def order(self, layer: int, request_index: int) -> list[int]: ...
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def evictions(self) -> int: ...

class LinkClock:
    def __init__(
        self,
        words: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        dilation: float,
        source: str = "auto",
    ) -> None: ...
    @property
    def source(self) -> str: ...
    @property
    def ticks_per_ns(self) -> float: ...
    def add_link(
        self,
        latency_ns: float,
        read_bytes_per_ns: float,
        write_bytes_per_ns: float,
        per_request_ns: float,
    ) -> int: ...
    def add_path(
        self,
        links: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        one_message: Annotated[
            NDArray[numpy.bool_], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        write: bool,
        setup_ns: float,
        parallelism: int,
        latency_ns: float,
    ) -> int: ...
    def now_ns(self) -> int: ...
    def reserve(self, path: int, start_ns: int, nbytes: int, rows: int) -> int: ...
    def wait_until_ns(self, time_ns: int) -> int: ...

class TimeEngine:
    def __init__(self) -> None: ...
    def add_link(
        self,
        latency_ns: float,
        read_bytes_per_ns: float,
        write_bytes_per_ns: float,
        per_request_ns: float,
    ) -> int: ...
    def add_path(
        self,
        links: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        one_message: Annotated[
            NDArray[numpy.bool_], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        write: bool,
        setup_ns: float,
        parallelism: int,
        latency_ns: float,
    ) -> int: ...
    def transfer(self, path: int, start_ns: int, nbytes: int, rows: int) -> int: ...
    def compute(self, actor: int, start_ns: int, duration_ns: int) -> int: ...
    def link_busy_ns(self) -> list[int]: ...
    def link_bytes(self) -> list[int]: ...
    def reset(self) -> None: ...
    def replay(
        self,
        actor: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        path: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        nbytes: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        rows: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        duration_ns: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        dep_offsets: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        deps: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        not_before_ns: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> tuple[
        Annotated[NDArray[numpy.int64], dict(shape=(None,))],
        Annotated[NDArray[numpy.int64], dict(shape=(None,))],
    ]: ...
