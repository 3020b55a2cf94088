"""What `emu env --for` prints for other programs."""

from __future__ import annotations

import json

import pytest

from emu.errors import UserError
from emu.provision.client_env import PROGRAMS, client_env
from emu.provision.rdma_port import RdmaPort

REGIONS = (("/dev/dax0.0", 256 << 20), ("/dev/dax1.0", 512 << 20))
PORT = RdmaPort("rxe0", 1)


def test_mooncake_gets_the_device_its_bytes_and_the_gid() -> None:
    """Without a size it takes 0; without a GID index it may choose a link-local one that reaches nobody."""
    device = {"MC_CXL_DEV_PATH": "/dev/dax0.0", "MC_CXL_DEV_SIZE": "268435456"}
    assert client_env("mooncake", REGIONS, None) == device
    rdma = {"MC_GID_INDEX": "1", "MC_MS_FILTERS": "rxe0"}
    assert client_env("mooncake", REGIONS, PORT) == {**device, **rdma}


def test_lmcache_gets_its_dax_plugin_with_the_size_in_gib() -> None:
    env = client_env("lmcache", REGIONS, PORT)
    assert env["LMCACHE_STORAGE_PLUGINS"] == "dax"
    extra = json.loads(env["LMCACHE_EXTRA_CONFIG"])
    assert extra["dax.device_path"] == "/dev/dax0.0"
    assert int(extra["dax.max_dax_size"] * 2**30) == 256 << 20
    assert extra["storage_plugin.dax.class_name"] == "DaxBackend"


def test_ucx_gets_the_port_and_needs_one() -> None:
    env = {"UCX_NET_DEVICES": "rxe0:1", "UCX_IB_GID_INDEX": "1"}
    assert client_env("ucx", REGIONS, PORT) == env
    with pytest.raises(UserError, match="no RDMA port"):
        client_env("ucx", REGIONS, None)


def test_every_program_has_an_environment() -> None:
    assert all(client_env(program, REGIONS, PORT) for program in PROGRAMS)
