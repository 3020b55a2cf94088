"""The examples of the documents, run as they stand; and the files that they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Home

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/examples/ci/README.md",
)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, document: str = "README.md") -> list[str]:
    """The fenced blocks of a language, in order."""
    text = (ROOT / document).read_text()
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    scripts = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.needs("shm", "torch")
@pytest.mark.parametrize("number", range(len(blocks("sh"))))
def test_shell_examples(number: int, home: Home, tmp_path: Path) -> None:
    """Through the installed `emu`; the `home` fixture takes down what a failed example leaves up."""
    assert (Path(sys.executable).parent / "emu").exists(), "emu is not installed beside this Python"
    # The default place is one per user: a testbed of somebody's might have the same name there.
    example = blocks("sh")[number].replace("emu up ", f"emu up --dir {home.run} ")
    result = run(["bash", "-euo", "pipefail", "-c", example], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    state = home.state / "emu" / "testbeds"
    assert not state.exists() or not list(state.glob("*.json")), "the example left a testbed up"


def test_there_are_examples_of_every_kind() -> None:
    assert len(blocks("sh")) >= 2
    assert "emu up" in blocks("sh")[0]
    assert len(blocks("python")) >= 1
    assert len(blocks("toml")) >= 1


@pytest.mark.needs("shm")
@pytest.mark.parametrize("number", range(len(blocks("python"))))
@pytest.mark.usefixtures("home")
def test_python_examples(number: int, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(blocks("python")[number])
    result = run([sys.executable, "-W", "error", str(file)], tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.needs("shm")
def test_pytest_examples(home: Home, tmp_path: Path) -> None:
    """Those with the fixtures of our plugin, as a user's project has them."""
    assert len(blocks("py")) == 1
    (tmp_path / "test_example.py").write_text(blocks("py")[0])
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--emu-dir={home.run}"]
    result = run(argv, tmp_path)
    assert "4 passed" in result.stdout, result.stdout


@pytest.mark.usefixtures("home")
def test_spec_file_examples(tmp_path: Path) -> None:
    for body in blocks("toml"):
        (tmp_path / "testbed.toml").write_text(body)
        result = run(
            ["emu", "up", "-f", "testbed.toml", "--dir", str(tmp_path), "--dry-run"], tmp_path
        )
        assert result.returncode == 0, result.stderr


def test_verbs_and_flags_in_the_text_exist(tmp_path: Path) -> None:
    """Every `emu VERB ... --flag` in backquotes or code, against the command's own help."""
    text = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    calls = re.findall(r"\bemu ((?:trace )?[a-z]+)((?: [^`\n|#]*)?)", "\n".join(_code(text)))
    assert len(calls) > 15
    help_of: dict[str, str] = {}
    for verb, rest in calls:
        if verb not in help_of:
            result = run(["emu", *verb.split(), "--help"], tmp_path)
            assert result.returncode == 0, f"emu {verb}: {result.stderr}"
            help_of[verb] = result.stdout
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", rest):
            assert flag in help_of[verb], f"emu {verb} has no {flag}"


def _code(text: str) -> list[str]:
    return [body for _, body in _FENCE.findall(text)] + re.findall(r"`(emu [^`\n]+)`", text)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_the_text_names_are_there(document: str) -> None:
    text = (ROOT / document).read_text()
    here = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    for link in links:
        assert (here / link).exists(), link
    paths = re.findall(r"`((?:emu|backends|tests|scripts|docs)/[\w./]+)`", text)
    made_by_the_reader = {"backends/mem.py", "emu/timing/profiles/media/mem.toml"}
    for path in set(paths) - made_by_the_reader:
        named = ROOT / path
        assert named.exists() or named.with_suffix(".py").exists(), path


def test_every_output_field_is_explained() -> None:
    """The README's table names exactly the fields of a run, apart from those that say themselves."""
    source = (ROOT / "emu" / "sac" / "figures.py").read_text()
    body = source[source.index("    return {\n") :]
    fields = set(re.findall(r'^        "(\w+)":', body[: body.index("    }\n")], re.MULTILINE))
    assert {"backend", "clock", "tokens_match"} <= fields
    table = (ROOT / "README.md").read_text().split("| field | meaning |")[1].split("\n\n")[0]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    assert fields - named == {"requests", "output_tokens", "differences"}
    assert named <= fields


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_are_clean() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if b"bash" in path.read_bytes()[:32]]
    scripts += [ROOT / ".ci" / "run", ROOT / "docs" / "examples" / "ci" / "run-tests"]
    result = run(["shellcheck", *map(str, scripts)], ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "script", ["scripts/setup", "scripts/quickstart", "scripts/test", ".ci/run"]
)
def test_scripts_parse_and_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert run(["bash", "-n", script], ROOT).returncode == 0
