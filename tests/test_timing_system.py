"""Systems: which links a path crosses, and what the calibrated profiles predict."""

from __future__ import annotations

import pytest

from emu.errors import UserError
from emu.timing.clock import make_clock
from emu.timing.system import System

ROW_BYTES = 1152
ENTRIES = (64, 128, 256, 512, 1024, 2048)
DESIGNS = {
    "dram": "pool_read.dram",
    "cxl": "pool_read.cxl",
    "gather": "pool_pack.rdma",
    "sparse": "pool_read.rdma",
}


def alone_ns(system: System, path: str, rows: int, row_bytes: int = ROW_BYTES) -> int:
    """One sparse read on an idle system."""
    return (
        make_clock(system).transfer("gpu0", system.path(path), rows * row_bytes, rows, "x").end_ns
    )


def test_gpus_share_the_links_of_their_socket():
    system = System.load("sac-server")
    links = [
        {system.link_names[link] for link in system.path("pool_read.cxl", gpu, 1).links}
        for gpu in (0, 3, 4, 7)
    ]
    assert links[0] == {"cxl_device[1]", "switch", "adapter[0]", "gpu_cxl[0]"}
    assert links[1] == {"cxl_device[1]", "switch", "adapter[0]", "gpu_cxl[3]"}
    assert links[2] == {"cxl_device[1]", "switch", "adapter[1]", "gpu_cxl[4]"}
    assert links[3] == {"cxl_device[1]", "switch", "adapter[1]", "gpu_cxl[7]"}


def test_counts_can_be_asked_for():
    system = System.load("sac-server", gpus=3, devices=5)
    assert [name for name in system.link_names if name.startswith("gpu_cxl")] == [
        "gpu_cxl[0]",
        "gpu_cxl[1]",
        "gpu_cxl[2]",
    ]
    assert system.path("pool_read.cxl", 2, 4) is system.path("pool_read.cxl", 2, 4)
    for gpu, device in ((3, 0), (0, 5), (-1, 0)):
        with pytest.raises(UserError, match="numbered 0 to"):
            system.path("pool_read.cxl", gpu, device)
    for counts in ({"gpus": 0}, {"devices": -1}):
        with pytest.raises(UserError, match="give 1 or more"):
            System.load("sac-server", **counts)


def test_an_unknown_path_or_mode_is_refused():
    system = System.load("laptop")
    with pytest.raises(UserError, match=r"did you mean 'pool_read\.cxl'"):
        system.path("pool_read.cxi")
    with pytest.raises(UserError, match="did you mean 'virtual'"):
        make_clock(system, "virtua")
    for dilation in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="dilation"):
            make_clock(system, "paced", dilation)


def test_clocks_say_what_they_are():
    system = System.load("laptop")
    off, virtual, paced = (
        make_clock(system, mode, 30).describe() for mode in ("off", "virtual", "paced")
    )
    assert off == {"mode": "off", "profile": None, "dilation": None}
    assert virtual == {"mode": "virtual", "profile": "laptop", "dilation": None}
    assert paced.pop("paceable_gb_per_s") > 0
    assert paced == {"mode": "paced", "profile": "laptop", "dilation": 30, "late_ns": 0}


@pytest.mark.parametrize("rows", ENTRIES)
def test_designs_keep_their_order(rows):
    system = System.load("sac-server")
    took = {name: alone_ns(system, path, rows) for name, path in DESIGNS.items()}
    assert took["dram"] <= took["cxl"] < took["gather"] < took["sparse"]


@pytest.mark.parametrize("rows", ENTRIES)
def test_sparse_reads_lie_in_the_published_bands(rows):
    """SAC Fig. 5: CXL 1.04-1.64 and RDMA 4-19.7 times DRAM; nothing in the profile was fitted to it."""
    system = System.load("sac-server")
    dram, cxl, rdma = (alone_ns(system, DESIGNS[name], rows) for name in ("dram", "cxl", "sparse"))
    assert 1.04 <= cxl / dram <= 1.64
    assert 4.0 <= rdma / dram <= 19.7


@pytest.mark.parametrize(
    ("chunks", "cxl_us", "rdma_us"), [(16 * 1024, 211, 5260), (16 * 512, 97, 2670)]
)
def test_belugas_sparse_reads_come_out_in_absolute_time(chunks, cxl_us, rdma_us):
    system = System.load("beluga-server")
    assert alone_ns(system, "pool_read.cxl", chunks, 160) / 1e3 == pytest.approx(cxl_us, rel=0.25)
    assert alone_ns(system, "pool_read.rdma", chunks, 160) / 1e3 == pytest.approx(rdma_us, rel=0.25)


def test_eight_gpus_on_one_device_share_its_bandwidth():
    """The reason for spreading requests over devices: one device serves 22.5 GB/s, however many GPUs ask."""

    def busy_ns(devices: int) -> int:
        system = System.load("beluga-server", devices=devices)
        clock = make_clock(system)
        return max(
            clock.transfer(
                f"gpu{gpu}", system.path("pool_read.cxl", gpu, gpu % devices), 1 << 24, 1, "kv"
            ).end_ns
            for gpu in range(8)
        )

    assert busy_ns(1) / busy_ns(2) == pytest.approx(2, rel=0.01)
    # from four devices on the sockets' adapters are the limit (46.2 GB/s for four GPUs)
    assert busy_ns(2) / busy_ns(4) == pytest.approx(2, rel=0.05)
    assert busy_ns(4) / busy_ns(8) < 1.05
