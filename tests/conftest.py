"""Skips by capability, shared with `emu doctor`; a private home for testbeds."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emu.pytest_plugin import require

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            require(item.config, name)


@dataclass(frozen=True)
class Home:
    """Where one test's testbeds live.

    Attributes:
        state: $XDG_STATE_HOME.
        run: for --dir; in memory, as the default is.
    """

    state: Path
    run: Path


@pytest.fixture
def home(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Home]:
    """A private $XDG_STATE_HOME and run directory; whatever a failed test left up is taken down.

    Its cache holds no guest kernel, so that the driver is local unless a test says otherwise.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    with private_home(tmp_path, monkeypatch) as made:
        yield made


@contextmanager
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A private $XDG_STATE_HOME and run directory; with the user's own cache, so that guests can be had."""
    from emu.provision.runner import Runner
    from emu.provision.state import StateDirectory

    monkeypatch.delenv("EMU_TESTBED", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shm = Path("/dev/shm")
    base = shm if os.access(shm, os.W_OK) else tmp_path
    run = Path(tempfile.mkdtemp(prefix="emu-test-", dir=base))
    try:
        yield Home(tmp_path / "state", run)
    finally:
        state = StateDirectory(tmp_path / "state" / "emu" / "testbeds")
        for name in state.names():
            Runner(state).down(name)
        shutil.rmtree(run)


@pytest.fixture
def guest_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """As home, for a test that boots guests."""
    with private_home(tmp_path, monkeypatch) as made:
        yield made
