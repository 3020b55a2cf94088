"""What lies at a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.provision import facts
from emu.provision.facts import path_facts

if TYPE_CHECKING:
    from pathlib import Path


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "device"
    file.write_bytes(bytes(4096))
    found = file.stat()
    same = ("file", found.st_dev, found.st_ino)
    assert path_facts(file) == facts.PathFacts("file", 4096, usable=True, identity=same)
    assert path_facts(tmp_path).kind == "other"
    assert path_facts(tmp_path / "none").kind == "missing"
    assert path_facts(tmp_path / "none" / "x").kind == "missing"
