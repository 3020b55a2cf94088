"""Request traces: reading, shaping, making and describing them, and the prompts they stand for."""

from emu.trace.generate import GenerateOptions, generate
from emu.trace.prompts import block_hashes, prompt_tokens
from emu.trace.read import read_trace
from emu.trace.request import BLOCK_TOKENS, BadLine, Request, Trace
from emu.trace.shape import shape
from emu.trace.write import write_trace

__all__ = [
    "BLOCK_TOKENS",
    "BadLine",
    "GenerateOptions",
    "Request",
    "Trace",
    "block_hashes",
    "generate",
    "prompt_tokens",
    "read_trace",
    "shape",
    "write_trace",
]
