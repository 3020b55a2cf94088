"""The committed stub of the C++ core says what the module that was built offers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def signatures(text: str) -> dict[str, list[str]]:
    """Every class, function, method and attribute by dotted name, with its signatures, free of formatting."""
    found: dict[str, list[str]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                name = prefix + node.name
                found.setdefault(name, []).append(", ".join(map(ast.unparse, node.bases)))
                walk(node.body, name + ".")
            elif isinstance(node, ast.FunctionDef):
                returns = ast.unparse(node.returns) if node.returns else ""
                marks = " ".join(map(ast.unparse, node.decorator_list))
                signature = f"{marks} ({ast.unparse(node.args)}) -> {returns}"
                found.setdefault(prefix + node.name, []).append(signature)
            elif isinstance(node, ast.AnnAssign):
                found[prefix + ast.unparse(node.target)] = [ast.unparse(node.annotation)]

    walk(ast.parse(text).body, "")
    return found


def test_the_stub_says_what_the_module_offers(tmp_path: Path) -> None:
    printed = tmp_path / "_native.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "emu._native", "-o", str(printed)],
        check=True,
        timeout=120,
    )
    built = signatures(printed.read_text())
    committed = signatures((ROOT / "emu" / "_native.pyi").read_text())
    assert len(built) > 20
    assert {"RowTables", "RowTables.add", "gather_rows"} <= set(built)
    for name in sorted(built.keys() | committed.keys()):
        assert committed.get(name) == built.get(name), (
            f"{name}: print the stub anew with nanobind.stubgen"
        )


def test_signatures_differ_where_the_text_means_something_else() -> None:
    one = "class A:\n    def f(self, n: int) -> int: ...\nX: int\n"
    same = 'class A:\n\n  def f(self,\n    n:int)->int:\n    """Doc."""\n\nX : int'
    assert signatures(one) == signatures(same)
    for other in (
        one.replace("n: int", "n: float"),
        one.replace("X", "Y"),
        one.replace("A", "B(C)"),
    ):
        assert signatures(one) != signatures(other)
