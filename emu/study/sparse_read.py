"""A GPU's random sparse read, alone: what SAC's Fig 5 and Beluga measure."""

from __future__ import annotations

from emu.timing.system import System

ENTRIES = tuple(2**n for n in range(7, 15))
ENTRY_BYTES = 1152


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


def relative_to_dram(profile: str, entry_bytes: int = ENTRY_BYTES) -> dict[str, list[float]]:
    """Reads over CXL and RDMA against the same from local DRAM, one ratio for each of ENTRIES."""
    system = System.load(profile)
    dram = [read_us(system, "pool_read.dram", n, entry_bytes) for n in ENTRIES]
    return {
        medium: [
            read_us(system, f"pool_read.{medium}", n, entry_bytes) / d
            for n, d in zip(ENTRIES, dram, strict=True)
        ]
        for medium in ("cxl", "rdma")
    }
