"""The pytest plugin: fixtures with CXL devices and KV stores, on one testbed per session and spec.

pytest imports this module in every project beside which emu is installed: nothing at its top but pytest itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emu.errors import EmuError
    from emu.layout import KVLayout
    from emu.provision.testbed import Testbed
    from emu.pytest_plugin.testbeds import Testbeds
    from emu.store import KVStore

MEDIA = ("dram", "cxl", "rdma")
LOCAL_DEVICE_SIZE = "64M"
"""Smaller than that of `emu up`: every worker of pytest-xdist has a testbed of its own."""
DRAM_BYTES = 64 << 20
_MARK = (
    "emu(cxl_devices=1, hosts=1, driver=..., profile=..., device_size=...): what the testbed of emu_testbed, "
    "cxl_devices and kv_store shall be; keywords as those of emu.testbed()"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, all with the prefix --emu-."""
    group = parser.getgroup("emu", "emulated CXL and RDMA memory (emu)")
    group.addoption(
        "--emu-driver",
        choices=("local", "qemu", "auto"),
        default="local",
        help="what makes the testbeds of tests whose mark names no driver [default: local]",
    )
    group.addoption(
        "--emu-need",
        default="",
        metavar="CAP[,CAP]",
        help="capabilities (as `emu doctor` names them) that must be there: a skip for their lack is a failure",
    )
    group.addoption(
        "--emu-dir",
        metavar="DIR",
        help="where testbeds' files go [default: /dev/shm, as emu up]; write --emu-dir=DIR, with '=': pytest takes a "
        "path after a blank for one that holds tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known, and refuse capabilities that there are not.

    Raises:
        pytest.UsageError: says the closest name.
    """
    config.addinivalue_line("markers", _MARK)
    if needed := _needed(config):
        from emu.errors import UserError
        from emu.probes import check_names

        try:
            check_names(needed)
        except UserError as error:
            raise pytest.UsageError(f"--emu-need: {error}") from None


def _needed(config: pytest.Config) -> list[str]:
    given: str = config.getoption("--emu-need")
    return [name for name in given.replace(" ", "").split(",") if name]


def require(config: pytest.Config, capability: str) -> None:
    """Skip the test where this machine lacks a capability; fail it where --emu-need names that.

    Args:
        config: pytest's.
        capability: as `emu doctor` names it.
    """
    from emu.probes import probe

    found = probe(capability)
    if not found.ok:
        _lacking(config, capability, f"{found.reason} ({found.remedy})")


def _lacking(config: pytest.Config, capability: str, why: str) -> NoReturn:
    words = f"needs {capability}: {why}"
    if capability in _needed(config):
        _fail(words)
    pytest.skip(words)


def _fail(words: str) -> NoReturn:
    """One line, whatever exception was handled just now."""
    raise pytest.fail.Exception(words, pytrace=False) from None


def _refuse(config: pytest.Config, error: EmuError) -> NoReturn:
    """A lack that has a name is a skip, as --emu-need can forbid it; everything else is a failure."""
    from emu.errors import HostError
    from emu.probes import PROBES

    if isinstance(error, HostError) and error.capability in PROBES:
        _lacking(config, error.capability, str(error))
    _fail(str(error))


@pytest.fixture(scope="session")
def _emu_testbeds(request: pytest.FixtureRequest) -> Iterator[Testbeds]:
    from emu.pytest_plugin.testbeds import Testbeds

    directory: str | None = request.config.getoption("--emu-dir")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    testbeds = Testbeds(worker, None if directory is None else Path(directory))
    try:
        yield testbeds
    finally:
        testbeds.close()


@pytest.fixture
def emu_testbed(request: pytest.FixtureRequest, _emu_testbeds: Testbeds) -> Iterator[Testbed]:
    """The testbed that the test's mark describes: with devices full of zeros, nothing running on its hosts.

    It is made once and given to every test of this process with an equal mark. What a test leaves running on a
    host is ended after it. Devices that existed before (`attach=[...]`) keep their content.
    """
    from emu.errors import EmuError

    try:
        testbed = _emu_testbeds.take(_flags(request))
    except EmuError as error:
        _refuse(request.config, error)
    yield testbed
    _emu_testbeds.give_back(testbed)


def _flags(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of all the test's marks, the nearest first; then the options and the defaults."""
    flags: dict[str, Any] = {}
    for mark in request.node.iter_markers("emu"):
        if mark.args:
            _fail(f"pytest.mark.emu takes keywords only, not {mark.args[0]!r}")
        flags = {**mark.kwargs, **flags}
    flags.setdefault("driver", request.config.getoption("--emu-driver"))
    if "attach" not in flags and "spec_file" not in flags:
        flags.setdefault("cxl_devices", 1)
    if flags["driver"] == "local" and "spec_file" not in flags:
        flags.setdefault("device_size", LOCAL_DEVICE_SIZE)
    return flags


@pytest.fixture
def cxl_devices(emu_testbed: Testbed) -> list[Path]:
    """Paths of the testbed's devices, to be opened and mapped by the test itself."""
    return [Path(path) for path in emu_testbed.devices]


@pytest.fixture
def kv_layout() -> KVLayout:
    """The layout that kv_store opens its device with; define a fixture of this name to give your own.

    BF16 KV rows (1152 B) and index keys (132 B) of two layers, as SAC's.
    """
    from emu.layout import Component, KVLayout

    return KVLayout((Component("kv", 1152, (0, 1)), Component("index", 132, (0, 1))))


@pytest.fixture(params=MEDIA)
def kv_store(request: pytest.FixtureRequest, kv_layout: KVLayout) -> Iterator[KVStore]:
    """An empty store on each medium in turn; for one only: parametrize("kv_store", ["cxl"], indirect=True)."""
    from emu.errors import EmuError
    from emu.registry import open_store
    from emu.store import StoreOptions

    if request.param not in MEDIA:
        _fail(f"kv_store: no medium {request.param!r}, use {', '.join(MEDIA)}")
    url, options = "dram://", StoreOptions(capacity_bytes=DRAM_BYTES)
    if request.param != "dram":
        testbed: Testbed = request.getfixturevalue("emu_testbed")
        options = StoreOptions(coherent=testbed.coherence == "bi")
        url = f"cxl://{testbed.devices[0]}"
        if request.param == "rdma":
            if testbed.node_socket is None:
                pytest.skip(f"a testbed of driver {testbed.driver} without a memory node")
            url = f"rdma://{testbed.node_socket}"
    try:
        store = open_store(url, kv_layout, options)
    except EmuError as error:
        _refuse(request.config, error)
    with store:
        yield store
