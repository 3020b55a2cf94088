"""What we declare of libibverbs is what its header says: every size, every offset, every number."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "emu" / "native" / "ibverbs_abi.h"
OURS = {"ops", "other", "unused", "global", "before_poll_cq", "before_post_send", "after_post_recv"}
"""Fields that stand for several of the header's."""


def struct_fields() -> list[tuple[str, str]]:
    """(struct, field) of every field that we declare."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    found = []
    for name, body in re.findall(
        r"^(?:struct|union) (ibv_\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL
    ):
        body = re.sub(r"\(\*(\w+)\)\([^;]*\);", r"\1;", body)  # a pointer to a function
        body = re.sub(r"(?:struct|union) \{.*?\} \w+;", "", body, flags=re.DOTALL)
        for declaration in body.split(";"):
            for part in declaration.split(","):
                field = re.search(r"(\w+)(?:\[\d+\])?\s*$", part)
                if field and field[1] not in OURS:
                    found.append((name, field[1]))
    return found


def numbers() -> list[str]:
    return sorted(set(re.findall(r"\bIBV_\w+", HEADER.read_text())))


def test_the_declarations_are_read_whole() -> None:
    fields = struct_fields()
    for known in (
        ("ibv_wc", "wr_id"),
        ("ibv_wc", "dlid_path_bits"),
        ("ibv_context_ops", "post_recv"),
        ("ibv_qp", "recv_cq"),
        ("ibv_mr", "rkey"),
        ("ibv_qp_attr", "alt_ah_attr"),
    ):
        assert known in fields
    assert len(fields) > 150
    assert len(numbers()) > 30


@pytest.mark.needs("ibverbs_headers")
def test_sizes_offsets_and_numbers_are_the_headers(tmp_path: Path) -> None:
    checks = []
    structs = sorted({name for name, _ in struct_fields()})
    for name in structs:
        checks.append(f"static_assert(sizeof(ibverbs::{name}) == sizeof(::{name}));")
    for name, field in struct_fields():
        place = f"{name}, {field}"
        checks.append(f"static_assert(offsetof(ibverbs::{place}) == offsetof(::{place}));")
        width = f"sizeof(ibverbs::{name}::{field}) == sizeof(::{name}::{field})"
        checks.append(f"static_assert({width});")
    checks += [f"static_assert(int(ibverbs::{n}) == int(::{n}));" for n in numbers()]
    checks.append(
        "static_assert(offsetof(ibverbs::ibv_send_wr, wr) == offsetof(::ibv_send_wr, wr));"
    )
    checks.append(
        "static_assert(offsetof(ibverbs::ibv_send_wr, wr.rdma.rkey) =="
        " offsetof(::ibv_send_wr, wr.rdma.rkey));"
    )
    status = re.findall(
        r"k(\w+) = (\d+)",
        re.search(
            r"enum class Status.*?\{(.*?)\};", (HEADER.parent / "verbs.h").read_text(), re.DOTALL
        )[1],
    )
    names = dict(
        re.findall(
            r"case Status::k(\w+): return \"(IBV_WC_\w+)\"",
            (HEADER.parent / "verbs.cc").read_text(),
        )
    )
    assert {name for name, _ in status} == set(names)
    checks += [f"static_assert({number} == int(::{names[name]}));" for name, number in status]
    source = tmp_path / "abi.cc"
    source.write_text(
        f'#include <infiniband/verbs.h>\n#undef ibv_query_port\n#undef ibv_reg_mr\n#include "{HEADER}"\n'
        + "\n".join(checks)
    )
    command = ["c++", "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
