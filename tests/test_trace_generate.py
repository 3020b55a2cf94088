"""Generated traces: shape, determinism, and the `emu trace` command."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from emu.cli.main import cli
from emu.errors import UserError
from emu.trace import GenerateOptions, Trace, generate, read_trace
from emu.trace.request import blocks_of
from emu.trace.shape import shape
from emu.trace.summary import summarise
from emu.trace.write import request_line

if TYPE_CHECKING:
    from pathlib import Path


def emu(*args: str) -> Result:
    return CliRunner().invoke(cli, ["trace", *args], catch_exceptions=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shape_is_that_of_the_conversation_trace(seed: int) -> None:
    requests = generate(GenerateOptions(12_031, seed))
    summary = summarise(Trace("", "emu", tuple(requests)))
    assert summary.input.mean == pytest.approx(12_035, rel=0.06)
    assert summary.input.percentiles[50] == pytest.approx(6_909, rel=0.06)
    assert summary.input.percentiles[99] == pytest.approx(85_401, rel=0.10)
    assert summary.input.minimum >= 891
    assert summary.input.maximum <= 126_195
    assert summary.output.mean == pytest.approx(343, rel=0.04)
    assert summary.block_reuse == pytest.approx(0.366, abs=0.025)
    assert summary.requests_per_s == pytest.approx(3.4, rel=0.05)


def test_arrivals_are_poisson() -> None:
    requests = generate(GenerateOptions(20_000, 3, requests_per_s=50.0))
    gaps = [b.arrival_ms - a.arrival_ms for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert min(gaps) >= 0
    assert mean == pytest.approx(20, rel=0.03)
    assert spread / mean == pytest.approx(1, rel=0.03)


def test_prompts_form_a_tree_over_one_system_prompt() -> None:
    parent: dict[int, int | None] = {}
    follow_ups = 0
    requests = generate(GenerateOptions(3000, 5))
    for request in requests:
        ids = request.hash_ids
        assert len(ids) == blocks_of(request.input_tokens)
        assert ids[0] == 0
        follow_ups += len(ids) > 1 and ids[1] in parent
        for before, block in zip((None, *ids), ids, strict=False):
            assert parent.setdefault(block, before) == before
    assert follow_ups / len(requests) == pytest.approx(0.387, abs=0.04)


def test_the_same_seed_gives_the_same_bytes_everywhere() -> None:
    text = "\n".join(request_line(r) for r in generate(GenerateOptions(500, 7)))
    again = "\n".join(request_line(r) for r in generate(GenerateOptions(500, 7)))
    other = "\n".join(request_line(r) for r in generate(GenerateOptions(500, 8)))
    assert text == again != other
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_a_shorter_trace_is_the_head_of_a_longer_one() -> None:
    assert generate(GenerateOptions(40, 1)) == generate(GenerateOptions(400, 1))[:40]


@pytest.mark.parametrize(
    "options",
    [
        GenerateOptions(0),
        GenerateOptions(10**9),
        GenerateOptions(1, seed=-1),
        GenerateOptions(1, requests_per_s=0.0),
        GenerateOptions(1, requests_per_s=float("nan")),
    ],
)
def test_bad_options_are_refused(options: GenerateOptions) -> None:
    with pytest.raises(UserError):
        generate(options)


def test_generate_to_a_file_or_stdout_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    shaped = ("--requests", "20", "--context", "2048", "--output-tokens", "16")
    assert emu("generate", *shaped, "--out", str(file)).exit_code == 0
    result = emu("generate", *shaped)
    assert result.exit_code == 0
    assert result.stdout == file.read_text()
    requests = read_trace(file).requests
    assert len(requests) == 20
    assert all(r.output_tokens == 16 and r.input_tokens <= 2032 for r in requests)
    assert any(r.input_tokens == 2032 for r in requests)


def test_generate_refuses_what_cannot_be(tmp_path: Path) -> None:
    for args in (
        ("--requests", "0"),
        ("--context", "0"),
        ("--context", "100", "--output-tokens", "100"),
        ("--rate", "-3"),
        ("--out", str(tmp_path)),
        ("--out", str(tmp_path / "none" / "t")),
    ):
        result = emu("generate", *args)
        assert isinstance(result.exception, UserError), args
        assert result.exception.remedy
    assert emu("generate", "--requests", "many").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_inspect_prints_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n'
        '{"timestamp": 500, "input_length": 2000, "output_length": 9, "hash_ids": [0, 1, 2, 3]}\n'
        "junk\n"
        '{"timestamp": 1000, "input_length": 400, "output_length": 11, "hash_ids": [0]}\n'
    )
    result = emu("inspect", str(file), "--json", "--skip-bad")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["schema_version"] == 1
    assert (found["format"], found["requests"], found["file"]) == ("mooncake", 3, str(file))
    assert [bad["line"] for bad in found["skipped"]] == [3]
    assert (found["span_ms"], found["requests_per_s"]) == (1000.0, 2.0)
    assert found["input_tokens"]["mean"] == 1000
    assert (found["input_tokens"]["min"], found["input_tokens"]["p50"]) == (400, 600)
    assert found["input_tokens"]["histogram"] == [
        {"from": 256, "requests": 1},
        {"from": 512, "requests": 1},
        {"from": 1024, "requests": 1},
    ]
    assert found["output_tokens"]["total"] == 27
    assert found["blocks"] == {"total": 7, "unique": 4, "reuse": pytest.approx(3 / 7)}

    text = emu("inspect", str(file), "--skip-bad").stdout
    for part in (
        "3 requests (mooncake), 1 bad lines skipped",
        "42.9% seen before",
        "1,000",
        f"{file}:3",
    ):
        assert part in text
    assert isinstance(emu("inspect", str(file)).exception, UserError)


def test_convert_keeps_the_trace_and_never_its_source(tmp_path: Path) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "b.jsonl"
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\nbad\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    source.write_text(text)
    assert isinstance(emu("convert", str(source), str(out)).exception, UserError)
    assert not out.exists()
    result = emu("convert", str(source), str(out), "--skip-bad")
    assert result.exit_code == 0
    assert "2 requests (azure)" in result.stderr
    assert "1 bad lines skipped" in result.stderr
    assert read_trace(out).requests == read_trace(source, skip_bad=True).requests
    assert emu("convert", str(out), "-").stdout == out.read_text()
    link = tmp_path / "link"
    link.symlink_to(source)
    assert isinstance(emu("convert", str(source), str(link), "--skip-bad").exception, UserError)
    assert source.read_text() == text


DIGEST = "10c0cb78ce0b9a2c9bd62dc2b99c2ed437422cfbb10f4d04a99d76bf1424f680"


@pytest.mark.parametrize("rate", [1e-300, 1e-320, 1e-12])
def test_what_cannot_be_read_again_is_not_written(rate):
    with pytest.raises(UserError, match="higher rate"):
        generate(GenerateOptions(100, requests_per_s=rate))


def test_more_output_tokens_than_a_trace_may_have_are_refused():
    with pytest.raises(UserError, match="20000000"):
        shape(generate(GenerateOptions(2)), output_tokens=20_000_000)
