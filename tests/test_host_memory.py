"""Memory limits of cgroups, and which file systems lie in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emu import host_memory
from emu.errors import HostError
from emu.host_memory import cgroup_free_bytes, free_bytes, mount_of, occupies_memory, require_free


def group(directory: Path, limit: tuple[str, str], used: tuple[str, int], stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / limit[0]).write_text(limit[1])
    (directory / used[0]).write_text(str(used[1]))
    (directory / "memory.stat").write_text(stat)


def v2(directory: Path, limit: str, used: int, inactive: int = 0) -> None:
    group(
        directory,
        ("memory.max", limit),
        ("memory.current", used),
        f"anon 7\ninactive_file {inactive}\n",
    )


def test_v2_takes_the_tightest_level_and_counts_cache_as_free(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    mount = tmp_path / "fs"
    v2(mount / "a" / "b", "max", 10)
    v2(mount / "a", "1000", 600, inactive=100)
    assert cgroup_free_bytes(own, mount) == 500
    v2(mount / "a" / "b", "300", 290)
    assert cgroup_free_bytes(own, mount) == 10


def test_v1_limit_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    names = ("memory.limit_in_bytes", "64000"), ("memory.usage_in_bytes", 63500)
    group(tmp_path / "fs" / "memory", *names, "total_inactive_file 1000\n")
    assert cgroup_free_bytes(own, tmp_path / "fs") == 1500


def test_no_limit_is_none(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/\n0::/\n")
    names = ("memory.limit_in_bytes", str(2**63 - 4096)), ("memory.usage_in_bytes", 5)
    group(tmp_path / "fs" / "memory", *names, "total_inactive_file 0\n")
    v2(tmp_path / "fs", "max", 5)
    assert cgroup_free_bytes(own, tmp_path / "fs") is None


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("limit", "free"), [(None, 5000), (700, 700), (9000, 5000)])
def test_the_smaller_of_machine_and_cgroup_counts(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, free: int
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 5000)
    monkeypatch.setattr(host_memory, "cgroup_free_bytes", lambda: limit)
    assert free_bytes() == free
    require_free(free, "it")
    with pytest.raises(HostError, match=r"it needs .*, but only .* of memory are free \(wait\)"):
        require_free(free + 1, "it", remedy="wait")


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is not a mount")
def test_shm_is_memory() -> None:
    assert mount_of(Path("/dev/shm")) == ("/dev/shm", "tmpfs")
    assert occupies_memory(Path("/dev/shm/none"))
    assert not occupies_memory(Path("/proc/none"))


def test_the_longest_mount_point_counts_and_escapes_are_read(tmp_path: Path) -> None:
    real = tmp_path / "ein Ort \u00e4"
    real.mkdir()
    escaped = str(real).replace(" ", "\\040")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "1 0 0:1 / / rw - ext4 /dev/vda rw\n"
        f"2 1 0:2 / {escaped} rw,relatime shared:1 - tmpfs tmpfs rw\n"
        f"3 1 0:3 / {escaped}er rw - xfs /dev/vdb rw\n"
    )
    assert mount_of(real, mountinfo) == (str(real), "tmpfs")
    assert mount_of(tmp_path, mountinfo) == ("/", "ext4")
