"""Devices that exist already: what is refused, what is never touched, and memory of a NUMA node."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from run_command import emu, one_line
from test_provision_plan import FACTS

import emu as emu_package
from emu import _native, numa
from emu.errors import EmuError, HostError, TestbedError, UserError
from emu.provision import attached, device_files
from emu.provision.attached import NodeFacts, PathFacts, path_facts
from emu.provision.facts import gather_facts
from emu.provision.plan import make_plan
from emu.provision.runner import Runner
from emu.provision.spec import Flags, TestbedSpec, make_spec
from emu.provision.state import StateDirectory
from emu.provision.steps import AllocateDevice, AttachDevice, ClearDevice

if TYPE_CHECKING:
    from conftest import Home

    from emu.provision.facts import Facts
    from emu.provision.plan import Plan

MIB = 1 << 20
DAX = "/dev/dax0.0"
GOOD = PathFacts("devdax", 512 * MIB, True, 2 * MIB, DAX, "char 252:0")


def spec(*attach: str, **flags: object) -> TestbedSpec:
    return make_spec(Flags(attach=attach, rdma="off", **flags))  # type: ignore[arg-type]


def facts(found: PathFacts = GOOD, **nodes: NodeFacts) -> Facts:
    return replace(FACTS, paths={DAX: found}, nodes={int(n[1:]): f for n, f in nodes.items()})


def file_device(folder: Path, size_bytes: int = 2 * MIB, name: str = "device") -> Path:
    path = folder / name
    path.write_bytes(bytes(size_bytes))
    return path


def plan_for(home: Home, *attach: object, name: str = "lab", **flags: object) -> Plan:
    wanted = spec(*map(str, attach), name=name, **flags)
    return make_plan(wanted, gather_facts(wanted, home.run, StateDirectory().testbeds()))


# -- the spec ---------------------------------------------------------------------------------------------
def test_flags_and_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "testbed.toml"
    file.write_text(
        f'[[device]]\nattach = "{DAX}"\n[[device]]\nattach = "numa:1"\n[rdma]\nmode = "off"\n'
    )
    assert make_spec(Flags(), file) == spec(DAX, "numa:1")
    both = make_spec(Flags(attach=["numa:0"], device_size="64M"), file)
    assert [d.attached for d in both.devices] == [DAX, "numa:1", "numa:0"]
    assert [d.size_bytes for d in both.devices] == [None, 64 * MIB, 64 * MIB]


def test_new_devices_and_attached_ones_stand_side_by_side() -> None:
    found = spec(DAX, cxl_devices=2)
    assert [d.attached for d in found.devices] == ["", "", DAX]
    assert [d.serial for d in found.devices] == [1, 2, 3]


def test_a_path_on_the_command_line_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec("pool").devices[0].path == str(tmp_path / "pool")


@pytest.mark.parametrize("text", ["numa:", "numa:x", "numa:-1", "numa:1:2", "numa:99999"])
def test_what_is_no_node_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--attach: .* is no NUMA node"):
        spec(text)


def test_overwrite_without_an_existing_device_is_refused() -> None:
    with pytest.raises(UserError, match="--overwrite, but no existing device"):
        spec("numa:0", overwrite=True)


# -- the plan ---------------------------------------------------------------------------------------------
def test_a_devdax_device_is_taken_whole_and_nothing_is_made_of_it() -> None:
    plan = make_plan(spec(DAX), facts())
    assert (plan.driver, plan.reason) == ("local", "attached devices are used as they are")
    assert (plan.devices[0].path, plan.devices[0].size_bytes) == (DAX, 512 * MIB)
    assert [s for s in plan.steps if getattr(s, "path", "") == DAX] == [AttachDevice(DAX, False)]
    assert plan.memory_bytes == 0


def test_memory_of_a_node_is_a_file_bound_to_it() -> None:
    plan = make_plan(
        spec("numa:1", device_size="64M"), facts(n0=NodeFacts(0), n1=NodeFacts(64 * MIB))
    )
    path = f"{plan.run_dir}/cxl0"
    assert AllocateDevice(path, 64 * MIB, 1) in plan.steps
    assert (plan.devices[0].existing, plan.devices[0].numa_node) == (False, 1)
    assert plan.memory_bytes == 64 * MIB


def test_overwriting_is_a_step_only_where_there_is_something() -> None:
    assert not any(
        isinstance(s, ClearDevice) for s in make_plan(spec(DAX, overwrite=True), facts()).steps
    )
    found = facts(replace(GOOD, foreign="foreign data"))
    steps = make_plan(spec(DAX, overwrite=True), found).steps
    assert [s for s in steps if isinstance(s, ClearDevice)] == [ClearDevice(DAX, 512 * MIB)]
    assert isinstance(steps[-1], ClearDevice), "when all the rest has succeeded"


def test_the_qemu_driver_makes_its_own_devices() -> None:
    with pytest.raises(HostError, match="there is no guest kernel"):
        make_plan(spec(DAX, driver="qemu"), facts())
    from emu.provision.guest_plan import refuse_what_qemu_lacks

    for target in (DAX, "numa:1"):
        with pytest.raises(UserError, match=f"{target} exists already, the qemu driver makes"):
            refuse_what_qemu_lacks(spec(target))


PATH_REFUSALS = [
    (PathFacts("missing"), UserError, ["does not exist", "/dev/daxN.M"]),
    (PathFacts("hidden"), HostError, ["not readable and writable", "chown"]),
    (PathFacts("other"), UserError, ["neither a file nor a devdax"]),
    (replace(GOOD, usable=False), HostError, ["not readable and writable", f'"$USER" {DAX}']),
    (replace(GOOD, folder_writable=False), HostError, ["directory beside it", "as root"]),
    (replace(GOOD, holder="b"), TestbedError, ["in use by testbed 'b'", "`emu down b`"]),
    (replace(GOOD, foreign="foreign data"), UserError, ["holds foreign data", "--overwrite"]),
    (replace(GOOD, size_bytes=3 * MIB), UserError, ["3145728 bytes", "multiple of 2 MiB"]),
    (replace(GOOD, size_bytes=0), UserError, ["0 bytes", "at least 1M"]),
]


@pytest.mark.parametrize(("found", "error", "words"), PATH_REFUSALS)
def test_an_existing_device_that_cannot_be_used_is_refused(
    found: PathFacts, error: type[EmuError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        make_plan(spec(DAX), facts(found))
    for word in [DAX, *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_size_that_is_not_the_devices_is_refused() -> None:
    wanted = spec(DAX)
    half = replace(wanted.devices[0], size_bytes=256 * MIB)
    with pytest.raises(UserError, match=r"has 512 MiB, not 256 MiB .*used whole"):
        make_plan(replace(wanted, devices=(half,)), facts())
    whole = replace(half, size_bytes=512 * MIB)
    assert make_plan(replace(wanted, devices=(whole,)), facts()).devices[0].size_bytes == 512 * MIB


def test_two_names_of_one_device_are_refused() -> None:
    link = "/dev/pool"
    found = replace(FACTS, paths={DAX: GOOD, link: GOOD})
    with pytest.raises(UserError, match=f"{DAX} and {link} are one device"):
        make_plan(spec(DAX, link), found)


NODE_REFUSALS = [
    ({}, {}, HostError, ["numa:1", "knows no NUMA"]),
    ({"n0": NodeFacts(1 << 40)}, {}, UserError, ["no NUMA node 1", "numa:0"]),
    (
        {"n0": NodeFacts(1 << 40), "n1": NodeFacts(1 << 40, allowed=False)},
        {},
        HostError,
        ["outside this process's cpuset", "use one of: numa:0;"],
    ),
    (
        {"n1": NodeFacts(511 * MIB)},
        {},
        HostError,
        ["node 1 has 511 MiB free, not 512 MiB", "--device-size"],
    ),
    ({"n1": NodeFacts(1 << 40)}, {"memory_backed": False}, UserError, ["lie on a disk", "tmpfs"]),
]


@pytest.mark.parametrize(("nodes", "change", "error", "words"), NODE_REFUSALS)
def test_a_node_that_cannot_serve_is_refused(
    nodes: dict[str, NodeFacts], change: dict[str, object], error: type[EmuError], words: list[str]
) -> None:
    found = replace(facts(**nodes), **change)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        make_plan(spec("numa:1", "numa:1"), found)
    for word in words:
        assert word in str(caught.value)


def test_a_size_off_the_page_is_refused_for_a_node() -> None:
    with pytest.raises(UserError, match="multiple of the page size"):
        make_plan(spec("numa:1", device_size="1048577"), facts(n1=NodeFacts(1 << 40)))


# -- the facts --------------------------------------------------------------------------------------------
def test_what_a_device_holds_is_told(home: Home, tmp_path: Path) -> None:
    empty = file_device(tmp_path)
    assert path_facts(empty).foreign == ""
    layout = emu_package.KVLayout((emu_package.Component("kv", 64, layers=(0,)),))
    with emu_package.open_store(f"cxl://{empty}", layout):
        pass
    assert path_facts(empty).foreign == "", "a pool of ours"
    assert path_facts(empty).has_directory
    for offset, words in (
        (0, "foreign data beginning 45"),
        (65600, "foreign data at offset 65600"),
    ):
        other = file_device(tmp_path, name=f"at{offset}")
        with other.open("r+b") as file:
            file.seek(offset)
            file.write(b"EXT4")
        assert words in path_facts(other).foreign
    with empty.open("r+b") as file:
        file.seek(20)
        file.write(b"x")
    assert "damaged pool header" in path_facts(empty).foreign


def test_a_device_in_use_is_known_by_any_of_its_names(tmp_path: Path) -> None:
    device = file_device(tmp_path)
    link, twin = tmp_path / "link", tmp_path / "twin"
    link.symlink_to(device)
    os.link(device, twin)
    holders = attached.identities({"b": [str(device)], "c": [str(tmp_path / "gone")]})
    for path in (device, link, twin):
        assert path_facts(path, holders).holder == "b"
    assert path_facts(file_device(tmp_path, name="free"), holders).holder == ""


def test_free_memory_of_a_node_counts_free_pages_and_half_of_the_clean_ones(tmp_path: Path) -> None:
    node = tmp_path / "node3"
    node.mkdir()
    lines = {"MemFree": 100, "Active(file)": 30, "Inactive(file)": 10, "SReclaimable": 4}
    (node / "meminfo").write_text("".join(f"Node 3 {k}:   {v} kB\n" for k, v in lines.items()))
    assert attached.node_free_bytes(3, tmp_path) == 122 << 10


# -- what up and down do ----------------------------------------------------------------------------------
def test_an_attached_file_keeps_its_bytes_its_size_and_its_place(
    home: Home, tmp_path: Path
) -> None:
    device = file_device(tmp_path)
    before = device.stat()
    runner = Runner(StateDirectory())
    record = runner.up(plan_for(home, device))
    assert record.devices[0].path == str(device)
    layout = emu_package.KVLayout((emu_package.Component("kv", 64, layers=(0,)),))
    with emu_package.open_store(f"cxl://{device}", layout) as store:
        store.put(["key"], [{"kv": np.full((1, 100, 64), 7, np.uint8)}])
        written = device.read_bytes()
    assert runner.down("lab").left == []
    after = device.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert device.read_bytes() == written, "down left the content alone"
    assert list(tmp_path.glob("device.*")) == [], "the directory that stores made is gone"
    assert list(home.run.iterdir()) == []


def test_a_directory_that_was_there_before_stays_with_its_pool(home: Home, tmp_path: Path) -> None:
    device = file_device(tmp_path)
    url = f"cxl://{device}"
    layout = emu_package.KVLayout((emu_package.Component("kv", 64, layers=(0,)),))
    rows = np.full((1, 64, 64), 9, np.uint8)
    with emu_package.open_store(url, layout) as store:
        store.put(["kept"], [{"kv": rows}])
    runner = Runner(StateDirectory())
    runner.up(plan_for(home, device))
    runner.down("lab")
    with emu_package.open_store(url, layout) as store:
        assert store.exists(["kept"]).all()


def test_a_pool_that_somebody_has_open_keeps_its_directory(home: Home, tmp_path: Path) -> None:
    device = file_device(tmp_path)
    layout = emu_package.KVLayout((emu_package.Component("kv", 64, layers=(0,)),))
    runner = Runner(StateDirectory())
    runner.up(plan_for(home, device))
    with emu_package.open_store(f"cxl://{device}", layout):
        undone = runner.down("lab")
        assert undone.left == [
            f"{device}: process {os.getpid()} still maps it; emu did not start it"
        ]
        assert Path(f"{device}.directory").exists()


def test_foreign_content_is_lost_only_when_asked(home: Home, tmp_path: Path) -> None:
    device = file_device(tmp_path)
    with device.open("r+b") as file:
        file.write(b"precious")
        file.seek(MIB)
        file.write(b"tail")
    before = device.read_bytes()
    with pytest.raises(UserError, match="holds foreign data"):
        plan_for(home, device)
    assert device.read_bytes() == before
    Runner(StateDirectory()).up(plan_for(home, device, overwrite=True))
    assert device.read_bytes() == bytes(MIB) + before[MIB:]
    Runner(StateDirectory()).down("lab")


def test_one_device_serves_one_testbed_at_a_time(home: Home, tmp_path: Path) -> None:
    device, link = file_device(tmp_path), tmp_path / "link"
    link.symlink_to(device)
    runner = Runner(StateDirectory())
    late = plan_for(home, device, name="late")  # planned while the device was free
    runner.up(plan_for(home, device, name="early"))
    with pytest.raises(TestbedError, match="in use by testbed 'early'"):
        plan_for(home, device, name="third")
    with pytest.raises(TestbedError, match="was taken by testbed 'early'"):
        runner.up(late)
    assert StateDirectory().names() == ["early"]
    with pytest.raises(TestbedError, match="in use by testbed 'early'"):
        plan_for(home, link, name="third")
    runner.down("early")
    runner.up(late)
    runner.down("late")


def test_a_device_that_a_testbed_made_cannot_be_attached_to_another(home: Home) -> None:
    runner = Runner(StateDirectory())
    record = runner.up(plan_for(home, cxl_devices=1, device_size="1M", driver="local"))
    with pytest.raises(TestbedError, match="in use by testbed 'lab'"):
        plan_for(home, record.devices[0].path, name="other")
    runner.down("lab")


def test_of_many_that_want_one_device_at_once_one_gets_it(home: Home, tmp_path: Path) -> None:
    device = file_device(tmp_path)
    program = (
        "import sys; from pathlib import Path; import emu\n"
        "try:\n"
        "    with emu.testbed(attach=[sys.argv[1]], name=sys.argv[2], directory=sys.argv[3],"
        " rdma='off'):\n"
        "        print('got', flush=True); sys.stdin.read()\n"
        "except emu.errors.TestbedError as error: print(error, flush=True)\n"
    ).replace("import emu\n", "import emu, emu.errors\n")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(device), f"racer{n}", str(home.run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    said = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
    for racer in racers:
        racer.communicate()
    assert said.count("got") == 1, said
    assert all("testbed 'racer" in line for line in said if line != "got"), said
    assert StateDirectory().names() == []


def test_a_device_that_vanishes_is_missing_in_the_status(home: Home, tmp_path: Path) -> None:
    from emu.provision.condition import inspect

    device = file_device(tmp_path)
    Runner(StateDirectory()).up(plan_for(home, device))
    device.unlink()
    found = inspect(StateDirectory(), "lab")
    assert (found.state, found.missing) == ("damaged", (str(device),))


# -- a node's memory --------------------------------------------------------------------------------------
@pytest.mark.needs("mbind", "shm")
def test_every_page_of_a_nodes_device_lies_on_it(home: Home) -> None:
    with emu_package.testbed(
        attach=["numa:0"], device_size="4M", directory=home.run, rdma="off"
    ) as testbed:
        path = Path(testbed.devices[0])
        assert path.stat().st_blocks * 512 >= 4 * MIB
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4 * MIB) as area:
            memory = np.frombuffer(area, np.uint8)
            memory[:: mmap.PAGESIZE].max()
            nodes = np.full(4 * MIB // mmap.PAGESIZE, -1, np.int32)
            assert _native.page_nodes(memory.ctypes.data, mmap.PAGESIZE, nodes) == 0
            policy = [
                line
                for line in Path("/proc/self/numa_maps").read_text().splitlines()
                if str(path) in line
            ]
            del memory
        assert (nodes == 0).all()
        assert policy
        assert "bind:0" in policy[0], "whoever maps it later allocates there, too"
    assert list(home.run.iterdir()) == []


def test_a_node_that_does_not_take_the_pages_fails_the_testbed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: (0,))
    monkeypatch.setattr(_native, "mbind", lambda *_: 1)
    if not Path("/sys/devices/system/node/node0/meminfo").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    with pytest.raises(HostError, match=r"cxl0 is not on NUMA node 0: mbind failed.*SYS_NICE"):
        Runner(StateDirectory()).up(plan_for(home, "numa:0", device_size="1M"))
    assert list(home.run.iterdir()) == []
    assert StateDirectory().names() == []


def test_a_node_that_fills_up_after_the_plan_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_files, "node_free_bytes", lambda node: 4096)
    if not numa.nodes():
        pytest.skip("this kernel knows no NUMA nodes")
    with pytest.raises(HostError, match="node 0 has only 4 KiB free by now"):
        Runner(StateDirectory()).up(plan_for(home, "numa:0", device_size="1M"))
    assert list(home.run.iterdir()) == []


# -- the command ------------------------------------------------------------------------------------------
def test_the_command_attaches_and_refuses_in_one_line(home: Home, tmp_path: Path) -> None:
    device = file_device(tmp_path)
    up = f"up --dir {home.run} --rdma off"
    done = emu(f"{up} --attach {device} --cxl-devices 1 --device-size 1M")
    assert done.returncode == 0, done.stderr
    assert str(device) in done.stdout
    one_line(emu(f"{up} --name b --attach {device}"), 1, "in use by testbed 'default'")
    one_line(emu(f"{up} --name b --attach {tmp_path}/none"), 1, "does not exist")
    assert emu("down").returncode == 0
    assert device.stat().st_size == 2 * MIB
    device.write_bytes(b"mine" * MIB)
    one_line(emu(f"{up} --attach {device}"), 1, "foreign data", "--overwrite")
    assert device.read_bytes() == b"mine" * MIB
