"""What commands need to know of a guest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guest:
    """One guest.

    Attributes:
        host: its name in the testbed.
        directory: where its sockets are.
        ports: of its agent: sessions at a time.
        devices: paths of the pool's regions inside.
        device_bytes: sizes of them.
    """

    host: str
    directory: str
    ports: int
    devices: tuple[str, ...]
    device_bytes: tuple[int, ...]
