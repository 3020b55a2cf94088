"""Your code on a device itself: records one after the other in a CXL device's memory.

python3 device_log.py append PATH TEXT
python3 device_log.py print PATH
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import zlib

HEAD = struct.Struct("<II")  # length and CRC-32 of a record; zeros end the log
ALIGN = 64  # records begin on a line of their own


class DeviceLog:
    """A log in the memory of a device: a file, or /dev/daxN.M.

    Args:
        path: the device.
        size_bytes: of it; a devdax device does not tell by seeking.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)

    def records(self) -> list[bytes]:
        """All whole records; what was torn in the middle ends the log."""
        return [self._memory[start:end] for start, end in self._places()]

    def append(self, record: bytes) -> None:
        """Add a record; its head is written last, so that a reader sees all of it or nothing."""
        end = max((end for _, end in self._places()), default=0)
        start = -(-end // ALIGN) * ALIGN
        self._memory[start + HEAD.size : start + HEAD.size + len(record)] = record
        self._memory[start : start + HEAD.size] = HEAD.pack(len(record), zlib.crc32(record))

    def _places(self) -> list[tuple[int, int]]:
        found, start = [], 0
        while start + HEAD.size <= len(self._memory):
            length, crc = HEAD.unpack_from(self._memory, start)
            first, end = start + HEAD.size, start + HEAD.size + length
            if not length or zlib.crc32(self._memory[first:end]) != crc:
                break
            found.append((first, end))
            start = -(-end // ALIGN) * ALIGN
        return found


if __name__ == "__main__":
    log = DeviceLog(sys.argv[2], int(os.environ["DEVICE_BYTES"]))
    if sys.argv[1] == "append":
        log.append(sys.argv[3].encode())
    print(b"\n".join(log.records()).decode())
