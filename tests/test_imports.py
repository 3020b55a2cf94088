"""The directions in which modules may import each other, and machine paths that must not be in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("emu/**/*.py"), *ROOT.glob("backends/**/*.py")])
FOUNDATION = {"errors", "units", "layout", "store"}
HOST = {"host_memory", "devdax", "process"}  # facts of this machine
# What each part of emu may import of the rest of emu. The command line may import everything.
MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "layout": {"errors"},
    "host_memory": {"errors", "units"},
    "devdax": set(),
    "process": {"errors"},
    "store": {"errors", "layout", "descriptor_wire"},  # the wire form late: it makes descriptors
    "descriptor_wire": {"errors", "store"},
    "suggest": {"errors"},
    "json_output": set(),
    "toml_file": {"errors"},
    "server": {"errors"},
    "registry": FOUNDATION,
    "numa": {"store", "_native"},
    "pool": FOUNDATION | {"descriptor_wire", "process", "devdax", "_native"},
    "timing": {"errors", "suggest", "toml_file", "process", "_native"},
    "trace": {"errors"},
    "provision": {"errors", "units", "suggest", "toml_file", "server", "registry", "timing"} | HOST,
    "probes": {"errors", "units", "suggest", "host_memory", "numa", "provision", "_native"},
    "sac": FOUNDATION
    | HOST
    | {"json_output", "suggest", "_native", "registry", "server", "timing", "trace", "provision"}
    | {"locality"},
    "bench": FOUNDATION | {"_native", "registry", "server", "host_memory"},
    "locality": FOUNDATION | {"suggest", "timing", "_native"},
    "sim": FOUNDATION | {"suggest", "text_file", "sac", "locality", "timing", "trace", "_native"},
    "testing": set(),
    "text_file": {"errors"},
    "capacity": FOUNDATION | {"text_file", "sac", "sim"},
    "calibrate": {"errors", "text_file", "timing"},
    "study": FOUNDATION | {"suggest", "sac", "sim", "capacity", "locality", "timing"},
}


def imported_modules(source: Path) -> set[str]:
    """Dotted names of everything that a file imports, inside functions too; packages and their members alike."""
    package = source.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def parts_of_emu(source: Path) -> set[str]:
    """The parts of emu (emu.PART...) that a file imports."""
    return {
        name.split(".")[1]
        for name in imported_modules(source)
        if name.startswith("emu.") and is_part(name.split(".")[1])
    }


def is_part(name: str) -> bool:
    return (
        name == "_native"
        or (ROOT / "emu" / name).is_dir()
        or (ROOT / "emu" / f"{name}.py").exists()
    )


def part(source: Path) -> str:
    return source.relative_to(ROOT / "emu").parts[0].removesuffix(".py")


def outside(third_party: str, allowed: tuple[str, ...]) -> list[str]:
    """Files that import a package although they are outside the folders where it is allowed."""
    return [
        str(source.relative_to(ROOT))
        for source in SOURCES
        if any(name.split(".")[0] == third_party for name in imported_modules(source))
        and not str(source.relative_to(ROOT)).startswith(allowed)
    ]


def test_the_walk_sees_imports_of_every_form() -> None:
    probe = ROOT / "emu" / "cli" / "main.py"
    assert {"click", "emu.errors", "emu.errors.EmuError"} <= imported_modules(probe)
    assert "numa" in parts_of_emu(ROOT / "backends" / "mapped.py")
    assert "_native" in parts_of_emu(ROOT / "backends" / "mapped.py")
    assert len(SOURCES) > 50


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_each_part_imports_only_what_is_beneath_it(name: str) -> None:
    sources = [
        source
        for source in SOURCES
        if source.parts[len(ROOT.parts)] == "emu" and part(source) == name
    ]
    assert sources, f"emu has no part {name}: take it out of MAY_IMPORT"
    for source in sources:
        beyond = parts_of_emu(source) - MAY_IMPORT[name] - {name}
        assert not beyond, f"{source.relative_to(ROOT)} imports emu.{', emu.'.join(sorted(beyond))}"


def test_every_part_has_its_line() -> None:
    parts = {part(source) for source in SOURCES if source.parts[len(ROOT.parts)] == "emu"}
    assert parts - {"__init__", "cli"} == set(MAY_IMPORT)


def test_emu_never_imports_a_backend() -> None:
    assert outside("backends", ("backends/",)) == []


def test_only_the_registry_names_a_backends_module() -> None:
    """Not even in a string, for instance of a command: the registry says how a scheme is served."""
    named = re.compile(r"backends\.\w")
    found = {
        str(source.relative_to(ROOT))
        for source in (ROOT / "emu").glob("**/*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if named.search(node.value)
    }
    assert found == {"emu/registry.py"}


def test_backends_import_only_what_a_backend_may_use() -> None:
    allowed = FOUNDATION | HOST | {"numa", "pool", "_native"}
    for source in (ROOT / "backends").glob("**/*.py"):
        beyond = parts_of_emu(source) - allowed
        assert not beyond, f"{source.relative_to(ROOT)} imports emu.{', emu.'.join(sorted(beyond))}"


def test_heavy_packages_stay_in_their_rooms() -> None:
    assert outside("torch", ("emu/sac/", "emu/bench/")) == []
    assert outside("click", ("emu/cli/",)) == []
    assert outside("matplotlib", ("emu/sac/", "emu/bench/", "emu/study/")) == []
    assert outside("transformers", ()) == []


def test_the_command_line_imports_its_verbs_late() -> None:
    """Only our light modules at the top of a verb's file, so that `emu status` stays quick."""
    for source in (ROOT / "emu" / "cli").glob("*.py"):
        tree = ast.parse(source.read_text())
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
        heavy = {
            n
            for n in names
            if n.split(".")[0] in {"torch", "numpy", "matplotlib"} or n.startswith("emu.sac")
        }
        assert not heavy, f"{source.name} imports {heavy} at its top"


def test_no_machine_path_is_in_the_tree() -> None:
    """Nothing may depend on where a checkout or a home lies."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    machine = re.compile(r"(?<![\w.])/(?:root|work|home/\w+|tmp/wt|Users/\w+)/")
    assert machine.search("a /" + "root/x") is not None
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file() and path.suffix not in {".png", ".npz"} and path != Path(__file__)
        for match in machine.finditer(path.read_text(errors="replace"))
    ]
    assert found == []
