"""Flags and file to one spec, and every refusal on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from emu.errors import UserError
from emu.provision.spec import DeviceSpec, Flags, make_spec

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
[testbed]
name = "lab"
driver = "local"
hosts = 2
coherence = "none"
profile = "laptop"
[[device]]
size = "64M"
[[device]]
size = 67108864
[topology]
kind = "direct"
[rdma]
mode = "off"
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "testbed.toml"
    file.write_text(text)
    return file


def test_flags_and_file_make_the_same_spec(tmp_path: Path) -> None:
    flags = Flags(
        cxl_devices=2,
        device_size="64M",
        name="lab",
        driver="local",
        hosts=2,
        coherence="none",
        profile="laptop",
        rdma="off",
    )
    assert make_spec(Flags(), write(tmp_path, FILE)) == make_spec(flags)


def test_defaults() -> None:
    spec = make_spec(Flags(cxl_devices=4))
    assert (spec.name, spec.driver, spec.hosts, spec.coherence) == ("default", "auto", 1, "bi")
    assert (spec.profile, spec.rdma, spec.node_bytes) == ("sac-server", "auto", None)
    assert spec.devices == tuple(DeviceSpec(n, 256 << 20, None, "volatile") for n in range(1, 5))


def test_a_flag_beats_the_file_but_not_an_existing_path(tmp_path: Path) -> None:
    file = write(tmp_path, FILE + '[[device]]\nattach = "/dev/dax0.0"\nserial = 77\n')
    spec = make_spec(Flags(name="other", hosts=1, device_size="128M", cxl_devices=3), file)
    assert (spec.name, spec.hosts, spec.coherence) == ("other", 1, "none")
    assert [device.size_bytes for device in spec.devices] == [128 << 20, 128 << 20, None]
    assert spec.devices[2].serial == 77


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[testbed]\nhots = 2\n[[device]]\nsize="1M"',
            ["[testbed]", "'hots'", "did you mean 'hosts'?"],
        ),
        ("[testbeds]\n", ["[testbeds]", "did you mean 'testbed'?"]),
        ('[[device]]\nsiez="1M"', ["[[device]] 0", "'siez'", "did you mean 'size'?"]),
        ('[[device]]\nsize="banana"', ["[[device]] 0 size", "'banana' is not a size"]),
        ("[[device]]\nsize=0", ["size", "too small"]),
        ("[[device]]\nsize=true", ["size", "True is not a size"]),
        ("[[device]]\nsize=1.5", ["size", "1.5 is not a size"]),
        ('[testbed]\nhosts="2"', ["hosts", "'2' is not a whole number"]),
        ("[testbed]\nhosts=true", ["hosts", "not a whole number"]),
        ("[testbed]\nhosts=0", ["hosts", "out of range", "1 to 16"]),
        ('[testbed]\nname="a/b"', ["name", "'a/b' is not a testbed name"]),
        ('[testbed]\nname=".."', ["name", "not a testbed name"]),
        ('[testbed]\ncoherence="nome"', ["coherence", "did you mean 'none'?"]),
        ('[testbed]\nprofile="sac-sever"', ["profile", "sac-sever", "sac-server"]),
        ('[testbed]\ndriver=["local"]', ["driver", "is not a text"]),
        ('[topology]\nkind="ring"', ["[topology] kind", "'ring'", "direct, switch"]),
        ('[rdma]\nmode="nod"', ["[rdma] mode", "did you mean 'node'?"]),
        ('[[device]]\nattach="dax0.0"', ["attach", "absolute path"]),
        ('[[device]]\nattach="/a:b"', ["attach", "absolute path"]),
        ('[[device]]\nserial=0\nsize="1M"', ["serial", "out of range"]),
        ('[[device]]\nserial=2\n[[device]]\nsize="1M"', ["serial 2"]),
        ('[[device]]\nattach="/a"\n[[device]]\nattach="/a"', ["path /a"]),
        ("[device]\nsize=1", ["[[device]]"]),
        ("testbed = 3", ["[testbed]", "not a table"]),
        ("device = [3]", ["[[device]] 0", "not a table"]),
        ('[testbed]\nname="x"', ["needs devices", "--cxl-devices N"]),
        ("[testbed\n", ["not TOML"]),
        ("[[device]]\n" * 17, ["17 is out of range", "1 to 16"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        make_spec(Flags(), file)
    for word in words:
        assert word in str(caught.value)
    if "needs devices" not in str(caught.value) and "two devices" not in str(caught.value):
        assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_binary_and_missing_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not TOML"):
        make_spec(Flags(), file)
    with pytest.raises(UserError, match="No such file"):
        make_spec(Flags(), tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (Flags(cxl_devices=0), "--cxl-devices: 0 is out of range"),
        (Flags(cxl_devices=17), "--cxl-devices: 17 is out of range"),
        (Flags(cxl_devices=1, device_size="0"), "--device-size: 0 is too small"),
        (Flags(cxl_devices=1, device_size="banana"), "--device-size: 'banana' is not a size"),
        (Flags(cxl_devices=1, device_size="-5"), "--device-size: '-5' is not a size"),
        (Flags(cxl_devices=1, device_size="4K"), "--device-size: 4K is too small"),
        (Flags(cxl_devices=1, name="a/b"), "--name: 'a/b' is not a testbed name"),
        (Flags(cxl_devices=1, name=""), "--name: '' is not a testbed name"),
        (Flags(cxl_devices=1, name="x" * 49), "is not a testbed name"),
        (Flags(cxl_devices=1, name="ok\n"), "is not a testbed name"),
        (Flags(cxl_devices=1, hosts=0), "--hosts: 0 is out of range"),
        (Flags(cxl_devices=1, profile="nonsense"), "--profile: "),
        (Flags(cxl_devices=1, driver="docker"), "--driver: no such value 'docker'"),
        (Flags(), "a testbed needs devices"),
    ],
)
def test_a_wrong_flag_is_refused_by_its_name(flags: Flags, words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_spec(flags)
    assert words in str(caught.value)


def test_a_count_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--cxl-devices 4, but .* describes 2"):
        make_spec(Flags(cxl_devices=4), write(tmp_path, FILE))


def test_a_size_of_hundreds_of_digits_is_a_size() -> None:
    spec = make_spec(Flags(cxl_devices=1, device_size="9" * 400 + "T"))
    assert spec.devices[0].size_bytes == int("9" * 400) << 40
