"""A decode GPU: continuous batching."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from emu.sac.plan import hbm_request_bytes
from emu.sac.step import DecodeStep

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from emu.sac.attach import Attacher, Delivery
    from emu.sac.context import DecodeContext
    from emu.sac.plan import RequestPlan
    from emu.sac.sequence import Sequence
    from emu.timing.actors import Signal, Wait


@dataclass(slots=True)
class Usage:
    """GPU memory and hot-buffer counters.

    Attributes:
        bytes_now, bytes_peak: rows and index keys held for attached requests.
        hits, misses, evictions: of the hot buffer.
    """

    bytes_now: int = 0
    bytes_peak: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class DecodeGpu:
    """One GPU of the decode instance.

    Args:
        number: of the GPU.
        deliveries: its requests, in order of arrival.
        context: what runs where.
        attacher: brings requests in.
        finish: called with each sequence that has produced its last token.
    """

    def __init__(
        self,
        number: int,
        deliveries: list[Delivery],
        context: DecodeContext,
        attacher: Attacher,
        finish: Callable[[Sequence], None],
    ) -> None:
        self.number = number
        self.usage = Usage()
        self._context, self._clock = context, context.clock
        self._attacher, self._finish = attacher, finish
        self._waiting = deque(deliveries)
        # Closed loop: since when there was a place, by request.
        self._arrived: dict[int, tuple[int, int]] = {}
        self._attaching = 0
        self._active: list[Sequence] = []
        self._wake: Signal | None = None
        self._copied: Signal | None = None  # the last request that began to attach has its bytes
        self._step = DecodeStep(number, context)
        self._free_places = list(range(context.spec.gpu_slots(number)))

    def actor(self) -> Generator[Wait, None, None]:
        """Runs until every request of this GPU has ended."""
        while True:
            self._admit()
            if self._active:
                yield from self._step.run(list(self._active))
                self._retire()
            elif self._attaching:
                self._wake = self._clock.signal()
                yield self._wake
            elif self._waiting:
                yield self._arrival_ns(self._waiting[0])
            else:
                break
        hot = self._step.hot
        if hot is not None:
            self.usage.hits, self.usage.misses = hot.hits, hot.misses
            self.usage.evictions = hot.evictions

    def wake(self) -> None:
        """Something changed for a GPU that waits."""
        if self._wake is not None:
            self._wake.fire()
            self._wake = None

    def _arrival_ns(self, delivery: Delivery) -> int:
        """When a request comes: at once in a closed loop, else at its time in the trace."""
        if self._context.spec.arrivals == "closed":
            return 0
        return round(delivery.plan.request.arrival_ms * 1e6)

    def arrivals(self) -> Generator[Wait, None, None]:
        """An actor that wakes the GPU at each arrival of an open loop."""
        for delivery in list(self._waiting):
            yield self._arrival_ns(delivery)
            self.wake()

    def _admit(self) -> None:
        """Start attaching every request that has arrived and fits.

        In a closed loop a request arrives when there is a place for it, be there memory or not.
        """
        if self._context.spec.arrivals == "closed":
            now = (self._clock.now_ns, self._clock.modelled_ns)
            for delivery in islice(self._waiting, len(self._free_places)):
                self._arrived.setdefault(delivery.plan.number, now)
        while self._waiting and self._free_places:
            delivery = self._waiting[0]
            need = self._hbm_bytes(delivery.plan)
            if self._arrival_ns(delivery) > self._clock.modelled_ns:
                return
            if self.usage.bytes_now + need > self._context.spec.hbm_bytes:
                return
            self._waiting.popleft()
            self.usage.bytes_now += need
            self.usage.bytes_peak = max(self.usage.bytes_peak, self.usage.bytes_now)
            self._attaching += 1
            place = self._free_places.pop(0)
            self._clock.spawn(
                f"gpu{self.number}.attach.{delivery.plan.number}", self._attach(delivery, place)
            )

    def _attach(self, delivery: Delivery, place: int) -> Generator[Wait, None, None]:
        arrival_ns = self._arrival_ns(delivery)
        turn, copied = self._copied, self._clock.signal()
        self._copied = copied
        sequence = yield from self._attacher.attach(delivery, place, self._step.hot, turn)
        copied.fire()
        record, at_its_time = sequence.record, (arrival_ns, arrival_ns)
        record.arrival_ns, record.modelled_arrival_ns = self._arrived.pop(
            delivery.plan.number, at_its_time
        )
        self._attaching -= 1
        self._active.append(sequence)
        self.wake()

    def _hbm_bytes(self, plan: RequestPlan) -> int:
        model = self._context.model
        return hbm_request_bytes(plan, self._context.design, model.config, model.layout)

    def _retire(self) -> None:
        """Let go of the sequences that have produced their last token."""
        for sequence in [
            s for s in self._active if len(s.record.tokens) == s.plan.request.output_tokens
        ]:
            self._active.remove(sequence)
            self._free_places.append(sequence.place)
            if self._step.hot is not None:
                self._step.hot.release(sequence.place)
            self.usage.bytes_now -= self._hbm_bytes(sequence.plan)
            self._finish(sequence)
