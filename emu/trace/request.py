"""What a trace is made of."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 512
"""Prompt tokens that one hash id stands for, as in Mooncake's traces."""

MAX_TOKENS = 10_000_000
"""The longest prompt or output that a trace may ask for; beyond it a number is taken for damage."""

PRIVATE_IDS = 1 << 64
"""Ids from here on are given by the reader to blocks that no other request shares; a file's own ids are below."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        id: "r0", "r1", ..: its place among the good lines of its file.
        arrival_ms: milliseconds from the start of the trace, >= 0.
        input_tokens: prompt length, >= 1.
        output_tokens: tokens to generate, >= 1.
        hash_ids: one id per 512-token block of the prompt, the last block perhaps partial. Two requests whose
            first n ids are equal have the same first n blocks.
    """

    id: str
    arrival_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that could not be read.

    Attributes:
        file: the path as the user gave it.
        line: 1-based line number.
        reason: what is wrong with it.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file.

    Attributes:
        path: the path as the user gave it.
        format: "mooncake", "azure" or "emu".
        requests: by arrival, those of equal arrival in file order.
        skipped: the bad lines, in file order; empty unless they were to be skipped.
        sha256: of the file, hexadecimal.
    """

    path: str
    format: str
    requests: tuple[Request, ...]
    skipped: tuple[BadLine, ...] = ()
    sha256: str = ""


def blocks_of(tokens: int) -> int:
    """Blocks of 512 tokens, the last perhaps partial."""
    return -(-tokens // BLOCK_TOKENS)
