"""What a medium or a server can do: the links, paths and compute of a model, every number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it comes from.

    Attributes:
        value: the number, in the unit that its field's name gives.
        source: who published or measured it, or what it was derived from.
        date: when that was.
        note: how it was derived, or what to doubt; may be empty.
    """

    value: float
    source: str
    date: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """How one link behaves; GB are 1e9 bytes. Reads and writes queue behind one another.

    Attributes:
        latency_ns: of one idle request.
        read_gb_per_s, write_gb_per_s: bandwidth.
        per_request_ns: least time between two requests (request-rate limit).
        parallelism: requests that may be outstanding.
        setup_ns: fixed software cost of an operation, however many requests it has.
        flush_ns: write-back or invalidation of one 64-byte line by software.
    """

    latency_ns: Figure
    read_gb_per_s: Figure
    write_gb_per_s: Figure
    per_request_ns: Figure
    parallelism: Figure
    setup_ns: Figure
    flush_ns: Figure

    def native(self) -> tuple[float, float, float, float]:
        """Arguments of add_link of the native clocks; GB/s are bytes per nanosecond."""
        return (
            self.latency_ns.value,
            self.read_gb_per_s.value,
            self.write_gb_per_s.value,
            self.per_request_ns.value,
        )


@dataclass(frozen=True, slots=True)
class MediaProfile:
    """A medium seen as one link.

    Attributes:
        name: the profile's name.
        description: one line.
        model: its numbers.
    """

    name: str
    description: str
    model: LinkModel


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link of a system.

    Attributes:
        per: one instance per "gpu", "socket", "device" or "system".
        model: the media profile's numbers, with those that the system replaces.
    """

    name: str
    per: str
    model: LinkModel


@dataclass(frozen=True, slots=True)
class PathSpec:
    """The links that an operation crosses.

    Attributes:
        name: for instance "pool_read.cxl".
        links: names of links, in order.
        write: True uses the links' write bandwidth.
        message_links: those that see one request per operation, however many rows it moves.
        setup_ns: fixed cost of an operation; None takes the sum over the links.
        parallelism: outstanding requests; None takes the least over the links.
    """

    name: str
    links: tuple[str, ...]
    write: bool
    message_links: frozenset[str]
    setup_ns: Figure | None
    parallelism: Figure | None


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Time that the accelerator computes.

    Attributes:
        prefill_ns_per_token_layer: of a prefill instance, per prompt token and layer.
        decode_base_ns: of one layer of a decode step, whatever the batch.
        decode_per_request_ns: added per request of the batch.
        decode_per_context_token_ns: added per request and token of its context.
    """

    prefill_ns_per_token_layer: Figure
    decode_base_ns: Figure
    decode_per_request_ns: Figure
    decode_per_context_token_ns: Figure

    def prefill_ns(self, tokens: int, layers: int) -> int:
        """Prefill of that many prompt tokens, nanoseconds."""
        return round(self.prefill_ns_per_token_layer.value * tokens * layers)

    def decode_layer_ns(self, batch: int, context: float) -> int:
        """One layer of one decode step, nanoseconds; context is the mean over the batch, in tokens."""
        per_request = (
            self.decode_per_request_ns.value + self.decode_per_context_token_ns.value * context
        )
        return round(self.decode_base_ns.value + per_request * batch) if batch else 0


@dataclass(frozen=True, slots=True)
class SystemProfile:
    """A server: how many of what, its links, the paths over them, its compute.

    Attributes:
        gpus, sockets, devices: how many there are, unless the user asks for other numbers.
    """

    name: str
    description: str
    gpus: Figure
    sockets: Figure
    devices: Figure
    links: Mapping[str, LinkSpec]
    paths: Mapping[str, PathSpec]
    compute: ComputeModel
