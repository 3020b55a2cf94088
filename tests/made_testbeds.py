"""Plans of testbeds whose memory node starts fast, and what must not be left of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from emu.provision import process
from emu.provision.facts import gather_facts
from emu.provision.plan import Plan, make_plan
from emu.provision.spec import Flags, make_spec
from emu.provision.state import StateDirectory
from emu.provision.steps import StartProcess

if TYPE_CHECKING:
    from conftest import Home

    from emu.provision.state import Record


NODE = (
    "import signal, socket, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1])\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)
"""Stands in for the memory node where only the life of a process matters: it starts faster."""


def plan_for(home: Home, name: str = "lab", node: str | None = NODE, **flags: object) -> Plan:
    chosen = {"cxl_devices": 2, "device_size": "1M", "name": name, **flags}
    spec = make_spec(Flags(**chosen))  # type: ignore[arg-type]
    plan = make_plan(spec, gather_facts(spec, home.run, StateDirectory().names()))
    if node is None:
        return plan
    argv = (sys.executable, "-S", "-c", node, plan.node_socket or "")
    return replace(
        plan,
        steps=tuple(
            replace(step, argv=argv) if isinstance(step, StartProcess) else step
            for step in plan.steps
        ),
    )


def nothing_left(home: Home, record: Record | None = None) -> None:
    assert list(home.run.iterdir()) == []
    assert list(StateDirectory().path.iterdir()) == []
    assert process.mapping(home.run) == []
    if record is not None:
        assert process.tagged(record.id) == []
        assert not any(process.is_running(entry.process) for entry in record.processes)


def edit(name: str, change: dict[str, object]) -> None:
    path = StateDirectory().record_path(name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
