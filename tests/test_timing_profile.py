"""Profiles: every number has a source; what is wrong with a file is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from emu.errors import UserError
from emu.timing.profile import Figure
from emu.timing.profile_file import load_media, load_system, media_names, system_names

if TYPE_CHECKING:
    from pathlib import Path

NUMBER = '{ value = 2, source = "me", date = "today" }'
MEDIUM = f"""description = "x"
latency_ns = {NUMBER}
read_gb_per_s = {NUMBER}
write_gb_per_s = {NUMBER}
per_request_ns = {NUMBER}
parallelism = {NUMBER}
setup_ns = {NUMBER}
flush_ns = {NUMBER}
"""
PATHS = {
    "pool_read.cxl",
    "pool_write.cxl",
    "pool_read.dram",
    "pool_write.dram",
    "pool_read.rdma",
    "pool_write.rdma",
    "prefetch.rdma",
    "local_read.rdma",
    "local_write.rdma",
    "pool_pack.rdma",
    "hbm",
}


def figures(value):
    """Every figure below a profile."""
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from figures(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from figures(getattr(value, name))


def test_the_profiles_that_must_be_there_are_there():
    assert set(media_names()) >= {
        "dram",
        "cxl-direct",
        "cxl-switch",
        "cxl-switch-beluga",
        "cxl-switch-memchannel",
        "rdma-100g",
        "rdma-400g",
        "pcie5-x16",
        "nvlink-c2c",
        "scale-up-900",
    }
    assert set(system_names()) >= {"sac-server", "sac-server-memchannel", "laptop"}


@pytest.mark.parametrize("name", media_names())
def test_every_number_of_a_medium_has_a_source(name):
    found = list(figures(load_media(name)))
    assert len(found) == 7
    assert all(len(figure.source) > 5 and figure.date for figure in found)


@pytest.mark.parametrize("name", system_names())
def test_every_number_of_a_system_has_a_source(name):
    system = load_system(name)
    found = list(figures(system))
    assert len(found) >= 3 + 4 + 7 * len(system.links)
    assert all(len(figure.source) > 2 and figure.date for figure in found)
    assert set(system.paths) == PATHS
    assert system.paths["hbm"].links == ()


def test_both_published_switch_figures_are_there():
    assert load_media("cxl-switch").model == load_media("cxl-switch-beluga").model
    latencies = [
        load_media(f"cxl-switch-{name}").model.latency_ns for name in ("beluga", "memchannel")
    ]
    assert [latency.value for latency in latencies] == [750, 220.5]
    assert load_system("sac-server").links["cxl_device"].model.latency_ns.value == 750
    assert load_system("sac-server-memchannel").links["cxl_device"].model.latency_ns.value == 220.5


def test_an_unknown_name_gets_the_closest_one_or_the_list():
    with pytest.raises(
        UserError, match=r"no system profile 'sac-sever'.*did you mean 'sac-server'"
    ):
        load_system("sac-sever")
    with pytest.raises(UserError, match=r"no media profile 'cxl-swich'.*did you mean 'cxl-switch'"):
        load_media("cxl-swich")
    with pytest.raises(UserError, match=r"use one of beluga-server, laptop"):
        load_system("/etc/passwd")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('source = "me", ', "", "latency_ns has no source"),
        ('source = "me"', 'source = "  "', "latency_ns has no source"),
        (', date = "today"', "", "latency_ns has no date"),
        (f"latency_ns = {NUMBER}", "latency_ns = 2", "latency_ns is not a number with a source"),
        ("value = 2", "value = -2", "value -2"),
        ("value = 2", "value = true", "value True"),
        ("value = 2", "value = nan", "value nan"),
        ("value = 2", 'value = "2"', "value '2'"),
        ("value = 2,", "", "value None"),
        ("value = 2", "vale = 2", "did you mean 'value'"),
        ("flush_ns", "flush", "did you mean 'flush_ns'"),
        (f"flush_ns = {NUMBER}\n", "", "flush_ns is not a number"),
        ('description = "x"', "", "description is missing"),
        ("latency_ns", "latency_ns latency_ns", "is not TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, old, new, reason):
    file = tmp_path / "mine.toml"
    file.write_text(MEDIUM)
    assert load_media(str(file)).model.latency_ns == Figure(2, "me", "today")
    file.write_text(MEDIUM.replace(old, new, 1))
    with pytest.raises(UserError, match=reason):
        load_media(str(file))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_media(str(tmp_path / "none.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\x00")
    with pytest.raises(UserError, match="not TOML"):
        load_system(str(binary))


def test_a_system_of_ones_own_starts_from_another(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "sac-server"\n[link.gpu_cxl]\nread_gb_per_s = {NUMBER}\n')
    mine, base = load_system(str(file)), load_system("sac-server")
    assert mine.name == "mine"
    assert mine.links["gpu_cxl"].model.read_gb_per_s == Figure(2, "me", "today")
    assert mine.links["gpu_cxl"].model.write_gb_per_s == base.links["gpu_cxl"].model.write_gb_per_s
    assert (mine.paths, mine.compute) == (base.paths, base.compute)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[link.gpu_cxl]\nper = "rack"', "no .*per = 'rack'"),
        ('[link.gpu_cxl]\nmedia = "cxl"', "no media profile 'cxl'"),
        ('[path."pool_read.cxl"]\nlinks = ["adaptr"]', "did you mean 'adapter'"),
        ('[path."pool_read.cxl"]\nlinks = 5', "links is not a list"),
        ('[path."pool_read.cxl"]\nwrite = "yes"', "write is 'yes'"),
        ("[path.hbm]\nlatency = 5", "no .*key 'latency'"),
        (f"gpus = {NUMBER.replace('2', '0')}", r"gpus is 0"),
        (f"gpus = {NUMBER.replace('2', '1.5')}", r"gpus is 1\.5"),
        ("[compute]\nprefill = 5", "did you mean|no .*key 'prefill'"),
        ("path = 5", r"no table \[path\]"),
    ],
)
def test_what_is_wrong_with_a_system_is_said(tmp_path, text, reason):
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "sac-server"\n{text}\n')
    with pytest.raises(UserError, match=reason):
        load_system(str(file))


def test_a_base_that_leads_back_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "{file}"\n')
    with pytest.raises(UserError, match="is no other profile"):
        load_system(str(file))


def test_compute_follows_its_formula():
    compute = load_system("sac-server").compute
    assert compute.decode_layer_ns(8, 131072) == round(287_000 + 8 * (7_700 + 0.11 * 131072))
    assert compute.decode_layer_ns(0, 0) == 0
    assert compute.prefill_ns(100, 61) == 994 * 100 * 61


def test_a_change_without_its_base_is_told_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text in ("", "[link.foo]\n", 'description = "mine"\n[link.nic]\nlatency_ns = 1\n'):
        file.write_text(text)
        with pytest.raises(UserError, match=r'lacks .*base = "sac-server"'):
            load_system(str(file))
    file.write_text('base = "sac-server"\n[link.foo]\n')
    with pytest.raises(UserError, match=r"\[link.foo\]: per is missing") as refused:
        load_system(str(file))
    assert "None" not in str(refused.value)


def test_on_a_laptop_only_the_core_s_own_copies_cross_the_core() -> None:
    """Rows that a NIC writes are where they are wanted; what loads bring, the core copies."""
    paths = load_system("laptop").paths
    crossing = {name for name, path in paths.items() if "core" in path.links}
    own = {"cxl", "dram"}
    assert crossing == {
        name for name in paths if name.split(".")[-1] in own or name.startswith("local_")
    }
