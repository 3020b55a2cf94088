"""QEMU's command is a pure function: golden for the common testbeds, and rules that hold for every topology."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.errors import UserError
from emu.provision.guest_facts import load_machine
from emu.provision.guests import Backing, GuestSpec, qemu_argv
from emu.provision.topology import WINDOW_BYTES, lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDEN = Path(__file__).with_name("golden")


def guest(count: int, kind: str = "direct", interleave: int = 1, number: int = 0) -> GuestSpec:
    sizes = [WINDOW_BYTES] * count
    return GuestSpec(
        qemu="/usr/bin/qemu-system-x86_64",
        accelerator="tcg",
        machine=load_machine(),
        kernel="/cache/vmlinuz",
        initramfs="/cache/initramfs.img",
        directory=f"/dev/shm/emu/lab/host{number}.guest",
        number=number,
        backings=tuple(Backing(f"/dev/shm/emu/lab/cxl{n}", s, n + 1) for n, s in enumerate(sizes)),
        topology=lay_out(sizes, kind, interleave),
        switch_socket="/dev/shm/emu/lab/network.sock",
    )


def lines(argv: Sequence[str]) -> list[str]:
    """One line for each option with its value."""
    return re.sub(r"\n(?!-)", " ", "\n".join(argv)).splitlines()


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("four-direct", guest(4)),
        ("four-switched", guest(4, "switch")),
        ("four-interleaved-second-host", guest(4, "direct", 4, number=1)),
        ("eight-direct", guest(8)),
    ],
)
def test_the_command_is_the_golden_one(name: str, spec: GuestSpec) -> None:
    path = GOLDEN / f"qemu-{name}.txt"
    assert lines(qemu_argv(spec)) == path.read_text().splitlines()


counts = st.integers(1, 16)
kinds = st.sampled_from(["direct", "switch"])


@given(counts, kinds)
def test_no_bridge_has_more_regions_than_decoders_and_every_device_hangs_once(
    count: int, kind: str
) -> None:
    spec = guest(count, kind)
    seen = [d for b in range(spec.topology.bridges) for d in spec.topology.devices_of(b)]
    assert seen == list(range(count))
    for bridge in range(spec.topology.bridges):
        assert 1 <= len(spec.topology.devices_of(bridge)) <= 4
    argv = " ".join(qemu_argv(spec))
    assert [f"sn={n + 1}" in argv for n in range(count)] == [True] * count
    assert len(set(re.findall(r"bus_nr=(\d+)", argv))) == spec.topology.bridges
    slots = re.findall(r"slot=(\d+)", argv)
    assert len(slots) == len(set(slots))


@given(counts, kinds)
def test_whatever_is_not_cxl_names_the_root_bus(count: int, kind: str) -> None:
    """Else QEMU puts it on the CXL host bridge and refuses: only bridges can be plugged there."""
    argv = qemu_argv(guest(count, kind))
    for option, value in pairwise(argv):
        if option == "-device" and "pci" in value.split(",")[0]:
            assert "bus=pcie.0" in value


@given(counts, kinds)
def test_a_window_for_each_region_and_room_for_all_memory(count: int, kind: str) -> None:
    spec = guest(count, kind)
    argv = qemu_argv(spec)
    machine = argv[argv.index("-M") + 1]
    assert machine.count(".size=256M") == len(spec.topology.regions) == count
    top = re.search(r"maxmem=(\d+)M", argv[argv.index("-m") + 1])
    assert top is not None
    assert int(top[1]) << 20 > count * WINDOW_BYTES


def test_the_hypervisor_bit_is_hidden_else_a_stock_kernel_commits_no_region() -> None:
    argv = qemu_argv(guest(1))
    assert "-hypervisor" in argv[argv.index("-cpu") + 1]


def test_a_lone_root_port_shows_its_decoders() -> None:
    assert "hdm_for_passthrough=true" in " ".join(qemu_argv(guest(4, "switch")))


def test_a_comma_in_a_path_stays_in_the_path() -> None:
    spec = replace(guest(1), directory="/a,b", switch_socket="/a,b/net")
    argv = " ".join(qemu_argv(spec))
    assert argv.count("/a,,b/") == argv.count("/a,") == 2 + load_machine().agent_ports


@pytest.mark.parametrize(
    ("sizes", "interleave", "words"),
    [
        ([256 << 20, 100 << 20], 1, "device 1 has 100 MiB.*multiples of 256M"),
        ([256 << 20] * 3, 2, "3 devices cannot be interleaved by 2"),
        ([256 << 20] * 8, 8, "8 devices cannot be interleaved by 8"),
        ([256 << 20, 512 << 20], 2, "differ in size"),
    ],
)
def test_what_cxl_cannot_have_is_refused_with_the_reason(
    sizes: list[int], interleave: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        lay_out(sizes, "direct", interleave)
