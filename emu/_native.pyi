"""The C++ core of emu: what Python cannot do in microseconds."""

import enum
from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

class SlotFault(KeyError):
    pass

class TokenFault(IndexError):
    pass

class RowTables:
    """
    Block tables of one store's requests. Not safe for two threads at once.
    """

    def __init__(self, block_tokens: int, num_regions: int) -> None: ...
    def add(
        self,
        blocks: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        prompt_tokens: int,
        shared_tokens: int,
        length: int,
        append_tokens: int = -1,
    ) -> int:
        """
        Add a request: blocks int32 [n], the prompt's first; -1 append_tokens: all that they hold. Returns its slot.
        """

    def remove(self, slot: int) -> None: ...
    def length(self, slot: int, region: int) -> int:
        """Tokens written in one region."""

    def min_length(self, slot: int) -> int:
        """Tokens written in every region."""

    def set_length(self, slot: int, length: int) -> None:
        """Set the length of every region."""

    def set_shared(self, slot: int, shared_tokens: int) -> None:
        """
        Close the tokens before this one to writes; past the prompt, appended ones too.
        """

    def capacity(self, slot: int) -> int:
        """Tokens that may be written, the prompt's included."""

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
) -> int:
    """
    Copy the rows of tokens int32 [B, k] (-1 skips) to out uint8 [R, row_bytes]; returns the rows copied.
    """

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
) -> int:
    """
    Write rows uint8 [B, n, row_bytes] at tokens start[b] .. start[b] + n; returns the rows written.
    """

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
) -> int:
    """
    Write back the lines of tokens start[b] .. start[b] + n; returns the lines.
    """

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
) -> int:
    """
    Drop the lines of tokens int32 [B, k] from the caches; returns the lines.
    """

def writeback(
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: int,
    nbytes: int,
) -> int:
    """
    Write dirty lines back to memory, then a store fence; returns the lines.
    """

def invalidate(
    memory: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: int,
    nbytes: int,
) -> int:
    """
    Drop lines from this CPU's caches, then a full fence; returns the lines.
    """

def store_fence() -> None: ...
def full_fence() -> None: ...
def nontemporal_copy(
    dst: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> int:
    """
    Copy past the caches, then a store fence; returns the part lines that were written back.
    """

def visibility_features() -> dict[str, bool]:
    """The flush instructions of this CPU."""

def mbind(address: int, nbytes: int, node: int) -> int:
    """
    Bind whole pages to a node and move those that are there already; returns 0 or errno.
    """

def page_nodes(
    address: int,
    page_bytes: int,
    nodes: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
) -> int:
    """
    Fill nodes int32 [n] with the node of each page from address on, or its negative errno; returns 0 or errno.
    """

class HotBuffer:
    """HiSparse's replacement rule. Not safe for two threads at once."""

    def __init__(self, num_layers: int, max_requests: int, slots: int, top_k: int) -> None: ...
    def admit(self, request_index: int, resident_tokens: int) -> None:
        """
        Forget what the index held; up to `slots` tokens count as resident, of more none does.
        """

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
    ) -> int:
        """
        One decode step of one layer: fills the outputs int32 [B, k]; returns the misses.
        """

    def slot_tokens(self, layer: int, request_index: int) -> list[int]:
        """Token of each slot, -1 if empty."""

    def order(self, layer: int, request_index: int) -> list[int]:
        """The slots, next victim first."""

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

class ServingOptions:
    def __init__(self) -> None: ...
    @property
    def hbm_bytes(self) -> int: ...
    @hbm_bytes.setter
    def hbm_bytes(self, arg: int, /) -> None: ...
    @property
    def host_bytes(self) -> int: ...
    @host_bytes.setter
    def host_bytes(self, arg: int, /) -> None: ...
    @property
    def base_ns(self) -> float: ...
    @base_ns.setter
    def base_ns(self, arg: float, /) -> None: ...
    @property
    def per_request_ns(self) -> float: ...
    @per_request_ns.setter
    def per_request_ns(self, arg: float, /) -> None: ...
    @property
    def per_context_ns(self) -> float: ...
    @per_context_ns.setter
    def per_context_ns(self, arg: float, /) -> None: ...
    @property
    def kv_row_bytes(self) -> int: ...
    @kv_row_bytes.setter
    def kv_row_bytes(self, arg: int, /) -> None: ...
    @property
    def index_row_bytes(self) -> int: ...
    @index_row_bytes.setter
    def index_row_bytes(self, arg: int, /) -> None: ...
    @property
    def tokens_per_row(self) -> int: ...
    @tokens_per_row.setter
    def tokens_per_row(self, arg: int, /) -> None: ...
    @property
    def closed(self) -> bool: ...
    @closed.setter
    def closed(self, arg: bool, /) -> None: ...
    @property
    def prefill(self) -> bool: ...
    @prefill.setter
    def prefill(self, arg: bool, /) -> None: ...
    @property
    def prefetches(self) -> bool: ...
    @prefetches.setter
    def prefetches(self, arg: bool, /) -> None: ...
    @property
    def resident(self) -> bool: ...
    @resident.setter
    def resident(self, arg: bool, /) -> None: ...
    @property
    def by_device(self) -> bool: ...
    @by_device.setter
    def by_device(self, arg: bool, /) -> None: ...
    @property
    def work_requests(self) -> bool: ...
    @work_requests.setter
    def work_requests(self, arg: bool, /) -> None: ...
    @property
    def index_prefetch(self) -> bool: ...
    @index_prefetch.setter
    def index_prefetch(self, arg: bool, /) -> None: ...
    @property
    def stop_after(self) -> int: ...
    @stop_after.setter
    def stop_after(self, arg: int, /) -> None: ...
    @property
    def lockstep_gpus(self) -> int: ...
    @lockstep_gpus.setter
    def lockstep_gpus(self, arg: int, /) -> None: ...

class Serving:
    """One simulated run; not for two threads, not for two runs."""

    def __init__(
        self,
        options: ServingOptions,
        gpu_places: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        anchors: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        has_index: Annotated[
            NDArray[numpy.bool_], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    def add_link(
        self,
        latency_ns: float,
        read_bytes_per_ns: float,
        write_bytes_per_ns: float,
        per_request_ns: float,
    ) -> None: ...
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
    ) -> None: ...
    def run(
        self,
        requests: Annotated[
            NDArray[numpy.int64], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        misses: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        runs: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        warm_steps: int,
        stream: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        phase: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        records: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order="C", device="cpu")],
        token_ns: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
        stall_ns: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def link_busy_ns(self) -> list[int]: ...
    def link_bytes(self) -> list[int]: ...
    def peak_bytes(self) -> list[int]:
        """GPU memory held at most, per GPU."""

    def stalled_ns(self) -> list[int]:
        """Time that each GPU's steps waited for rows."""

    def computing_ns(self) -> list[int]:
        """Time that each GPU computed."""

    @property
    def host_peak(self) -> int: ...
    @property
    def hbm_refusals(self) -> int: ...
    @property
    def host_refusals(self) -> int: ...
    @property
    def events(self) -> int: ...

def index_stream(
    context: int,
    window: int,
    background: int,
    active: int,
    pool: int,
    drift_per_step: float,
    zipf: float,
    layer_overlap: float,
    seed: int,
    common_seed: int,
    out: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")],
) -> None:
    """Fills int32 [steps, k] with the tokens that each step selects."""

class WorkFault(RuntimeError):
    pass

class RegisteredMemory:
    """Pages for the local side of a queue pair."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def fd(self) -> int: ...
    @property
    def address(self) -> int: ...
    def array(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C")]:
        """uint8 [nbytes]; keeps the pages mapped."""

    def close_fd(self) -> None:
        """Once registered: the mapping stays."""

class Opcode(enum.Enum):
    READ = 1

    WRITE = 2

    PACK = 3

class WorkRequest:
    """sge: (address, length, lkey) of registered memory, at most 30."""

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
    def status(self) -> str: ...

class QueuePair:
    """A reliable connection. Not safe for two threads at once."""

    def post(self, requests: Sequence[WorkRequest]) -> int:
        """Post as many as the send queue takes; returns how many were."""

    def poll(self, limit: int = 64) -> list[Completion]:
        """Completions that are there already."""

    def wait(self) -> None:
        """Sleep until poll() has something."""

    @property
    def send_queue_depth(self) -> int: ...
    @property
    def max_rd_atomic(self) -> int: ...
    @property
    def max_outstanding_reads(self) -> int: ...

class RingQueuePair(QueuePair):
    """A queue pair executed by a memory node."""

    def __init__(self, send_queue_depth: int, max_rd_atomic: int, timeout_s: float) -> None: ...
    @property
    def fds(self) -> list[int]:
        """(rings, doorbell, completion event), for the node."""

    def connect(self, socket: int) -> None:
        """The socket whose end says that the node is gone."""

class NodeMemory:
    """The memory of a node, mapped from a memfd sealed against shrinking."""

    def __init__(self, fd: int, nbytes: int) -> None: ...

class Responder:
    """A memory node's end of one queue pair, with a thread of its own."""

    def __init__(
        self, memory: NodeMemory, fds: Sequence[int], send_queue_depth: int, max_rd_atomic: int
    ) -> None: ...
    @property
    def max_rd_atomic(self) -> int:
        """READs that it takes in flight."""

    def register_memory(self, fd: int, nbytes: int, address: int) -> int:
        """Map a client's memory; returns its lkey."""

    def deregister_memory(self, lkey: int) -> None: ...
    def expose(self, offset: int, nbytes: int, remote_read: bool, remote_write: bool) -> int:
        """Let the client reach a range; returns its rkey."""

    def close(self) -> None:
        """Stop the thread; twice is allowed."""

class Requester:
    """Moves rows by work requests. Not safe for two threads at once."""

    def __init__(
        self,
        queue_pair: QueuePair,
        rkey: int,
        staging_address: int,
        staging_bytes: int,
        staging_lkey: int,
    ) -> None: ...
    def add_memory(self, address: int, nbytes: int, lkey: int) -> None:
        """Registered memory: arrays inside it are moved without a copy."""

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
    ) -> int:
        """
        READ the rows of tokens int32 [B, k] (-1 skips) into out uint8 [R, row_bytes]; returns the rows read.
        """

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
    ) -> int:
        """As read_rows, but the owner packs the rows into one message."""

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
    ) -> int:
        """
        WRITE rows uint8 [B, n, row_bytes] at tokens start[b] .. start[b] + n; returns the rows.
        """

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

class PoolFault(RuntimeError):
    pass

class PoolRefusal(RuntimeError):
    pass

class SharedPool:
    """The metadata of a pool in a device's memory; docs/pool-format.md."""

    def __init__(
        self,
        memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        fd: int,
        coherent: bool,
        num_blocks: int,
        block_tokens: int,
        meta_offset: int,
        slots: int,
        ring_lines: int,
        snapshot_lines: int,
        expiry_s: float,
        quarantine_s: float,
        offline: bool = False,
    ) -> None: ...
    def join(self, first: int, last: int) -> None:
        """Take a slot of that range and begin to beat."""

    def leave(self) -> None:
        """Give up every lease and the slot."""

    def validate(self) -> None:
        """Refuse to go on when the leases may be gone."""

    @property
    def slot(self) -> int: ...
    @property
    def lines_flushed(self) -> int: ...
    @property
    def transactions(self) -> int: ...
    def requests_read(
        self,
    ) -> list[tuple[int, str, int, int, int, int, list[int], int, bool, int, int]]: ...
    def members(self) -> list[tuple[int, int, int, bool, int, int]]: ...
    def repair(self) -> None:
        """Write a pool that was read offline anew from what could be read."""

    @property
    def problems(self) -> list[str]: ...
    @property
    def notes(self) -> list[str]: ...
    def contradictions(self) -> list[str]: ...
    def reserve(
        self, wants: Sequence[tuple[str, int, int, int, Sequence[bytes]]]
    ) -> list[tuple[int, int, int, int, int, int, int, list[int]]]:
        """
        Make room for all of (key, prompt tokens, blocks, chain hashes), or for none.
        """

    def publish(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Make (lease, tokens) visible."""

    def take_append_right(self, lease: int, num_tokens: int) -> None: ...
    def find(
        self, keys: Sequence[str]
    ) -> list[tuple[int, int, int, int, int, int, int, list[int]]]: ...
    def lease(
        self, keys: Sequence[str]
    ) -> list[tuple[int, int, int, int, int, int, int, list[int]]]: ...
    def attach(
        self, generation: int, key: str, blocks: Sequence[int]
    ) -> tuple[int, int, int, int, int, int, int, list[int]]: ...
    def release(self, leases: Sequence[int]) -> None: ...
    def remove(self, keys: Sequence[str]) -> list[int]:
        """Forget requests; returns their generations."""

    def used_blocks(self) -> int:
        """Blocks in use, after what the dead held has come back."""

    def lookup(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 16), order="C", device="cpu", writable=False)
        ],
        out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """Block of each chain hash uint8 [n, 16], -1: none."""

    def longest_prefix(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 16), order="C", device="cpu", writable=False)
        ],
    ) -> int:
        """Leading chain hashes uint8 [n, 16] that are here."""

def pool_simulate(
    first_seed: int,
    count: int,
    left_out: int = -1,
    victim_step: int = -1,
    pauses: bool = False,
    sleeps_at: int = -1,
    until_at: int = -1,
) -> dict[str, object]:
    """
    Run the pool's protocol on the shadow medium, one schedule a seed; stops at the first violation.
    """

def pool_sites() -> list[str]:
    """
    Every flush, fence and check of the protocol; left_out is an index into it.
    """
