from collections.abc import Sequence
import enum
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

class WorkFault(RuntimeError):
    pass

class RegisteredMemory:
    def __init__(self, nbytes: int) -> None: ...
    @property
    def fd(self) -> int: ...
    @property
    def address(self) -> int: ...
    def array(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C")]: ...
    def close_fd(self) -> None: ...

class Opcode(enum.Enum):
    READ = 1

    WRITE = 2

    PACK = 3

class WorkRequest:
    def __init__(
        self,
        opcode: Opcode,
        wr_id: int,
        rkey: int,
        remote_offset: int,
        sge: Sequence[tuple[int, int, int]],
        signalled: bool = True,
    ) -> None: ...

class Completion:
    @property
    def wr_id(self) -> int: ...
    @property
    def opcode(self) -> Opcode: ...
    @property
    def status(self) -> str: ...

class QueuePair:
    def post(self, requests: Sequence[WorkRequest]) -> int: ...
    def poll(self, limit: int = 64) -> list[Completion]: ...
    def wait(self) -> None: ...
    @property
    def send_queue_depth(self) -> int: ...
    @property
    def max_rd_atomic(self) -> int: ...
    @property
    def max_outstanding_reads(self) -> int: ...
    def reset_max_outstanding_reads(self) -> None: ...

class RingQueuePair(QueuePair):
    def __init__(self, send_queue_depth: int, max_rd_atomic: int, timeout_s: float) -> None: ...
    @property
    def fds(self) -> list[int]: ...
    def connect(self, socket: int) -> None: ...

class NodeMemory:
    def __init__(self, fd: int, nbytes: int) -> None: ...

class Responder:
    def __init__(
        self, memory: NodeMemory, fds: Sequence[int], send_queue_depth: int, max_rd_atomic: int
    ) -> None: ...
    @property
    def max_rd_atomic(self) -> int: ...
    def register_memory(self, fd: int, nbytes: int, address: int) -> int: ...
    def deregister_memory(self, lkey: int) -> None: ...
    def expose(self, offset: int, nbytes: int, remote_read: bool, remote_write: bool) -> int: ...
    def close(self) -> None: ...

class Requester:
    def __init__(
        self,
        queue_pair: QueuePair,
        rkey: int,
        staging_address: int,
        staging_bytes: int,
        staging_lkey: int,
    ) -> None: ...
    def add_memory(self, address: int, nbytes: int, lkey: int) -> None: ...
    def read_rows(
        self,
        tables: RowTables,
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
    def pack_rows(
        self,
        tables: RowTables,
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
    def write_rows(
        self,
        tables: RowTables,
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
    ) -> int: ...
    def read(
        self,
        offset: int,
        out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def write(
        self,
        offset: int,
        data: Annotated[
            NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    @property
    def work_requests(self) -> int: ...
    @property
    def reads(self) -> int: ...
    @property
    def writes(self) -> int: ...
    @property
    def packs(self) -> int: ...
    @property
    def completions(self) -> int: ...
    def reset_counters(self) -> None: ...
