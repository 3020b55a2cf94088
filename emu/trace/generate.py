"""Traces of the shape of Mooncake's conversation trace: a tree of conversations over one system prompt.

The figures below were fitted to, and the output percentiles measured on, conversation_trace.jsonl of
kvcache-ai/Mooncake (FAST'25 release, Apache-2.0): 12,031 requests at 3.4 per second; input mean 12,035, median
6,909, 99th percentile 85,401, range 891..126,195; output mean 343, range 1..2,000; 36.6 % of the 512-token blocks
seen before; 38.7 % of the requests share more than the system prompt with an earlier one.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist

from emu.errors import UserError
from emu.trace.formats import MAX_ARRIVAL_MS
from emu.trace.request import BLOCK_TOKENS, Request, blocks_of

MAX_REQUESTS = 10_000_000
MIN_INPUT_TOKENS = 891
MAX_INPUT_TOKENS = 126_195
REQUESTS_PER_S = 3.4
FOLLOW_UP_SHARE = 0.387
FORK_SHARE = 0.18
"""Follow-ups that keep only a part of the earlier prompt (measured: 17.7 % share less than all full blocks)."""
PARENT_BACK_MEAN = 730.0
"""Requests between a follow-up and what it follows (measured: a mean gap of 215 s at 3.4 requests per second)."""
OPENING_MEDIAN, OPENING_SIGMA = 5350.0, 1.27
MESSAGE_MEDIAN, MESSAGE_SIGMA = 150.0, 1.4
FORK_MEDIAN, FORK_SIGMA = 3500.0, 1.3
OUTPUT_PERCENTILES = (
    (0.0, 1),
    (0.01, 3),
    (0.05, 10),
    (0.10, 24),
    (0.25, 156),
    (0.50, 350),
    (0.75, 472),
    (0.90, 597),
    (0.95, 698),
    (0.99, 1118),
    (1.0, 2000),
)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What to generate.

    Attributes:
        requests: how many, >= 1.
        seed: the same seed gives the same trace.
        requests_per_s: mean rate of the Poisson arrivals.
    """

    requests: int
    seed: int = 0
    requests_per_s: float = REQUESTS_PER_S


def generate(options: GenerateOptions) -> list[Request]:
    """A trace, by arrival.

    Only random.Random.random() is drawn from, whose sequence Python promises to keep, and the rest is arithmetic
    here: the same options give the same trace everywhere.

    Raises:
        UserError: too few or too many requests, a negative seed or a rate that is not a positive number.
    """
    if not 1 <= options.requests <= MAX_REQUESTS:
        raise UserError(
            f"{options.requests} requests", remedy=f"ask for 1 to {MAX_REQUESTS} requests"
        )
    if options.seed < 0:
        raise UserError(f"seed {options.seed} is negative", remedy="give a seed from 0 up")
    if not 0 < options.requests_per_s <= 1e6:
        raise UserError(
            f"a rate of {options.requests_per_s} requests per second", remedy="give one in 0..1e6"
        )
    conversations = _Conversations(_Draws(options.seed))
    requests: list[Request] = []
    arrival_ms = 0.0
    for _ in range(options.requests):
        if arrival_ms > MAX_ARRIVAL_MS:
            raise UserError(
                f"at {options.requests_per_s} requests per second the trace lasts longer than {MAX_ARRIVAL_MS:g} ms",
                remedy="give a higher rate",
            )
        requests.append(conversations.next(requests, round(arrival_ms, 3)))
        arrival_ms += conversations.draws.exponential(1000 / options.requests_per_s)
    return requests


class _Draws:
    """Random draws by inversion from one uniform sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._normal = NormalDist()

    def uniform(self) -> float:
        """In (0, 1)."""
        return (self._random.random() * (1 << 53) + 0.5) / ((1 << 53) + 1)

    def exponential(self, mean: float) -> float:
        """Exponentially distributed, > 0."""
        return -mean * math.log(self.uniform())

    def lognormal(self, median: float, sigma: float) -> int:
        """Lognormally distributed, rounded."""
        return round(median * math.exp(sigma * self._normal.inv_cdf(self.uniform())))

    def output_tokens(self) -> int:
        """Between the measured percentiles, linearly."""
        u = self.uniform()
        at = bisect_right(OUTPUT_PERCENTILES, (u, math.inf))
        (p0, t0), (p1, t1) = OUTPUT_PERCENTILES[at - 1 : at + 1]
        return round(t0 + (t1 - t0) * (u - p0) / (p1 - p0))


class _Conversations:
    """Makes the next request from those before it."""

    def __init__(self, draws: _Draws) -> None:
        self.draws = draws
        self._ids = count()
        self._system = next(self._ids)

    def next(self, before: list[Request], arrival_ms: float) -> Request:
        """An opening, or a follow-up of an earlier request where it fits the longest input."""
        draws = self.draws
        kept, tokens = self._follow_up(before)
        if not MIN_INPUT_TOKENS <= tokens <= MAX_INPUT_TOKENS:
            kept, tokens = (), self._opening()
        own = tuple(next(self._ids) for _ in range(blocks_of(tokens) - max(1, len(kept))))
        return Request(
            id=f"r{len(before)}",
            arrival_ms=arrival_ms,
            input_tokens=tokens,
            output_tokens=draws.output_tokens(),
            hash_ids=(kept or (self._system,)) + own,
        )

    def _opening(self) -> int:
        while True:
            tokens = MIN_INPUT_TOKENS + self.draws.lognormal(OPENING_MEDIAN, OPENING_SIGMA)
            if tokens <= MAX_INPUT_TOKENS:
                return tokens

    def _follow_up(self, before: list[Request]) -> tuple[tuple[int, ...], int]:
        """The hash ids kept of the earlier prompt, and the new prompt's length; ((), 0) for an opening."""
        draws = self.draws
        if not before or draws.uniform() >= FOLLOW_UP_SHARE:
            return (), 0
        back = 1 + int(draws.exponential(min(PARENT_BACK_MEAN, len(before) / 2)))
        parent = before[-1 - (back - 1) % len(before)]
        if draws.uniform() < FORK_SHARE:
            head = round(parent.input_tokens * draws.uniform())
            tokens = head + draws.lognormal(FORK_MEDIAN, FORK_SIGMA)
        else:
            head = parent.input_tokens
            tokens = head + parent.output_tokens + draws.lognormal(MESSAGE_MEDIAN, MESSAGE_SIGMA)
        return parent.hash_ids[: head // BLOCK_TOKENS], tokens
