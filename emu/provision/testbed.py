"""A testbed in hand: what programs need to know of it, and running programs in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.errors import TestbedError, UserError
from emu.provision import execute
from emu.provision.facts import gather_facts
from emu.provision.plan import host_env, log_path, make_plan, scratch_path
from emu.provision.process import ProcessId, boot_id, identify, is_running
from emu.provision.rdma_port import rdma_port
from emu.provision.runner import Runner
from emu.provision.spec import Flags, check_name, make_spec
from emu.provision.state import StateDirectory
from emu.suggest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from emu.guest.guest import Guest
    from emu.provision.state import Record

DEFAULT_NAME = "default"


class Testbed:
    """A testbed that is up.

    Args:
        record: what up recorded.
        state: where it is recorded.
    """

    __test__ = False  # not a test class, whatever its name says

    def __init__(self, record: Record, state: StateDirectory) -> None:
        self.record = record
        self.state = state

    @classmethod
    def find(cls, name: str | None = None) -> Testbed:
        """The testbed of that name, or the one meant without a name.

        Without a name: $EMU_TESTBED (set inside `emu exec`), else "default", else the only one.

        Raises:
            UserError: not a testbed name.
            TestbedError: there is none, several, or it is not up; says what to do.
        """
        state = StateDirectory()
        record = state.load(resolve_name(name, state))
        if record.phase != "up" or record.boot_id != boot_id():
            why = "was lost at a reboot" if record.phase == "up" else f"is {record.phase}"
            raise TestbedError(
                f"testbed {record.name!r} {why}",
                name=record.name,
                remedy=f"clear it with `emu down {record.name}`, then `emu up` again",
            )
        return cls(record, state)

    @classmethod
    def find_lasting(cls, name: str | None = None) -> Testbed | None:
        """As find(), but None where no name is given and no testbed is up to stay.

        Testbeds that another command made for itself do not count.

        Raises:
            UserError, TestbedError: as find().
        """
        state = StateDirectory()
        if name is None and not os.environ.get("EMU_TESTBED") and not _lasting(state):
            return None
        return cls.find(name)

    @property
    def name(self) -> str:
        """Its name."""
        return self.record.name

    @property
    def devices(self) -> tuple[str, ...]:
        """Paths of the pool's devices."""
        return tuple(device.path for device in self.record.devices)

    def guest(self, host: str) -> Guest | None:
        """The guest that is this host, None where hosts are groups of processes."""
        return next((guest for guest in self.record.guests if guest.host == host), None)

    @property
    def regions(self) -> tuple[tuple[str, int], ...]:
        """(path, bytes) of the pool's devices as programs on the hosts see them."""
        if not self.record.guests:
            return tuple((device.path, device.size_bytes) for device in self.record.devices)
        guest = self.record.guests[0]
        return tuple(zip(guest.devices, guest.device_bytes, strict=True))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts: "host0", ..."""
        return self.record.hosts

    @property
    def profile(self) -> str:
        """Name of the system profile."""
        return self.record.profile

    @property
    def coherence(self) -> str:
        """Coherence between hosts, "bi" or "none"."""
        return self.record.coherence

    @property
    def driver(self) -> str:
        """What makes the devices, for instance "local"."""
        return self.record.driver

    @property
    def run_dir(self) -> str:
        """Directory of everything that up made."""
        return self.record.run_dir

    @property
    def node_socket(self) -> str | None:
        """Socket of the memory node, None without one."""
        return self.record.node_socket

    def env(self, host: str) -> dict[str, str]:
        """What a host's programs get: EMU_TESTBED, EMU_HOST, EMU_CXL_DEVICES, EMU_RDMA_NODE (if there is a node).

        In guests the agent adds the RDMA device and its GID; see emu.provision.rdma_port for soft-RoCE of this
        machine, which is added here.

        Raises:
            UserError: no such host.
        """
        if host not in self.hosts:
            raise UserError(
                f"testbed {self.name!r} has no host {host!r}",
                remedy=did_you_mean(host, self.hosts),
            )
        port = None if self.record.guests else rdma_port(self, host)
        return {**host_env(self.record, host), **(port.env if port else {})}

    def log_path(self, host: str) -> str:
        """The log of a host."""
        return log_path(self.run_dir, host)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory of this process's own in the testbed, for the time of a with block.

        Those of processes that were killed are removed on the way.
        """
        scratch = Path(scratch_path(self.run_dir))
        for left in scratch.iterdir():
            pid, _, start_time = left.name.partition("-")
            ours = pid.isdigit() and start_time.isdigit()
            if ours and not is_running(ProcessId(int(pid), int(start_time))):
                shutil.rmtree(left)
        own = identify(os.getpid())
        assert own is not None
        path = scratch / f"{own.pid}-{own.start_time}"
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def forget(self, pid: int) -> None:
        """Take a process that has ended out of the record."""
        execute.forget(self, pid)

    def spawn(self, host: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
        """Start a program on a host; down ends it. Arguments as execute.spawn's."""
        return execute.spawn(self, host, argv, **popen)

    def exec(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program on a host to its end; its output is captured and also in the host's log.

        Args:
            host: "host0", ...
            argv: the command.
            stdin: what it reads.
            env: more environment.
            timeout_s: it is killed after that.

        Returns:
            Exit status (128 + N after signal N), stdout and stderr.

        Raises:
            UserError: no such host, or no such program.
            subprocess.TimeoutExpired: it took longer.
        """
        out, err = bytearray(), bytearray()
        read_end = os.memfd_create("emu-exec-stdin", os.MFD_CLOEXEC)
        try:
            _write_all(read_end, stdin)
            os.lseek(read_end, 0, os.SEEK_SET)
            child = self.spawn(
                host, argv, env=env, stdin=read_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        finally:
            os.close(read_end)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            sinks = execute.Sinks(out.extend, err.extend)
            execute.pump(self, host, child, sinks, deadline=deadline)
            status = execute.ended_status(child)
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(
                list(argv), timeout_s or 0, bytes(out), bytes(err)
            ) from None
        finally:
            execute.end(self, child)
        return subprocess.CompletedProcess(list(argv), status, bytes(out), bytes(err))


def resolve_name(name: str | None, state: StateDirectory) -> str:
    """The testbed that a command means.

    Raises:
        UserError: not a testbed name.
        TestbedError: no name was given and there are none or several.
    """
    if name is not None:
        return check_name("--name", name)
    inside = os.environ.get("EMU_TESTBED")
    if inside:
        return check_name("EMU_TESTBED", inside)
    lasting = _lasting(state)
    if DEFAULT_NAME in lasting or not lasting:
        return DEFAULT_NAME
    if len(lasting) == 1:
        return lasting[0]
    raise TestbedError(
        "several testbeds, none named default", remedy=f"name one of {', '.join(lasting)}"
    )


def _lasting(state: StateDirectory) -> list[str]:
    """Names of the testbeds that `emu up` made."""
    return [name for name in state.names() if not _is_ephemeral(name, state)]


def _is_ephemeral(name: str, state: StateDirectory) -> bool:
    with suppress(TestbedError):
        return state.load(name).owner is not None
    return False


@contextmanager
def testbed(
    cxl_devices: int | None = None,
    *,
    name: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    spec_file: str | os.PathLike[str] | None = None,
    state: StateDirectory | None = None,
    **flags: Any,
) -> Iterator[Testbed]:
    """A testbed for the time of a with block; also what `emu run` uses when none is up.

    Args:
        cxl_devices: number of devices, if the spec file does not say it.
        name: its name; by default run-PID.
        directory: where its run directory is made; by default below /dev/shm.
        spec_file: a TOML spec.
        state: where it is recorded; by default where `emu status` looks.
        flags: driver, device_size, hosts, coherence, profile, rdma, attach, ...: as the flags of `emu up`.

    Raises:
        UserError, HostError, TestbedError: as `emu up`; UserError also for a flag that it has not.
    """
    known = [field.name for field in fields(Flags)]
    for flag in flags:
        if flag not in known:
            raise UserError(f"testbed() has no flag {flag!r}", remedy=did_you_mean(flag, known))
    state = state or StateDirectory()
    chosen = Flags(cxl_devices=cxl_devices, name=name or _free_name(state), **flags)
    spec = make_spec(chosen, Path(spec_file) if spec_file is not None else None)
    facts = gather_facts(spec, Path(directory) if directory is not None else None, state.testbeds())
    runner = Runner(state)
    record = runner.up(make_plan(spec, facts), owner=identify(os.getpid()))
    try:
        yield Testbed(record, state)
    finally:
        if state.record_path(record.name).exists() and state.load(record.name).id == record.id:
            runner.down(record.name)


def _free_name(state: StateDirectory) -> str:
    """A name for this process's testbed; an earlier process of the same pid may have left one."""
    name = f"run-{os.getpid()}"
    number = 1
    while state.record_path(name).exists():
        number += 1
        name = f"run-{os.getpid()}-{number}"
    return name


def _write_all(fd: int, data: bytes) -> None:
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
