"""The plan: a pure function, held by a golden file; every refusal with its numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from emu.errors import EmuError, HostError, TestbedError, UserError
from emu.provision.facts import Facts
from emu.provision.plan import make_plan
from emu.provision.spec import DeviceSpec, Flags, TestbedSpec, make_spec
from emu.provision.steps import step_from_json, step_to_json

GOLDEN = Path(__file__).with_name("golden") / "plan.json"
MIB = 1 << 20
FACTS = Facts(
    python="/usr/bin/python3",
    root="/dev/shm/emu-1000",
    root_is_default=True,
    root_exists=False,
    run_dir_exists=False,
    memory_backed=True,
    file_system="/dev/shm",
    fs_free_bytes=8 << 30,
    free_memory_bytes=8 << 30,
    cgroup_free_bytes=None,
    page_bytes=4096,
    testbeds=frozenset(),
    paths={},
    guests=HostError("there is no guest kernel", capability="guest_kernel", remedy="get one"),
)


def spec(**flags: object) -> TestbedSpec:
    return make_spec(Flags(**{"cxl_devices": 4, **flags}))  # type: ignore[arg-type]


def test_the_plan_is_the_golden_one() -> None:
    plan = make_plan(spec(cxl_devices=2, hosts=2, name="lab"), FACTS)
    assert plan.to_json() == json.loads(GOLDEN.read_text(), object_hook=_tuples)


def _tuples(values: dict[str, object]) -> dict[str, object]:
    """JSON has no tuples; the plan has."""
    return {
        key: tuple(value) if isinstance(value, list) and key != "steps" else value
        for key, value in values.items()
    }


def test_every_step_survives_the_record() -> None:
    for step in make_plan(spec(), FACTS).steps:
        assert step_from_json(json.loads(json.dumps(step_to_json(step)))) == step


def test_without_a_node_there_is_no_process_and_no_socket() -> None:
    plan = make_plan(spec(rdma="off"), FACTS)
    assert plan.node_socket is None
    assert plan.memory_bytes == 1024 * MIB
    assert "memory-node" not in json.dumps(plan.to_json())


def test_the_node_takes_one_device_size_and_its_process() -> None:
    assert make_plan(spec(), FACTS).memory_bytes == (1024 + 256 + 64) * MIB
    sized = replace(spec(), node_bytes=512 * MIB)
    assert make_plan(sized, FACTS).memory_bytes == (1024 + 512 + 64) * MIB


def test_devices_on_a_disk_take_no_memory() -> None:
    plan = make_plan(spec(rdma="off"), replace(FACTS, memory_backed=False, free_memory_bytes=MIB))
    assert plan.memory_bytes == 0


def test_auto_says_its_choice_and_the_reason() -> None:
    plan = make_plan(spec(), FACTS)
    assert (plan.driver, plan.reason) == ("local", "there is no guest kernel (get one)")
    assert make_plan(spec(driver="local"), FACTS).driver == "local"


def test_qemu_is_one_clear_error() -> None:
    with pytest.raises(HostError, match="there is no guest kernel") as caught:
        make_plan(spec(driver="qemu"), FACTS)
    assert caught.value.capability == "guest_kernel"


REFUSALS: list[tuple[dict[str, object], dict[str, object], type[EmuError], list[str]]] = [
    (
        {"fs_free_bytes": 64 * MIB},
        {},
        HostError,
        ["4 devices of 1 GiB in all do not fit /dev/shm: 64 MiB free", "--dir", "--shm-size"],
    ),
    (
        {"free_memory_bytes": 1200 * MIB},
        {},
        HostError,
        ["1.3 GiB of memory, 1.2 GiB of memory are free", "--rdma off", "--device-size"],
    ),
    (
        {"cgroup_free_bytes": 512 * MIB},
        {},
        HostError,
        ["512 MiB are left below the cgroup's memory limit"],
    ),
    (
        {"testbeds": frozenset({"default"})},
        {},
        TestbedError,
        ["exists already", "emu down default"],
    ),
    (
        {"run_dir_exists": True},
        {},
        TestbedError,
        ["/dev/shm/emu-1000/default exists", "move it away"],
    ),
    (
        {"root_is_default": False, "root": "/nowhere"},
        {},
        UserError,
        ["/nowhere is not a directory", "--dir"],
    ),
    ({"root": "/a:b"}, {}, UserError, ["':' separates devices"]),
    ({"root": "/" + "x" * 100}, {}, UserError, ["too long for a socket", "--rdma off"]),
    (
        {"page_bytes": 1 << 16},
        {"device_size": "1028K"},
        UserError,
        ["multiple of the page size (65536)"],
    ),
    (
        {},
        {"device_size": "1048577"},
        UserError,
        ["1048577 bytes", "multiple of the page size (4096)"],
    ),
]


@pytest.mark.parametrize(("facts", "flags", "error", "words"), REFUSALS)
def test_what_does_not_fit_is_refused_with_the_numbers(
    facts: dict[str, object], flags: dict[str, object], error: type[EmuError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        make_plan(spec(**flags), replace(FACTS, **facts))  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"topology": "switch"},
        {"interleave": 2},
        {"devices": (DeviceSpec(1, MIB, None, "persistent"),)},
    ],
)
def test_what_the_local_driver_lacks_is_refused_not_ignored(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="the local driver has no"):
        make_plan(replace(spec(), **change), FACTS)  # type: ignore[arg-type]
