"""The plan of `emu run`: what the options leave open, and what the figures carry of it."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from run_command import wait_for

from emu import __version__
from emu.cli.run import command
from emu.errors import TestbedError, UserError
from emu.provision.condition import inspect
from emu.provision.spec import MAX_DEVICES
from emu.provision.testbed import testbed
from emu.sac import command as run_module
from emu.sac.command import run_command
from emu.sac.report import footer, plan_lines
from emu.sac.run_plan import DEFAULT_GPUS, RunOptions, make_plan
from emu.timing.profile_file import load_system, system_names

if TYPE_CHECKING:
    from conftest import Home


def options(text: str, monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    """What click makes of a command line."""
    seen: list[RunOptions] = []
    monkeypatch.setattr(run_module, "run_command", seen.append)
    done = CliRunner().invoke(command, text.split())
    assert done.exit_code == 0, done.output
    return seen[0]


def bed_of(devices: int, profile: str = "sac-server") -> Any:
    record = SimpleNamespace(devices=[SimpleNamespace(size_bytes=64 << 20)] * devices)
    return SimpleNamespace(name="bed", profile=profile, devices=("",) * devices, record=record)


@pytest.mark.parametrize("name", system_names())
def test_counts_are_the_profile_s_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_system(name)
    plan = make_plan(options(f"--profile {name}", monkeypatch), None)
    assert plan.spec.gpus == min(DEFAULT_GPUS, profile.gpus.value)
    assert plan.spec.devices == min(profile.devices.value, MAX_DEVICES)
    assert plan.notes == ()
    more = int(profile.gpus.value) + 1
    asked = make_plan(options(f"--profile {name} --gpus {more}", monkeypatch), None)
    assert asked.spec.gpus == more
    (note,) = asked.notes
    assert note.startswith(f"{more} GPUs are modelled, {name} has {more - 1}")


def test_a_testbed_gives_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = options("", monkeypatch)
    assert make_plan(plain, bed_of(1)).spec.devices == 1
    plan = make_plan(plain, bed_of(3))
    assert plan.spec.devices == 3
    assert plan.notes[0].startswith("3 devices are modelled, sac-server has 2")
    assert make_plan(plain, bed_of(1, "laptop")).spec.gpus == 1
    with pytest.raises(UserError, match="testbed 'bed' has 3"):
        make_plan(options("--devices 4", monkeypatch), bed_of(3))


CHANGES = (
    "--model small",
    "--kv-dtype fp8",
    "--top-k 32",
    "--hot-buffer 256",
    "--gpus 2",
    "--devices 1",
    "--placement single",
    "--round 1",
    "--concurrency 4",
    "--arrivals trace",
    "--context 1024",
    "--output-tokens 8",
    "--requests 4",
    "--seed 1",
    "--hbm-bytes 1G",
    "--time off",
    "--profile laptop",
)


@pytest.mark.parametrize("change", CHANGES)
def test_runs_that_differ_can_be_told_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, changed = (make_plan(options(o, monkeypatch), None).facts() for o in ("", change))
    assert json.loads(json.dumps(plain)) == plain
    assert plain != changed


def test_the_trace_is_told_by_name_and_digest_and_no_path_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    profile = tmp_path / "mine.toml"
    profile.write_text('base = "sac-server"\ndescription = "mine"\n')
    seen = []
    for number, text in enumerate((line, line * 2, line)):
        trace = tmp_path / str(number) / "trace.jsonl"
        trace.parent.mkdir()
        trace.write_text(text)
        chosen = options(f"--trace {trace} --requests 1 --profile {profile}", monkeypatch)
        seen.append(make_plan(chosen, None).facts())
    assert seen[0] == seen[2] != seen[1]
    assert seen[0]["trace"]["name"] == "trace.jsonl"
    assert len(seen[0]["trace"]["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(seen)
    assert (seen[0]["profile"], seen[0]["emu_version"]) == ("mine", __version__)


def test_a_plan_is_read_by_people_with_every_size_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(options("--requests 2 --backend cxl,hbm --gpus 9", monkeypatch), None)
    lines = plan_lines(plan.to_json(), None)
    assert (
        lines[0]
        == "cxl, hbm on a testbed made for the run, model time of sac-server (mode virtual)"
    )
    text = "\n".join(lines)
    assert "top-k 64, hot buffer 128" in text
    assert "16 output tokens" in text
    assert lines[-1].startswith("note: 9 GPUs")
    assert "9 GPUs, 2 devices" in text
    assert not text.startswith("{")


@pytest.mark.parametrize("damage", ["device", "node"])
def test_a_damaged_testbed_is_refused_before_anything_is_computed(
    damage: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is missing, and whether the run would use it or not."""
    chosen = options("--backend cxl --requests 1", monkeypatch)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(home.state))
    monkeypatch.setattr(run_module, "execute", lambda *_: pytest.fail("it ran"))
    node = "node" if damage == "node" else "off"
    with testbed(1, name="bed", directory=home.run, device_size="1M", rdma=node) as bed:
        if damage == "device":
            Path(bed.devices[0]).unlink()
        else:
            process = bed.record.processes[0].process
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: inspect(bed.state, "bed").state == "damaged")
        with pytest.raises(TestbedError, match=r"'bed' is damaged: missing .*emu down bed"):
            run_command(replace(chosen, name="bed"))


def test_the_footer_says_one_length_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(options("", monkeypatch), None)
    facts = plan.facts()
    assert ", 16 output tokens (" in footer([{"spec": facts}])[0]
    facts["output_tokens_range"] = [3, 16]
    assert ", 3 to 16 output tokens (" in footer([{"spec": facts}])[0]
    single = replace(plan.spec, gpus=1, devices=1)
    facts = replace(plan, spec=single).facts()
    assert "1 GPU, 1 device," in footer([{"spec": facts}])[1]
