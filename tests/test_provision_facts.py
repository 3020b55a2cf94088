"""What lies at a path."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from emu.provision.attached import path_facts

if TYPE_CHECKING:
    from pathlib import Path


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "device"
    file.write_bytes(bytes(4096))
    found = path_facts(file)
    assert (found.kind, found.size_bytes, found.usable) == ("file", 4096, True)
    assert (found.resolved, found.align_bytes) == (str(file.resolve()), mmap.PAGESIZE)
    assert path_facts(tmp_path).kind == "other"
    assert path_facts(tmp_path / "none").kind == "missing"
    assert path_facts(tmp_path / "none" / "x").kind == "missing"
