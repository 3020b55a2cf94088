"""What `import emu` gives to somebody who explores it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
import pytest

import emu
from emu.errors import EmuError
from emu.store import check_array

if TYPE_CHECKING:
    from conftest import Home


def test_every_public_name_is_listed_and_there_and_loads_late() -> None:
    assert dir(emu) == sorted([*emu.__all__, "__version__"])
    for name in dir(emu):
        assert getattr(emu, name) is not None
    assert emu.__version__ == version("sac-emu")
    with pytest.raises(AttributeError, match="no attribute 'open_stor'"):
        _ = emu.open_stor  # type: ignore[attr-defined]
    check = "import sys, emu; dir(emu); emu.__version__; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_testbed_shows_what_it_is(home: Home) -> None:
    with emu.testbed(2, name="bed", directory=home.run, device_size="1M", rdma="off") as bed:
        assert repr(bed) == f"<Testbed 'bed': local, 1 hosts, 2 devices, {home.run}/bed>"


@pytest.mark.parametrize(
    "array", [[1], np.zeros(2, np.int8), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]]
)
def test_a_wrong_array_is_an_error_of_ours_and_a_value_error(array: object) -> None:
    with pytest.raises(EmuError, match=r"rows: got .* wanted uint8 \[4\]") as refused:
        check_array("rows", array, np.uint8, (4,))
    assert isinstance(refused.value, ValueError)


def test_a_wrong_layout_is_one_too() -> None:
    for row_bytes, layers in ((1151, (0,)), (0, (0,)), (1152, ())):
        with pytest.raises(EmuError) as refused:
            emu.KVLayout((emu.Component("kv", row_bytes, layers),), block_tokens=1)
        assert isinstance(refused.value, ValueError)
