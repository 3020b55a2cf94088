"""The example project for CI: its tests pass, and its workflow says what a hosted runner can do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from emu.probes import PROBES

if TYPE_CHECKING:
    from conftest import Home

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "ci"
WORKFLOW: dict[str, Any] = yaml.safe_load((EXAMPLE / ".github/workflows/test.yml").read_text())
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["test"]["steps"]


def run_tests(folder: Path, home: Home, *options: str) -> subprocess.CompletedProcess[str]:
    """As `./run-tests`, but with this interpreter in place of a fresh venv."""
    copy = shutil.copytree(EXAMPLE, folder / "project", ignore=shutil.ignore_patterns(".venv"))
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *options]
    return subprocess.run(
        [*argv, f"--emu-dir={home.run}"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.needs("shm")
@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_the_examples_tests_pass_without_guests(
    tmp_path: Path, home: Home, options: list[str]
) -> None:
    done = run_tests(tmp_path, home, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed, 1 skipped" in done.stdout
    assert "needs guest_kernel" in done.stdout
    assert list(home.run.iterdir()) == []


@pytest.mark.slow
@pytest.mark.needs("shm", "qemu", "cxl_type3", "guest_kernel")
def test_the_workflows_test_command_passes_with_guests(tmp_path: Path, guest_home: Home) -> None:
    command = STEPS[-1]["run"].split()
    assert command[:3] == ["python", "-m", "pytest"]
    done = run_tests(tmp_path, guest_home, *command[3:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 passed" in done.stdout
    assert list(guest_home.run.iterdir()) == []


def test_the_workflow_is_for_a_hosted_runner_and_keeps_the_kernel() -> None:
    assert WORKFLOW["jobs"]["test"]["runs-on"] == "ubuntu-24.04"
    cached = [step["with"]["path"] for step in STEPS if "actions/cache@" in step.get("uses", "")]
    script = (ROOT / "scripts" / "guest-image").read_text()
    assert cached == ["~/.cache/emu/guest"]
    assert "cache=${XDG_CACHE_HOME:-$HOME/.cache}/emu/guest" in script
    names = [step.get("name") for step in STEPS]
    assert names.index("Guest kernel from the cache") < names.index(
        "QEMU, and the guest kernel where the cache had none"
    )
    needed = re.search(r"--emu-need (\S+)", STEPS[-1]["run"])
    assert needed
    assert set(needed[1].split(",")) <= set(PROBES)


def test_every_command_of_the_workflow_and_the_script_is_there() -> None:
    lines = [line for step in STEPS for line in step.get("run", "").splitlines()]
    assert len(lines) >= 6
    for line in lines:
        parsed = subprocess.run(["bash", "-n", "-c", line], capture_output=True, check=False)
        assert parsed.returncode == 0, line
        program = line.removeprefix("sudo ").split()[0]
        if program.startswith("emu"):
            assert (Path(sys.executable).parent / program).exists(), program
    script = EXAMPLE / "run-tests"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
