"""The pytest plugin as a user's project sees it: in runs of pytest of their own, with and without pytest-xdist."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from run_command import wait_for

from emu.provision import process
from emu.provision.condition import inspect
from emu.provision.guest_image import cache_directory
from emu.provision.runner import Runner
from emu.provision.state import StateDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Home

pytestmark = pytest.mark.needs("shm")

ROWS = """
import numpy as np
import pytest

def value(tokens, fill):
    return {"kv": np.full((2, tokens, 1152), fill, np.uint8), "index": np.full((2, tokens, 132), fill, np.uint8)}

def rows(store, key, tokens):
    out = store.buffer(len(tokens) * 1152).reshape(1, -1, 1152)
    assert store.gather(store.slots([key]), 1, np.array([tokens], np.int32), out) == len(tokens)
    return out[0].copy()
"""
CACHE = cache_directory().parents[1]  # of this user: pytester gives every test another $HOME
# An editable install's import hook is listed among our files, and has to be imported before pytest is.
EDITABLE = "ignore:Module already imported so cannot be rewritten; _editable:pytest.PytestAssertRewriteWarning"
OPTIONS = ("-p", "no:cacheprovider", "-rs", "-W", "error", "-W", EDITABLE)


@pytest.fixture
def project(pytester: pytest.Pytester, home: Home) -> Iterator[pytest.Pytester]:
    """An empty project; at its end no testbed of its runs may be left, neither record nor file nor process."""
    yield pytester
    assert StateDirectory().names() == []
    assert list(home.run.iterdir()) == []


def run(project: pytest.Pytester, home: Home, *options: str, **outcomes: int) -> pytest.RunResult:
    result = project.runpytest_subprocess(*OPTIONS, f"--emu-dir={home.run}", *options)
    if outcomes:
        result.assert_outcomes(**outcomes)
    return result


def test_the_store_of_each_medium_holds_what_is_put_and_starts_empty(
    project: pytest.Pytester, home: Home
) -> None:
    project.makepyfile(
        ROWS
        + """
@pytest.mark.parametrize("again", [0, 1])
def test_store(kv_store, again):
    assert not kv_store.exists(["a"]).any(), "another test's"
    kv_store.put(["a"], [value(100, 7 + again)])
    assert (rows(kv_store, "a", [0, 99, 5]) == 7 + again).all()

@pytest.mark.parametrize("kv_store", ["cxl"], indirect=True)
def test_one_medium(kv_store, cxl_devices):
    assert kv_store.device == str(cxl_devices[0])

def test_devices_start_as_zeros(cxl_devices):
    assert cxl_devices[0].read_bytes().strip(bytes(1)) == b""
    assert [path.name for path in cxl_devices[0].parent.glob("*.directory")] == []
"""
    )
    run(project, home, passed=8)


def test_a_layout_of_ones_own(project: pytest.Pytester, home: Home) -> None:
    project.makepyfile(
        """
import emu, numpy as np, pytest

@pytest.fixture
def kv_layout():
    return emu.KVLayout((emu.Component("kv", 656, layers=(0, 1, 2)),))

def test_store(kv_store):
    kv_store.put(["a"], [{"kv": np.zeros((3, 64, 656), np.uint8)}])
"""
    )
    run(project, home, passed=3)


def test_equal_marks_share_a_testbed_and_different_ones_do_not(
    project: pytest.Pytester, home: Home
) -> None:
    project.makepyfile(
        """
import pytest
seen = []
pytestmark = pytest.mark.emu(rdma="off", device_size="1M")

@pytest.mark.emu(cxl_devices=2, hosts=2)
def test_a(emu_testbed): seen.append(emu_testbed.name); assert len(emu_testbed.hosts) == 2

def test_b(emu_testbed): seen.append(emu_testbed.name); assert len(emu_testbed.devices) == 1

@pytest.mark.emu(hosts=2, cxl_devices=2)
def test_c(emu_testbed, cxl_devices):
    seen.append(emu_testbed.name)
    assert [path.stat().st_size for path in cxl_devices] == [1 << 20] * 2

@pytest.mark.emu(profile="laptop", coherence="none")
def test_d(emu_testbed): assert (emu_testbed.profile, emu_testbed.coherence) == ("laptop", "none")

@pytest.mark.emu(device_size="2M")
def test_the_nearest_mark_counts(cxl_devices): assert cxl_devices[0].stat().st_size == 2 << 20

def test_names():
    assert seen[0] == seen[2] != seen[1]
    assert all(name.startswith("pytest-main-") for name in seen)
"""
    )
    run(project, home, passed=6)


def test_what_a_test_leaves_running_is_ended_after_it(project: pytest.Pytester, home: Home) -> None:
    project.makepyfile(
        """
import pytest
from emu.provision import process
pytestmark = pytest.mark.emu(rdma="off", device_size="1M", hosts=2)
left = []

def test_leaves(emu_testbed):
    left.append(emu_testbed.spawn("host1", ["sleep", "600"]))
    emu_testbed.exec("host0", ["sh", "-c", "sleep 600 & echo"])
    assert len(process.tagged(emu_testbed.record.id)) == 2

def test_finds_nothing(emu_testbed):
    assert process.tagged(emu_testbed.record.id) == []
    assert emu_testbed.state.load(emu_testbed.name).processes == []
"""
    )
    run(project, home, passed=2)


def test_a_testbed_that_a_test_broke_is_made_anew(project: pytest.Pytester, home: Home) -> None:
    project.makepyfile(
        """
import os, pytest, signal
from pathlib import Path
names = []

@pytest.fixture(autouse=True)
def remember(emu_testbed): names.append(emu_testbed.name)

def test_kills_its_node(emu_testbed):
    node = emu_testbed.record.processes[0].process.pid
    os.kill(node, signal.SIGKILL); os.waitpid(node, 0)

def test_removes_a_device(emu_testbed): os.unlink(emu_testbed.devices[0])

def test_takes_it_down(emu_testbed):
    from emu.provision.runner import Runner
    Runner(emu_testbed.state).down(emu_testbed.name)

def test_all_is_well(emu_testbed):
    assert Path(emu_testbed.devices[0]).exists()
    assert len(set(names)) == 4

def test_and_stays_so(emu_testbed): assert len(set(names)) == 4
"""
    )
    run(project, home, passed=5)


def test_an_environment_that_a_test_changes_is_not_the_plugins(
    project: pytest.Pytester, home: Home
) -> None:
    project.makepyfile(
        """
import pytest
pytestmark = pytest.mark.emu(rdma="off", device_size="1M")

def test_moves_home(monkeypatch, tmp_path, emu_testbed):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

@pytest.mark.emu(hosts=2)
def test_asks_late(monkeypatch, tmp_path, request):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    request.getfixturevalue("emu_testbed")
    assert not list(tmp_path.rglob("*.json"))
"""
    )
    run(project, home, passed=2)


def test_where_memory_is_short_idle_testbeds_give_way(project: pytest.Pytester, home: Home) -> None:
    project.makepyfile(
        """
import pytest
from emu.provision import facts
from emu.provision.state import StateDirectory
pytestmark = pytest.mark.emu(rdma="off", device_size="1M")

def test_first(emu_testbed, monkeypatch): pass

@pytest.fixture
def full(monkeypatch):
    monkeypatch.setattr(facts, "free_bytes", lambda path: 0 if StateDirectory().names() else 4 << 20)

@pytest.mark.emu(hosts=2)
def test_second(full, emu_testbed): assert StateDirectory().names() == [emu_testbed.name]

@pytest.mark.emu(device_size="64M")
def test_third(full, emu_testbed): pass
"""
    )
    result = run(project, home, passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*needs shm: 1 device of 64 MiB in all do not fit*4 MiB free*"])


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("cxl_device=2", "pytest.mark.emu has no 'cxl_device' (did you mean 'cxl_devices'?)"),
        ("name='mine'", "pytest.mark.emu has no 'name'"),
        ("4", "pytest.mark.emu takes keywords only, not 4"),
        ("cxl_devices=0", "--cxl-devices: 0 is out of range (use 1 to 16)"),
        ("driver='dockr'", "--driver: no such value 'dockr'"),
        ("attach=['/dev/null']", "device /dev/null is neither a file nor a devdax node"),
    ],
)
def test_a_wrong_mark_fails_the_test_in_one_line(
    project: pytest.Pytester, home: Home, mark: str, words: str
) -> None:
    project.makepyfile(f"import pytest\n@pytest.mark.emu({mark})\ndef test_it(emu_testbed): pass\n")
    result = run(project, home, errors=1)
    assert words in result.stdout.str()
    assert "During handling" not in result.stdout.str()


QEMU_TEST = 'import pytest\n@pytest.mark.emu(driver="qemu")\ndef test_it(emu_testbed): pass\n'


def test_a_skip_names_what_is_missing_and_need_forbids_it(
    project: pytest.Pytester, home: Home
) -> None:
    """The home fixture's cache holds no guest kernel."""
    project.makepyfile(QEMU_TEST)
    words = "*needs guest_kernel: there is no guest kernel*scripts/guest-image*"
    run(project, home, skipped=1).stdout.fnmatch_lines([words])
    run(project, home, "--emu-need", "shm, qemu", skipped=1)
    run(project, home, "--emu-need", "shm,guest_kernel", errors=1).stdout.fnmatch_lines([words])
    wrong = run(project, home, "--emu-need", "guest_kernl")
    assert wrong.ret == pytest.ExitCode.USAGE_ERROR
    assert "--emu-need: no capability 'guest_kernl' (did you mean" in wrong.stderr.str()


def test_the_drivers_option_is_for_marks_that_name_none(
    project: pytest.Pytester, home: Home
) -> None:
    project.makepyfile(
        """
import pytest
def test_free(emu_testbed): pass
@pytest.mark.emu(driver="local")
def test_bound(emu_testbed): assert emu_testbed.driver == "local"
"""
    )
    run(project, home, passed=2)
    run(project, home, "--emu-driver", "qemu", passed=1, skipped=1)


@pytest.mark.slow
@pytest.mark.needs("qemu", "cxl_type3", "guest_kernel")
def test_guests(
    pytester: pytest.Pytester, guest_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    pytester.makepyfile(
        """
import pytest
pytestmark = pytest.mark.emu(driver="qemu", device_size="256M")
name = []

def test_a_guest_writes_and_we_read(emu_testbed, cxl_devices):
    name.append(emu_testbed.name)
    code = ("import mmap, os; m = mmap.mmap(os.open(os.environ['EMU_CXL_DEVICES'], os.O_RDWR), 256 << 20);"
            " m[12345:12350] = b'guest'")
    done = emu_testbed.exec("host0", ["python3", "-I", "-S", "-c", code], timeout_s=120)
    assert done.returncode == 0, done.stderr
    with cxl_devices[0].open("rb") as device:
        device.seek(12345)
        assert device.read(5) == b"guest"

def test_the_next_test_finds_zeros_in_the_same_testbed(emu_testbed, cxl_devices):
    assert name == [emu_testbed.name]
    with cxl_devices[0].open("rb") as device:
        device.seek(12345)
        assert device.read(5) == bytes(5)
    from emu.provision.devices import set_mode
    set_mode(emu_testbed, "host0", "cxl0", "system-ram")

def test_memory_that_a_guest_took_is_not_wiped_beneath_it(emu_testbed):
    assert name != [emu_testbed.name]
"""
    )
    run(pytester, guest_home, "--emu-need", "qemu,cxl_type3,guest_kernel", passed=3)
    assert StateDirectory().names() == []


# -- several processes, and killed ones --------------------------------------------------------------------
def test_workers_of_xdist_have_testbeds_of_their_own(
    project: pytest.Pytester, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(
        """
import os, pytest, time
from pathlib import Path

@pytest.mark.parametrize("number", range(8))
def test_it(kv_store, emu_testbed, number):
    place = Path(os.environ["SEEN"])
    (place / emu_testbed.name).touch()
    deadline = time.monotonic() + 60
    while len(list(place.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)  # until the other worker has one, too
"""
    )
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("SEEN", str(seen))
    run(project, home, "-n", "2", passed=24)
    names = sorted(path.name for path in seen.iterdir())
    assert [name.split("-")[1] for name in names] == ["gw0", "gw1"]
    assert len({name.split("-")[2] for name in names}) == 2


HANG = """
import os, pytest, time
from pathlib import Path

@pytest.mark.emu(hosts=2)
@pytest.mark.parametrize("number", range(2))
def test_hangs(emu_testbed, number):
    child = emu_testbed.spawn("host1", ["sleep", "600"])
    (Path(os.environ["SEEN"]) / str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
@pytest.mark.parametrize("cleared_by", ["session", "command"])
def test_what_a_killed_session_left_is_cleared(
    project: pytest.Pytester, home: Home, tmp_path: Path, options: list[str], cleared_by: str
) -> None:
    project.makepyfile(test_hang=HANG, test_quick="def test_quick(emu_testbed): pass\n")
    seen = tmp_path / "seen"
    seen.mkdir()
    argv = [sys.executable, "-m", "pytest", *OPTIONS, f"--emu-dir={home.run}", *options]
    session = subprocess.Popen(
        [*argv, "test_hang.py"], env={**os.environ, "SEEN": str(seen)}, stdout=subprocess.DEVNULL
    )
    wait_for(lambda: len(list(seen.iterdir())) == (2 if options else 1))
    pids = [int(path.name) for path in seen.iterdir()]
    state = StateDirectory()
    records = [state.load(name) for name in state.names()]
    assert len(records) == len(pids)
    children = [found for record in records for found in process.tagged(record.id)]
    assert len(children) == 2 * len(records), "a memory node and a program each"
    for pid in {session.pid, *pids}:
        os.kill(pid, signal.SIGKILL)
    session.wait()
    wait_for(lambda: not any(process.identify(pid) for pid in pids))
    assert {inspect(state, name).state for name in state.names()} == {"abandoned"}
    if cleared_by == "session":
        run(project, home, "test_quick.py", passed=1)
    else:
        for name in state.names():
            Runner(state).down(name)
    assert not any(map(process.is_running, children))
    assert state.names() == []


def test_a_living_sessions_testbed_is_not_cleared(
    project: pytest.Pytester, home: Home, tmp_path: Path
) -> None:
    project.makepyfile(
        """
import subprocess, sys, os
def test_outer(emu_testbed, request):
    if "INNER" in os.environ: return
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q",
            "--emu-dir=" + request.config.getoption("--emu-dir")]
    done = subprocess.run(argv, env={**os.environ, "INNER": "1"}, capture_output=True, text=True)
    assert "1 passed" in done.stdout
    assert emu_testbed.state.load(emu_testbed.name).id == emu_testbed.record.id
    assert os.path.exists(emu_testbed.devices[0])
"""
    )
    run(project, home, passed=1)


# -- projects that have nothing to do with us -------------------------------------------------------------
def test_a_project_without_our_fixtures_loads_nothing(project: pytest.Pytester) -> None:
    """Every pytest run of the environment imports the plugin: that must cost nothing."""
    project.makepyfile("def test_it(): pass\n")
    project.makeconftest(
        """
import json, sys
def pytest_unconfigure(config):
    with open("modules.json", "w") as file:
        json.dump(sorted(sys.modules), file)
"""
    )
    loaded = []
    for options in ((), ("-p", "no:emu")):
        project.runpytest_subprocess("-p", "no:cacheprovider", *options).assert_outcomes(passed=1)
        loaded.append(set(json.loads(Path(project.path, "modules.json").read_text())))
    ours, without = loaded
    assert "emu.pytest_plugin" in ours
    assert ours - without == {"emu", "emu.pytest_plugin"}
    assert not {"torch", "numpy", "click", "psutil"} & ours


def test_the_mark_and_the_options_are_known_and_explained(project: pytest.Pytester) -> None:
    project.runpytest_subprocess("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.emu(cxl_devices=1*"]
    )
    text = project.runpytest_subprocess("--help").stdout.str()
    for option in ("--emu-driver", "--emu-need", "--emu-dir"):
        assert option in text
