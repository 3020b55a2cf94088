"""What SAC's studies share."""

from __future__ import annotations

from dataclasses import replace

from emu.study.result import PREDICTED, Row

K = 1024
FIG11_CONCURRENCY = (16, 64, 128, 192)
NAMES = {"cxl": "SAC (CXL)", "rdma": "RDMA, full prefetch", "dram": "local DRAM", "hbm": "HBM only"}


def with_reason(row: Row, text: str) -> Row:
    """The row with the reason, where it is missed."""
    return replace(row, reason=text) if row.met is False else row


def in_words(
    quantity: str, value: float, limits: tuple[float, float], interval: tuple[float, float]
) -> Row:
    """A ratio of which the paper says in words only where it lies."""
    low, high = interval
    return Row(quantity, value, "x", None, 0.0, PREDICTED, low, high, limits)
