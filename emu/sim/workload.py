"""Requests for a simulation: all alike, from the first or in a steady state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emu.errors import UserError
from emu.trace.request import Request


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and which of them the figures are about.

    Attributes:
        requests: in order.
        measured: half-open range of request numbers; the others fill the system before and after.
    """

    requests: tuple[Request, ...]
    measured: tuple[int, int]

    @classmethod
    def burst(cls, count: int, prompt: int, output: int) -> Workload:
        """All alike, and all measured: they start together.

        Raises:
            UserError: a count or length below 1.
        """
        _check(count, prompt, output)
        return cls(tuple(_request(i, prompt, output) for i in range(count)), (0, count))

    @classmethod
    def steady(cls, concurrency: int, prompt: int, output: int, seed: int = 0) -> Workload:
        """A closed loop in its steady state: at any time the requests in flight are at all stages of their output.

        The first `concurrency` requests have shorter outputs, evenly from 1 token to all, so that the ones after them
        begin one after the other; those are measured, and as many follow to keep the system full.

        Raises:
            UserError: a count or length below 1.
        """
        _check(concurrency, prompt, output)
        order = np.random.default_rng(seed).permutation(concurrency)
        first = [
            _request(i, prompt, max(1, output * (int(place) + 1) // concurrency))
            for i, place in enumerate(order)
        ]
        rest = [_request(i, prompt, output) for i in range(concurrency, 3 * concurrency)]
        return cls((*first, *rest), (concurrency, 2 * concurrency))


def _request(number: int, prompt: int, output: int) -> Request:
    return Request(f"r{number}", 0.0, prompt, output, ())


def _check(count: int, prompt: int, output: int) -> None:
    if min(count, output) < 1 or prompt < 2:
        raise UserError(
            f"{count} requests of {prompt} prompt and {output} output tokens",
            remedy="give 1 or more requests, prompts of 2 or more tokens, outputs of 1 or more",
        )
