"""KVM by trying: whatever a QEMU does instead of running a guest, TCG is taken with the reason, and nothing stays."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from emu.provision import accelerator
from emu.provision.accelerator import Verdict, choose_accelerator, try_kvm
from emu.provision.guest_facts import load_machine
from emu.provision.guest_image import GuestImage

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = GuestImage("/none/vmlinuz", "/none/initramfs.img", "6.12")


def fake_qemu(tmp_path: Path, script: str) -> str:
    path = tmp_path / "qemu"
    path.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'failed to set MSR: kvm_buf_set_msrs'; exit 134", "kvm_buf_set_msrs"),
        # QEMU stays, paused, and serves its monitor: only its words say so
        ("echo 'KVM internal error. Suberror: 1' >&2; exec sleep 600", "Suberror: 1"),
        ("exec sleep 600", "a guest does not boot"),
    ],
)
def test_a_guest_that_does_not_boot_means_tcg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr(accelerator, "BOOT_TIMEOUT_S", 1.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    verdict = try_kvm(fake_qemu(tmp_path, script), IMAGE, load_machine())
    assert verdict.accelerator == "tcg"
    assert words in verdict.reason
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def choose(version: str, cache: Path) -> Verdict:
    image = GuestImage("/none/vmlinuz", str(cache / "initramfs.img"), "6.12")
    return choose_accelerator("/usr/bin/qemu", version, image, load_machine())


def test_the_verdict_is_kept_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def tried(*_: object) -> Verdict:
        tries.append(time.monotonic())
        return Verdict("kvm", f"try {len(tries)}")

    (tmp_path / "kvm").write_bytes(b"")
    monkeypatch.setattr(accelerator, "KVM", str(tmp_path / "kvm"))
    monkeypatch.setattr(accelerator, "try_kvm", tried)
    assert choose("10.0", tmp_path) == choose("10.0", tmp_path) == Verdict("kvm", "try 1")
    assert choose("10.1", tmp_path) == Verdict("kvm", "try 2")
    (tmp_path / "accelerator.json").write_text("{ half a file")
    assert choose("10.1", tmp_path) == Verdict("kvm", "try 3")
    monkeypatch.setattr(accelerator, "KVM", str(tmp_path / "none"))
    assert choose("10.1", tmp_path) == Verdict("tcg", f"{tmp_path}/none: No such file or directory")
    assert len(tries) == 3
