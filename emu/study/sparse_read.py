"""A GPU's random sparse read, alone: what SAC's Fig 5 and Beluga measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emu.timing.system import System


def read_us(system: System, path_name: str, entries: int, entry_bytes: int) -> float:
    """Time of one read of scattered entries by one kernel that is launched for it.

    Paths of a decode step count the kernel as part of a CUDA graph; alone it costs what the GPU's link says
    (setup_ns: launch and synchronisation). RDMA reads have their synchronisation in the path.
    """
    path = system.path(path_name)
    engine = system.engine()
    system.add_paths(engine, 0)
    in_graph_ns = engine.transfer(path.number, 0, entries * entry_bytes, entries)
    if path_name.endswith(".rdma"):
        return in_graph_ns / 1000
    launch_ns = max(system.link_models[link].setup_ns.value for link in path.links)
    return (in_graph_ns - path.setup_ns + launch_ns) / 1000
