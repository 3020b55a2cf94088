"""One reader for every TOML file: what nobody would write on purpose is one error of ours, soon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from emu.errors import UserError
from emu.provision.spec import Flags, make_spec
from emu.timing.profile_file import load_system
from emu.toml_file import MAX_TOML_BYTES, read_toml

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = {
    "dotted key": b"a." * 50_000 + b"b=1",
    "dotted table": b"[" + b"a." * 50_000 + b"b]",
    "nested arrays": b"a=" + b"[" * 5_000,
    "nested tables": b"a=" + b"{a=" * 5_000,
    "huge number": b"[testbed]\nhosts=" + b"9" * 10_000,
    "too large": b"#" * (MAX_TOML_BYTES + 1),
    "not text": bytes(range(256)),
    "torn": b"[testbed",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_one_error_for_every_reader(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(text)
    for read in (
        lambda: read_toml(file, "spec"),
        lambda: make_spec(Flags(), file),
        lambda: make_spec(Flags(cxl_devices=1, profile=str(file))),
        lambda: load_system(str(file)),
    ):
        with pytest.raises(UserError, match=r"x\.toml"):
            read()


def test_an_ordinary_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[a.b]\nc = 1.5\n")
    assert read_toml(file, "spec") == {"a": {"b": {"c": 1.5}}}


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a regular file"):
        read_toml(tmp_path, "spec")
