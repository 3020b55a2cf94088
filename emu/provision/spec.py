"""What a testbed shall be: flags and a TOML file to one description, every key checked once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from emu.errors import UserError
from emu.suggest import did_you_mean
from emu.units import parse_size

DRIVERS = ("auto", "local", "qemu")
COHERENCE = ("bi", "none")
DEVICE_KINDS = ("volatile", "persistent")
TOPOLOGIES = ("direct", "switch")
RDMA_MODES = ("auto", "node", "rxe", "native", "off")
MAX_DEVICES = 16
MAX_HOSTS = 16
MIN_DEVICE_BYTES = 1 << 20
DEFAULT_DEVICE_BYTES = 256 << 20
DEFAULT_PROFILE = "sac-server"

_NUMA = "numa:"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")
T = TypeVar("T")
Check = Callable[[str, object], Any]


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device of the pool.

    Attributes:
        serial: identifies the device for its whole life, unique in the testbed.
        size_bytes: what to allocate; None takes all of `path`.
        path: an existing file or /dev/daxN.M to attach instead of making a file; never resized, never removed.
        kind: "volatile" or "persistent".
        numa_node: take this node's memory.
    """

    serial: int
    size_bytes: int | None
    path: str | None
    kind: str
    numa_node: int | None = None

    @property
    def attached(self) -> str:
        """What --attach named, "" for a device that is simply made."""
        return self.path or ("" if self.numa_node is None else f"{_NUMA}{self.numa_node}")


@dataclass(frozen=True, slots=True)
class TestbedSpec:
    """A testbed as it was asked for.

    Attributes:
        name: selects the testbed in every command.
        driver: "auto", "local" or "qemu".
        hosts: number of hosts, named host0, host1, ...
        coherence: "bi" (hardware-coherent between hosts) or "none".
        profile: name of the system profile that the model times come from.
        devices: the pool's devices.
        topology: "direct" or "switch".
        interleave: devices that one region spans.
        rdma: "node" starts a memory node on this machine, "rxe" is soft-RoCE in guests, "native" is soft-RoCE of
            this machine itself, "off" is nothing, "auto" is "rxe" with guests and "node" without.
        node_bytes: the memory node's memory; None means one device's size.
        overwrite: attached devices may lose what they hold.
    """

    __test__ = False  # not a test class, whatever its name says

    name: str
    driver: str
    hosts: int
    coherence: str
    profile: str
    devices: tuple[DeviceSpec, ...]
    topology: str
    interleave: int
    rdma: str
    node_bytes: int | None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line or the Python call gave; None where it gave nothing. A flag beats the file."""

    cxl_devices: int | None = None
    device_size: str | int | None = None
    name: str | None = None
    driver: str | None = None
    hosts: int | None = None
    coherence: str | None = None
    profile: str | None = None
    rdma: str | None = None
    topology: str | None = None
    interleave: int | None = None
    attach: Sequence[str] | None = None
    overwrite: bool | None = None


def _typed(where: str, value: object, kind: type[T], words: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{where}: {value!r} is not {words}")
    return value


def _choice(*options: str) -> Check:
    def check(where: str, value: object) -> str:
        text = _typed(where, value, str, "a text")
        if text not in options:
            raise UserError(f"{where}: no such value {text!r}", remedy=did_you_mean(text, options))
        return text

    return check


def _integer(low: int, high: int) -> Check:
    def check(where: str, value: object) -> int:
        number = _typed(where, value, int, "a whole number")
        if not low <= number <= high:
            raise UserError(f"{where}: {number} is out of range", remedy=f"use {low} to {high}")
        return number

    return check


def _size(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UserError(f"{where}: {value!r} is not a size", remedy="write for instance 256M")
    try:
        nbytes = parse_size(value)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", remedy=error.remedy) from None
    if nbytes < MIN_DEVICE_BYTES:
        raise UserError(f"{where}: {value} is too small", remedy="use at least 1M")
    return nbytes


def check_name(where: str, value: object) -> str:
    """A testbed's name.

    Raises:
        UserError: not such a name.
    """
    text = _typed(where, value, str, "a text")
    if not _NAME.fullmatch(text):
        raise UserError(
            f"{where}: {text!r} is not a testbed name",
            remedy="use up to 48 of a-z 0-9 _ . -, the first a letter or digit",
        )
    return text


def _path(where: str, value: object) -> str:
    text = _typed(where, value, str, "a path")
    if not text.startswith("/") or ":" in text or "\0" in text:
        raise UserError(f"{where}: {text!r}", remedy="write an absolute path without ':'")
    return text


def _attach(where: str, value: object) -> str:
    text = _typed(where, value, str, "a text")
    if not text.startswith(_NUMA):
        return _path(where, text)
    if not re.fullmatch(r"[0-9]{1,4}", text.removeprefix(_NUMA)):
        raise UserError(f"{where}: {text!r} is no NUMA node", remedy="write for instance numa:1")
    return text


def _profile(where: str, value: object) -> str:
    text = _typed(where, value, str, "a text")
    from emu.timing.profile import load_system

    try:
        load_system(text)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", remedy=error.remedy) from error
    return str(Path(text).absolute()) if text.endswith(".toml") else text


_TABLES: Mapping[str, Mapping[str, Check]] = {
    "testbed": {
        "name": check_name,
        "driver": _choice(*DRIVERS),
        "hosts": _integer(1, MAX_HOSTS),
        "coherence": _choice(*COHERENCE),
        "profile": _profile,
    },
    "topology": {"kind": _choice(*TOPOLOGIES), "interleave": _integer(1, MAX_DEVICES)},
    "rdma": {"mode": _choice(*RDMA_MODES), "size": _size},
}
_DEVICE: Mapping[str, Check] = {
    "size": _size,
    "attach": _attach,
    "kind": _choice(*DEVICE_KINDS),
    "serial": _integer(1, 2**64 - 1),
}
_FLAG_KEYS = {
    "name": ("testbed", "name"),
    "driver": ("testbed", "driver"),
    "hosts": ("testbed", "hosts"),
    "coherence": ("testbed", "coherence"),
    "profile": ("testbed", "profile"),
    "rdma": ("rdma", "mode"),
    "topology": ("topology", "kind"),
    "interleave": ("topology", "interleave"),
}
_CHECK_COUNT = _integer(1, MAX_DEVICES)


def make_spec(flags: Flags, file: Path | None = None) -> TestbedSpec:
    """The spec that flags and a file describe together.

    Raises:
        UserError: an unknown key, a wrong type or value, or flags that contradict the file; names file and key.
    """
    tables: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
    devices: list[dict[str, Any]] = []
    if file is not None:
        tables, devices = _read(file)
    for flag, (table, key) in _FLAG_KEYS.items():
        value = getattr(flags, flag)
        if value is not None:
            tables[table][key] = _TABLES[table][key](f"--{flag}", value)
    chosen = {"profile": DEFAULT_PROFILE, **tables["testbed"]}
    if "profile" not in tables["testbed"]:
        _profile("the default profile", DEFAULT_PROFILE)
    return TestbedSpec(
        name=chosen.get("name", "default"),
        driver=chosen.get("driver", "auto"),
        hosts=chosen.get("hosts", 1),
        coherence=chosen.get("coherence", "bi"),
        profile=chosen["profile"],
        devices=_devices(flags, devices, file),
        overwrite=bool(flags.overwrite),
        topology=tables["topology"].get("kind", "direct"),
        interleave=tables["topology"].get("interleave", 1),
        rdma=tables["rdma"].get("mode", "auto"),
        node_bytes=tables["rdma"].get("size"),
    )


def _read(file: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Tables and devices of a spec file, every key known and every value checked."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file}: not a regular file", remedy="name a readable TOML file")
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", remedy="name a readable TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not TOML: {error}") from error
    known = (*_TABLES, "device")
    for key in raw:
        if key not in known:
            raise UserError(f"{file}: no table [{key}]", remedy=did_you_mean(key, known))
    tables = {
        table: _check_table(f"{file}: [{table}]", raw.get(table, {}), checks)
        for table, checks in _TABLES.items()
    }
    listed = raw.get("device", [])
    if not isinstance(listed, list):
        raise UserError(f"{file}: [device]", remedy="write [[device]], once for each device")
    devices = [
        _check_table(f"{file}: [[device]] {number}", device, _DEVICE)
        for number, device in enumerate(listed)
    ]
    return tables, devices


def _check_table(where: str, raw: object, checks: Mapping[str, Check]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UserError(f"{where}: {raw!r} is not a table")
    for key in raw:
        if key not in checks:
            raise UserError(f"{where} has no key {key!r}", remedy=did_you_mean(key, tuple(checks)))
    return {key: checks[key](f"{where} {key}", value) for key, value in raw.items()}


def _devices(
    flags: Flags, listed: list[dict[str, Any]], file: Path | None
) -> tuple[DeviceSpec, ...]:
    count = len(listed)
    if flags.cxl_devices is not None:
        wanted = _CHECK_COUNT("--cxl-devices", flags.cxl_devices)
        if listed and wanted != count:
            raise UserError(
                f"--cxl-devices {wanted}, but {file} describes {count}",
                remedy="leave --cxl-devices out, or change the file",
            )
        listed = listed or [{} for _ in range(wanted)]
    listed = listed + [{"attach": _attach("--attach", _absolute(a))} for a in flags.attach or ()]
    if not listed:
        raise UserError(
            "a testbed needs devices",
            remedy="give --cxl-devices N or --attach PATH, or [[device]] in a spec file",
        )
    _CHECK_COUNT(f"{file}: number of [[device]]", len(listed))
    given = None if flags.device_size is None else _size("--device-size", flags.device_size)
    devices = tuple(_one_device(number, device, given) for number, device in enumerate(listed))
    _refuse_twins("serial", [str(device.serial) for device in devices])
    _refuse_twins("path", [device.path for device in devices if device.path])
    if flags.overwrite and not any(device.path for device in devices):
        raise UserError("--overwrite, but no existing device", remedy="leave it out")
    return devices


def _absolute(text: str) -> str:
    """A path on the command line is relative to the working directory; one in a file is absolute."""
    return text if text.startswith(_NUMA) else str(Path(text).absolute())


def _one_device(number: int, device: Mapping[str, Any], given: int | None) -> DeviceSpec:
    """A flag beats the file's size; an existing device has its own."""
    attach = device.get("attach", "")
    on_node = attach.startswith(_NUMA)
    exists = bool(attach) and not on_node
    made_bytes = given or device.get("size", DEFAULT_DEVICE_BYTES)
    return DeviceSpec(
        serial=device.get("serial", number + 1),
        size_bytes=device.get("size") if exists else made_bytes,
        path=attach if exists else None,
        kind=device.get("kind", "volatile"),
        numa_node=int(attach.removeprefix(_NUMA)) if on_node else None,
    )


def _refuse_twins(what: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(
                f"two devices have the {what} {value}", remedy=f"give each its own {what}"
            )


def flags_of(options: Mapping[str, Any]) -> Flags:
    """The flags among a command's options."""
    return Flags(**{field.name: options.get(field.name) for field in fields(Flags)})
