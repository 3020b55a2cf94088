"""What other programs read to find a testbed's devices and GID: `emu env --for`.

Names and forms as in those programs' own sources and documents, read in November 2026: Mooncake's
cxl_transport.cpp, client and RDMA context (MC_*), LMCache's DAX plugin and its configuration from the environment
(LMCACHE_*), UCX's `ucx_info -c` (UCX_*).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.provision.rdma_port import RdmaPort

PROGRAMS = ("mooncake", "lmcache", "ucx")
_DAX_PLUGIN = "lmcache.v1.storage_backend.plugins.dax_backend"


def client_env(
    program: str, regions: Sequence[tuple[str, int]], port: RdmaPort | None
) -> dict[str, str]:
    """The variables for one program.

    Args:
        program: of PROGRAMS.
        regions: (path, bytes) of the pool's devices as the host sees them. Mooncake and LMCache take one device per
            process: the first.
        port: the host's RDMA port, None without one.

    Raises:
        UserError: UCX without an RDMA port.
    """
    path, nbytes = regions[0]
    if program == "mooncake":
        env = {"MC_CXL_DEV_PATH": path, "MC_CXL_DEV_SIZE": str(nbytes)}
        if port is not None:
            env |= {"MC_GID_INDEX": str(port.gid_index), "MC_MS_FILTERS": port.device}
        return env
    if program == "lmcache":
        extra = {
            "storage_plugin.dax.module_path": _DAX_PLUGIN,
            "storage_plugin.dax.class_name": "DaxBackend",
            "dax.device_path": path,
            "dax.max_dax_size": nbytes / 2**30,
        }
        return {"LMCACHE_STORAGE_PLUGINS": "dax", "LMCACHE_EXTRA_CONFIG": json.dumps(extra)}
    if port is None:
        raise UserError(
            "this testbed has no RDMA port for UCX",
            remedy="make one with `emu up --driver qemu`, or --rdma native",
        )
    return {"UCX_NET_DEVICES": f"{port.device}:1", "UCX_IB_GID_INDEX": str(port.gid_index)}
