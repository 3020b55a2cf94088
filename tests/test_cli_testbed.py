"""The verbs of a testbed, as a user calls them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emu.cli.main import main
from emu.provision import process
from emu.provision.state import StateDirectory
from emu.timing.profile_file import media_names, system_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Home

COMMAND = [sys.executable, "-c", "from emu.cli import main; main()"]


@pytest.fixture
def run_emu(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: (exit status, stdout, stderr)."""
    before = {number: signal.getsignal(number) for number in (2, 3, 15, 1)}

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["emu", *map(str, arguments)])
        status: Any = 0
        try:
            main()
        except SystemExit as leaving:
            status = leaving.code
        for number, handler in before.items():
            signal.signal(number, handler)
        out, err = capfdbinary.readouterr()
        return int(status or 0), out.decode(), err.decode()

    return run


def up(home: Home, *more: object) -> list[object]:
    return [
        "up",
        "--cxl-devices",
        2,
        "--device-size",
        "1M",
        "--dir",
        home.run,
        "--rdma",
        "off",
        *more,
    ]


def test_from_up_to_down(home: Home, run_emu: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run_emu(*up(home, "--hosts", 2, "--name", "lab"))
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "local, because this version has only the local driver"
    assert f"{home.run}/lab/cxl1" in out
    status, out, _ = run_emu("status", "--json")
    (testbed,) = json.loads(out)["testbeds"]
    assert (testbed["name"], testbed["state"], testbed["driver"]) == ("lab", "up", "local")
    assert json.loads(out)["schema_version"] == 1
    assert run_emu("env", "host1")[1].splitlines() == [
        "export EMU_TESTBED=lab",
        "export EMU_HOST=host1",
        f"export EMU_CXL_DEVICES={home.run}/lab/cxl0:{home.run}/lab/cxl1",
    ]
    assert json.loads(run_emu("env", "--json")[1])["env"]["EMU_HOST"] == "host0"
    status, out, err = run_emu("exec", "host0", "--", "sh", "-c", "echo out; echo err >&2; exit 5")
    assert (status, out, err) == (5, "out\n", "err\n")
    assert run_emu("logs", "host0")[1] == "out\nerr\n"
    assert run_emu("logs")[1] == "==> host0 <==\nout\nerr\n==> host1 <==\n"
    assert "cxl0" in run_emu("down", "--dry-run")[1]
    status, out, _ = run_emu("down", "--json")
    (row,) = json.loads(out)["testbeds"]
    assert (status, row["name"], row["left"]) == (0, "lab", [])
    assert f"{home.run}/lab/cxl0" in row["removed"]
    assert list(home.run.iterdir()) == []
    assert run_emu("status")[1].startswith("no testbed")


def test_the_memory_node_serves_and_goes(home: Home) -> None:
    argv = ["up", "--cxl-devices", "1", "--device-size", "1M", "--dir", str(home.run), "--json"]
    done = subprocess.run([*COMMAND, *argv], capture_output=True, check=True, text=True)
    socket = Path(json.loads(done.stdout)["plan"]["node_socket"])
    assert socket.is_socket()
    record = StateDirectory().load("default")
    assert process.is_running(record.processes[0].process), (
        "it must outlive the command that made it"
    )
    subprocess.run([*COMMAND, "down"], check=True, capture_output=True)
    assert not process.is_running(record.processes[0].process)
    assert list(home.run.iterdir()) == []


def test_dry_run_touches_nothing(home: Home, run_emu: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run_emu(*up(home, "--dry-run"))
    assert status == 0
    assert f"allocate {home.run}/default/cxl0, 1 MiB" in out
    plan = json.loads(run_emu(*up(home, "--dry-run", "--json"))[1])["plan"]
    assert [step["action"] for step in plan["steps"]][:2] == ["MakeDirectory", "AllocateDevice"]
    assert list(home.run.iterdir()) == []
    assert not home.state.exists()


def test_flags_and_file_make_the_same_plan(
    home: Home, tmp_path: Path, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "testbed.toml"
    file.write_text('[[device]]\nsize = "1M"\n[[device]]\nsize = "1M"\n[rdma]\nmode = "off"\n')
    by_file = run_emu("up", "-f", file, "--dir", home.run, "--dry-run", "--json")
    assert by_file == run_emu(*up(home, "--dry-run", "--json"))
    assert by_file[0] == 0


BAD = [
    (["up", "--cxl-devices", "0"], 1, "--cxl-devices: 0 is out of range"),
    (["up", "--cxl-devices", "many"], 2, "'many' is not a valid integer"),
    (["up", "--cxl-devices", "1", "--device-size", "0"], 1, "--device-size: 0 is too small"),
    (["up", "--cxl-devices", "1", "--device-size", "banana"], 1, "'banana' is not a size"),
    (["up", "--cxl-devices", "1", "--profile", "nonsense"], 1, "nonsense"),
    (["up", "--cxl-devices", "1", "--name", "a/b"], 1, "'a/b' is not a testbed name"),
    (["up", "--cxl-devices", "1", "--driver", "qemu"], 1, "only the local driver"),
    (["up", "--cxl-devices", "16", "--device-size", "1000T"], 1, "do not fit"),
    (["up", "--cxl-devices", "1", "--dir", "/no/such/directory"], 1, "is not a directory"),
    (["up", "-f", "/no/such/file.toml"], 1, "No such file"),
    (["up"], 1, "a testbed needs devices"),
    (["status", "nobody"], 1, "no testbed 'nobody'"),
    (["down", "nobody"], 1, "no testbed 'nobody'"),
    (["down", "../x"], 1, "not a testbed name"),
    (["down", "x", "--all"], 2, "not both"),
    (["exec", "host0", "--", "true"], 1, "no testbed 'default'"),
    (["exec", "host0"], 2, "Missing argument"),
    (["env"], 1, "no testbed 'default'"),
    (["logs"], 1, "no testbed 'default'"),
    (["doctor", "--need", "qmu"], 1, "did you mean 'qemu'?"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    home: Home,
    run_emu: Callable[..., tuple[int, str, str]],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    if arguments[0] == "up" and "--dir" not in arguments:
        arguments = [
            *arguments,
            "--dir",
            str(home.run),
        ]  # the default root may be in use by somebody
    found, out, err = run_emu(*arguments)
    assert found == status, err
    assert out == ""
    assert words in err
    if status == 1:
        assert err.startswith("emu: ")
        assert err.count("\n") == 1
    assert list(home.run.iterdir()) == []
    assert not home.state.exists() or list(home.state.glob("emu/testbeds/*")) == []


def test_status_notices_devices_that_shrank_grew_or_are_gone(
    home: Home, run_emu: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    existing = tmp_path / "existing"
    existing.write_bytes(bytes(3 << 20))
    spec = tmp_path / "testbed.toml"
    sizes = f'[[device]]\nsize = "1M"\n[[device]]\npath = "{existing}"\nsize = "2M"\n'
    spec.write_text(f'{sizes}[rdma]\nmode = "off"\n')
    assert run_emu("up", "-f", spec, "--dir", home.run)[0] == 0
    made = home.run / "default" / "cxl0"

    def status() -> tuple[dict[str, Any], str]:
        (testbed,) = json.loads(run_emu("status", "--json")[1])["testbeds"]
        return testbed, run_emu("status")[1]

    testbed, text = status()
    assert (testbed["state"], testbed["resized"], testbed["missing"]) == ("up", [], [])
    for path, was, now, verb in (
        (made, 1 << 20, 4096, "shrank"),
        (made, 1 << 20, 2 << 20, "grew"),
        (existing, 2 << 20, 0, "shrank"),
    ):
        before = path.stat().st_size
        os.truncate(path, now)
        testbed, text = status()
        found = {"path": str(path), "recorded_bytes": was, "found_bytes": now}
        assert (testbed["state"], testbed["resized"]) == ("damaged", [found])
        assert f"default: device {path} {verb} from {was} to {now} bytes\n" in text
        assert "emu down default" in text
        os.truncate(path, before)
        assert status()[0]["state"] == "up"
    for path in (made, existing):
        path.rename(path.with_name("aside"))
        testbed, text = status()
        assert (testbed["state"], testbed["missing"]) == ("damaged", [str(path)])
        assert f"default: missing {path}\n" in text
        path.mkdir()  # another thing of that name is not the device
        assert status()[0]["missing"] == [str(path)]
        path.rmdir()
        path.with_name("aside").rename(path)
    assert run_emu("down")[0] == 0
    assert existing.stat().st_size == 3 << 20


@pytest.mark.parametrize("how", ["text", "dots", "symbolic link", "hard link"])
def test_one_device_under_two_names_is_refused(
    home: Home, run_emu: Callable[..., tuple[int, str, str]], how: str
) -> None:
    device, other = home.run / "device", home.run / "other"
    device.write_bytes(bytes(1 << 20))
    match how:
        case "text":
            other = device
        case "dots":
            other = home.run / ".." / home.run.name / "device"
        case "symbolic link":
            other.symlink_to(device)
        case "hard link":
            other.hardlink_to(device)
    spec = home.run / "spec.toml"
    spec.write_text(f'[[device]]\npath = "{device}"\n[[device]]\npath = "{other}"\n')
    before = sorted(home.run.iterdir())
    for dry_run in ([], ["--dry-run"]):
        code, out, err = run_emu("up", "-f", spec, "--dir", home.run, *dry_run)
        assert (code, out) == (1, "")
        assert f"devices {device} and {other} are the same device" in err
    assert sorted(home.run.iterdir()) == before


def test_down_says_what_stays_beside_a_device_of_the_user(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    device, spec = home.run / "device", home.run / "spec.toml"
    device.write_bytes(bytes(1 << 20))
    spec.write_text(f'[[device]]\npath = "{device}"\n[rdma]\nmode = "off"\n')
    assert run_emu("up", "-f", spec, "--dir", home.run)[0] == 0
    pool = home.run / "device.directory"
    pool.write_bytes(b"x")
    code, out, _ = run_emu("down", "--json")
    assert code == 0
    assert [left for left in json.loads(out)["testbeds"][0]["left"] if str(pool) in left]
    assert pool.read_bytes() == b"x"


def test_a_lock_of_a_killed_command_goes_and_one_in_use_stays(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    state = StateDirectory()
    state.path.mkdir(parents=True)
    stale, used = state.path / "stale.lock", state.path / "used.lock"
    stale.touch()
    with state.lock("used"):
        assert run_emu("down", "--all")[0] == 0
        assert not stale.exists()
        assert used.exists()


def test_a_state_directory_that_cannot_be_read_is_no_absence(
    home: Home,
    run_emu: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    with monkeypatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        for verb in (["status"], ["down", "--all"], ["down"]):
            code, _, err = run_emu(*verb)
            assert code == 1
            assert "cannot be read" in err


def test_a_hostile_record_blocks_no_other_testbed(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu("up", "--cxl-devices", "1", "--device-size", "1M", "--dir", home.run)[0] == 0
    bad = StateDirectory().record_path("bad")
    for content in ("[" * 100_000, "null", "9" * 5_000):
        bad.write_text(content)
        code, out, _ = run_emu("status")
        assert code == 0
        assert "unreadable" in out
        assert "default  up" in out
        assert run_emu("env")[0] == 0
    code, _, err = run_emu("down", "--all")
    assert code == 1
    assert "bad.json" in err
    bad.unlink()
    assert StateDirectory().names() == []


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_exec_runs_where_standard_streams_are_closed(
    home: Home, run_emu: Callable[..., tuple[int, str, str]], closed: tuple[int, ...]
) -> None:
    assert run_emu("up", "--cxl-devices", "1", "--device-size", "1M", "--dir", home.run)[0] == 0
    ran = home.run / "ran"
    program = f"import os, sys; open({str(ran)!r}, 'w').write(os.readlink('/proc/self/fd/0'))"
    command = [
        sys.executable,
        "-m",
        "emu.cli",
        "exec",
        "host0",
        "--",
        sys.executable,
        "-c",
        program,
    ]
    redirections = "".join(f" {fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    shell = f"{shlex.join(command)}{redirections}"
    done = subprocess.run(
        shell, shell=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert ran.read_text() == "/dev/null"
    ran.unlink()


def test_exec_of_what_cannot_be_run_ends_as_a_shell_does(
    home: Home, run_emu: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert run_emu(*up(home))[0] == 0
    (tmp_path / "text").write_text("no program")
    (tmp_path / "binary").write_bytes(b"\x7fELF, or so it says")
    (tmp_path / "binary").chmod(0o755)
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    for command in ("no-such-program", "/no/such/path", "text", "binary", "script", "."):
        path = command if command.startswith(("no", "/")) else str(tmp_path / command)
        shell = subprocess.run(["bash", "-c", '"$0"', path], capture_output=True, check=False)
        status, out, err = run_emu("exec", "host0", "--", path)
        assert (status, out) == (shell.returncode, ""), command
        assert err.startswith(f"emu: {path!r} cannot be run: ")
        assert err.count("\n") == 1
    (testbed,) = json.loads(run_emu("status", "--json")[1])["testbeds"]
    assert testbed["processes"] == []
    assert run_emu("down")[0] == 0


def test_a_name_in_use_is_refused_and_the_testbed_unharmed(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu(*up(home))[0] == 0
    status, _, err = run_emu(*up(home))
    assert status == 1
    assert "exists already" in err
    assert "emu down default" in err
    assert run_emu("exec", "host0", "true")[0] == 0
    status, _, err = run_emu("exec", "host7", "true")
    assert (status, "no host 'host7'" in err) == (1, True)
    assert run_emu("down", "--all")[0] == 0
    assert list(home.run.iterdir()) == []


def test_down_all_takes_every_testbed_and_says_which_failed(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    for name in ("one", "two", "zed"):
        assert run_emu(*up(home, "--name", name))[0] == 0
    record = StateDirectory().record_path("one")
    good = record.read_text()
    record.write_text("torn")
    status, out, err = run_emu("down", "--all")
    assert status == 1
    assert str(record) in err
    assert "two is down" in out
    assert "zed is down" in out
    record.write_text(good)
    assert run_emu("down", "--all")[0] == 0
    assert list(home.run.iterdir()) == []


def start(*arguments: str, **popen: Any) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, **popen)


def test_exec_passes_stdin_and_streams_while_the_program_runs(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu(*up(home))[0] == 0
    with start("exec", "host0", "--", "sh", "-c", "while read l; do echo got $l; done") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for word in (b"one", b"two"):
            child.stdin.write(word + b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"got " + word + b"\n"
        child.stdin.close()
        assert child.wait(60) == 0


def test_exec_hands_sigterm_on_and_ends_with_the_program(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu(*up(home))[0] == 0
    script = "trap 'echo bye; exit 9' TERM; echo on; while :; do sleep 0.05; done"
    with start("exec", "host0", "--", "sh", "-c", script) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == b"bye\n"
        assert child.wait(60) == 9
    assert StateDirectory().load("default").processes == []


def test_exec_whose_reader_goes_away_ends_like_any_program(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu(*up(home))[0] == 0
    with start("exec", "host0", "--", "yes") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"y\n"
        child.stdout.close()
        assert child.wait(60) == 128 + signal.SIGPIPE


def test_kill_9_of_exec_leaves_what_status_lists_and_down_clears(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu(*up(home))[0] == 0
    with start("exec", "host0", "--", "sh", "-c", "echo $$; exec sleep 600") as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        child.kill()
    rows = json.loads(run_emu("status", "--json")[1])["testbeds"][0]["processes"]
    assert rows == [{"pid": pid, "role": "sh", "host": "host0"}]
    assert run_emu("exec", "host0", "true")[0] == 0, "the testbed stays usable"
    assert run_emu("down")[0] == 0
    assert process.identify(pid) is None
    assert list(home.run.iterdir()) == []


def test_sigterm_during_up_undoes(home: Home) -> None:
    code = (
        "import os, signal, time\n"
        "from emu.cli import main\n"
        "def slow(*a): print('here', flush=True); time.sleep(600)\n"
        "os.posix_fallocate = slow\n"
        "main()"
    )
    argv = [sys.executable, "-c", code, *map(str, up(home, "--json"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        child.terminate()
        assert child.wait(60) == 128 + signal.SIGTERM
    assert list(home.run.iterdir()) == []
    assert list(StateDirectory().path.iterdir()) == []


def test_up_imports_nothing_heavy(home: Home) -> None:
    code = (
        "import sys\nfrom emu.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", code, *map(str, up(home, "--json"))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_has_seen_enough_is_no_error(
    run_emu: Callable[..., tuple[int, str, str]], home: Home
) -> None:
    run_emu(*up(home, "--name", "lab"))
    Path(StateDirectory().load("lab").run_dir, "host0.log").write_text("a line\n" * 100_000)
    command = [*COMMAND, "logs", "--name", "lab", "host0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as logs:
        assert logs.stdout is not None
        assert logs.stderr is not None
        assert logs.stdout.readline() == b"a line\n"
        logs.stdout.close()
        assert logs.stderr.read() == b""
        assert logs.wait(60) == 0


def test_a_script_can_tell_a_testbed_that_is_not_whole(
    home: Home, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    assert run_emu("status")[0] == 0
    assert run_emu("status", "--check")[0] == 1
    assert run_emu(*up(home, "--name", "lab"))[0] == 0
    status, out, _ = run_emu("status", "--check")
    assert status == 0
    for words in ("2 x 1 MiB", "sac-server", "bi"):
        assert words in out
    assert run_emu(*up(home, "--name", "other"))[0] == 0
    (home.run / "other" / "cxl1").unlink()
    assert [run_emu("status", *more)[0] for more in ([], ["--json"])] == [0, 0]
    assert [run_emu("status", "--check", *more)[0] for more in ([], ["--json"], ["other"])] == [
        1,
        1,
        1,
    ]
    assert run_emu("status", "--check", "lab")[0] == 0
    out = run_emu("down", "lab")[1]
    assert "files removed, 0 processes ended\n" in out
    assert run_emu("down", "other")[0] == 0


def test_down_says_pids_as_pids(home: Home, run_emu: Callable[..., tuple[int, str, str]]) -> None:
    assert run_emu(*up(home, "--rdma", "node"))[0] == 0
    pid = StateDirectory().load("default").processes[0].process.pid
    assert f"1 process ended (pid {pid})" in run_emu("down")[1]


def test_profiles_are_listed_with_their_numbers(
    run_emu: Callable[..., tuple[int, str, str]],
) -> None:
    listed = json.loads(run_emu("profiles", "--json")[1])["profiles"]
    assert [p["name"] for p in listed] == [*system_names(), *media_names()]
    assert all(p["description"] for p in listed)
    for profile in listed:
        status, out, err = run_emu("profiles", profile["name"], "--json")
        figures = json.loads(out)["figures"]
        assert (status, err) == (0, "")
        assert all(figure["source"] and figure["date"] for figure in figures.values())
        assert any(key.endswith("latency_ns") for key in figures)
    assert "another name of cxl-switch-beluga" in run_emu("profiles")[1]
    assert "per_request_ns" in run_emu("profiles", "sac-server")[1]
    status, _, err = run_emu("profiles", "sac-sever")
    assert status == 1
    assert "sac-server" in err


def test_traces_say_where_they_went(
    tmp_path: Path, run_emu: Callable[..., tuple[int, str, str]]
) -> None:
    trace = tmp_path / "trace.jsonl"
    status, out, err = run_emu("trace", "generate", "--requests", 4, "--out", trace)
    assert (status, out, err) == (0, "", f"4 requests to {trace}\n")
    whole, cut = (
        json.loads(run_emu("trace", "inspect", trace, "--json", *more)[1])["input_tokens"]["max"]
        for more in ([], ["--context", 800])
    )
    assert cut < 800 <= whole
