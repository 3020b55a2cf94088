"""Skips by capability, shared with `emu doctor`; a private home for testbeds."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emu import probes
from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--need", default="", help="capabilities that must be there: their skips become failures"
    )
    parser.addoption(
        "--long", action="store_true", help="run the harnesses in full: 200 kills, 5 minutes"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        probes.check_names(_needed(config))
    except UserError as error:
        raise pytest.UsageError(f"--need: {error}") from None


def _needed(config: pytest.Config) -> list[str]:
    return [name for name in config.getoption("--need").replace(" ", "").split(",") if name]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            finding = probes.probe(name)
            if finding.ok:
                continue
            words = f"needs {name}: {finding.reason} ({finding.remedy})"
            if name in _needed(item.config):
                pytest.fail(words, pytrace=False)
            pytest.skip(words)


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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A private $XDG_STATE_HOME and run directory; whatever a failed test left up is taken down."""
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
