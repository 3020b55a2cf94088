"""Probes: the rows of doctor, and the skips that CI can forbid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from emu import probes
from emu.cli.doctor import command
from emu.errors import UserError
from emu.probes import PROBES, Finding


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything but a second NUMA node."""
    monkeypatch.setattr(
        probes, "probe", lambda name: Finding(name, name != "numa2", "seen", "costs", "mend it")
    )


def test_every_probe_gives_an_answer_on_this_machine() -> None:
    for name in PROBES:
        finding = probes.probe(name)
        assert finding.capability == name
        assert finding.reason
        assert "the probe failed" not in finding.reason
        assert finding.ok == (finding.cost == "" and finding.remedy == "")
    assert probes.probe("native").ok
    assert probes.probe("python").ok
    assert not probes.probe("kvm").ok, "an openable /dev/kvm proves nothing"


def test_json_rows(findings: None) -> None:
    done = CliRunner().invoke(command, ["--json"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    assert rows["schema_version"] == 1
    assert [row["capability"] for row in rows["findings"]] == list(PROBES)
    assert all(
        set(row) == {"capability", "ok", "reason", "cost", "remedy"} for row in rows["findings"]
    )


def test_need_decides_the_exit_status(findings: None) -> None:
    assert CliRunner().invoke(command, []).exit_code == 0
    assert CliRunner().invoke(command, ["--need", "shm,numa"]).exit_code == 0
    done = CliRunner().invoke(command, ["--need", "shm, numa2"])
    assert done.exit_code == 1
    assert "needed but missing: numa2" in done.stderr
    assert "mend it" in done.stdout


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'numa"):
        probes.probe("numa3")


def test_a_probe_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[bool, str]:
        raise OSError("odd machine")

    entry = PROBES["numa2"]
    monkeypatch.setitem(PROBES, "numa2", type(entry)(broken, entry.cost, entry.remedy))
    probes.probe.cache_clear()
    finding = probes.probe("numa2")
    probes.probe.cache_clear()
    assert (finding.ok, finding.reason) == (False, "the probe failed: OSError: odd machine")


@pytest.mark.parametrize(
    ("options", "outcome", "status"),
    [
        ([], "1 passed, 1 skipped", 0),
        (["--emu-need", "kvm"], "1 passed, 1 error", 1),
        (["--emu-need", "kvmm"], "did you mean 'kvm'?", 4),
    ],
)
def test_a_skip_that_ci_forbids_is_a_failure(
    tmp_path: Path, options: list[str], outcome: str, status: int
) -> None:
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = needs(*capabilities): x\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        '@pytest.mark.needs("kvm")\ndef test_one(): pass\n'
        '@pytest.mark.needs("python")\ndef test_two(): pass\n'
    )
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "emu.pytest_plugin",
    ]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*argv, *options], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert outcome in done.stdout + done.stderr
    assert done.returncode == status
    if "skipped" in outcome:
        assert "needs kvm: " in done.stdout
